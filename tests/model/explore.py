"""Visits every state that a tiny cache and its scheduler can reach, and checks that all of them come to an end.

    python -m tests.model.explore [-k part of a name] [--most-states n] [--recheck n]

Every order of: a request arrives, a step is made, committed or cancelled, a request is aborted, a transfer ends well
or badly, passes its deadline, ends after all. ``docs/LIVENESS.md`` says what the results mean.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvtier.cpu_offload.transfer import Direction

from .bounds import preemption_bounds, step_bound
from .snapshot import forget_shared, freeze, name_of, thaw
from .tiny import INDEXED, STATES, Action, Config, Happened, World, watched


class Kind(IntFlag):
    """What an edge of the state graph is."""

    STEP = 1  # a schedule
    COMPUTES = 2  # ... of at least one token
    NEWS = 4  # a request arrives, is aborted, or is reported; a transfer ends or passes its deadline
    OUTSIDE = 8  # a request arrives or is aborted
    CANCEL = 16


@dataclass(slots=True)
class Edge:
    """One action."""

    to: int
    kind: Kind
    action: Action
    preempted: tuple[str, ...]


@dataclass
class Graph:
    """All states of a configuration; state 0 is where it begins."""

    edges: list[list[Edge]] = field(default_factory=list)
    parent: list[tuple[int, Action]] = field(default_factory=list)
    done: list[bool] = field(default_factory=list)
    waits: list[bool] = field(default_factory=list)
    unfinished: list[tuple[str, ...]] = field(default_factory=list)

    def path(self, state: int) -> list[Action]:
        """The shortest way to a state."""
        out = []
        while state:
            state, action = self.parent[state]
            out.append(action)
        return out[::-1]


@dataclass
class Result:
    """What an exploration found."""

    config: Config
    states: int = 0
    transitions: int = 0
    longest: int = 0  # steps to completion, from the worst state, when nothing new comes; waiting counts as one step
    preemptions: int = 0  # of one request, at most
    loading: int = 0  # states with a load under way
    both: int = 0  # states with a load and a store under way
    bound: int = 0  # what ``step_bound`` allows from the beginning
    seconds: float = 0.0
    whole: bool = True  # False: gave up after too many states
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return _line(
            self.config.name,
            self.states,
            self.transitions,
            self.loading,
            self.both,
            self.longest,
            self.bound,
            self.preemptions,
            len(self.violations),
            round(self.seconds),
        ) + ("" if self.whole else "  CUT SHORT")


def _line(name: str, *values: object) -> str:
    widths = (9, 11, 9, 8, 9, 7, 9, 11, 6)
    cells = (
        f"{value:>{width},}" if isinstance(value, int) else f"{value:>{width}}"
        for value, width in zip(values, widths, strict=True)
    )
    return f"{name:<38}" + "".join(cells)


HEADER = _line("configuration", "states", "edges", "loading", "both", "longest", "bound", "preempt", "violations", "s")


# --- search ---------------------------------------------------------------------------------------

MOST_VIOLATIONS = 5
CHANGES_THE_CACHE = ("schedule", "commit", "cancel")
"""Other actions only reach the inbox and the copy engine; what is audited after these three holds after them too."""


def explore(config: Config, most_states: int = 10**7, recheck: int = 0) -> Result:
    """Visits all states, breadth first, then judges the graph. Stops at ``MOST_VIOLATIONS``.

    ``recheck``: for up to so many pairs of worlds that were taken for the same state, compares what follows.
    """
    start, result, graph = time.perf_counter(), Result(config), Graph()
    with watched(config.cut), _cheap_collection():
        _search(config, graph, result, most_states, recheck)
        if result.whole and not result.violations:
            _judge(graph, result)
    forget_shared()
    result.states, result.transitions = len(graph.edges), sum(map(len, graph.edges))
    result.seconds = time.perf_counter() - start
    return result


STATES_PER_COLLECTION = 500


@contextmanager
def _cheap_collection() -> Iterator[None]:
    """Worlds are cyclic garbage by the thousand: collects them now and then, and never looks at the graph again."""
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def _search(config: Config, graph: Graph, result: Result, most_states: int, recheck: int) -> None:
    known: dict[bytes, int] = {}
    frontier: deque[tuple[int, bytes, list[Action]]] = deque()
    merged: list[tuple[bytes, bytes]] = []

    def visit(world: World, origin: int, action: Action) -> int:
        name = name_of(world)
        if name in known:
            if name[0] % 8 == 0 and len(merged) < recheck:  # some of them, from all over the graph
                merged.append((freeze(world), name))
            return known[name]
        state = known[name] = len(graph.edges)
        graph.edges.append([])
        graph.parent.append((origin, action))
        graph.done.append(world.is_done)
        graph.waits.append(world.waits)
        directions = {transfer.direction for transfer in world.engine.live.values()}
        result.loading += Direction.LOAD in directions
        result.both += len(directions) == 2
        graph.unfinished.append(tuple(sorted(world.added - set(world.reported))))
        if not action or action[0] in CHANGES_THE_CACHE:
            report(world.wrong_here(), state)
        frozen = freeze(world)
        frontier.append((state, frozen, world.actions()))
        if world.is_done:
            report(thaw(frozen).wrong_at_rest(), state)
        return state

    def report(wrong: Sequence[str], state: int, *more: Action) -> None:
        result.violations += [f"{what}\n    after {show([*graph.path(state), *more])}" for what in wrong]

    visit(World(config), 0, ())
    while frontier and len(result.violations) < MOST_VIOLATIONS:
        if len(graph.edges) > most_states:
            result.whole = False
            return
        state, frozen, actions = frontier.popleft()
        if state % STATES_PER_COLLECTION == 0:
            gc.collect()
            gc.freeze()
        for action in actions:
            world = thaw(frozen)
            happened = world.do(action)
            if happened.wrong:
                report(happened.wrong, state, action)
                continue
            to = visit(world, state, action)
            graph.edges[state].append(Edge(to, _kind(action, happened), action, happened.preempted))
    if not result.violations:
        for frozen, name in merged:
            result.violations += _differences(frozen, graph, known, known[name])


def _kind(action: Action, happened: Happened) -> Kind:
    kind = {"schedule": Kind.STEP, "commit": Kind(0), "cancel": Kind.CANCEL}.get(action[0], Kind.NEWS)
    if action[0] in ("add", "abort"):
        kind |= Kind.OUTSIDE
    if happened.tokens:
        kind |= Kind.COMPUTES
    if happened.reported:
        kind |= Kind.NEWS
    return kind


def _differences(frozen: bytes, graph: Graph, known: dict[bytes, int], state: int) -> list[str]:
    """What follows this world differently from the state that it was taken for. Tickets differ: actions by position."""
    actions = thaw(frozen).actions()
    first = graph.edges[state]
    if len(actions) != len(first):
        return [f"merged states differ: {actions} and {[e.action for e in first]}"]
    out = []
    for action, edge in zip(actions, first, strict=True):
        world = thaw(frozen)
        world.do(action)
        if known.get(name_of(world)) != edge.to:
            out.append(f"merged states differ after {action}\n    the first one is {show(graph.path(state))}")
    return out


def show(actions: Iterable[Action]) -> str:
    """Actions on one line."""
    return ", ".join(" ".join(map(str, action)) for action in actions)


# --- judging the graph ----------------------------------------------------------------------------


def components(num_states: int, successors: Callable[[int], Iterable[int]]) -> list[list[int]]:
    """Strongly connected components, each after all those that it leads to (Tarjan)."""
    index, low, on_stack = [-1] * num_states, [0] * num_states, [False] * num_states
    stack: list[int] = []
    out: list[list[int]] = []
    count = 0
    for root in range(num_states):
        if index[root] >= 0:
            continue
        work = [(root, iter(successors(root)))]
        index[root] = low[root] = count
        count += 1
        stack.append(root)
        on_stack[root] = True
        while work:
            state, rest = work[-1]
            for to in rest:
                if index[to] < 0:
                    index[to] = low[to] = count
                    count += 1
                    stack.append(to)
                    on_stack[to] = True
                    work.append((to, iter(successors(to))))
                    break
                if on_stack[to]:
                    low[state] = min(low[state], index[to])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[state])
                if low[state] == index[state]:
                    part = []
                    while not part or part[-1] != state:
                        part.append(stack.pop())
                        on_stack[part[-1]] = False
                    out.append(part)
    return out


def _judge(graph: Graph, result: Result) -> None:
    """Livelocks, dead ends, steps to completion and preemptions, from the finished graph."""
    config, edges = result.config, graph.edges

    def kept(state: int, without: Kind) -> list[Edge]:
        return [edge for edge in edges[state] if not edge.kind & without]

    parts = components(len(edges), lambda s: (e.to for e in kept(s, Kind.CANCEL)))
    part_of = [0] * len(edges)
    for i, part in enumerate(parts):
        for state in part:
            part_of[state] = i
    inside = [[e for s in part for e in kept(s, Kind.CANCEL) if part_of[e.to] == i] for i, part in enumerate(parts)]
    for part, cycle in zip(parts, inside, strict=True):
        if not cycle:
            continue
        way = f"\n    after {show(graph.path(min(part)))}\n    again and again {show(e.action for e in cycle)}"
        if any(e.kind & (Kind.COMPUTES | Kind.NEWS) or e.preempted for e in cycle):
            result.violations.append(f"I8: a livelock: things happen and lead back to the same state{way}")
        elif not all(graph.waits[state] for state in part):
            result.violations.append(f"I8: idle for ever, though no transfer is under way{way}")
    if result.violations:
        return
    steps = [0] * len(parts)
    for i, part in enumerate(parts):
        onward = [e for s in part for e in kept(s, Kind.CANCEL | Kind.OUTSIDE) if part_of[e.to] != i]
        if not onward and not graph.done[part[0]]:
            result.violations.append(f"I8: a dead end\n    after {show(graph.path(min(part)))}")
        waiting = bool(inside[i])
        steps[i] = max((steps[part_of[e.to]] + bool(e.kind & Kind.STEP) for e in onward), default=0) + waiting
        bound = step_bound(config, graph.unfinished[part[0]])
        if steps[i] > bound:
            result.violations.append(
                f"I8: {steps[i]} steps to go, bound {bound}\n    after {show(graph.path(min(part)))}"
            )
        result.longest = max(result.longest, steps[i])
    result.bound = step_bound(config, [f"r{i}" for i in range(len(config.prompts))])
    for r, bound in enumerate(preemption_bounds(config)):
        most = [0] * len(parts)
        for i, part in enumerate(parts):
            onward = [e for s in part for e in kept(s, Kind.CANCEL) if part_of[e.to] != i]
            most[i] = max((most[part_of[e.to]] + e.preempted.count(f"r{r}") for e in onward), default=0)
        result.preemptions = max(result.preemptions, max(most))
        if max(most) > bound:
            result.violations.append(f"I10: r{r} can be preempted {max(most)} times, bound {bound}")


# --- what is explored -----------------------------------------------------------------------------

DISTINCT, STEM, EQUAL = ((1, 2, 3), (4, 5, 6)), ((1, 2, 3), (1, 2, 7)), ((1, 2, 3), (1, 2, 3))
ALONE = ((1, 2, 3, 4, 5), (7, 8, 9))
PARTING, LATER = ((1, 2, 3, 4, 5), (1, 2, 6)), ((1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 9))
WARM = ((1, 2, 3, 4, 5), (1, 2, 3, 7, 8))
LOADED = {"warm": WARM[0], "prompts": WARM, "new": (1, 1)}
NOTHING: frozenset[str] = frozenset()
ANYTHING = frozenset({"abort", "cancel", "bad", "expire"})


def _only(*names: str) -> frozenset[str]:
    return frozenset(names)


def configurations() -> list[Config]:
    """The full set, small ones first within each kind."""
    return [*_one_tier(), *_stores(), *_loads(), *_remote_tier(), *_anything()]


def _one_tier() -> list[Config]:
    c = Config
    return [
        c("one tier, distinct", (4, 4, 4), new=(3, 3), can=_only("abort", "cancel")),
        c("one tier, equal prompts", (4, 4, 4), prompts=EQUAL, new=(3, 3), can=_only("abort", "cancel")),
        c("one tier, shared stem, a token a step", (4, 3, 2), prompts=STEM, batch=1, can=_only("abort", "cancel")),
        c("states, parting", (6, 4), prompts=PARTING, batch=5, can=_only("cancel"), spec=STATES),
        c("entries, a torn restore", (4, 4, 4), (6, 6, 6), warm=(1, 2, 3), new=(1, 1), can=_only("bad"), spec=INDEXED),
        c("states, longer", (7, 4), prompts=LATER, new=(3, 3), batch=5, can=_only("abort", "cancel"), spec=STATES),
        c("one tier, second first, one row", (4, 4, 4), priorities=(1, 0), rows=1, can=_only("abort", "cancel")),
        c("one tier, second first", (3, 3, 3), priorities=(1, 0), new=(3, 3), can=_only("abort", "cancel")),
        c("one tier, outgrows the pool", (2, 2, 2), new=(4, 3), can=_only("abort", "cancel")),
        c("one tier, roomy", (6, 6, 6), prompts=STEM, new=(4, 3), can=_only("abort", "cancel")),
    ]


def _stores() -> list[Config]:
    c = Config
    return [
        c("eager", (4, 4, 4), (6, 6, 6), new=(3, 2), can=_only("bad")),
        c("eager, tiny host", (4, 4, 4), (2, 2, 2), new=(3, 3), can=NOTHING),
        c("eager, second first", (4, 4, 4), (4, 4, 4), priorities=(1, 0), new=(3, 3), can=NOTHING),
        c("eager, equal prompts, abort", (3, 3, 3), (3, 3, 3), prompts=EQUAL, can=_only("abort")),
        c("eager, cancel", (3, 3, 3), (3, 3, 3), prompts=STEM, can=_only("cancel")),
        c("eager, writers wait", (3, 3, 3), (4, 4, 4), order="wait", can=_only("bad")),
        c("eager, stores hang", (3, 3, 3), (4, 4, 4), order="stuck", new=(2, 1), can=_only("expire")),
        c("lazy", (4, 4, 4), (4, 4, 4), store="lazy", new=(3, 3), can=NOTHING),
        c("lazy, fails", (3, 3, 2), (3, 3, 3), store="lazy", new=(2, 1), can=_only("bad")),
        c("lazy, writers wait", (4, 3, 3), (2, 2, 2), store="lazy", order="wait", can=_only("bad")),
        c("lazy, stores hang", (3, 3, 3), (4, 4, 4), store="lazy", order="stuck", new=(1, 1), can=_only("expire")),
        c("lazy, block by block", (4, 4, 4), (4, 4, 4), store="lazy", new=(3, 3), cut=True, can=NOTHING),
        c("lazy, block by block, fails", (3, 3, 2), (3, 3, 3), store="lazy", new=(2, 1), cut=True, can=_only("bad")),
        c(
            "lazy, block by block, hangs",
            (3, 3, 3),
            (4, 4, 4),
            store="lazy",
            order="stuck",
            new=(1, 1),
            cut=True,
            can=_only("expire"),
        ),
    ]


def _loads() -> list[Config]:
    c, deep = Config, {"new": (4, 3)}
    return [
        c("load and stores", (4, 4, 4), (4, 4, 4), warm=WARM[0], prompts=ALONE, new=(2, 2), can=NOTHING),
        c("loads fail", (3, 3, 3), (3, 3, 3), can=_only("bad"), **LOADED),
        c("loads fail, and their requests", (4, 4, 4), (4, 4, 4), on_load_error="fail", can=_only("bad"), **LOADED),
        c("loads hang", (3, 3, 3), (3, 3, 3), can=_only("expire"), **LOADED),
        c("loads, second first, abort", (3, 3, 3), (3, 3, 3), priorities=(1, 0), can=_only("abort"), **LOADED),
        c("loads, one row, cancel", (4, 4, 4), (4, 4, 4), rows=1, can=_only("cancel"), **LOADED),
        c("lazy, loads fail", (3, 3, 3), (3, 3, 3), store="lazy", can=_only("bad"), **LOADED),
        c("lazy, loads hang", (3, 3, 2), (3, 3, 2), store="lazy", can=_only("expire"), **LOADED),
        c("loads, abort, cancel", (3, 3, 2), (3, 3, 2), can=_only("abort", "cancel"), **LOADED),
        c("preempted and loaded again", (4, 4, 4), (6, 6, 6), can=NOTHING, prompts=((1, 2, 3), (4, 5, 6, 7)), **deep),
    ]


def _remote_tier() -> list[Config]:
    c = Config
    alone = {"shelf": True, "prompts": EQUAL[:1], "new": (1,), "priorities": (0,)}
    both = {"shelf": True, "stored": EQUAL[0], "prompts": STEM, "new": (1, 1)}
    return [
        c("store, spills fail", (3, 3, 3), (3, 3, 3), can=_only("bad"), **alone),
        c("store, spills hang", (3, 3, 3), (3, 3, 3), can=_only("expire"), **alone),
        c("store, fetches fail", (3, 3, 3), (3, 3, 3), stored=EQUAL[0], can=_only("bad"), **alone),
        c("store, fetches hang", (3, 3, 3), (3, 3, 3), stored=EQUAL[0], can=_only("expire"), **alone),
        c("store, anything", (3, 3, 3), (3, 3, 3), stored=EQUAL[0], can=ANYTHING, **alone),
        c("store, two, roomy", (3, 3, 3), (3, 3, 3), can=NOTHING, **both),
        c("store, two, tight", (2, 2, 2), (1, 1, 1), can=NOTHING, **both),
        c("store, two, abort", (3, 3, 3), (3, 3, 3), can=_only("abort"), **both),
        c("store, two, cancel", (3, 3, 3), (3, 3, 3), can=_only("cancel"), **both),
    ]


def _anything() -> list[Config]:
    """All that can happen, in every order."""
    c = Config
    return [
        c("eager, anything", (3, 3, 3), (3, 3, 3), new=(2, 1), can=ANYTHING),
        c("lazy, anything", (3, 3, 2), (3, 3, 2), store="lazy", new=(1, 1), can=ANYTHING),
        c("loads, anything but cancel", (3, 3, 2), (3, 3, 2), can=ANYTHING - {"cancel"}, **LOADED),
        c("loads, anything but expire", (3, 3, 2), (3, 3, 2), can=ANYTHING - {"expire"}, **LOADED),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", metavar="TEXT", default="", help="only configurations with this in their names")
    parser.add_argument("--most-states", type=int, default=10**7, help="give a configuration up after so many states")
    parser.add_argument("--recheck", type=int, default=0, help="merged states whose successors are compared")
    options = parser.parse_args()
    print(HEADER)
    results = []
    for config in configurations():
        if options.k in config.name:
            results.append(explore(config, options.most_states, options.recheck))
            print(results[-1], flush=True)
            print("".join(f"  {violation}\n" for violation in results[-1].violations), end="", flush=True)
    states, edges = sum(r.states for r in results), sum(r.transitions for r in results)
    wrong = sum(len(r.violations) for r in results)
    print(f"{len(results)} configurations, {states:,} states, {edges:,} transitions, {wrong} violations")
    return 1 if wrong or not all(r.whole for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
