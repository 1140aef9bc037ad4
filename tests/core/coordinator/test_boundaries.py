"""Which ends are kept: learned from where prompts are found again."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import inside
import numpy as np
import pytest
from breadth import sized
from hypothesis import given, strategies as st

from core.driving import Serving, prompt
from kvtier import FullAttention, InvalidRequest, Request, SlidingWindow
from kvtier.coordinator import boundaries
from kvtier.coordinator.boundaries import Boundaries, End
from kvtier.machine.stats import EndStats
from kvtier.pools.block_pool import Col
from kvtier.testing import canary_spec

SPEC = canary_spec({"full": (FullAttention(), 4), "near": (SlidingWindow(8), 4)})


def name(n: int) -> bytes:
    return n.to_bytes(16, "little")


def test_only_the_first_who_wants_a_boundary_is_told_that_nobody_else_did() -> None:
    known = Boundaries()
    assert not known.is_wanted(name(1))
    assert [known.want(name(n)) for n in (1, 2, 1, 2, 1)] == [True, True, False, False, False]
    assert known.is_wanted(name(1))


def test_the_boundaries_that_were_wanted_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "MOST", 8)
    known = Boundaries()
    known.want(name(0))
    for n in range(1, 100):
        known.want(name(n))
        known.end(name(1000 + n), End.PROMPT)
        assert not known.want(name(0)), n
    assert known.is_wanted(name(0)) and not known.is_wanted(name(90))
    assert len(inside.wanted_keys(known)) == 8 == len(known._ends)


def test_before_anything_is_known_what_costs_little_is_tried() -> None:
    """A turn mostly goes on from the answer; where prompts part is told by who knows; what is passed goes first."""
    known = Boundaries()
    assert [end for end in End if known.pays(end)] == [End.ANSWER, End.STEM, End.PASSED]


def test_each_app_learns_what_pays_in_it_and_a_new_one_follows_all(monkeypatch) -> None:
    monkeypatch.setattr(boundaries, "MOST_APPS", 2)
    known = Boundaries()
    for n in range(100):
        end = (End.PROMPT, End.ANSWER)[n % 2]
        known.end(name(n), end)
        known.learn((name(n), 64), None, (b"drops its answers", b"keeps them")[n % 2])
    for paid in End.PROMPT, End.ANSWER:
        assert known.pays(paid) and known.pays(paid, b"new")
        assert [known.pays(paid, app) for app in (b"drops its answers", b"keeps them")].count(True) == 1
    assert known.pays(End.PROMPT, b"drops its answers") and known.pays(End.ANSWER, b"keeps them")
    known.learn((name(1), 64), None, b"keeps them")
    known.learn((name(1), 64), None, b"new")
    assert known.pays(End.ANSWER, b"drops its answers"), "it was forgotten: the two newest are known"
    assert not known.pays(End.PROMPT, b"keeps them")


def test_a_new_app_follows_its_tenant(monkeypatch) -> None:
    """A conversation without a system prompt is an app of its own, and knows nothing of itself at first."""
    monkeypatch.setattr(boundaries, "MOST_APPS", 30)
    known, tenants = Boundaries(), (b"drops its answers", b"keeps them")
    for n in range(100):
        known.end(name(n), (End.PROMPT, End.ANSWER)[n % 2])
        known.learn((name(n), 64), None, name(1000 + n), tenants[n % 2])
    for n, end in enumerate((End.PROMPT, End.ANSWER)):
        known.learn(None, None, name(2000 + n), tenants[n])
        assert known.pays(end, name(2000 + n)) and not known.pays(1 - end, name(2000 + n))
    assert known.pays(End.PROMPT, b"new") and known.pays(End.ANSWER, b"new"), "without a tenant all count"
    assert len(known._apps) == 30 and len(known._tenants) == 28, "bounded"
    for _ in range(200):
        known.unused(name(2001))
    known.learn(None, None, name(2002), tenants[1])
    assert not known.pays(End.ANSWER, name(2002)), "nobody comes back to this tenant's texts"
    known.learn(None, None, name(2003), tenants[0])
    assert known.pays(End.PROMPT, name(2003))


def test_the_salt_of_a_request_is_its_tenant(make_serving) -> None:
    """Any salt: one that is no Unicode text, as JSON may have it, and a long one, of which little is remembered."""
    serving = make_serving(SPEC, 300)
    for n, salt in enumerate(["one", "half of a pair \ud83d", "long" * 10**5, None, "one"]):
        serving.serve(f"{n}", prompt(n, 33), cache_salt=salt)
    tenants = [*inside.keeping(serving.cache).boundaries._tenants.values()]
    assert [len(name) for name in tenants] == [16] * 4
    assert len({*tenants}) == 3 and tenants[0] == tenants[3]


@pytest.mark.parametrize("paid", [End.PROMPT, End.ANSWER])
def test_what_is_never_found_stops_paying_and_pays_again_once_it_is_found(paid: End) -> None:
    known, other = Boundaries(), End(1 - paid)
    for n in range(150):
        known.end(name(n), paid)
        known.learn((name(n), 64))
    assert known.pays(paid) and not known.pays(other)
    for n in range(200, 210):
        known.end(name(n), other)
        known.learn((name(7), 64), (name(n), 80))  # the longer one counts
    assert known.pays(other)


def test_an_end_that_conversations_come_back_to_pays_though_it_was_left() -> None:
    known = Boundaries()
    for n in range(20):
        known.end(name(n), End.ANSWER)
        known.learn((name(n), 64))
        assert known.leave(name(n))
    assert not known.pays(End.LEFT)
    for n in range(20):
        known.learn((name(n), 64))
    assert known.pays(End.LEFT) and known.pays(End.ANSWER)


def test_what_is_found_shortly_before_prompts_end_pays_for_their_ends_too() -> None:
    known = Boundaries()
    for n in range(150):
        known.end(name(n), End.SHORT)
        known.learn((name(n), 64))
    assert known.pays(End.SHORT) and known.pays(End.PROMPT) and not known.pays(End.ANSWER)


def test_an_end_is_not_taken_for_a_place_shortly_before_another_one() -> None:
    known = Boundaries()
    known.end(name(1), End.PROMPT)
    known.end(name(1), End.SHORT)
    known.learn((name(1), 64))
    assert known.stats()["prompt"].hits == 1 and known.stats()["short"].hits == 0


def test_what_is_found_where_nothing_ends_pays_for_what_windows_pass() -> None:
    known = Boundaries()
    for n in range(200):
        known.end(name(n), End.ANSWER)
        known.learn((name(n), 64))
    assert not known.pays(End.PASSED)
    for n in range(20):
        known.learn((name(n), 64), (name(999), 128))  # half of it would be found by what was passed alone
    assert known.pays(End.PASSED)


def test_where_others_have_been_found_is_a_stem() -> None:
    known = Boundaries()
    known.want(name(1))
    known.learn((name(1), 64))
    assert known.stats()["stem"].hits == 1 and not known.leave(name(1)), "no end that a conversation goes on from"


def test_what_somebody_wants_is_no_end_of_one_conversation_any_more() -> None:
    known = Boundaries()
    known.want(name(1))
    known.end(name(1), End.PROMPT)
    known.learn((name(1), 64))
    assert known.stats()["prompt"].hits == 0


@given(st.lists(st.tuples(st.sampled_from(["want", "end", "leave", "learn"]), st.integers(0, 9), st.sampled_from(End))))
def test_equal_stories_have_equal_answers(story: list[tuple[str, int, End]]) -> None:
    def told() -> list[bool]:
        known, answers = Boundaries(), list[bool]()
        calls: dict[str, Callable[[int, End], object]] = {
            "want": lambda n, end: known.want(name(n)),
            "end": lambda n, end: known.end(name(n), end),
            "leave": lambda n, end: known.leave(name(n)),
            "learn": lambda n, end: known.learn((name(n // 2), 1 + n), (name(n), 9 + n)),
        }
        for what, n, end in story:
            calls[what](n, end)
            answers += [known.pays(end), known.is_wanted(name(n))]
        return answers

    assert told() == told()


def test_hits_and_what_was_missed_are_counted_by_the_class_of_their_ends() -> None:
    known = Boundaries()
    ends = [end for end in End if end not in (End.LEFT, End.STEM, End.PASSED)]  # no text ends there
    for n, end in enumerate(ends):
        known.end(name(n), end)
        for _ in range(n + 1):
            known.learn((name(n), 64))
        known.learn(None, (name(n), 64))
    known.learn((name(99), 64), (name(98), 128))
    known.learn(None)
    stats = known.stats()
    assert [of.pays for of in stats.values()] == [known.pays(end) for end in End]
    assert list(stats) == [end.name.lower() for end in End]
    assert [(stats[end.name.lower()].hits, stats[end.name.lower()].missed) for end in ends] == [(1, 1), (2, 1), (3, 1)]
    assert stats["passed"] == EndStats(1, 1, known.pays(End.PASSED)) and stats["left"].hits == stats["stem"].hits == 0
    known.leave(name(0))
    known.learn((name(0), 64))
    assert known.stats()["left"].hits == 1 and known.stats()["prompt"].hits == 2


# --- in a cache -----------------------------------------------------------------------------------


def talk(serving: Serving, sessions: int, turns: int, kept: Callable[[list[int], list[int]], list[int]]) -> int:
    """Conversations, one turn of each after the other; the tokens that were found. ``kept(prompt, answer)``: the
    history."""
    histories = [prompt(k, 24) for k in range(sessions)]
    found = 0
    for turn in range(turns):
        for k in range(sessions):
            asked = [*histories[k], *prompt(100 + turn * sessions + k, 13)]
            done = serving.serve(f"{k} {turn}", asked, 16)
            found += sum(done.cached_tokens.values())
            histories[k] = kept(asked, done.token_ids)
    return found


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize("tier", ["device", "host"])
def test_conversations_whose_answers_are_not_kept_are_found_at_their_prompts(make_serving, monkeypatch, tier) -> None:
    """As where thinking is dropped from the history. Of room for one window each there is enough."""
    room = {"full": 300, "near": 24}

    def hits() -> int:
        device = room if tier == "device" else {"full": 40, "near": 12}
        serving = make_serving(SPEC, device, room, scheduler={"audit_every": 100})
        return talk(serving, 6, 6, lambda asked, answer: [*asked, *answer[12:]])

    learned = hits()
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": end is End.ANSWER)
    assert learned > 1.5 * hits()


def test_a_short_turn_does_not_cool_what_its_own_prompt_needs(make_serving) -> None:
    """The new prompt's window reaches below the hit that it goes on from."""
    serving = make_serving(canary_spec({"full": (FullAttention(), 4), "wide": (SlidingWindow(32), 4)}), 200)
    text = prompt(0, 41)
    serving.serve("a", text, 1)
    serving.add("b", [*text, *prompt(1, 8)], 30)
    serving.steps_until(lambda: serving.known("b") > len(text) + 8 + 4)
    tables = inside.coordinator(serving.cache).tables.arrays
    row = serving.scheduler.running[0].row
    start, stop, _ = tables.superseded[row]
    assert start >= stop or stop <= 48 - 31, "a hit on the prompt needs tokens from 17 on"
    serving.run()


