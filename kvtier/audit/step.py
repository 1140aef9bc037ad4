"""The audit of the step under way: the arrays that the engine was given for its forward (I15, I16)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvtier.audit.pools import Violation, indices
from kvtier.coordinator.coordinator import Coordinator
from kvtier.geometry.kinds import Kind
from kvtier.gpu_pool.row_state import Phase
from kvtier.pools.block_pool import Col, Mark

if TYPE_CHECKING:
    from kvtier.coordinator.core import Driver
    from kvtier.coordinator.step import Step

_NONE = int(Mark.NONE)
_BASE, _ROWS = int(Col.BASE), int(Col.ROWS)


def audit_step(coordinator: Coordinator, driver: Driver, step: Step) -> Iterator[Violation]:
    """The tokens of the step under way, and the index arrays built so far."""
    counts = step.seq_lens - step.starts
    starts = np.concatenate([[0], np.cumsum(counts)])
    if not np.array_equal(step.query_start, starts) or (counts < 1).any() or int(starts[-1]) != len(step.token_ids):
        yield Violation("I15", "the step's entries do not add up to its tokens")
        return
    t = coordinator.tables.arrays
    yield from _audit_entries(coordinator, driver, step)
    for k, row in enumerate(step.rows.tolist()):
        seq, at = driver.roster.holders[row], slice(int(starts[k]), int(starts[k + 1]))
        if seq is None:
            yield Violation("I15", f"row {row} is in the step, but nobody has it")
            continue
        known = np.concatenate([seq.tokens, t.generated[row, : t.num_generated[row]]])
        positions = np.arange(step.starts[k], step.seq_lens[k])
        if not np.array_equal(step.positions[at], positions) or step.seq_lens[k] > len(known):
            yield Violation("I15", f"{seq.request!r}: the step has other positions than its next ones")
        elif not np.array_equal(step.token_ids[at], known[positions]):
            yield Violation("I15", f"{seq.request!r}: the step computes tokens that are not its own")
    for g, group in enumerate(coordinator.spec.groups):
        yield from _audit_view(f"{group.name} of the step", coordinator, g, step)
        yield from _audit_exported(f"{group.name} of the step", coordinator, g, step)


def _audit_entries(coordinator: Coordinator, driver: Driver, step: Step) -> Iterator[Violation]:
    """The rows of the entries, the sampled entries, and the entries that compute known tokens."""
    t, holders = coordinator.tables.arrays, driver.roster.holders
    names = [seq.request.request_id if seq is not None else None for seq in (holders[row] for row in step.rows)]
    if step.request_ids != names:
        yield Violation("I15", f"the step names {step.request_ids}, its rows are those of {names}")
    last = indices(step.seq_lens == t.total[step.rows])
    if not np.array_equal(step.sample_rows, last):
        yield Violation(
            "I15", f"entries {step.sample_rows.tolist()} are sampled, {last.tolist()} reach their last token"
        )
    prefills = indices(t.phase[step.rows] != Phase.DECODE)
    if not np.array_equal(step.prefills, prefills):
        yield Violation("I15", f"entries {step.prefills.tolist()} are called prefills, {prefills.tolist()} are")


def _audit_exported(where: str, coordinator: Coordinator, g: int, step: Step) -> Iterator[Violation]:
    """The exported arrays, rebuilt from the rows entry by entry."""
    table, group = coordinator.tables.table(g), coordinator.spec.groups[g]
    bt, m, built = group.block_tokens, group.entry_tokens, step.built(g)
    blocks: list[list[int]] = []
    slots, tokens, entries = list[int](), list[int](), list[int]()
    qo, kv, pages, last = [0], [0], list[int](), list[int]()
    for row, start, end in zip(step.rows.tolist(), step.starts.tolist(), step.seq_lens.tolist(), strict=True):
        first = group.attention.first_visible(start) // bt
        blocks.append([0] * first + table[row, first : -(-end // bt)].tolist())
        slots += [int(table[row, p // bt]) * bt + p % bt for p in range(start, end)]
        for p in range(start, end):
            if p % m == m - 1:
                tokens.append(len(slots) - end + p)
                entries.append(int(table[row, p // bt]) * (bt // m) + p % bt // m)
        cuts = [start, end]
        if group.attention.kind is Kind.CHUNK:
            cuts = [start, *(p for p in range(start + 1, end) if group.attention.first_visible(p) == p), end]
        for a, b in pairwise(cuts):
            pages += table[row, group.attention.first_visible(a) // bt : -(-b // bt)].tolist()
            qo.append(qo[-1] + b - a)
            kv.append(len(pages))
            last.append((b - 1) % bt + 1)
    width = max((len(entry) for entry in blocks), default=0)
    expected = {
        "block_table": [entry + [0] * (width - len(entry)) for entry in blocks],
        "slot_mapping": slots,
        "entry_token": tokens,
        "entry_slot": entries,
        "qo_indptr": qo,
        "kv_indptr": kv,
        "kv_indices": pages,
        "kv_last_page_len": last,
    }
    for name, array in built.items():
        if name in expected and array.tolist() != expected[name]:
            yield Violation("I15", f"{where}: {name} is not what the rows say")


def _audit_states(where: str, coordinator: Coordinator, g: int, step: Step) -> Iterator[Violation]:
    """States go to blocks of the entry's own, which nobody else reads or finds; the last one ends the entry."""
    a, view, t = coordinator.pools.arrays, step.built(g), coordinator.tables.arrays
    base, entry, target = int(a.meta[g, _BASE]), view["entry"], view["target"]
    table, bt = coordinator.tables.table(g), coordinator.spec.groups[g].block_tokens
    if (target <= 0).any() or len(np.unique(target)) != len(target):
        yield Violation("S3", f"{where}: a state goes to the null block, or two go to one")
    elif (a.refs[base + target] != 1).any() or (a.mark[base + target] != _NONE).any():
        yield Violation("S3", f"{where}: a state goes to a block that is shared or findable")
    elif (a.fence[base + target] != 0).any():
        yield Violation("S3", f"{where}: a state goes to a block that a store still reads")
    spans = zip(step.rows.tolist(), step.starts.tolist(), step.seq_lens.tolist(), strict=True)
    for k, (row, start, end) in enumerate(spans):
        kept = [j for j in range(start // bt, (end - 1) // bt) if table[row, j]] + [(end - 1) // bt]
        ends = [min((j + 1) * bt, end) for j in kept]
        source = int(table[row, (start - 1) // bt]) if start else 0
        mine = entry == k
        if view["source"][k] != source or (start and not source):
            yield Violation("S1", f"{where}: entry {k} goes on from another state than the one after {start} tokens")
        if view["end"][mine].tolist() != ends or target[mine].tolist() != table[row, kept].tolist():
            yield Violation("S2", f"{where}: entry {k} does not leave a state in each of its blocks")
    if not (np.diff(entry) >= 0).all() or t.geometry[g, 0] != bt:
        yield Violation("S2", f"{where}: segments are not in the order of the entries")


def _audit_view(where: str, coordinator: Coordinator, g: int, step: Step) -> Iterator[Violation]:
    a, bt, built = coordinator.pools.arrays, coordinator.spec.groups[g].block_tokens, step.built(g)
    base, rows = int(a.meta[g, _BASE]), int(a.meta[g, _ROWS])
    for name, ids in (("block_table", built.get("block_table")), ("kv_indices", built.get("kv_indices"))):
        if ids is None:
            continue
        if ids.size and (ids.min() < 0 or ids.max() >= rows):
            yield Violation("I15", f"{where}: {name} names a block outside the pool")
        elif (a.refs[base + ids[ids > 0]] <= 0).any():
            yield Violation("I15", f"{where}: {name} names a block that nobody holds")
    if coordinator.spec.groups[g].attention.kind is Kind.STATE:
        if "target" in built:
            yield from _audit_states(where, coordinator, g, step)
        return
    slots = built.get("slot_mapping")
    if slots is not None:
        blocks = slots // bt
        if len(slots) != step.num_tokens or len(np.unique(slots)) != len(slots):
            yield Violation("I15", f"{where}: two tokens go to one slot")
        if ((blocks < 1) | (blocks >= rows)).any():
            yield Violation("I16", f"{where}: a token goes to the null block or outside the pool")
        elif (a.refs[base + blocks] != 1).any() or (a.mark[base + blocks] != _NONE).any():
            yield Violation("I16", f"{where}: a token goes to a block that is shared or findable")
        elif (a.fence[base + blocks] != 0).any():
            yield Violation("I17", f"{where}: a token goes to a block that a store still reads")
    if "kv_indptr" in built:
        qo, kv, last = built["qo_indptr"], built["kv_indptr"], built["kv_last_page_len"]
        sound = qo[0] == 0 and kv[0] == 0 and (qo[1:] > qo[:-1]).all() and (kv[1:] > kv[:-1]).all()
        sound &= int(kv[-1]) == len(built["kv_indices"]) and int(qo[-1]) == step.num_tokens
        if not sound or ((last < 1) | (last > bt)).any():
            yield Violation("I15", f"{where}: the paged index arrays contradict each other")
