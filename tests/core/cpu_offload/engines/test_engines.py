"""The copy engines by their protocol: bytes, ends, order, waits, and faults that are really there."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from patience import FOREVER_S, PATIENCE_S

from kvtier import CacheSpec, FullAttention, GroupSpec, SlidingWindow, TransferError
from kvtier.cpu_offload import tier_memory
from kvtier.cpu_offload.engines._blocks import copy_blocks
from kvtier.cpu_offload.engines.simulated import Faults, SimulatedEngine
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.geometry.layout import Layout
from kvtier.machine.wakeup import Wakeup
from kvtier.pools.arena import Arena

STORE, LOAD = Direction.STORE, Direction.LOAD
SPEC = CacheSpec(
    [
        GroupSpec("full", FullAttention(), 2, 1, 3, block_tokens=5),
        GroupSpec("win", SlidingWindow(4), 1, 2, 8, dtype="float32"),
    ]
)
SIZES = [group.block_bytes for group in SPEC.groups]


class Tiers:
    """Two arenas of different size with random bytes on the device, and transfers between them."""

    def __init__(self, verify: bool = False) -> None:
        self.device, self.host = (Arena(SPEC, Layout.fixed(SIZES, n), "cpu") for n in ([6, 5], [3, 9]))
        for arena in (self.device, self.host):
            arena.allocate("device_blocks")
        self.memory = TierMemory(self.device, self.host, verify)
        self.device.bytes[:] = np.random.default_rng(0).integers(0, 256, self.device.num_bytes, np.uint8)
        self.tickets = 0

    def transfer(self, direction: Direction, *blocks: tuple[int, int, int]) -> Transfer:
        """blocks: (group, device block, host block)."""
        self.tickets += 1
        groups, device, host = np.array(blocks, np.int32).T
        return Transfer(self.tickets, direction, groups, device, host, np.zeros((len(blocks), 2), np.uint64), 0, 0)

    def block(self, tier: Arena, g: int, b: int) -> np.ndarray:
        at, size = int(tier.origins[g] + b * tier.block_bytes[g]), int(tier.block_bytes[g])
        return tier.bytes[at : at + size]


def drain(engine, n: int):
    """The next n outcomes."""
    out, end = [], time.monotonic() + PATIENCE_S
    while len(out) < n:
        assert time.monotonic() < end, "no end"
        engine.wait(0.05)
        out += engine.poll()
    return out


ENGINES = {"threads": ThreadsEngine, "simulated": lambda memory: SimulatedEngine(memory, 3)}


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def engine_of(request):
    made = []

    def make(memory):
        made.append(request.param(memory))
        return made[-1]

    yield make
    for engine in made:
        assert engine.close(PATIENCE_S)


def test_a_store_and_a_load_move_whole_blocks_of_every_group(engine_of):
    tiers = Tiers()
    engine = engine_of(tiers.memory)
    before = tiers.device.bytes.copy()
    pairs = [(0, 6, 1), (0, 2, 3), (1, 5, 9), (1, 1, 1)]
    engine.submit(tiers.transfer(STORE, *pairs))
    assert [o.error for o in drain(engine, 1)] == [""]
    for g, d, h in pairs:
        assert np.array_equal(tiers.block(tiers.host, g, h), tiers.block(tiers.device, g, d))
    assert np.array_equal(tiers.device.bytes, before)
    tiers.device.bytes[:] = 0
    back = [(0, 1, 1), (0, 4, 3), (1, 2, 9), (1, 3, 1)]
    engine.submit(tiers.transfer(LOAD, *back))
    assert [o.error for o in drain(engine, 1)] == [""]
    for (g, d, h), (_, old, _) in zip(back, pairs, strict=True):
        start, size = int(tiers.device.origins[g] + old * tiers.device.block_bytes[g]), int(tiers.device.block_bytes[g])
        assert np.array_equal(tiers.block(tiers.device, g, d), before[start : start + size])
        assert h


@pytest.mark.parametrize("block", [(0, 7, 1), (0, 1, 4), (0, 0, 1), (0, 1, 0), (1, 6, 1), (1, 1, 10), (0, -1, 1)])
def test_a_copy_outside_its_pool_is_refused_before_a_byte_moves(block):
    tiers = Tiers()
    before = tiers.device.bytes.copy()
    for direction in Direction:
        with pytest.raises(TransferError):
            tiers.memory.copy(tiers.transfer(direction, (0, 1, 1), block))
    assert np.array_equal(tiers.device.bytes, before)
    assert not tiers.host.bytes.any()


def test_a_broken_copy_ends_as_an_error_and_the_thread_lives_on():
    tiers = Tiers()
    engine = ThreadsEngine(tiers.memory)
    engine.submit(tiers.transfer(STORE, (0, 7, 1)))
    engine.submit(tiers.transfer(STORE, (0, 1, 1)))
    first, second = sorted(drain(engine, 2), key=lambda o: o.ticket)
    assert "TransferError" in first.error
    assert second.error == ""
    assert engine.close(PATIENCE_S)


def test_each_end_is_reported_once(engine_of):
    tiers = Tiers()
    engine = engine_of(tiers.memory)
    for h in (1, 2, 3):
        engine.submit(tiers.transfer(STORE, (0, h, h)))
    assert sorted(o.ticket for o in drain(engine, 3)) == [1, 2, 3]
    assert list(engine.poll()) == []


def test_a_writer_that_is_ordered_after_a_store_does_not_change_what_is_stored(engine_of):
    tiers = Tiers()
    engine = engine_of(tiers.memory)
    for k in range(20):
        before = tiers.block(tiers.device, 0, 2).copy()
        transfer = tiers.transfer(STORE, (0, 2, 2))
        engine.submit(transfer)
        assert engine.order_after([transfer.ticket], 5.0)
        tiers.block(tiers.device, 0, 2)[:] = k
        drain(engine, 1)
        assert np.array_equal(tiers.block(tiers.host, 0, 2), before)


def test_verification_finds_each_block_that_has_changed_in_the_host_tier():
    tiers = Tiers(verify=True)
    pairs = [(0, 1, 1), (0, 2, 2), (1, 1, 5), (1, 4, 9)]
    assert len(tiers.memory.copy(tiers.transfer(STORE, *pairs))) == 0
    for k, (g, _, h) in enumerate(pairs):
        block = tiers.block(tiers.host, g, h)
        for at in (0, len(block) // 2, len(block) - 1):
            block[at] ^= 16
            assert tiers.memory.copy(tiers.transfer(LOAD, *pairs)).tolist() == [k]
            block[at] ^= 16
    assert len(tiers.memory.copy(tiers.transfer(LOAD, *pairs))) == 0


def test_a_store_that_damages_its_bytes_is_found_by_the_checksum_of_what_it_should_have_copied(monkeypatch):
    tiers = Tiers(verify=True)

    def damaging(dst, dst_at, src, src_at, sizes):
        copy_blocks(dst, dst_at, src, src_at, sizes)
        dst[dst_at[1]] ^= 1

    monkeypatch.setattr(tier_memory, "copy_blocks", damaging)
    tiers.memory.copy(tiers.transfer(STORE, (0, 1, 1), (0, 2, 2)))
    monkeypatch.undo()
    assert tiers.memory.copy(tiers.transfer(LOAD, (0, 1, 1), (0, 2, 2))).tolist() == [1]


# --- threads --------------------------------------------------------------------------------------


class Gate(TierMemory):
    """Copies that begin and then wait to be let on."""

    def __init__(self, tiers: Tiers) -> None:
        super().__init__(tiers.device, tiers.host, False)
        self.begun, self.open = threading.Event(), threading.Event()

    def copy(self, transfer: Transfer) -> np.ndarray:
        self.begun.set()
        assert self.open.wait(PATIENCE_S)
        return super().copy(transfer)


def test_a_writer_is_ordered_after_a_copy_only_once_its_last_byte_is_read():
    tiers = Tiers()
    gate = Gate(tiers)
    engine = ThreadsEngine(gate)
    transfer = tiers.transfer(STORE, (0, 2, 2))
    engine.submit(transfer)
    assert gate.begun.wait(PATIENCE_S)
    assert engine.order_after([transfer.ticket], 0.0) is False, "it is off the queue, but not read"
    gate.open.set()
    assert engine.order_after([transfer.ticket], PATIENCE_S) is True
    assert engine.close(PATIENCE_S)


def test_wait_sleeps_until_something_ends_and_no_longer(monkeypatch):
    tiers, slept = Tiers(), list[float]()
    engine = ThreadsEngine(tiers.memory)
    with monkeypatch.context() as patch:
        patch.setattr(Wakeup, "wait", lambda _, timeout_s: slept.append(timeout_s))
        assert engine.wait(FOREVER_S) is False
    assert len(slept) == 1 and FOREVER_S / 2 < slept[0] <= FOREVER_S
    engine.submit(tiers.transfer(STORE, (0, 1, 1)))
    assert engine.wait(FOREVER_S) is True
    assert engine.close(PATIENCE_S)


def test_wake_ends_a_wait_of_another_thread():
    engine = ThreadsEngine(Tiers().memory)
    threading.Timer(0.05, engine.wake).start()
    assert engine.wait(FOREVER_S) is False
    assert engine.close(PATIENCE_S)


def test_a_load_does_not_queue_behind_stores():
    tiers = Tiers()
    gate, copy = threading.Event(), tiers.memory.copy

    def slow(transfer):
        if transfer.direction is STORE:
            gate.wait(FOREVER_S)
        return copy(transfer)

    tiers.memory.copy = slow
    engine = ThreadsEngine(tiers.memory)
    for h in (1, 2):
        engine.submit(tiers.transfer(STORE, (0, h, h)))
    engine.submit(tiers.transfer(LOAD, (0, 3, 3)))
    assert [o.ticket for o in drain(engine, 1)] == [3]
    assert engine.order_after([1], 0.02) is False, "not ended within the time"
    gate.set()
    assert engine.order_after([1, 2], FOREVER_S) is True
    assert engine.close(PATIENCE_S)


def test_nobody_waits_for_a_copy_that_close_has_forgotten():
    tiers = Tiers()
    started, gate = threading.Event(), threading.Event()
    tiers.memory.copy = lambda transfer: (started.set(), gate.wait(FOREVER_S), np.empty(0))[2]
    engine = ThreadsEngine(tiers.memory)
    for h in (1, 2):
        engine.submit(tiers.transfer(STORE, (0, h, h)))
    assert started.wait(PATIENCE_S)
    closing = threading.Timer(0.1, engine.close, (0.05,))
    closing.start()
    assert engine.order_after([2], FOREVER_S) is False
    closing.join()
    gate.set()
    assert engine.close(PATIENCE_S)


def test_close_is_bounded_and_can_be_called_again():
    tiers = Tiers()
    started, gate = threading.Event(), threading.Event()
    tiers.memory.copy = lambda transfer: (started.set(), gate.wait(FOREVER_S), np.empty(0))[2]
    engine = ThreadsEngine(tiers.memory)
    engine.submit(tiers.transfer(STORE, (0, 1, 1)))
    assert started.wait(PATIENCE_S)
    assert engine.close(0.05) is False, "a copy is still running"
    gate.set()
    assert engine.close(PATIENCE_S) is True
    assert engine.close(PATIENCE_S) is True


def test_a_copy_that_is_damaged_on_the_way_from_damaged_memory_is_damaged():
    """Two damages do not make a block whole (a soak took one for unnoticed)."""
    tiers = Tiers(verify=True)
    tiers.memory.copy(tiers.transfer(STORE, (0, 1, 1)))
    tiers.memory.flip_host_bit(0, 1)
    load = tiers.transfer(LOAD, (0, 2, 1))
    assert len(tiers.memory.copy(load)) == 1
    tiers.memory.flip_device_bit(load, 0)
    assert len(tiers.memory.check(load)) == 1


# --- simulated ------------------------------------------------------------------------------------


def fates(seed: int, faults: Faults, n: int = 40) -> list[tuple[int, str]]:
    tiers = Tiers(verify=True)
    for h in (1, 2, 3):
        tiers.memory.copy(tiers.transfer(STORE, (0, h, h)))
    engine, out = SimulatedEngine(tiers.memory, seed, faults), []
    for k in range(n):
        engine.submit(tiers.transfer(LOAD, (0, 1 + k % 6, 1 + k % 3)))
        out += [(o.ticket, o.error) for o in engine.poll()]
    return out


def test_the_same_seed_gives_the_same_run():
    faults = Faults(fail=0.2, tear=0.2, corrupt=0.2, lose=0.1)
    assert fates(5, faults) == fates(5, faults)
    assert fates(5, faults) != fates(6, faults)


@pytest.mark.parametrize(
    ("faults", "error"),
    [(Faults(fail=1.0), "failure"), (Faults(tear=1.0), "torn"), (Faults(corrupt=1.0), "checksum"), (Faults(), "")],
)
def test_faults_happen_when_asked_for(faults, error):
    found = fates(1, faults)
    assert found
    assert all(error in e if error else e == "" for _, e in found)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_torn_copy_leaves_a_block_that_is_written_in_part(direction, count):
    tiers = Tiers()
    pairs = [(0, 6, 1), (1, 5, 9), (0, 2, 3), (1, 1, 1), (0, 1, 2)][:count]
    tiers.host.bytes[:] = np.random.default_rng(1).integers(0, 256, tiers.host.num_bytes, np.uint8)
    source, target = (tiers.device, tiers.host) if direction is STORE else (tiers.host, tiers.device)
    ends = [(d, h) if direction is STORE else (h, d) for _, d, h in pairs]
    before = [tiers.block(target, g, end[1]).copy() for (g, *_), end in zip(pairs, ends, strict=True)]
    engine = SimulatedEngine(tiers.memory, 0, Faults(tear=1.0))
    engine.submit(tiers.transfer(direction, *pairs))
    [outcome] = drain(engine, 1)
    assert outcome.error and outcome.bad is None, "none of it is said to have arrived"
    for k, ((g, *_), (a, b)) in enumerate(zip(pairs, ends, strict=True)):
        size = SIZES[g]
        there = size if k < count // 2 else size // 2 if k == count // 2 else 0
        now = tiers.block(target, g, b)
        assert np.array_equal(now[:there], tiers.block(source, g, a)[:there])
        assert np.array_equal(now[there:], before[k][there:])


def test_a_bit_that_flips_in_the_host_tier_is_found_by_the_next_load_of_its_block():
    tiers = Tiers(verify=True)
    pairs = [(0, 1, 1), (0, 2, 2), (1, 1, 5), (1, 4, 9)]
    tiers.memory.copy(tiers.transfer(STORE, *pairs))
    for k, (g, _, h) in enumerate(pairs):
        before = tiers.host.bytes.copy()
        tiers.memory.flip_host_bit(g, h)
        [changed] = np.flatnonzero(tiers.host.bytes != before)
        assert int(tiers.host.bytes[changed] ^ before[changed]).bit_count() == 1
        assert np.shares_memory(tiers.host.bytes[changed : changed + 1], tiers.block(tiers.host, g, h))
        assert tiers.memory.copy(tiers.transfer(LOAD, *pairs)).tolist() == [k]
        tiers.memory.flip_host_bit(g, h)
        assert len(tiers.memory.copy(tiers.transfer(LOAD, *pairs))) == 0
    for g, h in ((0, 0), (0, 4), (1, 10)):
        with pytest.raises(TransferError):
            tiers.memory.flip_host_bit(g, h)


def test_a_lost_copy_never_ends_until_told():
    tiers = Tiers()
    engine = SimulatedEngine(tiers.memory, 1, Faults(lose=1.0))
    engine.submit(tiers.transfer(STORE, (0, 1, 1)))
    assert not any(engine.poll() for _ in range(50))
    assert engine.order_after([1], 7.0) is False
    engine.end_lost()
    assert [o.ticket for o in engine.poll()] == [1]


def test_two_copies_under_way_on_the_same_bytes_are_reported():
    tiers = Tiers()
    for first, second, is_race in [
        ((STORE, (0, 1, 1)), (STORE, (0, 2, 1)), True),  # write after write
        ((STORE, (0, 1, 1)), (LOAD, (0, 2, 1)), True),  # read before the write is there
        ((LOAD, (0, 1, 1)), (STORE, (0, 1, 2)), True),
        ((STORE, (0, 1, 1)), (STORE, (0, 1, 2)), False),  # two readers
        ((STORE, (0, 1, 1)), (STORE, (1, 1, 1)), False),  # other groups
    ]:
        engine = SimulatedEngine(tiers.memory, 1, Faults(max_delay_s=9.0))
        for direction, block in (first, second):
            engine.submit(tiers.transfer(direction, block))
        assert bool(engine.missing_edges) == is_race
