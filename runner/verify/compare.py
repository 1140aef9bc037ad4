"""Logits, and the K and V behind them, against the cold run.

Owns       the meaning of equal. Bits must be equal if the forward repeats itself bit by bit and every step so far was
           computed as in the cold run. Else there is a tolerance by dtype: other chunks and batches round otherwise.
           If the tolerance is 0 (``exact=True``), bits must be equal whatever happened.
Promises   a difference is traced to the first place at which the step could see other content than the cold run wrote.
           Positions come before layers: a fault in a token's KV harms only later tokens and deeper layers. The KV is
           compared whenever it may have changed since the request's last sample; so a resumed request's is compared at
           its first token.
Does not   serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.geometry.spec import CacheSpec, GroupSpec
from runner.verify.cold import Cold, Entry, Place, bounds, read_slots, samples


@dataclass(frozen=True)
class FirstDifference:
    """Where what a step saw first differs from what the cold run wrote."""

    group: str
    layer: int
    """Index in the group."""
    model_layer: int
    what: str
    """"K" or "V"."""
    position: int
    block: int
    """Logical block, ``position // block_tokens``."""
    block_id: int
    """Where it lies in the device pool; 0 is the null block."""
    computed_now: bool
    """Whether the step whose logits differ wrote it; else an earlier step, or a copy."""
    difference: float


@dataclass(frozen=True)
class Difference:
    """A generated token whose logits, or whose visible KV, differ from the cold run's by more than is allowed."""

    prompt: int
    token: int
    """Index of the generated token."""
    position: int
    """Position of the token whose logits these are."""
    logits: float
    """Largest difference."""
    kv: FirstDifference | None
    """None: all KV that the step saw is equal, so that the forward pass itself went another way."""


@dataclass(frozen=True)
class _Seen:
    """When a request's KV was last known to be right, and its blocks then."""

    tokens: int
    disturbances: tuple[int, ...]
    """Preemptions and loads of the whole cache so far."""
    blocks: dict[str, np.ndarray]
    """The request's row of the block table, by group."""


