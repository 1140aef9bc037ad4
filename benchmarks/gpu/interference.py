"""What decode steps lose while copies keep the link busy, one way and both ways.

The copies go through an engine and an arena of their own, so that they wait for nobody's blocks: the link is as busy as
it can be. Rounds with and without them take turns, since requests grow longer from step to step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.gpu.figures import Figure
from benchmarks.gpu.link import raw
from benchmarks.gpu.rig import Rig, layout
from benchmarks.gpu.serving import Served, Stage, step
from kvtier.cpu_offload.engines.cuda.host_memory import HostMemory, Registration
from kvtier.cpu_offload.transfer import Direction
from kvtier.geometry.kinds import Kind
from runner.api.llm import LLM

STORE, LOAD = Direction.STORE, Direction.LOAD
MODES = {"loads": (LOAD,), "stores": (STORE,), "loads and stores": (LOAD, STORE)}
MOST_LOST = {1: 2.0, 2: 4.0}
"""Percent, by the number of directions."""
ORDER = (False, True, True, False)
"""Rounds of a mode: with copies, or without."""
ROUNDS = 2
BLOCKS = 1024
"""Of a transfer."""
DEPTH = 3
"""Transfers that are always under way in a direction."""


def steps(a_round: int) -> int:
    """Decode steps that ``run`` takes."""
    return len(MODES) * ROUNDS * len(ORDER) * a_round


class Traffic:
    """Transfers without end, in some directions, between the two halves of a rig's blocks."""

    def __init__(self, rig: Rig, directions: Sequence[Direction]) -> None:
        self._rig = rig
        self._under_way: dict[int, Direction] = {}
        device, host = layout(BLOCKS, 0.5)
        self._ids = {d: (device + np.int32(k * BLOCKS), host + np.int32(k * BLOCKS)) for k, d in enumerate(directions)}
        self.moved_bytes = 0

    def top_up(self) -> None:
        """Takes what has ended, and submits as much again."""
        self._take()
        for direction, ids in self._ids.items():
            while sum(d is direction for d in self._under_way.values()) < DEPTH:
                transfer = self._rig.transfer(direction, *ids)
                self._under_way[transfer.ticket] = direction
                self._rig.engine.submit(transfer)

    def drain(self) -> None:
        """Until nothing is under way."""
        while self._under_way:
            self._rig.engine.wait(1.0)
            self._take()

    def _take(self) -> None:
        for outcome in self._rig.engine.poll():
            if outcome.error:
                raise RuntimeError(outcome.error)
            direction = self._under_way.pop(outcome.ticket)
            self.moved_bytes += len(self._ids[direction][0]) * self._rig.block_bytes


def run(stage: Stage, subject: Served, a_round: int) -> Iterator[Figure]:
    """All modes, on requests that generate already."""
    group = next(g for g in subject.spec.groups if g.attention.kind is Kind.FULL)
    setup, count = stage.link, 2 * BLOCKS
    pins = Registration(setup.api.host_register, setup.api.host_unregister)
    size = max(2 * setup.raw_bytes, (count + 1) * group.block_bytes)
    pinned = HostMemory(size, pins, pci_bus_id=setup.pci_bus_id)
    try:
        peaks, duplex = raw(setup, pinned)
        rig = Rig(group, count, pinned, setup.api, setup.device)
        setup.on_device(rig.device)
        try:
            for words, directions in MODES.items():
                peak = duplex if len(directions) > 1 else peaks[directions[0]]
                yield _lost(subject.llm, rig, words, directions, a_round, peak)
        finally:
            rig.close()
    finally:
        pinned.release()


def _lost(llm: LLM, rig: Rig, words: str, directions: Sequence[Direction], a_round: int, peak: float) -> Figure:
    """The part of decode throughput that is lost to copies in these directions."""
    spent, moved = {False: 0.0, True: 0.0}, 0
    for with_copies in ORDER * ROUNDS:
        seconds, num_bytes = _round(llm, Traffic(rig, directions if with_copies else ()), a_round)
        spent[with_copies] += seconds
        moved += num_bytes
    rate = moved / spent[True] / 1e9
    return Figure(
        "interference",
        f"decode throughput lost beside {words}",
        100 * (1 - spent[False] / spent[True]),
        "%",
        at_most=MOST_LOST[len(directions)],
        note=f"{rate:.1f} GB/s meanwhile, {100 * rate / peak:.0f} % of the link's own peak",
    )


def _round(llm: LLM, traffic: Traffic, a_round: int) -> tuple[float, int]:
    """(seconds of the steps, bytes that were copied meanwhile)"""
    traffic.top_up()
    step(llm)
    before, begun = traffic.moved_bytes, time.perf_counter()
    for _ in range(a_round - 1):
        traffic.top_up()
        step(llm)
    seconds, moved = time.perf_counter() - begun, traffic.moved_bytes - before
    traffic.drain()
    return seconds, moved
