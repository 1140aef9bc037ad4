"""FlashInfer's index arrays: their meaning, and their derivation from a block table.

Owns       the meaning of (qo_indptr, kv_indptr, kv_indices, kv_last_page_len), in plain NumPy.
Promises   ``faults`` names every way in which the arrays of a step break I15: a wrong page is found before a kernel
           reads it. Engines get their arrays from a compiled loop (kvtier.gpu_pool.exports). ``paged_from_table`` is
           written independently of it, so each can be checked against the other.
Does not   touch tensors, or know the origin of a step.

Entry e has the queries qo_indptr[e] to qo_indptr[e + 1], and the pages kv_indices[kv_indptr[e]:kv_indptr[e + 1]]. The
last of them holds kv_last_page_len[e] tokens. The queries are the last of the entry's tokens, and masks count from
there: so pages may be dropped from the front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import numpy.typing as npt

from kvtier.geometry.kinds import Attention, Kind
from kvtier.machine.errors import StepError

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Paged = tuple[Int32s, Int32s, Int32s, Int32s]

MAX_ADDRESS = 2**32
"""FlashInfer counts the tokens of all pages of a batch in 32 bits."""


@dataclass(frozen=True)
class Bounds:
    """The bounds for a group's arrays: ``blocks`` pool rows (the null block is row 0), T new tokens."""

    attention: Attention
    block_tokens: int
    blocks: int
    tokens: int
    null_entries: int = 0
    """Number of padding entries at the end: one query on the null block each, whose output is ignored."""


def faults(paged: Paged, slots: Int64s, bounds: Bounds) -> list[str]:
    """Every fault found, each as one line; [] if the arrays are sound. ``slots`` [T]: the new tokens' slots."""
    found = _shape_faults(paged, slots, bounds)
    return found if found else _meaning_faults(paged, slots, bounds)


def _shape_faults(paged: Paged, slots: Int64s, bounds: Bounds) -> list[str]:
    """Faults that make the arrays unreadable."""
    names = "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"
    found = [
        f"{name} is {array.dtype} {list(array.shape)}, must be int32 and flat"
        for name, array in zip(names, paged, strict=True)
        if array.dtype != np.int32 or array.ndim != 1
    ]
    if found:
        return found
    qo, kv, indices, last = paged
    if len(qo) != len(last) + 1 or len(kv) != len(last) + 1:
        return [f"qo_indptr has {len(qo)} and kv_indptr {len(kv)} numbers for {len(last)} entries"]
    for name, array, total in (("qo_indptr", qo, bounds.tokens), ("kv_indptr", kv, len(indices))):
        if array[0] != 0 or array[-1] != total or (np.diff(array) < 1).any():
            found.append(f"{name} does not rise from 0 to {total}: {_some(array)}")
    if len(slots) != bounds.tokens:
        found.append(f"{len(slots)} slots for {bounds.tokens} tokens")
    if len(indices) * bounds.block_tokens >= MAX_ADDRESS:
        found.append(f"{len(indices)} pages of {bounds.block_tokens} tokens are more than FlashInfer counts")
    return found


def _meaning_faults(paged: Paged, slots: Int64s, bounds: Bounds) -> list[str]:
    """Faults of arrays that can be read: wrong pages, wrong lengths, pages that no mask reaches."""
    qo, kv, indices, last = paged
    bt, real = bounds.block_tokens, len(last) - bounds.null_entries
    queries, pages = np.diff(qo).astype(np.int64), np.diff(kv).astype(np.int64)
    tokens = (pages - 1) * bt + last
    found = _entries("has a last page of no possible length", (last < 1) | (last > bt))
    found += _entries("has fewer tokens than queries", tokens < queries)
    found += _entries(
        f"is on pages outside its pool of {bounds.blocks}", _any(kv, (indices < 0) | (indices >= bounds.blocks))
    )
    on_null = _any(kv, indices == 0)
    found += _entries("reads the null block", on_null[:real])
    padding = (~on_null | (pages != 1) | (queries != 1) | (last != 1))[real:]
    found += _entries("pads the batch with something else than the null block", padding, real)
    found += _entries("has pages that its mask cannot reach", _unreachable(tokens, queries, bounds)[:real])
    return found if found else _slot_faults(paged, slots, bounds, tokens)


