"""What a hostile reading of the canary asked of it: each test was red when it was written."""

from __future__ import annotations

import inside
import numpy as np
import pytest
from breadth import sized
from core.driving import prompt

from kvtier import ChunkedLocal, FullAttention, KVCache, Request, Scheduler, SlidingWindow
from kvtier.coordinator.step import GroupView
from kvtier.geometry.keys import KeyChain
from kvtier.gpu_pool.exports import Exports
from kvtier.pools.block_pool import Place
from kvtier.testing import CanaryEngine, canary_spec, expected_tokens
from kvtier.testing.canary import POISON


def run(scheduler, canary) -> dict[str, list[int]]:
    done = {}
    while scheduler.has_work():
        step = scheduler.schedule()
        ids = canary.forward(step) if step.num_tokens else []
        done |= {f.request_id: f.token_ids for f in scheduler.commit(step, ids)}
        if not step.num_tokens:
            scheduler.wait(0.01)
    return done


@pytest.mark.parametrize("attention", [SlidingWindow(5), ChunkedLocal(8)])
def test_the_canary_reads_what_the_first_query_of_a_chunk_sees(attention):
    """Garbage in every cached window (or chunk) block that a hit brought must change the text."""
    spec = canary_spec({"full": (FullAttention(), 2), "near": (attention, 2)}, num_layers=1)
    with KVCache(spec, device_blocks={"full": 60, "near": 40}, key_secret=b"tests") as cache:
        scheduler, canary = Scheduler(cache, 64, 4), CanaryEngine(cache)
        first = Request("first", prompt(0, 21), 1)
        canary.run(scheduler, [first])
        again = Request("again", [*prompt(0, 20), *prompt(1, 9)], 4)
        scheduler.add(again)
        canary.add(again)
        step = scheduler.schedule()
        hit = int(step.starts[0])
        assert hit == 20
        table = step.group("near").block_table[0, : hit // 2]
        for tensor in cache.kv("near", 0):
            tensor[table[table > 0].tolist()] = 123.0
        try:
            done = {f.request_id: f.token_ids for f in scheduler.commit(step, canary.forward(step))}
            text = (done | run(scheduler, canary))["again"]
        except AssertionError:
            return  # noticing at once is as good
        assert text != expected_tokens(spec, again.prompt_token_ids, 4), "garbage was not noticed"


@pytest.mark.parametrize(("field", "values"), [("adapter", ("a", "b")), ("extra_keys", (("cat",), ("dog",)))])
def test_the_canary_sees_kv_of_another_adapter_or_image(monkeypatch, make_cache, field, values):
    """Keys that leave one out share KV between requests of equal tokens, which a model would compute differently."""
    root = KeyChain.root
    monkeypatch.setattr(KeyChain, "root", lambda chain, adapter, salt, extra_keys: root(chain, None, salt, ()))
    cache = make_cache(blocks=24)
    scheduler, engine = Scheduler(cache), CanaryEngine(cache)
    for value in values:
        shapes = {field: value}
        done = engine.run(scheduler, [Request("r", prompt(0, 13), 3, **shapes)])["r"]
        right = done.token_ids == expected_tokens(cache.spec, prompt(0, 13), 3, **shapes)
        assert right == (value == values[0])
    assert done.cached_tokens["device"] == 12


def test_a_wrong_slot_changes_every_sampled_token(make_cache):
    """There are only 97 tokens, so two hashes agree now and then."""
    cache = make_cache(blocks=4)
    scheduler, engine = Scheduler(cache), CanaryEngine(cache)
    words = cache.kv("full", 0)[0].numpy().view(np.uint64)
    for k in range(sized(60, 300)):
        engine.run(scheduler, [Request("right", prompt(k, 9), 1)])
        words[1:] ^= np.uint64(1)
        done = engine.run(scheduler, [Request("wrong", prompt(k, 9), 1)])["wrong"]
        assert done.cached_tokens["device"] == 8
        assert done.token_ids != expected_tokens(cache.spec, prompt(k, 9), 1)
        cache.reset()


def test_what_lies_behind_a_text_in_its_last_page_is_poison(make_cache):
    """What a block held before may be the very tokens that somebody reads too early."""
    cache = make_cache(blocks=4)
    scheduler, engine, request = Scheduler(cache), CanaryEngine(cache), Request("A", prompt(0, 6), 1)
    scheduler.add(request)
    engine.add(request)
    step = scheduler.schedule()
    ids = engine.forward(step)
    last = int(step.group("full").block_table[0, 1])
    for layer in range(cache.spec.groups[0].num_layers):
        for tensor in cache.kv("full", layer):
            is_poison = tensor.numpy().view(np.uint64)[last, :, 0, 0] >> 16 == POISON >> 16
            assert is_poison.tolist() == [False, False, True, True]
    scheduler.commit(step, ids)


def test_what_is_free_is_poison_in_both_tiers(make_serving):
    """What a block held before may be the very content that somebody loads or reads too late."""
    serving = make_serving(blocks=8, host=8, hold=[])
    serving.serve("A", prompt(0, 13), 2)
    cache = serving.cache
    left = [np.flatnonzero(pools.arrays.place == Place.CACHED) for pools in (inside.pools(cache), inside.host(cache))]
    for pools in (inside.pools(cache), inside.host(cache)):
        pools.forget_all()
    serving.serve("B", prompt(1, 2), 1)
    for arena, blocks in zip(cache.arenas, left, strict=True):
        for tensor in (tensor for layer in arena.views(0) for tensor in layer):
            is_poison = tensor.numpy().view(np.uint64)[blocks, :, 0, 0] >> 16 == POISON >> 16
            assert is_poison.all(axis=1).sum() >= len(blocks) - 1 > 1, "B has one of them"


THREE = {"full": (FullAttention(), 4), "window": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


def is_noticed() -> bool:
    """Whether anything is wrong with three texts whose prompts take two or three steps each."""
    spec = canary_spec(THREE, num_layers=1)
    with KVCache(spec, device_blocks=dict.fromkeys(THREE, 60), key_secret=b"tests") as cache:
        scheduler, engine = Scheduler(cache, 20, 4), CanaryEngine(cache)
        requests = [Request(f"{k}", prompt(k, 41), 7) for k in range(3)]
        try:
            done = engine.run(scheduler, requests)
        except AssertionError:
            return True
        return any(done[r.request_id].token_ids != expected_tokens(spec, r.prompt_token_ids, 7) for r in requests)


def swap_in_chunks(slots, starts, ends):
    """Exchanges the slots of two neighbours in the middle of every long chunk of prompt."""
    for at, count in zip(np.cumsum(ends - starts) - (ends - starts), ends - starts, strict=True):
        if count > 12:
            slots[[at + 5, at + 6]] = slots[[at + 6, at + 5]]


def swap_in_rows(table, starts, ends):
    """Exchanges two blocks in the middle of every long row."""
    for row in table:
        held = np.flatnonzero(row)
        if len(held) > 4:
            row[held[[1, 2]]] = row[held[[2, 1]]]


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize(("export", "damage"), [("slots", swap_in_chunks), ("tables", swap_in_rows)])
@pytest.mark.parametrize("name", THREE)
def test_the_canary_reads_what_every_token_of_a_chunk_sees(monkeypatch, name, export, damage):
    """Wrong slots in the middle of a chunk of prompt, of which the token after it sees nothing."""
    g, build = list(THREE).index(name), getattr(Exports, export)

    def damaged(self, tables, rows, starts, ends):
        made = [array.copy() for array in build(self, tables, rows, starts, ends)]
        damage(made[g], starts, ends)
        return made

    assert not is_noticed()
    monkeypatch.setattr(Exports, export, damaged)
    assert is_noticed()


@pytest.mark.usefixtures("unaudited")
def test_a_wrong_slot_shows_although_the_request_is_computed_again():
    """Whoever has read it is preempted, and nothing that it has written is left."""
    spec = canary_spec(THREE, num_layers=1)
    with KVCache(spec, device_blocks=dict.fromkeys(THREE, 60), key_secret=b"tests") as cache:
        scheduler, engine, request = Scheduler(cache, 20, 4), CanaryEngine(cache), Request("A", prompt(0, 41), 3)
        scheduler.add(request)
        engine.add(request)
        step = scheduler.schedule()
        swap_in_chunks(step.group("window").slot_mapping, step.starts, step.seq_lens)
        engine.write(step)
        scheduler.cancel(step)
        assert run(scheduler, engine)["A"] != expected_tokens(spec, request.prompt_token_ids, 3)


def exchange(array):
    if len(array) > 1:
        array[[0, 1]] = array[[1, 0]]


def add_to(k, n):
    """Damage to one number of an array: entry k is n more."""

    def damage(array):
        if len(array) > 2:
            array[k] += n

    return damage


PAGES = {
    "queries of the next entry": (0, add_to(1, 1)),
    "a query too few": (0, add_to(-1, -1)),
    "pages of the next entry": (1, add_to(1, 1)),
    "a page too few": (1, add_to(-1, -1)),
    "two pages exchanged": (2, exchange),
    "another last page": (2, add_to(-1, 1)),
    "a longer last page": (3, add_to(0, 1)),
    "a shorter last page": (3, add_to(-1, -1)),
}


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize("damage", PAGES)
def test_the_canary_reads_the_page_lists(monkeypatch, damage):
    build, (k, wrong) = Exports.pages, PAGES[damage]

    def damaged(self, *args):
        made = [tuple(array.copy() for array in paged) for paged in build(self, *args)]
        for paged in made:
            wrong(paged[k])
        return made

    monkeypatch.setattr(Exports, "pages", damaged)
    assert is_noticed()


PADDING = {
    "two queries": (0, add_to(-1, 1)),
    "no page": (1, add_to(-1, -1)),
    "somebody's page": (2, add_to(-1, 1)),
    "more of the null block": (3, add_to(-1, 1)),
}


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize("damage", PADDING)
def test_the_canary_reads_the_padding(monkeypatch, damage):
    pad, (k, wrong) = GroupView.padded, PADDING[damage]

    def damaged(self, rows):
        made = tuple(array.copy() for array in pad(self, rows))
        if rows > len(self.paged()[3]):
            wrong(made[k])
        return made

    monkeypatch.setattr(GroupView, "padded", damaged)
    assert is_noticed()
