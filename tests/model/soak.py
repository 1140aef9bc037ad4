"""A long random walk from the command line: ``python -m tests.model.soak --steps 1000000 --seed 0``.

Prints what happened; a failure is cut down, printed as a script, and gives exit status 1.
"""

from __future__ import annotations

import argparse
import math
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

from model.memory import Memory, MemoryLog, slopes
from model.walk import Rule, random_config, random_rule, replay, script, shrink
from model.world import Config, Counts, World

WALK = 600
"""Rules in one world; every twentieth world lives forty times as long."""
HANGS_S = 120
"""A rule that makes no step takes milliseconds, and so does a step; the first one compiles for a minute."""
CUT_S = 600
FAULTS = (
    *("copies: fail", "copies: tear", "copies: corrupt", "host blocks damaged"),
    *("store calls that may go wrong", "stored objects damaged"),
)
"""Counts of worlds; copies that are never to end come on top."""
UNITS = ("MiB resident", "MiB given out by malloc", "thousands of Python objects")
"""Of ``Memory``."""
GROWTH = Memory(resident=math.inf, malloc=0.02, objects=0.3)
"""What may come and go by chance."""


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


def walk(seed: int, counts: Counts, bar: tqdm[None], has_remote: bool | None) -> None:
    """One world from its opening to its end; exits with what it found if anything is wrong."""
    rnd = random.Random(seed)
    config, rules = random_config(rnd, seed, has_remote), list[Rule]()
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


def tell(memory: MemoryLog, again: bool) -> bool:
    """Prints the memory of the run's second half. Whether it grew, where the same worlds were walked ``again``."""
    settled = memory.second_half()
    if len(settled) < 2:
        return False
    first, last = settled[0][1], settled[-1][1]
    print(f"{'memory, from half of it on':36} {'from':>12} {'to':>12}   per million steps")
    for unit, *row in zip(UNITS, first, last, slopes(settled), strict=True):
        print(f"{unit:36} {row[0]:>12,.2f} {row[1]:>12,.2f} {row[2]:>12,.2f}")
    grows = again and (last.malloc - first.malloc > GROWTH.malloc or last.objects - first.objects > GROWTH.objects)
    if grows:
        print("memory grows, and the worlds are the same")
    return grows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="steps to schedule, over many worlds")
    parser.add_argument("--seed", type=int, default=0, help="of the first world; the others follow")
    parser.add_argument(
        "--worlds", type=int, help="walk only so many, again and again: then memory must stay as it is (status 1)"
    )
    parser.add_argument(
        "--store",
        action=argparse.BooleanOptionalAction,
        help="whether there is a remote tier; by default in every second world",
    )
    args = parser.parse_args()
    if args.worlds is not None and args.worlds < 1:
        parser.error("--worlds must be 1 at least")
    counts, walked, start, memory = Ticking(), 0, time.monotonic(), MemoryLog()
    stopped = suppress(KeyboardInterrupt)  # it says what it has seen so far
    for wish in (signal.SIGINT, signal.SIGTERM):  # shells have what runs in the background ignore the first
        signal.signal(wish, signal.default_int_handler)
    with tqdm(total=args.steps, unit=" steps", mininterval=1.0) as bar, stopped:
        while counts.seen["steps"] < args.steps:
            walk(args.seed + (walked % args.worlds if args.worlds else walked), counts, bar, args.store)
            walked += 1
            if not args.worlds or walked % args.worlds == 0:
                memory.note(counts.seen["steps"])
    counts.add("worlds", walked)
    counts.add("faults injected", sum(counts.seen[name] for name in FAULTS))
    for name, n in sorted(counts.seen.items()):
        print(f"{name:36} {n:>12,}")
    print("violations, wrong texts, missing orders: none; the first would have ended the run")
    grows = tell(memory, again=args.worlds is not None)
    print(f"{'seconds':36} {time.monotonic() - start:>12,.0f}")
    raise SystemExit(grows)


if __name__ == "__main__":
    main()
