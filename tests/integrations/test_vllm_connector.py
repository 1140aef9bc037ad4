"""``KvtierConnector`` behind an engine that keeps to vLLM's contract (``fake_vllm``); vLLM need not be there."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import inside
import pytest
from breadth import sample, sized

from integrations.fake_vllm import FakeEngine, stems
from integrations.fake_worker import Request
from integrations.served_once import OTHER, TEXT, push_out, pushed_out, use
from kvtier import StepError
from kvtier.integrations.vllm.follow import TrackedRequest
from kvtier.testing import Faults, SimulatedEngine

UNKIND = Faults(fail=0.04, tear=0.03, corrupt=0.02, lose=0.02, max_delay_s=5.0)


@pytest.mark.parametrize(
    ("kinds", "blocks"),
    [(("full",), 21), (("window", "full"), 27), (("window", "chunk", "full"), 33), (("wide", "window"), 18)],
    ids=str,
)
def test_what_was_pushed_out_comes_back_from_the_host(kinds, blocks):
    engine = FakeEngine(kinds, blocks, host_memory=40_000)
    first, second = stems(1, 2, most=59)
    first, second = first + [1] * (59 - len(first)), second + [2] * (59 - len(second))
    assert engine.serve(first).cached_tokens == 0
    assert engine.serve(second).cached_tokens == 0
    engine.settle()
    assert engine.serve(first).cached_tokens == 56
    engine.settle()
    assert engine.serve([*second, 5, 6, 7]).cached_tokens >= 56
    engine.settle()
    assert engine.loads >= 2
    engine.check()


def random_requests(engine: FakeEngine, seed: int, count: int, patch: pytest.MonkeyPatch) -> None:
    """Over a few stems, with aborts and resets, until all have ended and the engine is at rest."""
    rnd, texts, added = random.Random(seed), stems(seed), 0
    free = len(engine.pool.free)
    while added < count or engine.requests:
        if added < count and len(engine.requests) < 5:
            text = rnd.choice(texts)
            prompt = [*text[: rnd.randrange(1, len(text) + 1)], *(rnd.randrange(1000) for _ in range(rnd.randrange(4)))]
            engine.add(f"r{added}", prompt, rnd.randrange(1, 20))
            added += 1
            if rnd.random() < 0.2 and len(prompt) < 60:
                texts[rnd.randrange(len(texts))] = prompt
        if engine.requests and rnd.random() < 0.05:
            engine.abort(rnd.choice(list(engine.requests)))
        if rnd.random() < 0.004:
            engine.reset()
        if engine.steps % 40 == 39:
            for one in engine.engines:
                one.end_lost()
        engine.step()
        engine.check()
    for _ in range(3):
        engine.settle()
        for one in engine.engines:
            one.end_lost()
        engine.step()
    engine.settle()
    engine.check()
    assert len(engine.pool.free) == free, "a block is left held"
    assert all(block.ref_cnt == 0 for block in engine.pool.blocks)


@pytest.mark.parametrize("faults", [Faults(max_delay_s=2.0), UNKIND], ids=["sound", "unkind"])
@pytest.mark.parametrize(("seed", "workers"), sample(itertools.product(range(60), [1, 2]), [(0, 1), (1, 2)]))
def test_random_requests_read_only_what_was_written(monkeypatch, seed, faults, workers):
    kinds, blocks = [(("window", "chunk", "full"), 34), (("window", "full"), 28), (("wide", "window"), 21)][seed % 3]
    memory = random.Random(seed).choice([6_000, 20_000]) * workers
    engine = FakeEngine(kinds, blocks, workers, seed, faults, host_memory=memory)
    random_requests(engine, seed, sized(60, 90), monkeypatch)
    assert engine.loads + engine.preemptions > 3


@pytest.mark.parametrize("seed", range(sized(2, 20)))
def test_that_a_text_is_new_is_seen_by_its_first_keys_and_changes_nothing_else(monkeypatch, seed):
    engines = []
    for look in (1, 1000):
        monkeypatch.setattr("kvtier.host_tier.text.LOOK", look)
        engines.append(FakeEngine(("window", "full"), 28, 1, seed, Faults(max_delay_s=2.0), host_memory=6_000))
        random_requests(engines[-1], seed, 60, monkeypatch)
    few, whole = ((one.loads, one.hits, one.steps, one.books.counts.stored_blocks) for one in engines)
    assert few == whole
    assert engines[0].loads > 0


@pytest.mark.parametrize(
    ("seed", "kinds", "blocks"), [(1054, ("wide", "window"), 21), (1084, ("window", "chunk", "full"), 34)]
)
def test_what_vllm_has_taken_out_of_a_table_is_not_stored(monkeypatch, seed, kinds, blocks):
    """A boundary just behind a short last chunk sees blocks that are others' by now. These seeds stored them."""
    faults = Faults(fail=0.04, tear=0.03, corrupt=0.01, lose=0.02, max_delay_s=5.0)
    memory = random.Random(seed).choice([3_000, 6_000, 20_000])
    random_requests(FakeEngine(kinds, blocks, 1, seed, faults, host_memory=memory), seed, 100, monkeypatch)


