"""A long random walk from the command line: ``python -m tests.model.soak --steps 1000000 --seed 0``.

Prints what happened; a failure is cut down, printed as a script, and gives exit status 1.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

from core.loops import compiled_again
from tqdm import tqdm

from model.memory import MemoryLog, slopes
from model.walk import Rule, random_config, random_rule, replay, script, shrink
from model.world import Config, Counts, World

WALK = 600
"""Rules in one world; every twentieth world lives forty times as long."""
HANGS_S = 120
"""A rule that makes no step takes milliseconds, and so does a step; the first one compiles for a minute."""
CUT_S = 600
FAULTS = ("copies: fail", "copies: tear", "copies: corrupt", "host blocks damaged")
"""Counts of worlds; copies that are never to end come on top."""
UNITS = ("MiB resident", "MiB given out by malloc", "thousands of Python objects")
"""Of ``Memory``."""


class Hangs(BaseException):
    """No ``Exception``: those of copy engines are copies that failed."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises ``Hangs`` in the middle of what takes longer."""

    def hangs(*_: object) -> NoReturn:
        raise Hangs(f"no end after {seconds} s")

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


class Ticking(Counts):
    """Each step has the time of ``within`` for itself: their number is bounded by the world."""

    def add(self, name: str, n: int = 1) -> None:
        super().add(name, n)
        if name == "steps":
            signal.alarm(HANGS_S)


def walk(seed: int, counts: Counts, bar: tqdm[None]) -> None:
    """One world from its opening to its end; exits with what it found if anything is wrong."""
    rnd = random.Random(seed)
    config, rules = random_config(rnd, seed), list[Rule]()
    with within(HANGS_S):
        world = World(config, counts, every_rule=False)
    try:
        for _ in range(WALK * (40 if seed % 20 == 19 else 1)):
            rules.append(random_rule(rnd))
            name, arguments = rules[-1]
            before = counts.seen["steps"]
            with within(HANGS_S):
                getattr(world, name)(*arguments)
            bar.update(counts.seen["steps"] - before)
        rules.append(("drain", (0,)))
        with within(HANGS_S):
            world.drain()
        world.cache.close()
        assert compiled_again() == {}
    except (Exception, Hangs):
        report(config, rules)
        raise SystemExit(1) from None


def report(config: Config, rules: list[Rule]) -> None:
    """Prints the failure and the shortest walk that still shows it; the whole walk, if that hangs."""
    traceback.print_exc()
    print("\ncutting the failing walk down ...", file=sys.stderr)
    try:
        with within(CUT_S):
            rules = shrink(config, rules)
            replay(config, rules)
    except (Exception, Hangs):
        traceback.print_exc()
    print("\n" + script(config, rules))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="steps to schedule, over many worlds")
    parser.add_argument("--seed", type=int, default=0, help="of the first world; the others follow")
    args = parser.parse_args()
    counts, seed, start, memory = Ticking(), args.seed, time.monotonic(), MemoryLog()
    stopped = suppress(KeyboardInterrupt)  # it says what it has seen so far
    for wish in (signal.SIGINT, signal.SIGTERM):  # shells have what runs in the background ignore the first
        signal.signal(wish, signal.default_int_handler)
    with tqdm(total=args.steps, unit=" steps", mininterval=1.0) as bar, stopped:
        while counts.seen["steps"] < args.steps:
            walk(seed, counts, bar)
            seed += 1
            memory.note(counts.seen["steps"])
    counts.add("worlds", seed - args.seed)
    counts.add("faults injected", sum(counts.seen[name] for name in FAULTS))
    for name, n in sorted(counts.seen.items()):
        print(f"{name:36} {n:>12,}")
    print("violations, wrong texts, missing orders: none; the first would have ended the run")
    settled = memory.second_half()
    if len(settled) > 1:
        print(f"{'memory, from half of it on':36} {'from':>12} {'to':>12}   per million steps")
        for unit, first, last, slope in zip(UNITS, settled[0][1], settled[-1][1], slopes(settled), strict=True):
            print(f"{unit:36} {first:>12,.2f} {last:>12,.2f} {slope:>12,.2f}")
    print(f"{'seconds':36} {time.monotonic() - start:>12,.0f}")


if __name__ == "__main__":
    main()
