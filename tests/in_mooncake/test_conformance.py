"""What every ``BlockStore`` promises, of this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from remote.mooncake_cluster import HOST, PORT, Cluster

conformance = pytest.importorskip("remote.conformance")
driving = pytest.importorskip("remote.driving")
uri = pytest.importorskip("kvtier.remote.uri")


class TestMooncake(conformance.Conformance):  # type: ignore[misc]
    @pytest.fixture
    def driver(self, calm: Cluster) -> Iterator[Any]:
        store = uri.open_store(f"mooncake://{HOST}:{PORT}?threads=2&timeout_s=2")
        store._client.remove_all(True)
        yield driving.Driver(store)
        assert store.close(driving.PATIENCE_S)
