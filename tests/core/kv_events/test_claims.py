"""What routers are told is what a hit can use: wire events, replayed, against the cache's own match (I25)."""

from __future__ import annotations

import random
from collections.abc import Iterable

import inside
import numpy as np
import pytest
from breadth import sample
from model.metrics import findable

from core.driving import prompt, sees
from core.kv_events.router import Path, Router
from kvtier import ChunkedLocal, FullAttention, KVCache, KVEvents, Request, SlidingWindow
from kvtier.cache.kv_events.claims import Claims
from kvtier.cache.kv_events.wire import Encoder
from kvtier.coordinator.tracked import Tracked
from kvtier.geometry.keys import Text
from kvtier.testing import Faults, SimulatedEngine

BT = 4
FULL = {"full": (FullAttention(), BT)}
HYBRID = {**FULL, "win": (SlidingWindow(10), BT), "chunk": (ChunkedLocal(8), BT)}
TWO_FULL = {**FULL, "wide": (FullAttention(), BT), "win": (SlidingWindow(6), BT)}


class Told:
    """Claims of a cache, and a router that hears them."""

    def __init__(self, cache: KVCache, most_blocks: int = 100_000) -> None:
        self.cache, self.events, self.claims = cache, KVEvents(cache), Claims(cache.spec, most_blocks)
        self.router, self.encoder = Router(BT), Encoder()
        self.texts: set[tuple[int, ...]] = set()

    def text(self, tokens: Iterable[int]) -> None:
        ids = tuple(tokens)
        self.texts.add(ids)
        keys = self.events.keys_of(Request("text", list(ids), 1))["full"]
        self.claims.add_text(keys[:, 0], np.array(ids, np.int32))

    def poll(self) -> None:
        self.claims.note(self.events.poll())
        told = self.claims.take()
        if told:
            self.router.hear(self.encoder.encode(told))

    def accepted(self, ids: tuple[int, ...], found: set[tuple[str, str, bytes]]) -> int:
        """The longest prefix, in tokens, that a hit can have: word for word from the contract, block by block."""
        keys = self.events.keys_of(Request("text", list(ids), 1))
        there = {name: [any((t, name, k.tobytes()) in found for t in ("device", "host")) for k in of]
                 for name, of in keys.items()}  # fmt: skip
        for n in range(len(ids) // BT * BT, 0, -BT):
            seen = {g.name: {j // BT for j in range(n) if sees(g, n, j)} for g in self.cache.spec.groups}
            if all(there[name][b] for name, blocks in seen.items() for b in blocks):
                return n
        return 0

    def usable(self) -> set[Path]:
        """All blocks of known texts up to the hits that these texts allow."""
        found, blocks = findable(self.cache), set[Path]()
        for ids in self.texts:
            parts = [ids[i : i + BT] for i in range(0, self.accepted(ids, found), BT)]
            blocks |= {tuple(parts[: i + 1]) for i in range(len(parts))}
        return blocks

    def check(self) -> None:
        """Believed is what can be used; on the device, as far as the full-attention groups have all of it there."""
        assert self.router.believed == self.usable()
        assert not self.router.found["GPU"] & self.router.found["CPU"]
        found, full = (
            findable(self.cache),
            [g.name for g in self.cache.spec.groups if isinstance(g.attention, FullAttention)],
        )
        for path in self.router.believed:
            keys = self.events.keys_of(Request("path", [t for block in path for t in block], 1))
            on_device = all(("device", name, key.tobytes()) in found for name in full for key in keys[name])
            assert (path in self.router.found["GPU"]) == on_device


@pytest.mark.parametrize("groups", [FULL, HYBRID, TWO_FULL], ids=["full", "hybrid", "two_full"])
@pytest.mark.parametrize("seed", sample(range(6), [0]))
def test_a_listener_believes_what_match_accepts_through_shortage_failed_copies_and_resets(make_serving, seed, groups):
    rnd = random.Random(seed)
    engine = lambda m: SimulatedEngine(m, seed=seed, faults=Faults(fail=0.2, corrupt=0.1))  # noqa: E731
    serving = make_serving(groups, 16, 40, copy_engine=engine, verify="full")
    told, believed = Told(serving.cache), 0
    open_ones: dict[str, Request] = {}
    for k in range(90):
        if rnd.random() < 0.4:
            salt = {"cache_salt": "s"} if rnd.random() < 0.2 else {}
            request = serving.add(f"{k}", prompt(rnd.randrange(4), rnd.randrange(1, 40)), rnd.randrange(1, 12), **salt)
            if not salt:
                open_ones[f"{k}"] = request
                told.text(request.tokens.tolist())
        if rnd.random() < 0.03:
            serving.cache.reset()
        serving.step()
        for name in [name for name in open_ones if name in serving.finished]:
            told.text([*open_ones.pop(name).tokens.tolist(), *serving.finished[name].token_ids])
        if rnd.random() < 0.5:
            told.poll()
            told.check()
            believed += len(told.router.believed)
    serving.run()
    told.poll()
    told.check()
    assert believed > 100
    for ids in told.texts:  # the oracle is right: the cache's own match says the same
        asked = Request("asked", [*ids, 1], 1)
        chain = serving.cache.core.coordinator.chain
        seq = Tracked(asked, 0, Text(chain, chain.root(None, None, ()), asked.tokens))
        hit = serving.cache.core.coordinator.match(seq)
        assert not hit.pending
        assert hit.num_tokens == told.accepted(ids, findable(serving.cache))


def test_full_blocks_whose_windows_are_gone_are_not_claimed_and_come_back(make_serving):
    serving = make_serving({**FULL, "win": (SlidingWindow(10), BT)}, {"full": 64, "win": 8})
    told = Told(serving.cache)
    first, other = prompt(0, 24), prompt(1, 40)
    for name, tokens in (("A", first), ("B", other)):
        serving.serve(name, tokens, 1)
        told.text(tokens)
    told.poll()
    held = {key for _, group, key in findable(serving.cache) if group == "full"}
    mine = told.events.keys_of(Request("A", first, 1))["full"]
    assert {key.tobytes() for key in mine} <= held, "the full blocks are there"
    assert told.accepted(tuple(first), findable(serving.cache)) == 0, "and their windows are not"
    told.check()
    assert told.router.believed
    serving.serve("A again", first, 1)
    told.poll()
    told.check()
    assert told.accepted(tuple(first), findable(serving.cache)) == 24


def test_blocks_of_a_text_are_claimed_for_a_hit_that_ends_in_its_continuation(make_serving):
    serving = make_serving({**FULL, "win": (SlidingWindow(10), BT)}, 64)
    told, text = Told(serving.cache), prompt(0, 49)
    for tokens in (text[:24], text):  # two runs of blocks
        told.text(tokens)
    serving.serve("all of it", text, 1)
    keys, pools = told.events.keys_of(Request("a", text, 1))["win"][:6], inside.pools(serving.cache)
    group = np.full(6, 1, np.int32)
    found = pools.find(group, keys)
    pools.unpublish(group[found > 0], found[found > 0])
    told.poll()
    assert told.accepted(tuple(text[:24]), findable(serving.cache)) == 0, "its own windows are gone"
    assert len(told.router.believed) == 12
    told.check()


def test_device_blocks_behind_one_of_the_host_are_told_as_the_hosts(make_serving):
    serving = make_serving(FULL, 40, 40, hold=[])
    told = Told(serving.cache)
    told.text(prompt(0, 33))
    serving.serve("a", prompt(0, 33), 1)
    told.poll()
    assert (len(told.router.found["GPU"]), len(told.router.found["CPU"])) == (8, 0)
    third = told.events.keys_of(Request("a", prompt(0, 33), 1))["full"][2:3]
    pools, group = inside.pools(serving.cache), np.zeros(1, np.int32)
    pools.unpublish(group, pools.find(group, np.ascontiguousarray(third)))
    told.poll()
    assert (len(told.router.found["GPU"]), len(told.router.found["CPU"])) == (2, 6)
    told.check()


def test_generated_text_is_claimed_once_its_request_has_ended(make_serving):
    serving = make_serving(FULL, 32)
    told = Told(serving.cache)
    tokens = prompt(0, 8)
    done = serving.serve("A", tokens, 9)
    told.text(tokens)
    told.poll()
    assert len(told.router.believed) == 2, "nobody knows the other blocks' text"
    told.text([*tokens, *done.token_ids])
    told.poll()
    told.check()
    assert len(told.router.believed) == 4


@pytest.mark.parametrize("most", [6, 20])
def test_texts_are_bounded_and_what_is_forgotten_is_taken_back(make_serving, most):
    rnd = random.Random(most)
    serving = make_serving(HYBRID, 40, 60)
    told = Told(serving.cache, most)
    told_of = 0
    for k in range(40):
        tokens = [*prompt(rnd.randrange(3), rnd.randrange(1, 30)), *prompt(k, 9)]
        told.text(tokens)
        assert len(told.claims.texts) <= most
        serving.serve(f"{k}", tokens, 1)
        told.poll()
        assert told.router.believed <= told.usable()
        told_of = max(told_of, len(told.router.believed))
    assert told_of > most // 3
    assert len(told.router.believed) <= most


def test_everything_is_all_that_was_told_and_holds(make_serving):
    serving = make_serving(HYBRID, 16, 60)
    told = Told(serving.cache)
    for k in range(6):
        tokens = prompt(k % 3, 20 + 4 * k)
        told.text(tokens)
        serving.serve(f"{k}", tokens, 3)
    told.poll()
    late = Router(BT)
    events = late.hear(told.encoder.encode(told.claims.everything()))
    assert events[0] == {"type": "AllBlocksCleared"}
    assert late.found == told.router.found
    assert late.found["GPU"] and late.found["CPU"]
    serving.cache.reset()
    told.poll()
    assert not told.router.believed
    assert len(told.claims.everything()) == 1
