"""A real Mooncake Store on loopback: `make test-store` installs it, and gives these tests a network of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import Client
from remote.alone import is_alone
from remote.mooncake_cluster import Cluster

from kvtier.machine.errors import ConfigError
from kvtier.remote.backends.mooncake_library import import_library

if not is_alone():
    pytest.skip("Mooncake listens on all addresses: run `make test-store`", allow_module_level=True)
try:
    import_library()
except ConfigError as reason:
    pytest.skip(f"{reason}; `make test-store` installs it", allow_module_level=True)

Clients = Callable[..., Client]


def clients() -> Iterator[Clients]:
    """Clients that are closed in the end."""
    made: list[Client] = []

    def make(**options: Any) -> Client:
        made.append(Client(**options))
        return made[-1]

    yield make
    for client in made:
        client.close()


make_client = pytest.fixture(clients, name="make_client")
make_calm_client = pytest.fixture(clients, name="make_calm_client", scope="module")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A master and a storage process."""
    cluster = Cluster(tmp_path)
    cluster.start_storage()
    yield cluster
    cluster.close()


@pytest.fixture
def client(cluster: Cluster, make_client: Clients) -> Client:
    return make_client()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster for tests that do it no harm."""
    cluster = Cluster(tmp_path_factory.mktemp("mooncake"))
    cluster.start_storage(memory_mb=256)
    yield cluster
    cluster.close()