def _unreachable(tokens: Int64s, queries: Int64s, bounds: Bounds) -> npt.NDArray[np.bool_]:
    """Entries whose first page none of their queries can see, or that reach over a chunk's border."""
    if bounds.attention.kind is Kind.WINDOW:
        return tokens - queries - (bounds.attention.span_tokens - 1) >= bounds.block_tokens
    if bounds.attention.kind is Kind.CHUNK:
        return tokens > bounds.attention.span_tokens
    if bounds.attention.kind is Kind.FULL:
        return np.zeros(len(tokens), np.bool_)
    if bounds.attention.kind is Kind.STATE:
        raise StepError("a group of states has no pages: ask the step for its states()")
    assert_never(bounds.attention.kind)


def _slot_faults(paged: Paged, slots: Int64s, bounds: Bounds, tokens: Int64s) -> list[str]:
    """New tokens that are written elsewhere than they are read: one mapping per token within a step."""
    qo, kv, indices, _ = paged
    bt = bounds.block_tokens
    entry = np.repeat(np.arange(len(tokens)), np.diff(qo))
    at = tokens[entry] - qo[entry + 1] + np.arange(bounds.tokens)  # of each new token, in its entry's pages
    read = indices[kv[entry] + at // bt].astype(np.int64) * bt + at % bt
    padding = entry >= len(tokens) - bounds.null_entries
    wrong = np.where(padding, slots >= 0, slots != read)
    return (
        []
        if not wrong.any()
        else [
            f"token {int(t)} (entry {int(entry[t])}) is written to slot {int(slots[t])} and read from {int(read[t])}"
            for t in np.flatnonzero(wrong)[:3]
        ]
    )


def _any(indptr: Int32s, flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether any flag of each entry is set; every entry has at least one."""
    return np.logical_or.reduceat(flags, indptr[:-1]) if len(indptr) > 1 else np.zeros(0, np.bool_)


def _entries(what: str, wrong: npt.NDArray[np.bool_], first: int = 0) -> list[str]:
    at = np.flatnonzero(wrong) + first
    return [f"entry {_some(at)} {what}"] if len(at) else []


def _some(array: npt.NDArray[np.integer]) -> str:
    return ", ".join(map(str, array[:4].tolist())) + (", ..." if len(array) > 4 else "")


def paged_from_table(
    attention: Attention, block_tokens: int, query_start: Sequence[int], seq_lens: Sequence[int], table: Int32s
) -> Paged:
    """FlashInfer's arrays from a block table [R, W], as ``GroupView.paged`` gives them.

    ``query_start`` [R + 1] and ``seq_lens`` [R] as in a step. A chunked group's entries are cut where chunks begin.
    """
    qo, kv, last, pages = [0], [0], [], []
    for r, end in enumerate(seq_lens):
        a = end - (query_start[r + 1] - query_start[r])
        while a < end:
            b = (
                min(end, (a // attention.span_tokens + 1) * attention.span_tokens)
                if attention.kind is Kind.CHUNK
                else end
            )
            first, stop = attention.first_visible(a) // block_tokens, -(-b // block_tokens)
            pages += table[r, first:stop].tolist()
            qo.append(qo[-1] + b - a)
            kv.append(len(pages))
            last.append(b - (stop - 1) * block_tokens)
            a = b
    qo_indptr, kv_indptr, kv_indices, kv_last_page_len = (np.array(x, np.int32) for x in (qo, kv, pages, last))
    return qo_indptr, kv_indptr, kv_indices, kv_last_page_len
