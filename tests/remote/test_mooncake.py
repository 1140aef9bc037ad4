"""Mooncake's backend, as far as it goes without Mooncake; the rest is in tests/in_mooncake (`make test-store`)."""

from __future__ import annotations

import builtins
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE_S

from kvtier.machine.errors import ConfigError
from kvtier.remote.backends import mooncake as mooncake_store, mooncake_library
from kvtier.remote.backends.batches import by_number, by_size, first_alone
from kvtier.remote.backends.contract import Answer, Outcome
from kvtier.remote.backends.mooncake import MooncakeBackend
from kvtier.remote.backends.mooncake_library import (
    CODES,
    LIMITS,
    MooncakeOptions,
    connect,
    import_library,
    meaning,
    seconds_in_force,
    set_environment,
)
from kvtier.remote.backends.mooncake_memory import (
    MOST_PIECES,
    PACKED_AS,
    PACKED_BYTES,
    STAGE_BYTES,
    Pieces,
    Stage,
    pieces_of,
    place,
)
from remote import alone
from remote.fake_mooncake import FakeClient, library

ROOT = Path(__file__).parent.parent.parent
EMPTY = memoryview(b"")


def test_options_are_read_from_text() -> None:
    assert MooncakeOptions.read({}) == MooncakeOptions()
    given = {"protocol": "rdma", "devices": "mlx5_0", "replica_num": "2", "threads": "4", "timeout_s": "0.5"}
    read = MooncakeOptions.read(given)
    assert (read.protocol, read.devices, read.replica_num, read.threads, read.timeout_s) == (
        "rdma",
        "mlx5_0",
        2,
        4,
        0.5,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"protocl": "tcp"}, "no option 'protocl'; there are protocol"),
        ({"threads": "0"}, "threads is '0'"),
        ({"threads": "1.5"}, "threads is '1.5'"),
        ({"replica_num": "-1"}, "replica_num is '-1'"),
        ({"timeout_s": "²"}, "timeout_s is"),
        ({"timeout_s": "0"}, "timeout_s is"),
        ({"timeout_s": "nan"}, "timeout_s is"),
    ],
)
def test_bad_options_are_refused_before_anything_is_imported(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MooncakeBackend("127.0.0.1", 1, options)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (ModuleNotFoundError("No module", name="mooncake"), r"pip install 'kvtier\[mooncake\]'"),
        (ModuleNotFoundError("No module", name="msgpack"), "pip install msgpack"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "apt install libibverbs1"),
        (ImportError("libother.so.1: cannot open shared object file"), "cannot be loaded: libother.so.1"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, problem: ImportError, words: str) -> None:
    real = builtins.__import__

    def fail(name: str, *rest: Any) -> Any:
        if name.startswith("mooncake"):
            raise problem
        return real(name, *rest)

    monkeypatch.setattr(mooncake_library.importlib, "import_module", fail)
    with pytest.raises(ConfigError, match=words):
        import_library()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mooncake's variables are as they were in the end."""
    before = {name: value for name, value in os.environ.items() if name.startswith("MC_")}
    for name in before:
        monkeypatch.delenv(name)
    monkeypatch.setattr(mooncake_library, "_set_here", {})
    yield
    for name in [name for name in os.environ if name.startswith("MC_")]:
        del os.environ[name]


@pytest.mark.usefixtures("environment")
def test_time_limits_are_set_but_not_over_those_of_the_user() -> None:
    os.environ["MC_RPC_TIMEOUT_MS"] = "9000"
    for seconds in (3, 2):
        set_environment(seconds)
        assert os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] == os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == str(seconds)
        assert os.environ["MC_RPC_CONNECT_TIMEOUT_MS"] == f"{seconds}000"
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "9000"
    assert seconds_in_force() == 9.0
    os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = "soon"
    assert seconds_in_force() == 30.0
    assert set(LIMITS) < set(os.environ)


@pytest.mark.usefixtures("environment")
def test_no_master_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=f"no master at 127.0.0.1:{port}"):
        connect(None, "127.0.0.1", port, MooncakeOptions(timeout_s=1))


