"""What goes cold of boundaries that nobody else has wanted, where answers' ends alone pay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import inside
import numpy as np
import pytest

from core.driving import Serving, prompt
from core.slabs import shared_serving
from kvtier import FullAttention, SlidingWindow
from kvtier.coordinator.boundaries import Boundaries, End
from kvtier.pools.block_pool import Col
from kvtier.testing import canary_spec

SPEC = canary_spec({"full": (FullAttention(), 4), "near": (SlidingWindow(8), 4)})


@pytest.fixture
def make_serving(make_serving: Callable[..., Serving]) -> Callable[..., Serving]:
    """Copies end at the next poll: what is released while a store reads it is not the first to go when that ends."""
    return partial(make_serving, hold=())


@pytest.fixture(autouse=True)
def answers_alone_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on conversations whose answers stay as they were."""
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": end is End.ANSWER)


def cold(serving: Serving) -> list[int]:
    """How many blocks of each tier's window group are to go first whatever their age."""
    cache = serving.cache
    return [pools.num_superseded(1) for pools in (inside.pools(cache), inside.host(cache)) if pools is not None]


def goes_on(serving: Serving, name: str, text: list[int], more: int, new_tokens: int = 1) -> list[int]:
    """A turn of a conversation: its text afterwards."""
    text = [*text, *prompt(sum(map(ord, name)), more)]
    return [*text, *serving.serve(name, text, new_tokens).token_ids]


def test_what_a_conversation_has_moved_on_from_is_the_first_to_go(make_serving):
    serving = make_serving(SPEC, 200, 200)
    text = goes_on(serving, "a", [], 33)
    assert cold(serving) == [0, 0]
    goes_on(serving, "b", text, 32)
    assert cold(serving) == [2, 2], "the window of the first turn's end, in both tiers"


@pytest.mark.parametrize("loaded", [False, True])
def test_what_the_next_turn_needs_as_well_stays(make_serving, loaded: bool):
    wide = canary_spec({"full": (FullAttention(), 4), "wide": (SlidingWindow(16), 4)})
    serving = make_serving(wide, 200, 200)
    text = goes_on(serving, "a", [], 33)
    if loaded:
        inside.pools(serving.cache).forget_all()
    goes_on(serving, "b", text, 4)
    assert cold(serving)[1] == 1, "of the four blocks that the second turn found, its end sees three"


def test_what_a_conversation_has_loaded_and_moved_on_from_is_the_first_to_go(make_serving):
    serving = make_serving(SPEC, 200, 200)
    text = goes_on(serving, "a", [], 33)
    inside.pools(serving.cache).forget_all()
    assert cold(serving) == [0, 0]
    goes_on(serving, "b", text, 32)
    assert serving.finished["b"].cached_tokens == {"device": 0, "host": 32}
    assert cold(serving) == [2, 2], "the window of the first turn's end, in both tiers"


def test_what_a_long_answer_has_moved_on_from_is_the_first_to_go(make_serving):
    serving = make_serving(SPEC, 200, 200)
    goes_on(serving, "a", [], 33, new_tokens=40)
    assert cold(serving) == [2, 2], "the window of the prompt's end, in both tiers"
    goes_on(serving, "b", [], 33, new_tokens=4)
    assert cold(serving) == [2, 2], "a short answer has not passed it"


def test_a_prompt_that_is_sent_again_stays(make_serving):
    serving = make_serving(SPEC, 200, 200)
    for n in range(3):
        serving.serve(f"{n}", prompt(0, 33), 40 * (n > 0) + 1)
        assert cold(serving) == [0, 0], n


def test_a_prompt_that_was_wanted_stays_though_its_content_was_lost(make_serving):
    serving = make_serving(SPEC, 200, 200)
    for n in range(2):
        serving.serve(f"{n}", prompt(0, 33), 1)
    for pools in (inside.pools(serving.cache), inside.host(serving.cache)):
        pools.forget_all()
    serving.serve("again", prompt(0, 33), 40)
    assert cold(serving) == [0, 0]


def test_where_prompts_have_parted_stays_when_the_second_moves_on(make_serving):
    """Its end, four tokens later, goes; what it shares with the first does not."""
    serving = make_serving(SPEC, 200, 200)
    system = prompt(0, 32)
    serving.serve("0", [*system, *prompt(1, 33)], 1)
    serving.serve("1", [*system, *prompt(2, 5)], 40)
    assert cold(serving) == [1, 1]


