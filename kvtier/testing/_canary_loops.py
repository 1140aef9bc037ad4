"""The canary's model as compiled loops: chains of tokens, slot values, reads from pages, poison."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import inlined, jit


@inlined
def _mix(x: Any) -> Any:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit
def chain_values(tokens: Any, value: Any, out: Any) -> None:
    """A value per token that depends on all tokens up to it; ``value`` is the previous token's."""
    for i in range(len(tokens)):
        value = value * np.uint64(6364136223846793005) + np.uint64(tokens[i]) * np.uint64(1442695040888963407)
        value = _mix(value + np.uint64(1))
        out[i] = value


@inlined
def _slot(chain: Any, place: Any) -> Any:
    """The KV of a token in one place (a group's layer, K or V)."""
    return _mix(chain + np.uint64(place) * np.uint64(0x9E3779B97F4A7C15))


@inlined
def _bound(value: Any, position: Any, place: Any) -> Any:
    """A slot's part in the next token: bound to the place of its read."""
    return _mix(value ^ _mix(np.uint64(position) * np.uint64(1_000_003) + np.uint64(place)))


@jit
def residuals(words: Any, table: Any, firsts: Any, stops: Any, chain: Any, offsets: Any, place: Any, out: Any) -> None:
    """Adds to out[r] the content that row r reads in [firsts[r], stops[r]) of one place, less the expected content.

    Row r's chain value of position p is chain[offsets[r] + p]. Zero if every slot is right.
    """
    bt = words.shape[1]
    for r in range(len(stops)):
        for p in range(firsts[r], stops[r]):
            read = _bound(words[table[r, p // bt], p % bt], p, place)
            out[r] += read - _bound(_slot(chain[offsets[r] + p], place), p, place)


@jit
def digest_chain(chain: Any, first: Any, place: Any) -> Any:
    total = np.uint64(0)
    for p in range(first, len(chain)):
        total += _bound(_slot(chain[p], place), p, place)
    return total


@jit
def digest_pages(words: Any, table: Any, entries: Any, firsts: Any, ends: Any, place: Any, out: Any) -> None:
    """Adds to out[k] the content that entry entries[k] reads in [firsts[k], ends[k]) of one place, words[block,
    offset]."""
    bt = words.shape[1]
    for k in range(len(entries)):
        total = np.uint64(0)
        for p in range(firsts[k], ends[k]):
            total += _bound(words[table[entries[k], p // bt], p % bt], p, place)
        out[k] += total


@jit
def write_slots(words: Any, slots: Any, chain: Any, place: Any, row_of: Any, error: Any) -> None:
    """Writes the KV of the new tokens; it is wrong if their row has read wrong content."""
    bt = words.shape[1]
    for i in range(len(slots)):
        words[slots[i] // bt, slots[i] % bt] = _slot(chain[i], place) + error[row_of[i]]


@jit
def poison_blocks(words: Any, blocks: Any, value: Any) -> None:
    for b in blocks:
        words[b, :] = value


@jit
def poison_tails(words: Any, table: Any, ends: Any, value: Any) -> None:
    bt = words.shape[1]
    for r in range(len(ends)):
        if ends[r] % bt:
            words[table[r, ends[r] // bt], ends[r] % bt :] = value


@jit
def read_pages(
    qo: Any, kv: Any, indices: Any, last: Any, row_of: Any, positions: Any, chunk: Any, bt: Any, table: Any
) -> Any:
    """Block tables from page lists, read as a kernel reads them: an entry's queries are the last of its tokens.

    Writes table[r, j], which is all null before. ``chunk`` is 0 if masks need no virtual batches. Returns the first
    entry that cannot be read, -1 if there is none. Entries after the last token are padding.
    """
    num_tokens, entries = len(positions), len(last)
    if len(qo) != entries + 1 or len(kv) != entries + 1 or qo[0] != 0 or kv[0] != 0 or kv[entries] != len(indices):
        return np.int64(0)
    for e in range(entries):
        begin, end, count = qo[e], qo[e + 1], kv[e + 1] - kv[e]
        if begin >= num_tokens:
            if end - begin != 1 or count != 1 or indices[kv[e]] != 0 or last[e] != 1:
                return np.int64(e)
            continue
        if end <= begin or end > num_tokens or count < 1 or kv[e] < 0 or last[e] < 1 or last[e] > bt:
            return np.int64(e)
        r, stop = row_of[begin], positions[end - 1] + 1
        first = stop - (count - 1) * bt - last[e]
        if row_of[end - 1] != r or first < 0 or first % bt:
            return np.int64(e)
        if chunk and first // chunk != (stop - 1) // chunk:
            return np.int64(e)
        for i in range(count):
            page, j = indices[kv[e] + i], first // bt + i
            if table[r, j] != 0 and table[r, j] != page:
                return np.int64(e)
            table[r, j] = page
    return np.int64(-1) if qo[entries] >= num_tokens else np.int64(entries)
