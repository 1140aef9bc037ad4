"""The prompts to serve, and pools of such sizes that a scenario is certain to happen, for any groups and lengths.

Owns       prompt lengths, the chunk size, and every pool size of the kit, all computed from the model's spec.
Promises   a full hit ends where a chunk of the cold run ended. So the computation after it repeats the cold run step by
           step: only then can bits be compared.
Does not   serve anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtier import CacheSpec, ConfigError, GroupSpec
from kvtier.geometry.kinds import Kind
from runner import needle
from runner.model.hybrid import HybridModel
from runner.model.prompts import ordinary_tokens

TOKENS = 2_048
NEW_TOKENS = 24
_FEW_CHUNKS = 4
"""Chunks that a prompt is cut into, or somewhat more; fewer if it is short."""
_LONGEST_CHUNK = 4_096
_STRIDE = 5
"""Prompts end this many tokens apart within a block: on its border, and off it."""
_FLOOD_SEED = 1_000_000

Blocks = dict[str, int]


@dataclass(frozen=True)
class Plan:
    """Prompts of about equal length, the chunk that a step computes at most, and what follows from both."""

    spec: CacheSpec
    prompts: tuple[list[int], ...]
    flood: list[int]
    """Other content, as long as the longest prompt; served under ever new salts it pushes everything else out."""
    new_tokens: int
    chunk_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    # --- what a full hit is -----------------------------------------------------------------------

    def hit_tokens(self, prompt: int) -> int:
        """Tokens of the longest hit that prompt can have: all but the last, in whole units."""
        unit = self.spec.hit_tokens
        return (len(self.prompts[prompt]) - 1) // unit * unit

    def hit_blocks(self, prompt: int) -> int:
        """Blocks that this hit consists of, in all groups together."""
        return sum(len(_needed(group, self.hit_tokens(prompt))) for group in self.spec.groups)

    def hit_cover(self, prompt: int) -> int:
        """Tokens of this hit of which some group needs a block: all, unless every group is local."""
        n = self.hit_tokens(prompt)
        return n - min(_needed(group, n).start * group.block_tokens for group in self.spec.groups)

    @property
    def interrupt_tokens(self) -> int:
        """Where a prompt is interrupted: after about half of its chunks."""
        return max(1, self.hit_tokens(0) // self.chunk_tokens // 2) * self.chunk_tokens

    def interrupts(self, prompt: int) -> list[int]:
        """Computed tokens at which a request is interrupted: there, and amid its answer, before the last token."""
        return [self.interrupt_tokens, len(self.prompts[prompt]) + (self.new_tokens - 1) // 2]

    # --- pools, in usable blocks by group ---------------------------------------------------------

    def tight(self) -> Blocks:
        """Just one request's maximum: a request that runs in these pools has pushed everything else out."""
        return {group.name: self._peak(group) for group in self.spec.groups}

    def partly(self) -> Blocks:
        """One request, and room for part of what the one before it has left."""
        return {group.name: self._peak(group) + self._survivors(group) for group in self.spec.groups}

    def roomy(self) -> Blocks:
        """One running request, and what len(prompts) finished ones leave cached."""
        return {g.name: self._peak(g) + len(self.prompts) * self._most_left(g) for g in self.spec.groups}

    def ample(self) -> Blocks:
        """One running request, and every block of every prompt's text: nothing goes, whatever is named."""
        whole = {g.name: -(-self._end // g.block_tokens) for g in self.spec.groups}
        return {g.name: self._peak(g) + len(self.prompts) * whole[g.name] for g in self.spec.groups}

    def single(self) -> Blocks:
        """One request, and no other beside it once it is interrupted."""
        if any(group.attention.kind is Kind.FULL for group in self.spec.groups):
            return self.tight()  # a full-attention group holds the whole text
        return {group.name: group.peak_blocks(self._end) for group in self.spec.groups}  # steps of any length

    def crowded(self) -> Blocks:
        """All prompts at once and a first new block, but not all that they will generate."""
        blocks = {}
        for group in self.spec.groups:
            if group.attention.kind is Kind.FULL:
                prompts = sum(-(-len(p) // group.block_tokens) for p in self.prompts)
                blocks[group.name] = max(prompts + 1, self._peak(group))
            else:
                blocks[group.name] = len(self.prompts) * self._peak(group)
        return blocks

    def host(self) -> Blocks:
        """Host pools that lose nothing between two times that a prompt is served."""
        blocks = {}
        for group in self.spec.groups:
            preempted = 0 if group.attention.kind is Kind.FULL else 2 * group.peak_blocks(self._end)
            blocks[group.name] = (len(self.prompts) + 3) * (self._most_left(group) + preempted)
        return blocks

    @property
    def _end(self) -> int:
        """Tokens whose KV the longest request has written when it ends; the last token's never is."""
        return self.longest + self.new_tokens - 1

    def _held(self, group: GroupSpec, start: int, end: int) -> int:
        """Blocks that a request holds to compute [start, end): also what a hit at the boundary before would need."""
        unit = self.spec.hit_tokens
        return group.blocks_needed(max(0, start - 1) // unit * unit, end)

    def _peak(self, group: GroupSpec) -> int:
        """The most blocks that a lone request holds."""
        most, start = 0, 0
        while start < self._end:
            end = min(start + self.chunk_tokens, self.longest) if start < self.longest else start + 1
            most = max(most, self._held(group, start, end))
            start = end
        return most

    def _left_behind(self, group: GroupSpec, prompt: int) -> list[int]:
        """Logical blocks that stay findable when a request ends, in the order of their eviction."""
        length = len(self.prompts[prompt])
        end, unit = length + self.new_tokens - 1, self.spec.hit_tokens
        if group.attention.kind is Kind.FULL:
            return list(range(end // group.block_tokens))[::-1]
        anchors = [n // unit * unit for n in (length, length - 1, end, end - 1)]
        blocks = {block for n in anchors for block in _needed(group, n)}
        held = _needed(group, anchors[-1]).start  # released at the end, the last first; earlier blocks one by one
        return sorted(b for b in blocks if b < held) + sorted((b for b in blocks if b >= held), reverse=True)

    def _most_left(self, group: GroupSpec) -> int:
        return max(len(self._left_behind(group, i)) for i in range(len(self.prompts)))

    def _survivors(self, group: GroupSpec) -> int:
        """How many blocks must survive, so that of each prompt's hit about half does, as nearly as can be."""

        smaller = np.full((len(self.prompts), self._most_left(group) + 1), 0)
        for i, halves in enumerate(smaller):
            needed = _needed(group, self.hit_tokens(i))
            ours = np.array([block in needed for block in self._left_behind(group, i)])
            gone = np.concatenate([[0], np.cumsum(ours)])[::-1]  # by number of survivors
            halves[: len(gone)] = np.minimum(gone, len(needed) - gone)
        return max(range(smaller.shape[1]), key=lambda n: (int(smaller[:, n].min()), int(smaller[:, n].sum())))


def make(model: HybridModel, spec: CacheSpec, bundled: bool, tokens: int | None, prompts: int, new_tokens: int) -> Plan:
    """A plan for prompts of at most ``tokens`` tokens; None picks what the model can take, up to ``TOKENS``.

    Raises ``ConfigError`` for lengths with which the scenarios cannot happen.
    """
    if prompts < 2 or new_tokens < 2:
        raise ConfigError("--prompts and --new-tokens must be at least 2: requests meet, and are interrupted")
    limit = None if model.max_tokens is None else model.max_tokens - new_tokens
    if tokens is None:
        tokens = TOKENS if limit is None else min(TOKENS, limit)
    elif limit is not None and tokens > limit:
        name = "the bundled model" if bundled else model.name
        raise ConfigError(
            f"{name} was made for {model.max_tokens:,} tokens; use --tokens {limit} or fewer, or fewer new ones"
        )
    unit = spec.hit_tokens
    lengths, chunk_tokens = _lengths(tokens, unit, prompts, _fits_needle if bundled else lambda n: True)
    if bundled:
        made = [needle.make_prompt(n, seed=i).token_ids for i, n in enumerate(lengths)]
    else:
        made = [ordinary_tokens(model.vocab_size, n, seed=i) for i, n in enumerate(lengths)]
    flood = ordinary_tokens(model.vocab_size, max(lengths), seed=_FLOOD_SEED)
    return Plan(spec, tuple(made), flood, new_tokens, chunk_tokens)


def _lengths(tokens: int, unit: int, count: int, fits: Callable[[int], bool]) -> tuple[list[int], int]:
    """(prompt lengths, chunk): whole chunks of whole units each, and a last chunk of at most one unit."""
    rests = [unit - _STRIDE * i % unit for i in range(count)]
    for units in range((tokens - unit) // unit, 1, -1):
        few = max(_FEW_CHUNKS, -(-units * unit // _LONGEST_CHUNK))
        numbers = range(few, 2 * few + 1) if units > _FEW_CHUNKS else [units]
        chunks = next((k for k in numbers if units % k == 0), None)
        lengths = [units * unit + rest for rest in rests]
        if chunks is not None and all(map(fits, lengths)):
            return lengths, units // chunks * unit
    raise ConfigError(
        f"--tokens {tokens} is too short: with blocks of {unit} tokens use {3 * unit} or more, 512 at best"
    )


def _fits_needle(tokens: int) -> bool:
    try:
        return needle.usable_length(tokens) == tokens
    except ValueError:
        return False


def _needed(group: GroupSpec, boundary: int) -> range:
    """Logical blocks of ``group`` that a hit of ``boundary`` tokens needs."""
    return range(group.attention.first_visible(boundary) // group.block_tokens, boundary // group.block_tokens)
