"""Found by the soak at step 613,572: who gives up a row can name what his heir's match wanted to load."""

from __future__ import annotations

import inside
from core.driving import prompt

from kvtier import FullAttention, SlidingWindow

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4)}


def test_the_one_that_gives_its_row_has_computed_the_prefix(make_serving):
    """The host has the windows of 8 tokens, the device has not: A computes them too, and names them as it gives way."""
    serving = make_serving(GROUPS, 60, 60, hold=[], scheduler={"max_running": 3, "max_batched_tokens": 6})
    serving.add("A", prompt(0, 30), 2, priority=1)
    serving.step()
    serving.add("first", prompt(0, 9), 1)
    serving.add("B", prompt(5, 4), 40)
    serving.steps_until(lambda: "first" in serving.finished)
    inside.pools(serving.cache).forget_all()
    serving.add("C", prompt(6, 4), 40)
    serving.steps_until(lambda: serving.scheduler.num_running == 3 and serving.scheduler.progress("A")[0] >= 8)
    assert serving.scheduler.progress("A")[0] < 12
    serving.add("heir", prompt(0, 12), 2)
    serving.step()
    assert serving.is_running("heir")
    assert not serving.is_running("A")
    serving.run()
    assert sum(serving.finished["heir"].cached_tokens.values()) == 8
