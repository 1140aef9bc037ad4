"""The canary's model as compiled loops: chains of tokens, slot values, what is read back from pages, poison."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier._jit import inlined, jit


@inlined
def _mix(x: Any) -> Any:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit
def chain_values(tokens: Any, value: Any, out: Any) -> None:
    """A value per token that depends on all tokens up to it; ``value`` is that of the token before."""
    for i in range(len(tokens)):
        value = value * np.uint64(6364136223846793005) + np.uint64(tokens[i]) * np.uint64(1442695040888963407)
        value = _mix(value + np.uint64(1))
        out[i] = value


@inlined
def _slot(chain: Any, place: Any) -> Any:
    """What the KV of a token is in one place (a group's layer, K or V)."""
    return _mix(chain + np.uint64(place) * np.uint64(0x9E3779B97F4A7C15))


@inlined
def _bound(value: Any, position: Any, place: Any) -> Any:
    """A slot's part in the next token: bound to where it is read."""
    return _mix(value ^ _mix(np.uint64(position) * np.uint64(1_000_003) + np.uint64(place)))


@jit
def residuals(words: Any, table: Any, firsts: Any, starts: Any, chain: Any, offsets: Any, place: Any, out: Any) -> None:
    """Adds to out[r] what row r reads in [firsts[r], starts[r]) of one place, less what it should read there.

    Row r's chain value of position p is chain[offsets[r] + p]. Zero if every slot is right.
    """
    bt = words.shape[1]
    for r in range(len(starts)):
        for p in range(firsts[r], starts[r]):
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
    """Adds to out[k] what entry entries[k] reads in [firsts[k], ends[k]) of one place, words[block, offset]."""
    bt = words.shape[1]
    for k in range(len(entries)):
        total = np.uint64(0)
        for p in range(firsts[k], ends[k]):
            total += _bound(words[table[entries[k], p // bt], p % bt], p, place)
        out[k] += total


@jit
def write_slots(words: Any, slots: Any, chain: Any, place: Any, row_of: Any, error: Any) -> None:
    """The KV of the new tokens; wrong if what their row has read was wrong."""
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
