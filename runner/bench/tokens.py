"""Prompts as token ids without text: each block has a key, and equal keys are equal tokens.

Promises   the token at a place of a block depends on seed, key and place alone. So two prompts that begin with the same
           keys begin with the same tokens, in this run and in any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvtier.machine.errors import ConfigError

FEWEST_IDS = 8
"""Fewest different token ids: with fewer, prompts would share more than their plan says."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)

Ids = NDArray[np.int64]


def key_of(*parts: object) -> int:
    """64 bits that stand for ``parts``, the same in every process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Prompt:
    """Blocks of tokens: ``keys`` say which, ``counts`` how many of each are taken, from its first on."""

    keys: NDArray[np.uint64]
    counts: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """The prompt's length."""
        return int(self.counts.sum())


def prompt_of(blocks: Iterable[tuple[int, int]]) -> Prompt:
    """A prompt of pairs of key and number of tokens; those without tokens are left out."""
    kept = [(key, count) for key, count in blocks if count > 0]
    keys = np.array([key for key, _ in kept], np.uint64)
    return Prompt(keys, np.array([count for _, count in kept], np.int64))


class Alphabet:
    """The token ids that prompts are made of. Raises ``ConfigError`` for fewer than ``FEWEST_IDS``."""

    def __init__(self, ids: Sequence[int], source: str) -> None:
        self.ids: Ids = np.unique(np.array(ids, np.int64))
        self.source = source
        """Where they are from, for the report."""
        if len(self.ids) < FEWEST_IDS or self.ids[0] < 0:
            raise ConfigError(
                f"prompts need at least {FEWEST_IDS} different token ids from 0 up, and {source} has "
                f"{len(self.ids)}; give others with --token-ids FIRST:LAST"
            )
        width = len(str(self.ids[-1]))
        self._cells = np.array([b"%*d," % (width, one) for one in self.ids.tolist()])

    def draw(self, prompt: Prompt, seed: int) -> Ids:
        """The tokens of ``prompt``, int64 [tokens]."""
        return self.ids[self._places(prompt, seed)]

    def as_json(self, prompt: Prompt, seed: int) -> bytes:
        """The tokens of ``prompt`` as the inside of a JSON list.

        Numbers are padded to one width, which JSON allows: 90,000 of them take a millisecond, so that the streams that
        are being read wait no longer.
        """
        return self._cells[self._places(prompt, seed)].tobytes()[:-1]

    def _places(self, prompt: Prompt, seed: int) -> Ids:
        counts = prompt.counts
        starts = np.cumsum(counts) - counts
        places = (np.arange(prompt.tokens) - np.repeat(starts, counts)).astype(np.uint64)
        base = np.repeat(_mixed(prompt.keys ^ np.uint64(key_of("seed", seed))), counts)
        return (_mixed(base + places * _STEP) % np.uint64(len(self.ids))).astype(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: each bit of the value reaches each bit of the result."""
    values = (values ^ (values >> _SHIFTS[0])) * _MULTIPLIERS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return values ^ (values >> _SHIFTS[2])
