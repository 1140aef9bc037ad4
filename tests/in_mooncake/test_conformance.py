"""What every ``BlockStore`` promises, of this one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from remote.mooncake_cluster import HOST, PORT, Cluster

conformance = pytest.importorskip("remote.conformance")
from kvtier.remote.uri import open_store  # noqa: E402
from remote.driving import PATIENCE_S, Driver  # noqa: E402


class TestMooncake(conformance.Conformance):  # type: ignore[misc]
    @pytest.fixture
    def driver(self, calm: Cluster) -> Iterator[Driver]:
        store = open_store(f"mooncake://{HOST}:{PORT}?threads=2&timeout_s=2")
        store._client.remove_all(True)
        yield Driver(store)
        assert store.close(PATIENCE_S)
