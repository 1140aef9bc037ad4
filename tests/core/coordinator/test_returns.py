"""Conversations that come back: all of them if there is room, else some of them whole."""

from __future__ import annotations

from collections import OrderedDict

import inside
import numpy as np
import pytest

from core.driving import prompt
from kvtier import FullAttention, SlidingWindow
from kvtier.coordinator import returns
from kvtier.coordinator.returns import Returns
from kvtier.testing import canary_spec

SPEC = canary_spec({"full": (FullAttention(), 4), "near": (SlidingWindow(8), 4)})


def chain(conversation: int, units: int) -> np.ndarray:
    """Keys of a text, uint64 [units, 2]; a longer text of the same conversation begins with them."""
    return np.random.default_rng(conversation).integers(1, 2**63, (units, 2), np.uint64)


class Lru:
    """A cache of whole conversations, each of size 1, which asks ``Returns`` whom to keep."""

    def __init__(self, room: int) -> None:
        self.known, self.room = Returns(1), room
        self._there: OrderedDict[int, int] = OrderedDict()
        self._length: dict[int, int] = {}
        self.hits = 0

    def turn(self, conversation: int) -> bool:
        """Returns whether it was a guest."""
        before = self._length.get(conversation, 0)
        found = self._there.pop(conversation, 0)
        self.hits += found > 0
        keys = chain(conversation, before + 4)
        guest, text = self.known.begin(keys, found, float(self.room), 1.0)
        self.known.end(keys, [before + 3, before + 4], 1.0, text)
        self._length[conversation] = before + 4
        if not guest:
            self._there[conversation] = before + 4
            if len(self._there) > self.room:
                self._there.popitem(last=False)
        return guest


def test_of_a_round_that_is_a_fifth_too_long_most_is_found() -> None:
    cache = Lru(80)
    for _ in range(5):
        for conversation in range(100):
            cache.turn(conversation)
    assert cache.hits >= 0.6 * 400


@pytest.mark.parametrize("room", [100, 120, 400])
def test_of_a_round_that_fits_all_is_found_and_nobody_is_a_guest(room: int) -> None:
    cache = Lru(room)
    guests = [cache.turn(conversation) for _ in range(5) for conversation in range(100)]
    assert cache.hits == 400 and not any(guests)


def test_what_comes_back_soon_is_kept_by_use_alone() -> None:
    """Open conversations at random, of which some end and others begin: what was used last is the best guess."""
    random, cache, guests = np.random.default_rng(5), Lru(20), 0
    for turn in range(4000):
        guests += cache.turn(turn // 10 + int(random.integers(12)))
    assert guests < 40


def test_distances_do_not_depend_on_what_was_there() -> None:
    """Else to keep some would change what says whether to keep some."""
    stories = [Returns(1), Returns(1)]
    for turn in range(300):
        conversation, units = turn % 30, 4 * (turn // 30 + 1)
        for known, hit in zip(stories, (0, units - 4), strict=True):
            keys = chain(conversation, units)
            _, text = known.begin(keys, hit, 20.0, 1.0)
            known.end(keys, [units], 1.0, text)
    assert np.array_equal(stories[0]._found, stories[1]._found) and stories[0]._found.sum() > 0


def test_when_rounds_stop_nobody_is_a_guest_any_more() -> None:
    """Else what was kept would stay for ever, and others would find nothing of what they share."""
    cache = Lru(80)
    for _ in range(4):
        for conversation in range(100):
            cache.turn(conversation)
    assert any(cache.turn(conversation) for conversation in range(100))
    guests = [cache.turn(1000 + k) for k in range(600)]
    assert not any(guests[300:])


def test_a_text_that_is_forgotten_is_no_guest_if_its_content_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Returns(1)
    monkeypatch.setattr(known, "_keeps_some", lambda capacity: True)
    assert [known.begin(chain(3, 8), hit, 9.0, 1.0)[0] for hit in (0, 3, 4, 8)] == [True, True, False, False]


def test_old_texts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "TEXTS", 16)
    known = Returns(1)
    for conversation in range(17):
        known.end(chain(conversation, 4), [4], 1.0, -1)
    assert known.begin(chain(0, 8), 0, 9.0, 1.0) == (False, -1)
    assert known.begin(chain(16, 8), 0, 9.0, 1.0) == (False, 16)
    assert known.begin(chain(99, 8), 0, 9.0, 1.0) == (False, -1)
    assert known.begin(chain(99, 0), 0, 9.0, 1.0) == (False, -1)


def rounds(serving, sessions: int, turns: int) -> int:
    """Conversations in strict turn; the tokens that were found."""
    histories, found = [prompt(k, 60) for k in range(sessions)], 0
    for turn in range(turns):
        for k in range(sessions):
            asked = [*histories[k], *prompt(100 + turn * sessions + k, 5)]
            done = serving.serve(f"{k} {turn}", asked, 4)
            found += sum(done.cached_tokens.values())
            histories[k] = [*asked, *done.token_ids]
    return found


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize("tier", ["device", "host"])
def test_rounds_on_a_tier_that_is_a_fifth_too_small(make_serving, tier) -> None:
    def found(blocks: int) -> int:
        room = {"full": blocks, "near": blocks // 4}
        tiers = [room] if tier == "device" else [{"full": 60, "near": 16}, room]
        serving = make_serving(SPEC, *tiers, scheduler={"audit_every": 100})
        return rounds(serving, 20, 6)

    most = found(800)
    assert found(360) > 0.45 * most, "20 conversations of about 21 blocks in the middle"


def test_a_round_in_small_is_sound_after_every_step(make_serving) -> None:
    serving = make_serving(SPEC, {"full": 90, "near": 24}, {"full": 100, "near": 24})
    assert rounds(serving, 6, 4) > 0
    assert inside.returns(serving.cache)._recent > 8


def test_a_preempted_request_is_no_guest_of_its_own(make_serving) -> None:
    serving = make_serving(SPEC, {"full": 24, "near": 20})
    serving.add("a", prompt(0, 33), 40)
    serving.steps_until(lambda: serving.known("a") > 40)
    serving.add("urgent", prompt(1, 60), 1, priority=-1)
    serving.run()
    assert serving.finished["a"].preemptions and inside.returns(serving.cache)._count == 2
