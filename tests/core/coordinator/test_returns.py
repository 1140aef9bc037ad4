"""Conversations that come back: all of them if there is room, else some of them whole."""

from __future__ import annotations

from collections import OrderedDict

import inside
import numpy as np
import pytest

from core.driving import prompt
from kvtier import FullAttention, SlidingWindow
from kvtier.coordinator import returns
from kvtier.coordinator.boundaries import Boundaries
from kvtier.coordinator.partings import SLACK, Partings
from kvtier.coordinator.returns import Before, Returns
from kvtier.testing import canary_spec

SPEC = canary_spec({"full": (FullAttention(), 4), "near": (SlidingWindow(8), 4)})


def chain(conversation: int, units: int) -> np.ndarray:
    """Keys of a text, uint64 [units, 2]; a longer text of the same conversation begins with them."""
    return np.random.default_rng(conversation).integers(1, 2**63, (units, 2), np.uint64)


class Same:
    """Each text has one byte, without those that others have."""

    def alone(self, num_tokens: int, shared: int) -> float:
        return float(num_tokens > shared)


def made() -> Returns:
    """A unit is as long as the slack, and has one key."""
    return Returns(Same(), SLACK, SLACK)


class Lru:
    """A cache of whole conversations, each of size 1, which asks ``Returns`` whom to keep."""

    def __init__(self, room: int) -> None:
        self.known, self.room = made(), room
        self._there: OrderedDict[int, int] = OrderedDict()
        self._length: dict[int, int] = {}
        self.hits = 0

    def turn(self, conversation: int) -> bool:
        """Returns whether it was a guest."""
        before = self._length.get(conversation, 0)
        found = self._there.pop(conversation, 0)
        self.hits += found > 0
        keys = chain(conversation, before + 4)
        guest, earlier = self.known.begin(keys, found, float(self.room), 1.0)
        self.known.end(keys, before + 3, before + 4, earlier)
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
    stories = [made(), made()]
    for turn in range(300):
        conversation, units = turn % 30, 4 * (turn // 30 + 1)
        for known, hit in zip(stories, (0, units - 4), strict=True):
            keys = chain(conversation, units)
            _, before = known.begin(keys, hit, 20.0, 1.0)
            known.end(keys, units, units, before)
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
    known = made()
    monkeypatch.setattr(known, "_keeps_some", lambda capacity: True)
    assert [known.begin(chain(3, 8), hit, 9.0, 1.0)[0] for hit in (0, 3, 4, 8)] == [True, True, False, False]


def test_old_texts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "TEXTS", 16)
    known = made()
    for conversation in range(17):
        known.end(chain(conversation, 4), 4, 4, Before())
    assert known.begin(chain(0, 8), 0, 9.0, 1.0) == (False, Before())
    assert known.begin(chain(16, 8), 0, 9.0, 1.0) == (False, Before(16, 4, goes_on=True, of_new=True))
    assert known.begin(chain(99, 8), 0, 9.0, 1.0) == (False, Before())
    assert known.begin(chain(99, 0), 0, 9.0, 1.0) == (False, Before())


def joined(*parts: tuple[int, int]) -> np.ndarray:
    """Keys of a text whose parts are the beginnings of others."""
    return np.concatenate([chain(*part) for part in parts])


def test_where_a_prompt_parts_from_the_newest_text_is_known_and_where_it_goes_on() -> None:
    known = made()
    for tail in range(3):
        keys = joined((0, 10), (1 + tail, 6))
        _, before = known.begin(keys, 0, 9.0, 1.0)
        first = Before(0, 10, shared=10, early=3 * SLACK, of_new=True, stem=10)
        assert before == (Before(), first, Before(1, 10, shared=10, stem=10))[tail], (
            "nobody else was known to part there"
        )
        known.end(keys, 13, 16, before)
    at_an_answer_s_end = Before(1, 16, goes_on=True, shared=10)
    assert known.begin(joined((0, 10), (2, 9)), 0, 9.0, 1.0)[1] == at_an_answer_s_end
    for cut, goes_on in (12, True), (13, True), (14, True), (15, True), (11, False):
        before = known.begin(joined((0, 10), (2, cut - 10), (9, 5)), 0, 9.0, 1.0)[1]
        shared, behind, stem = (10, 0, 0) if goes_on else (cut, (cut - 10) * SLACK, cut)
        early = max(0, 13 - cut) * SLACK
        assert before == Before(1, cut, goes_on, shared, early=early, behind=behind, stem=stem)


def test_a_text_that_has_gone_on_has_nothing_behind_a_stem() -> None:
    """Turn by turn alone, and each time the new question is written anew: nothing would be kept for that."""
    known, prompts = made(), [chain(0, 8), chain(0, 16), joined((0, 13), (1, 5))]
    befores = []
    for keys in prompts:
        befores.append(known.begin(keys, 0, 99.0, 1.0)[1])
        known.end(keys, len(keys), len(keys), befores[-1])
    assert [before.goes_on for before in befores] == [False, True, False]
    assert (befores[2].units, befores[2].behind, befores[2].of_new) == (13, 0, True)
    assert known.partings.behind(1.0) == 0


