"""How much of a prompt a step computes beside what others have left in the cache.

The model has windows of eight layers beside two full ones, as Gemma has: a token of prompt takes four times as much for
its windows, for a moment, as for what is kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, KVCache, Request, Scheduler, SlidingWindow
from kvtier.coordinator.chunk import LITTLE, SHORT_STEP

pytestmark = pytest.mark.usefixtures("unaudited")

Tokens = npt.NDArray[np.int32]

BT, WINDOW = 16, 448


def spec_of(attention: SlidingWindow | ChunkedLocal, layers: int = 8) -> CacheSpec:
    sizes = 2, 64, "bfloat16", BT
    return CacheSpec([GroupSpec("full", FullAttention(), 2, *sizes), GroupSpec("local", attention, layers, *sizes)])


GEMMA = spec_of(SlidingWindow(WINDOW))


class Served:
    """An arena that holds ``num_tokens`` tokens of both groups, or pools of ``blocks``, and who asks for what."""

    def __init__(
        self,
        num_tokens: int,
        spec: CacheSpec = GEMMA,
        budget: int = 8192,
        blocks: dict[str, int] | None = None,
        running: int = 16,
    ) -> None:
        num_bytes = num_tokens * sum(g.token_bytes for g in spec.groups) if blocks is None else None
        self.cache = KVCache(spec, device="meta", device_bytes=num_bytes, device_blocks=blocks, key_secret=b"chunk")
        self.scheduler = Scheduler(self.cache, budget, running)
        self.num_tokens, self.count = num_tokens, 0

    def __call__(self, *prompts: Tokens) -> tuple[list[int], int]:
        """Serves requests of one token each; returns (how many tokens each step has computed, how many were found)."""
        steps, found = [], 0
        for prompt in prompts:
            self.count += 1
            self.scheduler.add(Request(f"{self.count}", prompt, 1))
        while self.scheduler.has_work():
            step = self.scheduler.schedule()
            steps.append(int(step.query_start[-1]))
            for done in self.scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64)):
                found += sum(done.cached_tokens.values())
        return steps, found

    def full(self) -> Served:
        """The same, after many short texts."""
        for seed in range(1_000, 1_000 + 2 * self.num_tokens // 400):
            self(text(400, seed))
        return self


SHORT_ONES = [SHORT_STEP] * (5_000 // SHORT_STEP) + [5_000 % SHORT_STEP]
"""Steps of 5,000 tokens."""


def text(num_tokens: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 100_000, num_tokens).astype(np.int32)


def test_in_an_empty_arena_a_step_is_as_long_as_it_may_be() -> None:
    assert Served(40_000)(text(8_000, 1))[0] == [8_000]


def test_in_a_full_one_a_step_is_short() -> None:
    """What a long prompt pushes out for good it takes as it goes; its windows borrow as much as ``SHORT_STEP``."""
    steps, _ = Served(20_000).full()(text(5_000, 1))
    assert steps == SHORT_ONES


@pytest.mark.parametrize("prompts", [2, 5])
def test_several_prompts_share_a_short_step(prompts: int) -> None:
    steps, _ = Served(20_000).full()(*(text(1_500, 1 + k) for k in range(prompts)))
    assert sum(steps) == 1_500 * prompts
    others = (prompts - 1) * (WINDOW + BT)
    assert max(steps) <= SHORT_STEP + others, "the others have what their windows keep in any case"


def test_requests_that_decode_take_nothing_off_a_short_step() -> None:
    serve = Served(25_000, running=SHORT_STEP + 200).full()
    for i in range(SHORT_STEP + 100):
        serve.scheduler.add(Request(f"decodes {i}", text(8, 50_000 + i), 30))
    for _ in range(2):
        step = serve.scheduler.schedule()
        serve.scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
    serve.scheduler.add(Request("long", text(5_000, 1), 1))
    chunks = []
    while sum(chunks) < 5_000:
        step = serve.scheduler.schedule()
        chunks.append(int(np.diff(step.query_start).max()))
        serve.scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
    assert chunks == SHORT_ONES


def test_a_conversation_that_goes_on_costs_the_others_nothing() -> None:
    """Eleven of 2,000 tokens fit beside a twelfth while it runs, if that borrows 1,250 tokens at most; they go on in a
    circle, in which the one that has waited longest comes next."""
    window_layers, full_layers = 8, 2
    kept = 2_000 * full_layers + (WINDOW + BT) * window_layers
    last = 2_000 * full_layers + (WINDOW + 1_250) * window_layers
    serve = Served((11 * kept + last) // (window_layers + full_layers))
    texts = [text(2_000, seed) for seed in range(12)]
    first = [serve(t)[0] for t in texts]
    assert first[0] == [2_000]
    assert SHORT_STEP < first[-1][0] < 2_000
    assert [serve(np.concatenate([t, text(40, 99)]))[1] for t in texts] == [2_000] * 12


def test_what_nobody_will_ask_for_again_is_there_for_a_step() -> None:
    """Twenty conversations have gone on and left windows behind that their next turns do not need."""
    serve = Served(15_000)
    texts = [text(1_000, seed) for seed in range(20)]
    for t in texts:
        serve(t)
    for t in texts:
        serve(np.concatenate([t, text(600, 99)]))
    long = np.concatenate([texts[0], text(600, 99), text(2_000, 100)])
    steps, found = serve(long)
    assert (found, sum(steps)) == (1_600, 2_000)
    assert SHORT_STEP < steps[0] < 2_000


def test_windows_that_borrow_little_do_not_shorten_a_step() -> None:
    spec = spec_of(SlidingWindow(WINDOW), layers=1)
    serve = Served(int(2_000 / LITTLE / 3) + 1_000, spec).full()
    assert serve(text(2_000, 1))[0] == [2_000]
    serve = Served(int(2_000 / LITTLE / 3) - 3_000, spec).full()
    assert SHORT_STEP < serve(text(2_000, 1))[0][0] < 2_000


def test_a_chunk_that_all_of_its_queries_see_is_not_borrowed() -> None:
    """A chunk group keeps all of a chunk until the next one begins, however many steps that takes."""
    assert Served(10_000, spec_of(ChunkedLocal(2_048)), budget=2_048).full()(text(4_096, 1))[0] == [2_048] * 2


@pytest.mark.parametrize(
    ("full", "local", "longest"), [(20_000, 400, SHORT_STEP), (400, 20_000, 5_000)], ids=["windows", "the text"]
)
def test_pools_of_their_own_have_nothing_for_each_other(full: int, local: int, longest: int) -> None:
    """Only what the windows' pool has counts for them; the text takes what it will keep, however long the steps."""
    serve = Served(16_000, blocks={"full": full, "local": local}).full()
    assert serve(text(5_000, 1))[0][0] == longest


def test_full_attention_never_shortens_a_step() -> None:
    sizes = 2, 64, "bfloat16", BT
    assert Served(20_000, CacheSpec([GroupSpec("full", FullAttention(), 4, *sizes)])).full()(text(5_000, 1))[0] == [
        5_000
    ]


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_by_it(seed: int) -> None:
    """Requests of any length over a full arena: each step computes at least one token of each, and all of them end."""
    rng, serve = np.random.default_rng(seed), Served(12_000).full()
    lengths = rng.integers(1, 4_000, 20)
    steps, found = serve(*[text(int(n), 50 + i) for i, n in enumerate(lengths)])
    assert sum(steps) + found == lengths.sum()
    assert serve.cache.stats().requests["preemptions"] == 0
    assert serve.cache.audit() == []