# --- one promise at a time ------------------------------------------------------------------------


def loading(engine: FakeEngine, name: str = "again"):
    """A request that waits for its load."""
    request = engine.add(name, TEXT)
    for _ in range(5):
        engine.step()
        if request.status == "remote":
            return request
    raise AssertionError("nothing is loaded")


def never(engine: FakeEngine) -> None:
    """Copies from now on do not end before ``end_all``."""
    use(engine, Faults(lose=1.0))


def end_all(engine: FakeEngine) -> None:
    """Copies under way end, and later ones as usual."""
    use(engine, Faults(max_delay_s=1.0))
    for one in engine.engines:
        one.end_lost()


def test_a_load_that_hangs_is_given_up_and_its_blocks_stay_held_until_it_has_ended():
    engine = pushed_out()
    free = len(engine.pool.free)
    never(engine)
    request = loading(engine)
    while request.status != "finished":
        engine.step()
    assert engine.failures == 1
    held = free - len(engine.pool.free)
    assert held == 11 + 3, "the load may still write to them"
    engine.check()
    end_all(engine)
    engine.settle()
    engine.step()
    assert len(engine.pool.free) == free
    engine.check()
    assert engine.books.counts.expired >= 1


def test_an_aborted_load_gives_everything_back():
    engine = pushed_out()
    free = len(engine.pool.free)
    never(engine)
    loading(engine)
    engine.abort("again")
    assert len(engine.pool.free) < free
    end_all(engine)
    engine.settle()
    assert len(engine.pool.free) == free
    engine.check()


def aborted_while_its_load_hangs(engine):
    never(engine)
    loading(engine)
    engine.abort("again")
    for _ in range(12):
        engine.step()
    assert engine.requests == {}


def test_an_abort_of_a_load_that_hangs_does_not_wait_for_it():
    engine = pushed_out()
    free = len(engine.pool.free)
    aborted_while_its_load_hangs(engine)
    end_all(engine)
    engine.step()
    engine.step()
    assert len(engine.pool.free) == free
    engine.check()


def test_a_damaged_block_is_computed_and_stored_again():
    engine = pushed_out()
    worker = engine.workers[0].connector
    inside.host_bytes(inside.vllm_worker(worker))[:] ^= 4
    assert engine.serve(TEXT).cached_tokens == 0, "told to vLLM as a hit, and computed after all"
    assert engine.failures == 1
    assert engine.books.counts.corrupt_blocks > 0
    engine.settle()
    push_out(engine)
    assert engine.serve(TEXT).cached_tokens == 44
    engine.check()