@pytest.mark.usefixtures("environment")
def test_what_the_client_is_made_with_and_a_master_that_refuses() -> None:
    made: list[dict[str, Any]] = []
    codes = [0, -1]
    client = SimpleNamespace(setup=lambda **given: made.append(given) or codes.pop(0), close=lambda: made.append({}))
    store = SimpleNamespace(MooncakeDistributedStore=lambda: client)
    with socket.create_server(("127.0.0.1", 0)) as master:
        port = master.getsockname()[1]
        assert connect(store, "127.0.0.1", port, MooncakeOptions(tenant="t")) is client
        with pytest.raises(ConfigError, match="code -1"):
            connect(store, "127.0.0.1", port, MooncakeOptions())
    assert made[0]["global_segment_size"] == 0
    assert (made[0]["local_hostname"], made[0]["metadata_server"]) == ("127.0.0.1", "P2PHANDSHAKE")
    assert (made[0]["master_server_addr"], made[0]["tenant_id"]) == (f"127.0.0.1:{port}", "t")
    assert made[-1] == {}


def test_every_code_has_an_outcome_and_words() -> None:
    assert meaning(0) == meaning(1 << 20) == meaning(-705) == (Outcome.OK, "")
    assert meaning(-704) == meaning(-703) == (Outcome.MISS, "")
    assert meaning(-200)[0] is Outcome.REFUSED
    for code in [*CODES, -9999]:
        outcome, reason = meaning(code)
        assert bool(reason) == (outcome in (Outcome.FAILED, Outcome.REFUSED))
        assert not reason or f"Mooncake: {code}" in reason


@pytest.mark.parametrize(
    ("names", "sizes", "parts"),
    [
        ("", [], []),
        ("abcd", [1, 1, 1, 1], [[0, 1], [2, 3]]),  # two objects of two pieces each
        ("aabb", [1, 1, 1, 1], [[0], [1, 2], [3]]),
        ("abc", [60, 50, 10], [[0], [1, 2]]),
        ("abc", [10, 500, 10], [[0], [1], [2]]),
    ],
)
def test_batches_have_few_pieces_few_bytes_and_no_name_twice(
    names: str, sizes: list[int], parts: list[list[int]]
) -> None:
    objects = [[memoryview(bytes(size)), EMPTY] for size in sizes]
    assert list(by_size(names, objects, most_pieces=4, most_bytes=100)) == parts


def test_the_first_object_of_batches_goes_alone() -> None:
    assert list(first_alone([[0, 1, 2], [3, 4]])) == [[0], [1, 2], [3, 4]]
    assert list(first_alone([[0], [1, 2]])) == [[0], [1, 2]]
    assert list(first_alone([])) == []


def test_batches_by_number() -> None:
    assert [list(part) for part in by_number(5, 2)] == [[0, 1], [2, 3], [4]]
    assert by_number(0, 2) == []


