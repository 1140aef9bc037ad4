"""How long the requests of a tiny cache may take at most: counted from its sizes, not from its code.

``docs/LIVENESS.md`` has the argument behind each bound; the explorer compares every path with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .tiny import Config


def preemption_bounds(config: Config) -> list[int]:
    """How often each request can be preempted for want of blocks or a row, cancels aside.

    Each preemption of r serves a request q before it in service order. Either q is being admitted, or q runs and then
    takes a block that it did not have. q is admitted at most 2 + P(q) times (the first time, after each preemption,
    after one failed load) and takes at most ceil(limit / block_tokens) blocks per group and admission. So P(r) is the
    sum over all q before r of (2 + P(q)) * (1 + sum over groups of ceil(limit(q) / block_tokens)).
    """
    order = sorted(range(len(config.prompts)), key=lambda i: (config.priorities[i], i))
    if len(set(config.priorities)) == 1:  # arrival decides, and both may come first
        return [max(_preemptions(config, list(o))[i] for o in (order, order[::-1])) for i in range(len(order))]
    return _preemptions(config, order)


def _preemptions(config: Config, order: Sequence[int]) -> list[int]:
    out, total = [0] * len(order), 0
    for r in order:
        out[r] = total
        blocks = sum(-(-config.limits[r] // group.block_tokens) for group in config.spec.groups)
        total += (2 + out[r]) * (1 + blocks)
    return out


def step_bound(config: Config, unfinished: Iterable[str]) -> int:
    """Steps after which these requests are reported and all transfers settled, if each transfer ends or is overdue.

    Steps that compute: K = sum over r of (1 + P(r)) * (limit(r) - 1), one token each at worst. Transfers: those that
    are live (each has a host block of its own, or a row), and at most one and G more, G being the number of groups,
    whenever the pools change hands: in each step that computes, at each admission and end (3 + P(r)), and when a
    store becomes overdue or ends after all, which takes a device block out of the cache each time. Every other step
    waits for one of these transfers, or takes note of one or of a request that has ended. With a store, each request
    asks it four times at most, and fetches once; each text is spilled at two boundaries, in an object each.
    """
    p, groups = preemption_bounds(config), len(config.spec.groups)
    ids = [int(name[1:]) for name in unfinished]
    computing = sum((1 + p[i]) * (config.limits[i] - 1) for i in ids)
    changes = computing + sum(3 + p[i] for i in ids) + 2 * sum(config.device) + 1
    transfers = sum(config.host) + config.rows + (1 + groups) * changes if config.host else 0
    calls = (5 + 2 * sum(1 + p[i] for i in ids)) * (len(ids) + 1) if config.shelf else 0
    return computing + 2 * (transfers + calls + len(ids) + 1)