def test_without_verification_damage_goes_unseen():
    engine = pushed_out(verify="off")
    inside.host_bytes(inside.vllm_worker(engine.workers[0].connector))[:] ^= 4
    engine.serve(TEXT)
    assert engine.wrong > 0


@pytest.fixture
def counts_nans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")


@pytest.mark.parametrize("length", [len(TEXT) + 1, len(TEXT) + 2, len(TEXT) + 4], ids=["first", "middle", "last"])
def test_what_a_request_has_stored_whose_logits_are_no_numbers_is_not_found(counts_nans, length):
    """vLLM tells of the last step's only after the request has ended; of an earlier one's it tells until the next."""
    engine = pushed_out()
    engine.nans = {length: 5}
    assert engine.serve(TEXT).cached_tokens == 44
    engine.nans = {10**6: 0}
    engine.settle()
    push_out(engine)
    assert engine.serve(TEXT).cached_tokens == 0
    engine.settle()
    push_out(engine)
    assert engine.serve(TEXT).cached_tokens == 44, "it was stored again"
    engine.check()


def test_a_request_that_comes_at_once_does_not_find_it_either(counts_nans):
    engine = pushed_out()
    push_out(engine)
    engine.nans = {len(TEXT) + 1: 1}
    wrong = engine.add("wrong", TEXT, 1)
    while wrong.status != "finished":
        engine.step()
    assert engine.connector.get_num_new_matched_tokens(engine.add("next", TEXT), 0) == (0, False)


def test_a_load_of_what_proves_wrong_fails(counts_nans):
    engine = pushed_out(deadline_s=1e3)
    use(engine, Faults(max_delay_s=50.0))
    request = loading(engine)
    wrong = Request("wrong", TEXT, 1)
    follow = inside.vllm_side(engine.connector)._follow(wrong)
    wrong.num_nans_in_logits = 3
    while request.status != "finished":
        engine.step()
    assert follow.is_wrong
    assert engine.failures == 1
    engine.check()


def test_without_vllms_count_nobody_knows():
    engine = pushed_out()
    engine.nans = {len(TEXT) + 2: 5}
    engine.serve(TEXT)
    engine.settle()
    push_out(engine)
    assert engine.serve(TEXT).cached_tokens == 44


def test_a_reset_makes_loads_under_way_fail():
    engine = pushed_out(deadline_s=1e3)
    use(engine, Faults(max_delay_s=50.0))
    request = loading(engine)
    engine.reset()
    while request.status != "finished":
        engine.step()
    assert engine.failures == 1
    engine.settle()
    engine.check()
    assert engine.loads == 1, "there was nothing to ask for again"


def test_stores_that_still_write_a_hit_are_waited_for_a_moment():
    engine = FakeEngine(("window", "full"), 50, host_memory=40_000, deadline_s=1000.0)
    inside.vllm_clock(engine.connector, engine.engines[0].now)
    never(engine)
    engine.serve(TEXT)
    push_out(engine)
    request = engine.add("again", TEXT)
    engine.step()
    assert request.status == "waiting", "asked for again"
    while request.status != "finished":
        engine.step()
    assert request.cached_tokens == 0
    news = inside.vllm_side(engine.connector).news()
    assert news["waits_for_stores"] >= 1
    assert news["waits_given_up"] == 1


def test_without_the_order_of_writers_texts_are_wrong(monkeypatch):
    """The control of all tests here: a step overwrites what a store still reads."""
    wrong = 0
    for ordered in (True, False):
        if not ordered:
            monkeypatch.setattr(SimulatedEngine, "order_after", lambda *_: True)
        for seed in range(8):
            engine = FakeEngine(("window", "full"), 21, 1, seed, Faults(max_delay_s=6.0), host_memory=40_000)
            for text in (TEXT, OTHER, TEXT, OTHER):
                engine.serve(text)
            for text in (TEXT, OTHER, TEXT):
                engine.settle()
                engine.serve(text)
            assert engine.loads > 1
            wrong += engine.wrong
            assert wrong == 0 or not ordered
    assert wrong


