"""The race amplifier: forwards and copies that are late on purpose, pools that are full, and a host that never waits.

With every order in place nothing is ever wrong; with any one of them removed something is. Of the seven edges one
cannot be removed by itself: 7, two stores to one host block, is kept by the store stream, which has all stores in the
order of their submission, whether or not a host block is pinned. (What the pin keeps beyond that is edge 5.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import inside
import numpy as np
import pytest
import torch
from core.driving import prompt

from kvtier import ChunkedLocal, FullAttention, InvariantBroken, KVCache, Request, Scheduler, SlidingWindow
from kvtier.coordinator.scheduler import Scheduler as SchedulerClass
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.ends import Ends
from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime
from kvtier.cpu_offload.engines.streams import StreamsEngine
from kvtier.cpu_offload.transfer import Direction
from kvtier.machine.errors import TransferError
from kvtier.pools.block_pool import BlockPools
from kvtier.pools.pool_state import Place
from kvtier.testing import canary_spec

from .canary import DeviceCanary

GROUPS = {"full": (FullAttention(), 16), "win": (SlidingWindow(40), 16), "chunk": (ChunkedLocal(64), 16)}
DEVICE = {"full": 90, "win": 40, "chunk": 34}
HOST = {"full": 200, "win": 60, "chunk": 60}
FULL = 0.95
"""Least share of each pool that holds something while there is enough to do, on average."""
STORE, LOAD = Direction.STORE, Direction.LOAD
SPIN = 400_000
"""Cycles: some 0.2 ms, about what a step's copies take, and less than the host takes for a step."""
LONG = 10 * SPIN
BEHIND = 30 * SPIN
"""On average, forwards that spin for up to so long take longer than the host does for a step: it runs ahead of them."""
DAMAGE = (InvariantBroken, TransferError)
SEEDS = 4


@dataclass(frozen=True)
class Seen:
    """What was noticed of a run."""

    wrong_words: int
    """That a forward saw."""
    corrupt_blocks: int
    violations: list[str]
    loaded_blocks: int
    full: np.ndarray
    """Share of each group's blocks that held something, between the first tenth of the steps and the last."""

    @property
    def wrong(self) -> bool:
        """Whether bytes were."""
        return bool(self.wrong_words or self.corrupt_blocks)


