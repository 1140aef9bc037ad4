"""Answers against the reference's, token by token and by logprob.

Owns       the meaning of equal inside vLLM, and the limits.
Promises   each token is compared as long as both runs have the same text before it. Every logprob of the reference's
           likeliest tokens must be within the limit. In float32 the tokens must be the same. In half precision two
           tokens may change places if they are so near each other that the limit allows it. What comes after them
           cannot be compared, since the texts differ.
Does not   demand bits: a hit ends in mid-chunk, and other chunks and batches round otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from runner.verify.vllm.served import Answer

LIMITS = {"float32": 1e-4, "float16": 6.25e-2, "bfloat16": 5e-1}
"""Allowed difference of a logprob, by the model's dtype.

In half precision it is four roundings of a logit between 16 and 32. A rounding is 1/64 in float16, 1/8 in bfloat16.
vLLM computes logits in the model's dtype. A logprob is the difference of a logit and of the sum over all of them.
"""


@dataclass(frozen=True)
class Difference:
    """The first of an answer that is not allowed. ``logprob``: of the reference's likeliest tokens, the largest."""

    answer: str
    token: int
    """Index of the generated token."""
    expected_id: int
    got_id: int
    logprob: float

    def __str__(self) -> str:
        which = (
            f"token {self.got_id} instead of {self.expected_id}"
            if self.got_id != self.expected_id
            else f"the same token {self.got_id}"
        )
        return f"{self.answer}, generated token {self.token}: {which}, logprobs differ by {self.logprob:.3g}"


class Comparing:
    """Collects what a scenario's answers amount to."""

    def __init__(self, reference: Mapping[str, Answer], dtype: str, limit: float) -> None:
        """``reference``: by name."""
        self._reference = reference
        self._exact_tokens = dtype == "float32"
        self._limit = limit
        self.compared = 0
        """Generated tokens."""
        self.largest = 0.0
        """Difference of a logprob."""
        self.swapped = 0
        """Answers that go on otherwise after a near tie."""
        self.first: Difference | None = None

    def add(self, answer: Answer) -> None:
        """One more; it may be shorter than the reference's."""
        expected = self._reference[answer.name]
        pairs = zip(answer.token_ids, answer.logprobs, expected.token_ids, expected.logprobs, strict=False)
        for i, (token, ours, expected_id, theirs) in enumerate(pairs):
            gap = _gap(dict(theirs), dict(ours), {token, expected_id})
            self.compared += 1
            self.largest = max(self.largest, gap)
            if gap > self._limit or (token != expected_id and self._exact_tokens):
                self.first = self.first or Difference(answer.name, i, expected_id, token, gap)
                return
            if token != expected_id:
                self.swapped += 1
                return


def _gap(theirs: Mapping[int, float], ours: Mapping[int, float], chosen: set[int]) -> float:
    """The largest difference of tokens that both tell; infinite if a chosen one is missing, or if one is no number."""
    gaps = [abs(theirs[t] - ours[t]) if theirs[t] != ours[t] else 0.0 for t in theirs.keys() & ours.keys()]
    missing = any(t not in theirs or t not in ours for t in chosen)
    return math.inf if missing or any(math.isnan(gap) for gap in gaps) else max(gaps, default=math.inf)