def test_a_prompt_that_was_hit_stays_when_conversations_move_on_from_it(make_serving):
    serving = make_serving(SPEC, 200, 200)
    system = prompt(0, 32)
    for n in range(3):
        serving.serve(f"{n}", [*system, *prompt(n + 1, 33)], 1)  # the second finds where they part, the third hits it
    before = cold(serving)
    assert before == [0, 0]
    serving.serve("3", [*system, *prompt(9, 33)], 1)
    assert cold(serving) == before


def test_copies_of_what_nobody_is_known_to_want_are_the_first_that_the_host_gives_up(make_serving):
    """In lazy mode they are made when the device needs the room."""
    serving = make_serving(SPEC, 24, 200, store="lazy")
    text = list[int]()
    for n in range(6):
        text = goes_on(serving, f"{n}", text, 12)
    serving.serve("other", prompt(90, 60), 1)
    serving.run()
    assert cold(serving)[1] > 0
    hits = serving.serve("again", text, 1).cached_tokens
    assert sum(hits.values()) >= len(text) - 8


def launder(serving: Serving, *n: int) -> list[int]:
    """Stores for the n[g] coldest blocks of every group are planned; how many there are."""
    coordinator = inside.coordinator(serving.cache)
    return inside.stores(serving.cache).launder(coordinator.pools, *coordinator.pools.coldest_of(np.array(n))).tolist()


@pytest.mark.parametrize(("host", "copied"), [(2, 0), (3, 1), (4, 2), (200, 2)])
def test_it_takes_no_room_in_the_host_from_what_somebody_may_want(make_serving, host: int, copied: int):
    serving = make_serving(SPEC, 200, {"full": 200, "near": host}, store="lazy")
    pools = inside.host(serving.cache)
    serving.serve("somebody's", prompt(50, 33), 1)
    assert launder(serving, 0, 2) == [0, 2]
    serving.run()
    kept = pools.column(Col.CACHED)[1]
    text = goes_on(serving, "a", [], 33)
    text = goes_on(serving, "b", text, 32)
    assert cold(serving) == [4, 0], "what was passed, and what the host has a copy of"
    assert launder(serving, 0, 4) == [0, copied]
    serving.run()
    assert (pools.column(Col.CACHED)[1], pools.column(Col.EVICTED)[1]) == (kept + copied, 0)
    goes_on(serving, "c", text, 32)
    more = launder(serving, 0, 2)
    assert more == [0, 2 if host == 200 else 0], "a copy that is being made takes the room that an older one gave"


def test_what_the_host_has_takes_no_room_from_what_it_lacks(make_serving):
    """A window that was loaded and passed is given up first; behind it stands one that has no copy."""
    serving = make_serving(SPEC, 200, {"full": 200, "near": 4}, store="lazy")
    text = goes_on(serving, "a", [], 33)
    assert launder(serving, 8, 2) == [8, 2]
    serving.run()
    inside.pools(serving.cache).forget_all()
    goes_on(serving, "c", goes_on(serving, "b", [], 33), 32)
    goes_on(serving, "d", text, 32)
    assert serving.finished["d"].cached_tokens == {"device": 0, "host": 32}
    device = inside.pools(serving.cache)
    assert device.is_superseded(*device.coldest_of([0, 5])).tolist() == [True] * 4 + [False]
    assert launder(serving, 0, 4) == [0, 2]
    serving.run()


def test_slabs_that_no_group_of_the_host_has_are_room_for_what_was_passed(make_cache):
    serving = shared_serving(make_cache, SPEC, 400, 400, store="lazy")
    text = list[int]()
    for turn in "abcd":
        text = goes_on(serving, turn, text, 32)
    passed, host = cold(serving)[0], inside.host(serving.cache)
    assert passed >= 4
    assert (host.column(Col.EMPTY)[1], host.unused[1]) == (0, 400)
    assert launder(serving, 0, passed) == [0, passed]
    serving.run()


@pytest.mark.parametrize("first", ["full", "near"])
def test_room_that_groups_share_is_first_for_what_somebody_may_want(make_cache, first: str):
    groups = dict(
        sorted({"full": (FullAttention(), 4), "near": (SlidingWindow(8), 4)}.items(), key=lambda g: g[0] != first)
    )
    serving = shared_serving(make_cache, canary_spec(groups), 400, 4, store="lazy")
    full = list(groups).index("full")
    text = goes_on(serving, "a", [], 33)
    for turn in "bcd":
        text = goes_on(serving, turn, text, 32)
    device, host = inside.pools(serving.cache), inside.host(serving.cache)
    assert device.num_superseded(1 - full) >= 4
    assert host.column(Col.PER_SLAB).tolist() == [1, 1]
    assert launder(serving, 4, 4) == [4 * (g == full) for g in (0, 1)]
    assert host.column(Col.EVICTED).tolist() == [0, 0]
