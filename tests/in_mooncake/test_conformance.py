"""What every ``Backend`` promises, of this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from patience import PATIENCE_S
from remote.conformance import Conformance
from remote.driving import Driver
from remote.mooncake_cluster import HOST, PORT, Cluster

from kvtier.remote.backends.uri import open_backend


class TestMooncake(Conformance):
    @pytest.fixture
    def driver(self, calm: Cluster) -> Iterator[Any]:
        store = open_backend(f"mooncake://{HOST}:{PORT}?threads=2&timeout_s=2")
        store._client.remove_all(True)
        yield Driver(store)
        assert store.close(PATIENCE_S)
