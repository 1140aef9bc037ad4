"""Where a window or chunk group keeps what a later hit needs, and that it keeps nothing else."""

from __future__ import annotations

import inside
import numpy as np
import pytest

from kvtier import ChunkedLocal, FinishedRequest, FullAttention, KVCache, Request, Scheduler, SlidingWindow
from kvtier.testing import CanaryEngine, canary_spec, expected_tokens

SPEC = canary_spec({"full": (FullAttention(), 4), "window": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(16), 4)})
STEM = [int(t) for t in np.random.default_rng(0).integers(0, 97, 50)]


class Served:
    """A roomy device pool, one request after the other."""

    def __init__(self, **options: object) -> None:
        self.cache = KVCache(SPEC, device_blocks=dict.fromkeys(SPEC.names, 200), **options)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.cache, max_batched_tokens=16)
        self.engine = CanaryEngine(self.cache)
        self.count = 0

    def __call__(self, prompt: list[int], new: int = 3) -> FinishedRequest:
        self.count += 1
        request = Request(str(self.count), prompt, new)
        done = self.engine.run(self.scheduler, [request])[str(self.count)]
        assert done.token_ids == expected_tokens(SPEC, prompt, new)
        assert self.cache.audit() == []
        return done


def test_the_next_turn_hits_at_the_end_of_the_last_answer() -> None:
    serve = Served()
    first = serve(STEM, new=9)
    known = STEM + first.token_ids
    assert serve([*known, 1, 2, 3]).cached_tokens["device"] == (len(known) - 1) // 4 * 4


def test_the_same_prompt_again_leaves_only_its_last_block() -> None:
    serve = Served()
    for length in (47, 48, 49):
        serve(STEM[:length])
        assert serve(STEM[:length]).cached_tokens["device"] == (length - 1) // 4 * 4


def test_the_third_prompt_with_a_shared_stem_hits_where_the_second_parted() -> None:
    """The second cannot know before it looks that others share its stem; it leaves an anchor for whoever comes next."""
    serve = Served()
    assert serve([*STEM, 1, 2, 3]).cached_tokens["device"] == 0
    serve([*STEM, 4, 5, 6])
    assert serve([*STEM, 7, 8, 9]).cached_tokens["device"] == 48


@pytest.mark.parametrize("shared", [8, 17, 32, 49])
def test_a_waiting_twin_gets_an_anchor_where_it_parts(shared: int) -> None:
    """Both arrive at once: the second waits for what the first computes, and computes only what is its own."""
    serve = Served()
    prompts = {"a": STEM, "b": STEM[:shared] + [96 - t for t in STEM[shared:]]}
    done = serve.engine.run(serve.scheduler, [Request(name, prompt, 4) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert done[name].token_ids == expected_tokens(SPEC, prompt, 4)
    assert done["b"].cached_tokens["device"] == shared // 4 * 4


def test_a_twin_that_comes_later_waits_for_what_is_still_to_come(make_serving) -> None:
    """The first is in the middle of its prompt when the second arrives."""
    groups = {"full": (FullAttention(), 4), "window": (SlidingWindow(6), 4)}
    serving = make_serving(groups, 60, scheduler={"max_batched_tokens": 16})
    serving.add("a", STEM, 4)
    serving.step()
    serving.step()
    assert serving.scheduler.progress("a") == (32, 50)
    serving.add("b", [*STEM[:49], 1], 4)
    serving.run()
    assert serving.finished["b"].cached_tokens == {"device": 48, "host": 0}


def test_blocks_that_nobody_can_hit_are_not_kept_findable() -> None:
    serve = Served()
    inside.pass_nothing(serve.cache)
    serve(STEM)
    keyed = {name: int(n) for name, n in zip(SPEC.names, inside.pools(serve.cache).arrays.meta[:, 8], strict=True)}
    assert keyed["full"] == (len(STEM) + 2) // 4
    assert keyed["window"] <= 2 * 3
    assert keyed["chunk"] <= 4


@pytest.mark.parametrize("budget", [4, 64])
def test_a_row_holds_what_the_next_token_and_the_last_boundary_need_and_nothing_else(make_serving, budget):
    """After every step, whether it was a chunk of prompt or a decode; blocks of 2 and 4 tokens, so hits end at 4s."""
    groups = {"full": (FullAttention(), 4), "window": (SlidingWindow(5), 2), "chunk": (ChunkedLocal(8), 4)}
    serving = make_serving(groups, 60, scheduler={"max_batched_tokens": budget})
    serving.add("A", STEM[:13], 30)
    for _ in range(28):
        step = serving.step()
        computed = int(step.seq_lens[0])
        anchor = (computed - 1) // 4 * 4
        for group in serving.spec.groups:
            first = group.attention.first_visible(anchor) // group.block_tokens
            held = serving.cache.stats().device[group.name].held
            assert held == -(-computed // group.block_tokens) - first, (group.name, computed)
    serving.run()
