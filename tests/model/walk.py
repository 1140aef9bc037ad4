"""Random walks through a world, recorded as plain data; a failing one is cut down and printed as a script."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from model.played_backend import FATES, ROTS
from model.world import KINDS, Config, Counts, World

Rule = tuple[str, tuple[Any, ...]]
"""A method of ``World`` and its arguments."""

WEIGHTS = {
    "submit": 12,
    "revisit": 10,
    "crowd": 3,
    "urgent": 3,
    "schedule": 34,
    "commit": 30,
    "cancel": 1,
    "abort": 2,
    "finish": 1,
    "fail": 1,
    "end_copy": 22,
    "rot": 3,
    "end_call": 32,
    "rot_store": 1,
    "elsewhere": 4,
    "pass_time": 8,
    "reset": 0.7,
    "fill_host": 0.15,
    "reopen": 0.3,
    "drain": 0.3,
}


def random_config(rnd: random.Random, seed: int, has_remote: bool | None = None) -> Config:
    """Tiny pools: nearly every bug needs fewer than 15 blocks and 4 requests. Every second world has a store, unless
    ``has_remote`` says."""
    groups: dict[str, tuple[str, int, int, int, int]] = {}
    has_remote = rnd.random() < 0.5 if has_remote is None else has_remote
    objects = rnd.choice([1, 300, 1000]) if has_remote else None  # and more room in the host, from which they come
    kinds = rnd.choice(
        [["full", "window", "chunk"]] * 4
        + [["full"], ["full", "window"], ["chunk", "window"], ["full", "full", "window"]]
        + [["full", "state"], ["state"], ["full", "window", "state"], ["full", "state", "state"]]
    )
    sizes = rnd.choice([(2,), (4,), (2, 4), (2, 4), (3, 2, 6)])
    for i, kind in enumerate(kinds):
        bt = rnd.choice(sizes)
        if kind == "state" and groups:  # they come last: kept where hits end
            bt = math.lcm(*(group[2] for group in groups.values()))
        span = rnd.choice([1, 2, 3, 5, 8]) if kind == "window" else bt * rnd.choice([1, 2, 3])
        host = rnd.randint(*rnd.choice([(1, 6), (6, 20), (20, 60)]))
        host = max(host, rnd.choice([0, 30, 60])) if objects is not None else host
        groups[f"{kind} {i}"] = (kind, span, bt, rnd.randint(2, 12), host)
    assert set(kinds) <= set(KINDS)
    room = [12, 40, 80] if has_remote else [4, 12, 40]
    shares = 0.7 if "state" in kinds else 0.4  # pools of states take slabs in which others have blocks in use
    slabs = (rnd.randint(3, 14), rnd.choice(room)) if rnd.random() < shares else None
    return Config(
        groups,
        host=rnd.random() < 0.9 or has_remote,
        slabs=slabs,
        layers=rnd.choice([(1, 2, 3), (3, 1, 2), (1, 1, 1), (5, 4, 3)]),
        store=rnd.choice(["eager"] * 7 + ["off"] if has_remote else ["eager", "lazy"]),
        verify=rnd.choice(["full", "full", "off"]),
        on_load_error=rnd.choice(["recompute", "recompute", "recompute", "fail"]),
        streams=rnd.random() < 0.6,
        max_batched_tokens=rnd.choice([1, 3, 6, 6, 16]),
        max_running=rnd.choice([1, 2, 3, 4]),
        deadline_s=rnd.choice([20.0, 50.0]),
        lose=rnd.choice([0.0, 0.0, 0.05]),
        lag_s=rnd.choice([0.0, 0.0, 5.0]),
        link=rnd.choice([None, None, (1, 1), (400, 1), (400, 1500)]),
        orders=rnd.choice(["orders", "orders", "waits", "breaks"]),
        objects=objects,
        quick=rnd.choice([0.0, 0.7, 0.97]),
        seed=seed,
    )


def random_rule(rnd: random.Random) -> Rule:
    """One rule with arguments; lengths crowd around multiples of blocks, windows and chunks."""
    name = rnd.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    pick: dict[str, Callable[[], tuple[Any, ...]]] = {
        "submit": lambda: (
            rnd.choice([0, 0, 1, 2, 3]),
            max(0, rnd.choice([2, 4, 6, 8, 12, 16]) + rnd.choice([-1, 0, 0, 1])),
            rnd.choice([0, 0, 0, 1, 2, 5]),
            rnd.choice([1, 1, 2, 3, 4, 6, 9]),
            rnd.choice([0, 0, 0, 0, 1, 2, 3]),
            rnd.choice([0, 0, 0, 0, -1, 1]),
            rnd.random() < 0.3,
        ),
        "revisit": lambda: (rnd.randrange(6), rnd.choice([1, 2, 4])),
        "crowd": lambda: (rnd.choice([0, 1, 3, 3]), rnd.randrange(3), rnd.choice([6, 9, 16])),
        "urgent": lambda: (rnd.choice([0, 3, 3]), rnd.choice([6, 8, 9, 12, 16])),
        "abort": lambda: (rnd.randrange(6),),
        "finish": lambda: (rnd.randrange(6),),
        "fail": lambda: (rnd.randrange(6),),
        "end_copy": lambda: (rnd.randrange(6), rnd.choice([0] * 7 + [1, 2, 3, 3])),
        "rot": lambda: (rnd.randrange(40),),
        "end_call": lambda: (rnd.randrange(6), rnd.choice([0] * 3 * len(FATES) + list(range(len(FATES))))),
        "rot_store": lambda: (rnd.randrange(200), rnd.randrange(len(ROTS))),
        "elsewhere": lambda: (rnd.choice([0, 0, 1, 2]), rnd.choice([4, 9, 13, 17]), rnd.choice([0, 0, 0, 0, 1, 2, 3])),
        "pass_time": lambda: (rnd.choice([0.005, 0.01, 0.05, 0.5, 1.0, 2.0, 5.0, 5.0, 60.0]),),
        "fill_host": lambda: (rnd.randrange(4),),
        "drain": lambda: (rnd.choice([0, 0, 1, 3]), rnd.random() < 0.3),
    }
    return name, pick.get(name, tuple)()


SHORT_WALKS = range(32)
"""Seeds of the walks that every run of the suite takes; the long ones are those of soak.py."""


def short_walk(seed: int) -> tuple[Config, list[Rule]]:
    """A world and its rules: many of its loads end at last, one well or badly after the other."""
    rnd = random.Random(seed)
    rules = [random_rule(rnd) for _ in range(160)]
    again = [("drain", (0,)), ("rot", (seed,)), *(("revisit", (k, 2)) for k in range(6)), ("drain", (1 + seed % 3,))]
    return random_config(rnd, seed), [*rules, *again]


def replay(config: Config, rules: Sequence[Rule], counts: Counts | None = None) -> None:
    """Carries out a recorded walk; raises what it raises."""
    world = World(config, counts)
    try:
        for name, arguments in rules:
            getattr(world, name)(*arguments)
    finally:
        world.cache.close()


def fails(config: Config, rules: Sequence[Rule]) -> bool:
    """Whether the walk goes wrong in any way."""
    try:
        replay(config, rules)
    except Exception:
        return True
    return False


def shrink(config: Config, rules: Sequence[Rule], limit: int = 3000) -> list[Rule]:
    """Leaves out what the failure does not need: halves, quarters, ... and at last single rules (Zeller's ddmin)."""
    kept, size, tries = list(rules), max(1, len(rules) // 2), 0
    while size and tries < limit:
        at, shorter = 0, False
        while at < len(kept) and tries < limit:
            candidate = kept[:at] + kept[at + size :]
            tries += 1
            if fails(config, candidate):
                kept, shorter = candidate, True
            else:
                at += size
        if not shorter or size > 1:
            size = size // 2
    return kept


def script(config: Config, rules: Sequence[Rule]) -> str:
    """The walk as a program for ``python`` in the folder ``tests``."""
    lines = [f"world.{name}({', '.join(map(repr, arguments))})" for name, arguments in rules]
    head = ["# run in the folder tests: python this_file", "from model.world import Config, World", ""]
    return "\n".join([*head, f"world = World({config!r})", *lines, ""])
