"""What a cache without limits would find, and how much of it there is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from runner.bench.replay.asked import Asked


class Whole(NamedTuple):
    """The sums over all requests."""

    requests: int
    sessions: int
    prompt_tokens: int
    found_tokens: int
    """Prompt tokens in full blocks that an earlier text begins with, but for each prompt's last token."""
    distinct_tokens: int
    """Tokens in different full blocks of all texts."""

    @property
    def rate(self) -> float:
        """The hit rate that nothing exceeds."""
        return self.found_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def measure(asked: Iterable[Asked], block_tokens: int) -> Whole:
    """Measures by the blocks of the texts, in the order in which they are asked for."""
    known: dict[tuple[int, bytes], int] = {}
    sessions = set()
    requests = prompts = found = 0
    for ask in asked:
        prompt = ask.prompt
        text = np.concatenate([prompt, ask.answer[:-1]])  # K and V of the last token are never written
        full, most = len(text) // block_tokens, (len(prompt) - 1) // block_tokens
        parent, hit, is_hit = -1, 0, True
        for k in range(full):
            name = parent, text[k * block_tokens : (k + 1) * block_tokens].tobytes()
            is_hit = is_hit and name in known and k < most
            hit += is_hit
            parent = known.setdefault(name, len(known))
        sessions.add(ask.session)
        requests += 1
        prompts += len(prompt)
        found += hit * block_tokens
    return Whole(requests, len(sessions), prompts, found, len(known) * block_tokens)
