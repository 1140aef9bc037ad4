"""The canary's model: its slots, and the text that a request must have.

Owns       the geometry of a canary cache, the value of every slot, and the text of a request with its chain of values.
Promises   the KV of a token, or of an entry, is a 64-bit value. It depends on all tokens up to it, on the group and on
           the layer. It also depends on the request's adapter and extra keys (an image has such an effect), but not on
           its salt. The next token is a hash over all slots that each group's mask can see. ``expected_tokens``
           computes a text from the tokens alone, one request at a time.
Does not   know caches, steps or blocks.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.geometry.kinds import Attention, Kind, Part, RecurrentState
from kvtier.geometry.spec import CacheSpec, GroupSpec
from kvtier.testing._canary_loops import chain_values, digest_chain

U64 = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

VOCABULARY = 97
STATE = RecurrentState((Part("a", (2,), "float32"), Part("b", (2,), "float32")))
"""Two 64-bit values, as a slot has them: those that the last token's slot would have, which depend on all tokens before
it."""


def canary_spec(groups: Mapping[str, tuple[Any, ...]], num_layers: int | Mapping[str, int] = 2) -> CacheSpec:
    """A spec whose slots hold one 64-bit value for K and one for V: name -> (attention, block_tokens). ``STATE`` is the
    attention of a group of states.

    A third item has more fields of the group: {"head_dim_v": 0, "entry_tokens": 4}. ``num_layers`` is a number for
    every group, or a mapping by name.
    """
    layers = dict.fromkeys(groups, num_layers) if isinstance(num_layers, int) else num_layers
    return CacheSpec(
        [
            GroupSpec(name, attention, layers[name], block_tokens=block_tokens)
            if isinstance(attention, RecurrentState)
            else GroupSpec(name, attention, layers[name], 1, 2, "float32", block_tokens, **(more[0] if more else {}))
            for name, (attention, block_tokens, *more) in groups.items()
        ]
    )


def first_read(attention: Attention, position: int) -> int:
    """The first token whose content the token at ``position`` reads: of states its own, which has all others in it."""
    return position if attention.kind is Kind.STATE else attention.first_visible(position)


def places(spec: CacheSpec) -> Iterator[tuple[int, int, int]]:
    """(place, group, layer) of K; V's place is the next number, if there is a V."""
    place = 1
    for g, group in enumerate(spec.groups):
        for layer in range(group.num_layers):
            yield place, g, layer
            place += 2


class CanaryText:
    """The tokens of one request and their chain; grows as it is generated."""

    def __init__(self, prompt: Sequence[int] | npt.NDArray[Any], seed: np.uint64) -> None:
        self._seed = seed
        self.tokens = np.empty(0, np.int64)
        self.chain = np.empty(0, np.uint64)
        self.count = 0
        self.misread = False
        """Whether a forward of this request has seen a wrong slot."""
        self.append(np.asarray(prompt, np.int64))

    def append(self, tokens: Int64s) -> None:
        end = self.count + len(tokens)
        if end > len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * end)
            self.chain = np.resize(self.chain, 2 * end)
        before = self.chain[self.count - 1] if self.count else self._seed
        self.tokens[self.count : end] = tokens
        chain_values(tokens, before, self.chain[self.count : end])
        self.count = end


def seed_of(adapter: str | None, extra_keys: Sequence[Any]) -> np.uint64:
    """The inputs that shape the KV besides the tokens; a salt does not."""
    if adapter is None and not extra_keys:
        return np.uint64(0)
    digest = hashlib.blake2b(marshal.dumps((adapter, tuple(extra_keys)), 2), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def digest_of(spec: CacheSpec, chain: U64) -> int:
    """The content that the last token of a text reads, if every slot that it sees is right.

    An entry that tokens share has the value of the last of them, so it depends on all of them.
    """
    total = 0
    for place, g, _ in places(spec):
        group = spec.groups[g]
        entries = np.ascontiguousarray(chain[group.entry_tokens - 1 :: group.entry_tokens])
        first = first_read(group.attention, len(chain) - 1) // group.entry_tokens
        for i in range(1 if group.head_dim_v == 0 else 2):
            total += int(digest_chain(entries, first, place + i))
    return total & 0xFFFFFFFFFFFFFFFF


def expected_tokens(
    spec: CacheSpec,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: Sequence[int] = (),
    adapter: str | None = None,
    extra_keys: Sequence[Any] = (),
) -> list[int]:
    """The oracle: the text of a request computed without a cache."""
    text, out = CanaryText(prompt, seed_of(adapter, extra_keys)), list[int]()
    while len(out) < max_new_tokens:
        out.append(digest_of(spec, text.chain[: text.count]) % VOCABULARY)
        if out[-1] in eos:
            break
        text.append(np.array(out[-1:], np.int64))
    return out
