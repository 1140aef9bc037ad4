"""What both engines serve.

Owns       the prompts, their lengths, and the names by which answers are compared.
Promises   the crowd's short prompts and long answers outgrow a pool of one and a half prompts, if all of them run.
Does not   serve anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runner.model.prompts import ordinary_tokens

TOKENS = 2_048
NEW_TOKENS = 24
_CHUNKS = 8
"""Steps that a prompt is cut into."""
_LEAST_CHUNK = 64
_LEAST_TOKENS = 256
_LEAST_CROWD = 8
"""Small requests, so that those which run fill the pool, and their answers need more."""
_STRIDE = 5
"""Prompts end this many tokens apart within a block: on its border, and off it."""
_FLOOD_SEED = 1_000_000


@dataclass(frozen=True)
class Plan:
    """``prompts``: by name, token ids. ``crowd``: likewise, parts of the prompts, served all at once.

    ``new_tokens`` and ``crowd_new_tokens``: generated for each. ``chunk_tokens``: that a step computes at most.
    """

    prompts: Mapping[str, list[int]]
    crowd: Mapping[str, list[int]]
    vocab_size: int
    new_tokens: int
    crowd_new_tokens: int
    chunk_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts.values()))

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest text."""
        return max(n + new for n, new in self._lengths())

    def flood(self, number: int) -> list[int]:
        """Other content, as long as the longest prompt."""
        return ordinary_tokens(self.vocab_size, self.longest, seed=_FLOOD_SEED + number)

    def half(self, name: str) -> list[int]:
        """The first half of a prompt, and a token more."""
        return self.prompts[name][: len(self.prompts[name]) // 2 + 1]

    def least_tokens(self, block_tokens: int, has_states: bool) -> int:
        """What ``--tokens`` must be for blocks of so many tokens.

        Of generated text vLLM keeps no states: a preempted request comes back to its prompt's, which needs a block.
        """
        least = 4 * block_tokens
        if has_states:
            least = max(least, (block_tokens + 1) * len(self.crowd) + _STRIDE * len(self.prompts))
        return least

    def _lengths(self) -> Iterator[tuple[int, int]]:
        yield from ((len(p), self.new_tokens) for p in self.prompts.values())
        yield from ((len(p), self.crowd_new_tokens) for p in self.crowd.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``Plan(**...)`` reads them."""
        return asdict(self)


def make(
    vocab_size: int, model_tokens: int, tokens: int | None, prompts: int, new_tokens: int, chunk: int | None
) -> Plan:
    """A plan for a model that takes ``model_tokens`` tokens. Raises ``ValueError`` for lengths that cannot work."""
    if prompts < 2 or new_tokens < 2:
        raise ValueError("--prompts and --new-tokens must be at least 2: requests meet, and are interrupted")
    most = model_tokens - new_tokens
    if tokens is None:
        tokens = min(TOKENS, most)
    if tokens > most:
        raise ValueError(f"the model takes {model_tokens:,} tokens; use --tokens {most} or fewer, or fewer new ones")
    if tokens < _LEAST_TOKENS:
        raise ValueError(f"--tokens {tokens} is too short; use {_LEAST_TOKENS} or more")
    texts = [ordinary_tokens(vocab_size, tokens - _STRIDE * i, seed=i) for i in range(prompts)]
    pieces = max(2, -(-_LEAST_CROWD // prompts))
    short = (tokens - _STRIDE * prompts) // (pieces * prompts)
    parts = {
        f"part {at} of prompt {i}": text[at * short :][:short] for at in range(pieces) for i, text in enumerate(texts)
    }
    return Plan(
        prompts={f"prompt {i}": text for i, text in enumerate(texts)},
        crowd=parts,
        vocab_size=vocab_size,
        new_tokens=new_tokens,
        crowd_new_tokens=max(new_tokens, tokens // 4),
        chunk_tokens=chunk or max(_LEAST_CHUNK, tokens // _CHUNKS),
    )