def test_models_with_full_attention_alone_learn_whether_answers_are_found(make_serving) -> None:
    serving = make_serving({"full": (FullAttention(), 4)}, 100)
    for k in range(3):
        serving.serve(f"{k}", prompt(0, 33), 9)
    ends = serving.cache.stats().ends
    assert (ends["prompt"].hits, ends["prompt"].pays) == (2, True)


def test_a_cache_tells_which_ends_were_found_and_which_would_have_been(make_serving, monkeypatch) -> None:
    serving = make_serving(SPEC, 300)
    text = prompt(0, 33)
    said = [*text, *serving.serve("a", text, 16).token_ids]
    serving.serve("again", text, 1)
    serving.serve("on", [*said, *prompt(1, 9)], 1)
    ends = serving.cache.stats().ends
    assert {name: (of.hits, of.missed) for name, of in ends.items() if of.hits or of.missed} == {
        "prompt": (1, 0),
        "answer": (1, 0),
    }
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": end is not End.ANSWER)
    said = [*prompt(2, 33), *serving.serve("b", prompt(2, 33), 16).token_ids]
    serving.serve("b on", [*said, *prompt(3, 9)], 1)
    ends = serving.cache.stats().ends
    assert (ends["answer"].hits, ends["answer"].missed, ends["answer"].pays) == (1, 1, False)
    assert ends["prompt"].hits == 2, "there it was found instead"