@pytest.mark.parametrize("v2", [False, True])
def test_blocks_that_are_zeroed_before_the_connector_hears_of_it_spoil_their_stores(v2):
    engine = FakeEngine(
        ("full",), 40, settings={"v2": v2}, host_memory=40_000, faults=Faults(max_delay_s=50.0), deadline_s=1e3
    )
    request = engine.serve(TEXT)
    engine.zeroed = [engine.pool.cached[0, request.block_hashes[10]].block_id]
    engine.step()
    engine.zeroed = []
    engine.settle()
    push_out(engine)
    assert engine.serve(TEXT).cached_tokens == (32 if v2 else 44)


def test_preempted_requests_come_back_from_the_host():
    engine = FakeEngine(("window", "full"), 27, host_memory=40_000, max_running=3)
    for k in range(3):
        engine.add(f"r{k}", [*TEXT[:20], k, *TEXT[20:28]], 30)
    engine.settle()
    assert engine.preemptions > 0
    assert engine.loads > 0
    engine.check()


def test_an_engine_that_only_reads_stores_nothing():
    engine = FakeEngine(("window", "full"), 21, host_memory=40_000, store="off")
    for text in (TEXT, OTHER, TEXT):
        engine.serve(text)
        engine.settle()
    assert engine.books.counts.stores == engine.loads == 0


def test_a_request_whose_tokens_change_is_followed_anew():
    """A streaming session's: vLLM takes tokens back, and hashes with them."""
    engine = FakeEngine(("full",), 30)
    request = Request("r", TEXT, 1)
    follow = TrackedRequest(engine.books, request, 1)
    first = follow.text()
    assert follow.text() is first
    del request.block_hashes[6:]
    assert follow.text() is not first
    with pytest.raises(StepError, match="closed"):
        first.match(0, 45)


def test_what_vllm_has_taken_back_is_not_stored():
    """A session's turn has ended with a planned step that was in vain; its last token is another one by now."""
    engine = FakeEngine(("full",), 40, host_memory=40_000)
    text = [*TEXT, 46, 47]
    request = engine.add("r", text, 5)
    while request.num_tokens < 49:
        engine.step()
    follow = inside.vllm_side(engine.connector).follow("r")
    assert follow.end >= 48
    request.tokens[47:], request.num_computed_tokens = [5, 6], 47
    del request.block_hashes[11:]
    request.extend_hashes()
    engine.abort("r")
    engine.settle()
    push_out(engine)
    assert engine.serve([*text, 5, 9]).cached_tokens == 44
    engine.check()


def test_blocks_that_another_connector_failed_to_fill_are_not_stored():
    """vLLM computes them again, after the step in which they were planned to be stored."""
    engine = FakeEngine(("full",), 40, host_memory=40_000)
    request = engine.add("r", TEXT, 1)
    while request.num_tokens < 46 and request.status != "finished":
        engine.step()
    ids = [block.block_id for key, block in engine.pool.cached.items() if key == (0, request.block_hashes[10])]
    output = SimpleNamespace(kv_connector_worker_meta=None, invalid_block_ids=set(ids))
    engine.connector.update_connector_output(output)
    engine.settle()
    push_out(engine)
    assert engine.serve(TEXT).cached_tokens < 44


def test_an_idle_engine_looks_after_a_load_that_it_has_given_up():
    engine, now = pushed_out(), [100.0]
    inside.vllm_clock(engine.connector, lambda: now[0])
    free = len(engine.pool.free)
    aborted_while_its_load_hangs(engine)
    assert len(engine.pool.free) < free
    engine.settle()
    assert len(engine.pool.free) < free, "nothing to do for the moment"
    now[0] += 2.0
    assert engine.connector.has_pending_push_work()
    end_all(engine)
    engine.step()
    assert len(engine.pool.free) == free