class Registry:
    """Stands for the library's client: what is registered."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}

    def register_buffer(self, address: int, size: int) -> int:
        if size > 8 * STAGE_BYTES:
            return -600
        self.ranges[address] = size
        return 0

    def unregister_buffer(self, address: int) -> int:
        del self.ranges[address]
        return 0

    def holds(self, address: int, size: int) -> bool:
        return any(begin <= address and address + size <= begin + n for begin, n in self.ranges.items())


@pytest.fixture
def make_pieces() -> tuple[Registry, Callable[[memoryview], Pieces]]:
    registry = Registry()
    stage = Stage(registry)

    def make(arena: memoryview) -> Pieces:
        address, size = place(arena)
        registry.ranges[address] = size
        return Pieces(registry, range(address, address + size), stage)

    return registry, make


Made = tuple[Registry, Callable[[memoryview], Pieces]]


def test_the_arena_is_used_in_place_and_all_else_is_registered_for_the_call(make_pieces: Made) -> None:
    registry, make = make_pieces
    arena = memoryview(np.zeros(4096, np.uint8))
    pieces = make(arena)
    before = dict(registry.ranges)
    trailer, large = memoryview(bytearray(b"t" * 64)), memoryview(bytearray(2 * STAGE_BYTES))
    pieces.add(0, [arena[100:200], EMPTY, trailer, large])
    pieces.add(1, [arena[4000:4096], trailer, memoryview(bytearray(2 * STAGE_BYTES))])
    assert pieces.addresses[0][0] == place(arena)[0] + 100
    assert pieces.addresses[0][2] == place(large)[0]
    assert pieces.sizes == [[100, 64, 2 * STAGE_BYTES], [96, 64, 2 * STAGE_BYTES]]
    for addresses, sizes in zip(pieces.addresses, pieces.sizes, strict=True):
        assert all(registry.holds(address, size) for address, size in zip(addresses, sizes, strict=True))
    assert len({address for addresses in pieces.addresses for address in addresses}) == 6
    pieces.end()
    assert registry.ranges == before


def test_neighbours_in_the_arena_move_as_one(make_pieces: Made) -> None:
    _, make = make_pieces
    arena = memoryview(bytearray(2 * PACKED_BYTES))
    pieces = make(arena)
    pieces.add(0, [arena[64:128], arena[128:256], arena[0:64], arena[300:-1]])
    assert pieces.addresses == [[place(arena)[0] + at for at in (64, 0, 300)]]
    assert pieces.sizes == [[192, 64, 2 * PACKED_BYTES - 301]]


def test_an_object_of_small_pieces_moves_as_one_there_and_back(make_pieces: Made) -> None:
    registry, make = make_pieces
    arena = memoryview(bytearray(range(1, 256)) * 16)
    objects = [[arena[at + k : at + k + 100] for at in (0, 1000, 500)] for k in (0, 2000)]
    for of in objects:
        of.append(memoryview(bytearray(b"trailer")))
    written = [b"".join(of) for of in objects]
    pieces = make(arena)
    for k, of in enumerate(objects):
        pieces.add(k, of)
    assert pieces.sizes == [[307], [307]] and all(registry.holds(of[0], 307) for of in pieces.addresses)
    pieces.fill()
    assert [ctypes.string_at(of[0], 307) for of in pieces.addresses] == written
    arena[:] = bytes(len(arena))
    objects[0][-1][:] = bytes(7)
    pieces.give_back([1])
    assert b"".join(objects[1]) == written[1] and not any(b"".join(objects[0]))


def test_a_batch_of_packed_objects_fits_the_stage(make_pieces: Made) -> None:
    registry, make = make_pieces
    buffers = [memoryview(bytearray(PACKED_BYTES // 4))] * 4
    assert pieces_of(buffers) == PACKED_AS and pieces_of([*buffers, buffers[0][:1]]) == 5, "one byte too large"
    assert pieces_of([memoryview(bytearray(PACKED_BYTES))]) == 1, "there is nothing to pack"
    pieces, before = make(memoryview(bytearray(8))), dict(registry.ranges)
    for k in range(MOST_PIECES // PACKED_AS):
        pieces.add(k, buffers)
    pieces.add(99, [memoryview(bytearray(64))])
    assert pieces.sizes == [[PACKED_BYTES]] * (MOST_PIECES // PACKED_AS) + [[64]]
    assert registry.ranges.keys() - before.keys() == set()


def test_batches_end_by_what_objects_count_as() -> None:
    names, objects = [str(k) for k in range(5)], [[memoryview(b"ab")] * 3] * 5
    assert list(by_size(names, objects, 6, 100, lambda buffers: 2)) == [[0, 1, 2], [3, 4]]
    assert list(by_size(names, objects, 6, 100)) == [[0, 1], [2, 3], [4]]


def test_trailers_go_through_the_stage_there_and_back_for_the_objects_that_came(make_pieces: Made) -> None:
    _, make = make_pieces
    written = [memoryview(bytearray([k] * 70)) for k in (1, 2)]
    pieces = make(memoryview(bytearray(10)))
    for k, buffer in enumerate(written):
        pieces.add(k, [buffer])
    pieces.fill()
    for buffer in written:
        buffer[:] = bytes(70)
    pieces.give_back([1])
    assert written[0] == bytes(70)
    assert written[1] == bytes([2] * 70)


def test_memory_that_cannot_be_registered_is_said(make_pieces: Made) -> None:
    _, make = make_pieces
    with pytest.raises(ConfigError, match="ulimit -l"):
        make(memoryview(bytearray(10))).add(0, [memoryview(bytearray(9 * STAGE_BYTES))])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, environment: None) -> Iterator[tuple[MooncakeBackend, FakeClient]]:
    """A remote over a fake client."""
    client = FakeClient()
    monkeypatch.setattr(mooncake_store, "import_library", lambda: library(client))
    with socket.create_server(("127.0.0.1", 0)) as master:
        store = MooncakeBackend("127.0.0.1", master.getsockname()[1], {})
    store.register(memoryview(bytearray(1 << 20)))
    yield store, client
    client.moves.set()
    assert store.close(PATIENCE_S)
    assert client.is_closed


Fake = tuple[MooncakeBackend, FakeClient]


def answers(store: MooncakeBackend, count: int = 1) -> dict[int, Answer]:
    """So many of them, by ticket."""
    found: dict[int, Answer] = {}
    while len(found) < count:
        assert store.wait(PATIENCE_S)
        found |= {answer.ticket: answer for answer in store.poll()}
    return found


def test_a_look_goes_on_beside_moves_that_hang_and_these_go_on_in_their_order(fake: Fake) -> None:
    store, client = fake
    client.moves.clear()
    many = [f"n{k}" for k in range(300)]  # some batches
    store.put(1, many, [[memoryview(b"x")]] * 300, PATIENCE_S)
    assert client.entered.wait(PATIENCE_S)
    store.get(2, ["n0"], [[memoryview(bytearray(1))]], PATIENCE_S)
    store.look(3, ["n0"], PATIENCE_S)
    assert answers(store)[3].outcomes == (Outcome.MISS,)
    client.moves.set()
    found = answers(store, 2)
    assert set(found[1].outcomes) == {Outcome.OK}
    assert client.calls[:3] == ["put", "look", "get"]  # reads go before what is left of the put


def test_until_something_has_moved_a_call_begins_with_one_object(fake: Fake) -> None:
    """It may hang for a minute, and each object of a batch as long again."""
    store, client = fake
    names = [f"n{k}" for k in range(8)]
    client.objects = dict.fromkeys(names, b"x")
    for failing, batches in ((0, [1, 7]), (0, [8]), (-702, [8]), (-702, [1, 7]), (0, [1, 7]), (0, [8])):
        client.failing = failing
        client.batches.clear()
        store.get(1, names, [[memoryview(bytearray(1))] for _ in names], PATIENCE_S)
        assert set(answers(store)[1].outcomes) == {Outcome.FAILED if failing else Outcome.OK}
        assert client.batches == batches


def test_a_call_stops_trying_once_there_is_no_master(fake: Fake) -> None:
    store, client = fake
    client.failing = -900
    store.put(1, [f"n{k}" for k in range(300)], [[memoryview(b"x")]] * 300, PATIENCE_S)
    answer = answers(store)[1]
    assert set(answer.outcomes) == {Outcome.FAILED}
    assert (len(answer.reasons), set(answer.reasons.values())) == (300, {meaning(-900)[1]})
    assert client.calls == ["put"]


def test_a_put_after_one_that_failed_half_way_is_ok_only_if_the_object_is_there(fake: Fake) -> None:
    store, client = fake
    put = [["n"], [[memoryview(b"x")]], PATIENCE_S]
    for code, forgotten, outcome in ((-901, False, "failed"), (0, False, "failed"), (0, True, "ok"), (0, True, "ok")):
        client.failing = code
        if forgotten:
            client.begun.clear()
        store.put(1, *put)
        answer = answers(store)[1]
        assert answer.outcomes[0].value == outcome
        assert ("half-way" in answer.reasons.get(0, "")) == (outcome == "failed" and not code)
    assert client.calls == ["put", "put", "look", "put", "look", "put"]  # asked only as long as it is not sure


def test_another_length_is_told_from_a_transfer_that_failed(fake: Fake) -> None:
    store, client = fake
    client.objects["n"] = bytes(1000)
    for failing, size, words in (
        (0, 10, "1,000 bytes, not 10"),
        (0, 2000, "not 2,000"),
        (-800, 1000, "storage process"),
    ):
        client.failing = failing
        store.get(1, ["n"], [[memoryview(bytearray(size))]], PATIENCE_S)
        answer = answers(store)[1]
        assert (answer.outcomes, words in answer.reasons[0]) == ((Outcome.FAILED,), True)


def test_with_mooncake_installed_the_rest_runs_on_a_network_of_its_own() -> None:
    try:
        import_library()
    except ConfigError as reason:
        pytest.skip(f"{reason}; `make test-store` installs it")
    if refusal := alone.refusal():
        pytest.skip(refusal)
    line = alone.command(sys.executable, "-m", "pytest", "tests/in_mooncake/test_calm.py", "-p", "no:cacheprovider")
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