def test_a_request_that_was_preempted_does_not_count_what_it_finds_of_itself(make_serving) -> None:
    serving = make_serving(SPEC, {"full": 24, "near": 20})
    serving.add("a", prompt(0, 33), 40)
    serving.steps_until(lambda: serving.known("a") > 40)
    serving.add("urgent", prompt(1, 60), 1, priority=-1)
    serving.run()
    assert serving.finished["a"].preemptions
    assert [(of.hits, of.missed) for of in serving.cache.stats().ends.values()] == [(0, 0)] * len(End)


def test_what_windows_pass_is_found_on_the_device_and_never_stored(make_serving) -> None:
    serving = make_serving(SPEC, 300, 300)
    text = prompt(0, 161)
    serving.serve("first", text, 1)
    device, host = (pools.column(Col.CACHED)[1] for pools in (inside.pools(serving.cache), inside.host(serving.cache)))
    assert device > 20 and host == 2, "the window at its end"
    assert serving.serve("parts", [*text[:24], *prompt(1, 20)], 1).cached_tokens == {"device": 24, "host": 0}


def test_ends_that_do_not_pay_go_first_though_their_request_has_left(make_serving, monkeypatch) -> None:
    serving = make_serving(SPEC, 300)
    pools = inside.pools(serving.cache)
    serving.serve("pays", prompt(0, 61), 3)
    before = pools.num_superseded(1)
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": end is End.STEM)
    serving.serve("does not", prompt(1, 61), 3)
    assert pools.num_superseded(1) == before + 2, "the window at its end"