def amplify(
    seed: int,
    count: int,
    device: str = "cuda:0",
    num_layers: int = 64,
    spin: int = SPIN,
    forget: bool = False,
    late: Mapping[Direction, int] | None = None,
    launch: Callable[[Callable[[], None]], None] | None = None,
    finish: Callable[[], None] = torch.cuda.synchronize,
    **options: Any,
) -> Seen:
    """Serves ``count`` requests over a dozen stems.

    ``spin``: cycles that a forward waits at most. ``forget``: the device forgets what is being stored, so that it comes
    back from the host at once. ``late``: cycles that every copy of a direction waits before it begins. ``launch``: as
    ``DeviceCanary`` takes it.
    """
    spec = canary_spec(GROUPS, num_layers)
    played = {} if launch is None else {"launch": launch}
    with (
        late_copies(late or {}),
        KVCache(spec, device=device, device_blocks=DEVICE, host_blocks=HOST, key_secret=b"races", **options) as cache,
    ):
        scheduler = Scheduler(cache, max_batched_tokens=96, max_running=12)
        inside.learn_nothing(cache)  # what stays warm spares copies, and those of hits at that
        inside.touch_nothing(scheduler)
        canary, rng = DeviceCanary(cache, seed, spin, **played), np.random.default_rng(seed)
        requests = [
            Request(f"r{i}", [*prompt(int(rng.integers(12)), int(rng.integers(20, 400))), i % 97], 1)
            for i in range(count)
        ]
        done = canary.run(scheduler, requests, after_step=lambda: forget_what_is_stored(cache) if forget else None)
        finish()
        stats = cache.stats()
        assert len(done) == count
        assert {f.finish_reason for f in done} == {"length"}
        steps = len(canary.empty)
        return Seen(
            int(canary.mismatches.item()),
            stats.transfers.corrupt_blocks,
            [f"{v.invariant}: {v.detail}" for v in cache.audit()],
            stats.transfers.loaded_blocks,
            1.0 - np.mean(canary.empty[steps // 10 : steps - steps // 10], axis=0),
        )


@contextmanager
def late_copies(cycles: Mapping[Direction, int]) -> Iterator[None]:
    """Within it, a GPU's copy streams are kept busy before each copy."""
    copy = CudaRuntime.copy

    def late(self, stream, memory, transfer):
        device = memory.arenas[0].storage.device
        if device.type == "cuda" and cycles.get(transfer.direction):
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
                torch.cuda._sleep(cycles[transfer.direction])
        return copy(self, stream, memory, transfer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaRuntime, "copy", late)
        yield


def forget_what_is_stored(cache: KVCache) -> None:
    """Blocks that nobody holds and a store reads lose their keys."""
    pools = cache.core.coordinator.pools
    for t in inside.connector(cache).ledger.live():
        if t.direction is STORE:
            free = pools.arrays.place[pools.entries(t.groups, t.device)] == int(Place.FENCED)
            pools.unpublish(t.groups[free], t.device[free])


@pytest.mark.parametrize("late", [{}, {STORE: SPIN, LOAD: SPIN}], ids=["", "late"])
@pytest.mark.parametrize(("store", "verify"), [("eager", "off"), ("lazy", "full")])
def test_nothing_is_ever_wrong(monkeypatch, store, verify, late):
    monkeypatch.setenv("KVTIER_AUDIT", "0")
    seen = amplify(0, 500, store=store, verify=verify, late=late, spin=BEHIND)
    assert not seen.wrong
    assert seen.violations == []
    assert seen.loaded_blocks > 500
    assert (seen.full >= FULL).all(), seen.full


# --- one order removed --------------------------------------------------------------------------------


def without_wait(patch: pytest.MonkeyPatch, direction: Direction) -> None:
    """Copies of one direction are put behind an event behind nothing."""
    give, idle = StreamsEngine._give, list[int]()

    def given(self, copy, mark):
        if copy.transfer.direction is direction:
            idle.extend([] if idle else [self.runtime.new_stream("idle")])
            mark = self.runtime.record(idle[0])
        give(self, copy, mark)

    patch.setattr(StreamsEngine, "_give", given)


def settle_at_once(patch: pytest.MonkeyPatch) -> None:
    """Requests run as soon as their loads are submitted."""

    def settle(self):
        for seq in self.roster.loading():
            inside.coordinator(self).start_running(seq)

    patch.setattr(SchedulerClass, "_settle_loads", settle)


def without_fences(patch: pytest.MonkeyPatch) -> None:
    """Whoever gets a block that a store reads writes it at once."""
    patch.setattr(StreamsEngine, "order_after", lambda *_: True)


def ready_at_once(patch: pytest.MonkeyPatch) -> None:
    """Host copies are found as soon as their stores are planned."""
    choose = BlockPools.take_for_stores

    def chosen(self, device, groups, blocks, keys):
        found = choose(self, device, groups, blocks, keys)
        self.make_ready(found[0], found[2])
        return found

    patch.setattr(BlockPools, "take_for_stores", chosen)


class Unpinned:
    """Host pools of which nobody holds the blocks that are let go."""

    def __init__(self, pools: BlockPools) -> None:
        self._pools = pools

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pools, name)

    def release(self, *_: Any, **__: Any) -> None:
        pass


def without_pins(patch: pytest.MonkeyPatch) -> None:
    """The next store may have the host blocks of a load as soon as it is submitted, and is given them first."""
    load, end = Connector.load, Ends.load

    def loaded(self, groups, hosts, *rest):
        ticket = load(self, groups, hosts, *rest)
        self._host.release(groups, hosts, cold=True)
        return ticket

    def unpinned(self, groups, hosts):
        self._host.release(groups, hosts, cold=True)

    def ended(self, *args):
        host, self._host = self._host, Unpinned(self._host)
        try:
            end(self, *args)
        finally:
            self._host = host

    patch.setattr(Connector, "load", loaded)
    patch.setattr(Ends, "load", ended)
    patch.setattr(Connector, "unpin_host", unpinned)


REMOVED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "edge 1: last write -> store read": (lambda patch: without_wait(patch, STORE), {"spin": BEHIND}),
    "edge 2: last read -> load write": (lambda patch: without_wait(patch, LOAD), {"spin": BEHIND}),
    "edge 3: load write -> first read": (settle_at_once, {"late": {LOAD: LONG}}),
    "edge 4: store read -> next writer": (without_fences, {"late": {STORE: LONG}, "store": "lazy"}),
    "edge 5: store write -> load read": (ready_at_once, {"late": {STORE: LONG}, "forget": True}),
    "edge 6: load read -> next store write": (without_pins, {"late": {LOAD: LONG}}),
}
"""How each is removed, and the run in which it is missed."""


def is_noticed(edge: str, seed: int, count: int, remove: bool = True, **where: Any) -> bool:
    """Whether wrong bytes, or an error that names damage, come of a run without ``edge``; other errors are raised."""
    take_away, options = REMOVED[edge]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTIER_AUDIT", "0")
        if remove:
            take_away(patch)
        try:
            seen = amplify(seed, count, **{"store": "eager", **options, **where})
        except DAMAGE:
            return True
        assert remove or seen.loaded_blocks > count
        return seen.wrong


@pytest.mark.parametrize("edge", REMOVED)
def test_with_any_one_order_removed_something_is_wrong(edge):
    assert any(is_noticed(edge, seed, 300) for seed in range(SEEDS)), "nobody has noticed"


@pytest.mark.parametrize("edge", REMOVED)
def test_nothing_is_wrong_in_those_runs_with_the_order_in_place(edge):
    assert not is_noticed(edge, 0, 300, remove=False)