def test_two_questions_shortly_behind_a_beginning_make_it_a_stem() -> None:
    known, found = made(), []
    for question in range(4):
        keys = joined((0, 10), (1 + question, 1))
        before = known.begin(keys, 0, 9.0, 1.0)[1]
        found.append((before.units, before.stem))
        known.end(keys, 11, 11, before)
    assert found == [(0, 0), (10, 0), (10, 10), (10, 10)], "the second could be the first one written anew"


def test_what_texts_share_counts_once_and_for_the_newest() -> None:
    known = made()
    known._sizes_of.alone = lambda tokens, shared: float(tokens - shared)
    for tail in range(4):
        keys = joined((0, 10), (1 + tail, 6))
        known.end(keys, 13, 16, known.begin(keys, 0, 9.0, 1.0)[1])
    assert (known._sizes[:4] / SLACK).tolist() == [6, 6, 6, 16]
    for keys in joined((0, 10), (2, 8)), joined((0, 10), (4, 9)):
        known.end(keys, 17, len(keys), known.begin(keys, 0, 9.0, 1.0)[1])
    assert (known._sizes[:6] / SLACK).tolist() == [6, 0, 6, 0, 8, 19]


def unused(known: Returns, count: int, turns: int, room: float) -> list[int]:
    """Conversations of ``turns`` turns with one of ten beginnings; how many of the texts so far are unused."""
    random, sums = np.random.default_rng(3), [0]
    for n in range(count):
        stem = int(random.integers(10))
        for turn in range(turns):
            keys = joined((stem, 10), (100 + n, 4 * (turn + 1)))
            _, before = known.begin(keys, 0, room, 1.0)
            assert len({*known.unused}) <= 10, "named by their beginnings"
            sums.append(sums[-1] + len(known.unused))
            known.end(keys, len(keys) - 1, len(keys), before)
    return sums


def test_texts_that_nobody_comes_back_to_are_unused() -> None:
    sums = unused(made(), 100, 1, 10.0)
    assert sums[10] == 0, "nobody knows yet: of texts of the room's size, some may still be asked for"
    assert sums[100] > 70


def test_texts_are_used_if_they_are_asked_for_again_and_as_long_as_there_is_room() -> None:
    assert 40 < unused(made(), 100, 2, 10.0)[-1] < 100, "of two turns, the second one's"
    assert unused(made(), 100, 1, 1e6)[-1] == 0


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
    assert inside.keeping(serving.cache).returns._recent > 8


def test_a_preempted_request_is_no_guest_of_its_own(make_serving) -> None:
    serving = make_serving(SPEC, {"full": 24, "near": 20})
    serving.add("a", prompt(0, 33), 40)
    serving.steps_until(lambda: serving.known("a") > 40)
    serving.add("urgent", prompt(1, 60), 1, priority=-1)
    serving.run()
    assert serving.finished["a"].preemptions and inside.keeping(serving.cache).returns._count == 2


@pytest.mark.usefixtures("unaudited")
def test_a_stem_whose_content_has_gone_is_kept_when_it_comes_again(make_serving) -> None:
    """Nothing in the pools tells of it any more."""
    serving = make_serving(SPEC, {"full": 24, "near": 12})
    stem = prompt(1, 40)
    found = []
    for k in range(3):
        done = serving.serve(f"{k}", [*stem, *prompt(10 + k, 6)], 2)
        found.append(done.cached_tokens["device"])
        if k == 0:
            serving.serve("other", prompt(99, 90), 1)
    assert found == [0, 0, 40]


@pytest.mark.usefixtures("unaudited")
def test_stems_stay_in_place_of_the_tails_behind_them(make_serving) -> None:
    def found(pays: bool) -> int:
        with pytest.MonkeyPatch.context() as patch:
            if pays:
                patch.setattr(Boundaries, "unused", lambda self, app: None)
            serving = make_serving(SPEC, {"full": 120, "near": 60}, scheduler={"audit_every": 100})
            random, found = np.random.default_rng(7), 0
            for k in range(150):
                done = serving.serve(f"{k}", [*prompt(int(random.integers(8)), 24), *prompt(100 + k, 80)], 2)
                found += done.cached_tokens["device"] * (k >= 100)
            return found

    assert found(pays=True) < 0.6 * 50 * 24, "the room is too small for what is used last"
    assert found(pays=False) > 0.9 * 50 * 24


@pytest.mark.usefixtures("unaudited")
def test_the_second_prompt_of_a_new_beginning_finds_it_once_others_have_parted_so(make_serving) -> None:
    """Questions are longer than the slack, and the pools too small for all that windows pass."""

    def found(learns: bool) -> list[bool]:
        with pytest.MonkeyPatch.context() as patch:
            if not learns:
                patch.setattr(Partings, "reach", lambda self, slack_bytes: 0)
            serving = make_serving(SPEC, {"full": 400, "near": 240}, scheduler={"audit_every": 20})
            found = []
            for k in range(40):  # the second question comes when two other beginnings have come
                for app in (k, k - 3):
                    asked = [*prompt(3 + app, 100), *prompt(1000 + k + 500 * (app == k), 80)]
                    done = serving.serve(f"{k} {app}", asked, 2)
                    found.append(done.cached_tokens["device"])
            return [tokens == 100 for tokens in found[21::2]]

    assert sum(found(learns=False)) <= 3
    assert sum(found(learns=True)) >= 27
