"""What a cache that forgets nothing could reuse of a plan's prompts."""

from __future__ import annotations

import numpy as np

from runner.bench.plan import Plan
from runner.bench.tokens import Prompt


def shareable_tokens(plan: Plan) -> int:
    """Prompt tokens that an earlier request's prompt, or a conversation's own history, begins with.

    Sessions count in the order of their start. Blocks that are shared in part count as not shared, so that this may be
    a little less than what a cache finds.
    """
    seen: set[tuple[int, int]] = set()
    total = 0
    for session in plan.sessions:
        former: Prompt | None = None
        for turn, (length, _) in zip(session.turns, session.lengths(), strict=True):
            if turn.continues:
                total += length - turn.prompt.tokens
                continue
            shared = _common(former, turn.prompt)
            if not shared:
                blocks = list(zip(turn.prompt.keys.tolist(), turn.prompt.counts.tolist(), strict=True))
                shared = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
                seen.update(blocks)
            total += int(turn.prompt.counts[:shared].sum())
            former = turn.prompt
    return total


def _common(former: Prompt | None, prompt: Prompt) -> int:
    """Blocks that both begin with."""
    if former is None:
        return 0
    n = min(len(former.keys), len(prompt.keys))
    same = (former.keys[:n] == prompt.keys[:n]) & (former.counts[:n] == prompt.counts[:n])
    return n if same.all() else int(np.argmin(same))