@pytest.mark.parametrize(("ends", "found"), [((End.PROMPT,), 0), ((End.PROMPT, End.SHORT), 72)])
def test_prompts_that_part_shortly_before_their_ends_are_found_there(make_serving, monkeypatch, ends, found) -> None:
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": end in ends)
    serving = make_serving(SPEC, 300)
    text = prompt(0, 91)
    serving.serve("first", text, 1)
    assert serving.serve("parts", [*text[:73], *prompt(1, 20)], 1).cached_tokens["device"] == found


def test_what_a_caller_tells_of_is_found_by_the_next_one_who_parts_there(make_serving) -> None:
    """Without a hint the second finds nothing, and the third what the second has left at the parting."""
    for told, found in ((), (0, 32, 32)), ((33,), (32, 32, 32)), ((5, 33, 60), (32, 32, 32)):
        serving = make_serving(SPEC, 300)
        inside.pass_nothing(serving.cache)
        serving.serve("first", [*prompt(0, 33), *prompt(1, 30)], 9, boundaries=told)
        later = [[*prompt(0, 33), *prompt(2 + k, 30)] for k in range(3)]
        assert [serving.serve(f"{k}", text, 9).cached_tokens["device"] for k, text in enumerate(later)] == [*found]


@pytest.mark.usefixtures("unaudited")
def test_hints_that_never_pay_are_not_followed_any_more(make_serving) -> None:
    serving = make_serving(SPEC, 3000, scheduler={"audit_every": 100})
    for k in range(sized(60, 120)):
        text = prompt(2 * k, 33)
        said = serving.serve(f"{k}", [*text, *prompt(2 * k + 1, 30)], 9, boundaries=(33,)).token_ids
        serving.serve(f"{k} on", [*text, *prompt(2 * k + 1, 30), *said, 1, 2, 3], 1)
    assert not serving.cache.stats().ends["stem"].pays


@pytest.mark.parametrize("wrong", [(0,), (-1,), (34,), (1.5,), (True,), ("1",), "12", {3: 4}, 7, None, [[1]], [{}]])
def test_boundaries_that_are_no_places_in_the_prompt_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="boundaries"):
        Request("a", prompt(0, 33), 1, boundaries=wrong)  # type: ignore[arg-type]


def test_a_request_has_its_boundaries_once_each_and_in_order() -> None:
    request = Request("a", prompt(0, 33), 1, boundaries=[33, np.int64(4), 4])
    assert request.boundaries == (4, 33)
    assert pickle.loads(pickle.dumps(request)).boundaries == (4, 33)
    with pytest.raises(AttributeError):
        request.boundaries = ()


@pytest.mark.parametrize("groups", [["full"], ["full", "near"]])
@pytest.mark.parametrize("host", [None, 300])
def test_answers_of_which_nothing_is_found_again_go_first(make_serving, monkeypatch, groups, host) -> None:
    """A template that drops the thinking: the next turn goes on from the prompt's end."""
    spec = canary_spec({name: (SPEC.group(name).attention, 4) for name in groups})
    serving = make_serving(spec, 300, host, hold=[])
    tiers = [inside.pools(serving.cache), *([] if host is None else [inside.host(serving.cache)])]
    inside.pass_nothing(serving.cache)
    serving.serve("pays", prompt(0, 33), 17)
    assert [pools.num_superseded(0) for pools in tiers] == [0] * len(tiers)
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": end in (End.PROMPT, End.STEM))
    text, said = prompt(1, 33), serving.serve("does not", prompt(1, 33), 17).token_ids
    serving.run()
    assert [pools.num_superseded(0) for pools in tiers] == [4] * len(tiers), "of 49 tokens, from the 33rd on"
    assert serving.serve("dropped", [*text, *prompt(2, 9)], 1).cached_tokens["device"] == 32
    assert serving.serve("kept", [*text, *said, 1, 2], 1).cached_tokens["device"] >= 32, "as long as there is room"


def test_an_answer_is_kept_as_long_as_something_of_answers_is_found(make_serving, monkeypatch) -> None:
    serving = make_serving(SPEC, 300)
    for paying in (End.ANSWER, End.PASSED):
        monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"", paying=paying: end is paying)
        serving.serve(f"{paying}", prompt(int(paying), 33), 17)
    assert inside.pools(serving.cache).num_superseded(0) == 0