class Comparing:
    """Watches a run of prompts whose cold run is known, and makes it generate the cold run's tokens.

    So every step can be compared, also after a token that would have been chosen otherwise.
    """

    def __init__(self, spec: CacheSpec, cold: list[Cold], lengths: list[int], tolerance: float, repeats: bool) -> None:
        """``lengths``: of the prompts. ``repeats``: the forward pass gives the same bits for the same steps."""
        self._spec = spec
        owner: dict[Place, int] = {}
        for i, places in enumerate(spec.layers):
            for place in (place for role, place in places.items() if role != "state"):
                owner.setdefault(place, i)
        self._places = [(i, place) for place, i in owner.items()]
        """What layers write of tokens or entries, in model order; a state is judged by what follows from it."""
        self._cold = cold
        self._lengths = lengths
        self._tolerance = tolerance
        self._repeats = repeats
        self._seen: dict[str, _Seen] = {}  # request: at its last sample
        self.same_steps = True
        """So far every step computed alone just what one of the cold run's steps did."""
        self.exact = repeats or tolerance == 0
        """Bits were demanded of every comparison."""
        self.compared = 0
        self.largest_logits = 0.0
        self.largest_kv = 0.0
        self.other_tokens = 0
        """Tokens that are not the likeliest any more."""
        self.first: Difference | None = None

    def watch(self, step: Any, cache: Any, logits: Tensor, ids: np.ndarray, entries: list[Entry]) -> None:
        """Looks after a forward: compares what was sampled, and replaces it by the cold run's tokens."""
        alone = len(step.request_ids) == 1
        for row, prompt in entries:
            self.same_steps &= alone and bounds(step, row) in self._cold[prompt].ranges
        for (row, prompt), sample in samples(step, entries):
            self._compare(step, cache, row, prompt, logits[sample].cpu(), int(ids[sample]))
            ids[sample] = self._cold[prompt].token_ids[self._token(step, row, prompt)]

    def _token(self, step: Any, row: int, prompt: int) -> int:
        return int(step.seq_lens[row]) - self._lengths[prompt]

    def _compare(self, step: Any, cache: Any, row: int, prompt: int, logits: Tensor, chosen: int) -> None:
        cold, token = self._cold[prompt], self._token(step, row, prompt)
        exact = self._tolerance == 0 or (self._repeats and self.same_steps)
        self.exact &= exact
        self.compared += 1
        self.other_tokens += chosen != cold.token_ids[token]
        gap = _gap(logits, cold.logits[token])
        found = float(gap.max())
        self.largest_logits = max(self.largest_logits, found)
        wrong = found > self._allowed(cold.logits[token], exact)
        end = bounds(step, row)[1]
        goes_on = self._goes_on(step, cache, row)
        if goes_on and not wrong:
            return  # nothing was restored since its KV was last compared
        kv = self._first_kv(step, cache, row, cold, exact)
        if (wrong or kv is not None) and self.first is None:
            self.first = Difference(prompt, token, end - 1, found, kv)

    def _goes_on(self, step: Any, cache: Any, row: int) -> bool:
        """Whether all but the new tokens' KV is untouched since the request's last sample; notes this one."""
        (start, end), stats, request = bounds(step, row), cache.stats(), step.request_ids[row]
        t = stats.transfers
        disturbances = stats.requests["preemptions"], t.loaded_blocks, t.failed_loads
        blocks = {g.name: step.group(g.name).block_table[row].copy() for g in self._spec.groups}
        before, self._seen[request] = self._seen.get(request), _Seen(end, disturbances, blocks)
        if before is None or (before.tokens, before.disturbances) != (start, disturbances):
            return False
        for group in self._spec.groups:
            seen = slice(group.attention.first_visible(start) // group.block_tokens, -(-start // group.block_tokens))
            if not np.array_equal(before.blocks[group.name][seen], blocks[group.name][seen]):
                return False
        return True

    def _allowed(self, cold: Tensor, exact: bool) -> float:
        if exact:
            return 0.0
        finite = cold[cold.isfinite()]
        return self._tolerance * max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)

    def _first_kv(self, step: Any, cache: Any, row: int, cold: Cold, exact: bool) -> FirstDifference | None:
        """All that the entry's new tokens can see, layer by layer in model order."""
        first: FirstDifference | None = None
        for model_layer, (name, layer) in self._places:
            group = self._spec.group(name)
            for which, what in enumerate("KV" if group.head_dims[1] else "K"):
                found = self._differs(
                    step, cache.kv(name, layer)[which], row, group, cold.kv[name, layer][which], exact
                )
                if found is not None and (first is None or found[0] < first.position):
                    position, block_id, gap = found
                    first = FirstDifference(
                        group=name,
                        layer=layer,
                        model_layer=model_layer,
                        what=what,
                        position=position,
                        block=position // group.block_tokens,
                        block_id=block_id,
                        computed_now=position >= bounds(step, row)[0],
                        difference=gap,
                    )
        return first

    def _differs(
        self, step: Any, pool: Tensor, row: int, group: GroupSpec, cold: Tensor, exact: bool
    ) -> tuple[int, int, float] | None:
        """(position, block id, difference) of the first visible token whose K or V is not the cold run's."""
        (start, end), m, size = bounds(step, row), group.entry_tokens, group.block_entries
        seen = np.arange(group.attention.first_visible(start) // m, end // m)  # entries: of each token, unless shared
        if not len(seen):
            return None
        blocks = step.group(group.name).block_table[row][seen // size].astype(np.int64)
        slots = torch.from_numpy(blocks * size + seen % size)
        reference = cold[seen[0] : seen[-1] + 1]
        gaps = _gap(read_slots(pool, slots, group).float(), reference.float()).flatten(1).amax(1)
        self.largest_kv = max(self.largest_kv, float(gaps.max()))
        wrong = torch.nonzero(gaps > self._allowed(reference.float(), exact))
        if not len(wrong):
            return None
        at = int(wrong[0])
        return int(seen[at] + 1) * m - 1, int(blocks[at]), float(gaps[at])


def _gap(ours: Tensor, cold: Tensor) -> Tensor:
    """|difference| by element: 0 where equal (infinities too), infinite where only one is a number."""
    gap = (ours - cold).abs().nan_to_num(nan=float("inf"))
    return gap.masked_fill(ours == cold, 0.0)
