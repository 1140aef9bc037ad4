"""What stays of texts, without a cache: whatever a story of texts is, no kept boundary loses what hits there need."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from breadth import sized
from hypothesis import given, settings, strategies as st

from kvtier import ChunkedLocal, FullAttention, SlidingWindow
from kvtier.coordinator.boundaries import Boundaries, End
from kvtier.coordinator.keeping import Course, Keeping, Text
from kvtier.coordinator.partings import SLACK, Partings
from kvtier.geometry.kinds import Attention, Kind
from kvtier.testing import canary_spec

GROUPS = {
    "full": (FullAttention(), 4),
    "near": (SlidingWindow(6), 2),
    "far": (SlidingWindow(100), 4),
    "chunk": (ChunkedLocal(16), 4),
}
SPEC = canary_spec(GROUPS)
UNIT, HASH = SPEC.hit_tokens, SPEC.hash_tokens
LOCAL = [(group.attention, group.block_tokens) for group in SPEC.groups if group.attention.kind is not Kind.FULL]


@dataclass
class Told:
    """A text under way."""

    tokens: list[int]
    course: Course = field(default_factory=Course)
    prompt: int = 0

    @property
    def keys(self) -> np.ndarray:
        """Equal for equal beginnings."""
        names, name = [], 1
        for k in range(len(self.tokens) // HASH):
            name = hash((name, tuple(self.tokens[k * HASH : (k + 1) * HASH]))) & (2**63 - 1)
            names.append((name, name * 0x9E3779B97F4A7C15 & (2**64 - 1)))
        return np.array(names, np.uint64).reshape(-1, 2)


def check_kept(course: Course) -> None:
    for attention, bt in LOCAL:
        for kept in course.kept:
            superseded = range(course.cold_from // bt, course.cold_to // bt)
            needed = needs(attention, bt, kept)
            assert max(superseded.start, needed.start) >= min(superseded.stop, needed.stop), (course, attention, kept)


def needs(attention: Attention, bt: int, end: int) -> range:
    """Blocks with the tokens that a token at ``end`` sees before it."""
    first = next((n for n in range(end) if attention.first_visible(end) <= n), end)
    return range(first // bt, -(-end // bt))


def keeping_of(choice: int) -> Keeping:
    return Keeping(SPEC.groups, UNIT, HASH, whole=(0.0, 1e5)[choice % 2], passes=choice > 1)


@given(st.data(), st.integers(0, 3))
@settings(max_examples=sized(60, 2000))
def test_what_a_kept_boundary_needs_is_never_superseded(data, choice) -> None:
    keeping, running, ended = keeping_of(choice), [], [Told([7] * 40)]
    for k in range(data.draw(st.integers(2, 14), "steps")):
        what = data.draw(st.sampled_from(["begin", "begin", "prompt", "end", "back"]), "what")
        if what == "begin" or not running:
            from_text = data.draw(st.sampled_from(ended + running), "from").tokens
            most = data.draw(st.integers(0, len(from_text)), "common")
            told = Told([*from_text[:most], *([100 + k] * data.draw(st.integers(1, 60), "new"))])
            told.prompt = len(told.tokens)
            running.append(told)
            begin(keeping, told, data)
        else:
            told = data.draw(st.sampled_from(running), "of")
            is_new = told.course.prompt_end == Course().prompt_end
            if what == "prompt" and is_new:
                for boundary in keeping.parted(told.course, 0, len(told.tokens)):
                    keeping.part(told.course, told.keys, boundary)
                    check_kept(told.course)
                keeping.end_prompt(told.course, told.keys, len(told.tokens))
            elif what == "end" and not is_new:
                told.tokens += [200 + k] * data.draw(st.integers(0, 30), "answer")
                end = len(told.tokens)
                keeping.end(told.course, told.keys, end, end > told.prompt)
                keeping.leave(told.course, told.keys, told.prompt, end)
                running.remove(told)
                ended.append(told)
            elif what == "back":
                keeping.end(told.course, told.keys, len(told.tokens), not is_new, comes_back=True)
                check_kept(told.course)
                begin(keeping, told, data)
        for each in (*running, *ended[-1:]):
            check_kept(each.course)


def begin(keeping: Keeping, told: Told, data: st.DataObject) -> None:
    most = (len(told.tokens) - 1) // UNIT
    hit = data.draw(st.integers(0, most), "hit")
    full = data.draw(st.integers(hit, most), "full")
    stems = tuple(sorted(data.draw(st.sets(st.integers(1, len(told.tokens)), max_size=3), "told")))
    room = data.draw(st.sampled_from([1e3, 1e5, 1e7]), "room")
    keeping.begin(told.course, Text(told.keys, len(told.tokens), hit * UNIT, full * UNIT, stems), lambda _: room)
    if full > hit:
        told.course.branches.add(full * UNIT)


def turn(keeping: Keeping, tokens: list[int], hit: int, answer: int) -> Told:
    """A request from its beginning to its end."""
    told = Told(list(tokens), prompt=len(tokens))
    keeping.begin(told.course, Text(told.keys, len(tokens), hit, hit), lambda _: 1e9)
    keeping.end_prompt(told.course, told.keys, len(tokens))
    told.tokens += [9] * answer
    keeping.end(told.course, told.keys, len(told.tokens), answer > 0)
    keeping.leave(told.course, told.keys, len(tokens), len(told.tokens))
    return told


def test_a_turn_s_own_end_keeps_what_it_shares_with_the_end_that_it_has_moved_on_from():
    keeping = Keeping(SPEC.groups, UNIT, HASH)
    first = turn(keeping, [1] * 80, 0, 20)
    second = turn(keeping, [*first.tokens, *([2] * 8)], 100, 12)
    assert second.course.went_on_from == 100
    assert second.course.cold_to == SlidingWindow(100).first_visible(116)


def test_a_boundary_that_others_have_wanted_meanwhile_stays():
    keeping = Keeping(SPEC.groups, UNIT, HASH)
    first = turn(keeping, [1] * 80, 0, 20)
    child = Told([*first.tokens, *([2] * 300)], prompt=400)
    keeping.begin(child.course, Text(child.keys, 400, 100, 100), lambda _: 1e9)
    assert child.course.went_on_from == 100 and child.course.cold_from == 0
    turn(keeping, [*first.tokens, *([3] * 300)], 100, 4)
    keeping.end_prompt(child.course, child.keys, 400)
    assert 100 in child.course.kept and child.course.cold_from >= 100


def test_what_a_conversation_shares_with_others_stays_when_it_goes_on():
    keeping = Keeping(SPEC.groups, UNIT, HASH)
    turn(keeping, [*([1] * 80), *([2] * 300)], 0, 4)
    begun = turn(keeping, [*([1] * 80), *([3] * 300)], 0, 4)
    told = Told([*begun.tokens, *([4] * 200)], prompt=584)
    keeping.begin(told.course, Text(told.keys, 584, 384, 384), lambda _: 1e9)
    assert told.course.went_on_from == 384
    assert told.course.cold_from == 80 and 80 in told.course.kept


def test_a_stem_whose_content_has_gone_is_named_again():
    keeping = Keeping(SPEC.groups, UNIT, HASH)
    turn(keeping, [*([1] * 80), *([2] * 300)], 0, 4)
    told = Told([*([1] * 80), *([3] * 300)])
    keeping.begin(told.course, Text(told.keys, 380, 0, 0), lambda _: 1e9)
    assert keeping.parted(told.course, 0, 380) == [80]
    assert keeping.parted(told.course, 80, 380) == []


def test_what_others_teach_of_partings_takes_nothing_from_what_stays(monkeypatch):
    """All clients of a cache teach it; whatever it learns of partings, a text keeps the
    boundaries that it would have kept."""

    def story(reach: int) -> list[Course]:
        monkeypatch.setattr(Partings, "reach", lambda self, slack_bytes: reach)
        keeping = Keeping(SPEC.groups, UNIT, HASH)
        first = turn(keeping, [1] * 380, 0, 20)
        others = [turn(keeping, [k] * 200, 0, 4) for k in range(5, 12)]
        again = turn(keeping, [*first.tokens, *([2] * 40)], 400, 8)
        return [told.course for told in (first, *others, again)]

    for alone, taught in zip(story(0), story(SLACK), strict=True):
        assert taught.kept >= alone.kept
        assert taught.gone_from >= alone.gone_from
        check_kept(taught)
    assert story(SLACK)[0].slack_from < story(0)[0].slack_from, "something was taught"


def test_content_behind_a_stem_stays_for_a_while(monkeypatch):
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": False)
    monkeypatch.setattr(Partings, "behind", lambda self, slack_bytes: SLACK)
    keeping = Keeping(SPEC.groups, UNIT, HASH)
    texts = [turn(keeping, [*([1] * 80), *([2 + k] * 300)], hit, 0) for k, hit in enumerate([0, 0, 80])]
    new, second, third = [text.course for text in texts]
    assert (new.behind_to, second.behind_to, third.behind_to) == (0, 80 + SLACK, 80 + SLACK)
    assert third.named_from == 80 and third.cold_from == 80 + SLACK
    short = turn(keeping, [*([1] * 80), *([9] * 80)], 80, 0).course
    assert keeping._needed(short, 160) < short.cold_from == 80 + SLACK, "in its prompt's last window too"
    assert third.gone_from == 80 + SLACK, "full blocks too"
    keeping.begin(third, Text(texts[2].keys, 380, 120, 120), lambda _: 1e9)
    assert third.behind_to == 0, "it comes back, and finds what it has left itself"


def test_windows_stay_no_further_behind_a_stem_than_full_blocks(monkeypatch):
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": False)
    keeping = Keeping(SPEC.groups, UNIT, HASH)
    monkeypatch.setattr(Partings, "behind", lambda self, size: 2 * SLACK if size == keeping.sizes.slack else SLACK)
    texts = [turn(keeping, [*([1] * 80), *([2 + k] * 300)], hit, 0) for k, hit in enumerate([0, 0, 80])]
    assert texts[2].course.behind_to == texts[2].course.gone_from == 80 + SLACK


def test_a_text_that_goes_on_from_a_prompts_end_keeps_nothing_behind_a_stem(monkeypatch):
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": False)
    monkeypatch.setattr(Partings, "behind", lambda self, size: SLACK)
    keeping = Keeping(SPEC.groups, UNIT, HASH)
    first = turn(keeping, [1] * 80, 0, 20)
    turn(keeping, [*first.tokens, *([5] * 40)], 0, 0)
    course = turn(keeping, [*first.tokens, *([6] * 200)], 100, 0).course
    assert (course.went_on_from, course.behind_to) == (100, 0)
    assert course.before.stem * UNIT == 100, "it parts there from the second one"


def test_the_end_of_a_prompt_that_others_have_wanted_stays_though_such_ends_do_not_pay(monkeypatch):
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": end is End.ANSWER)
    keeping = Keeping(SPEC.groups, UNIT, HASH)
    turn(keeping, [1] * 80, 0, 20)
    turn(keeping, [*([1] * 80), *([2] * 40)], 80, 4)
    again = Told([1] * 80)
    keeping.begin(again.course, Text(again.keys, 80, 60, 60), lambda _: 1e9)
    keeping.end_prompt(again.course, again.keys, 80)
    assert again.course.kept >= {76, 80} and again.course.cold_from == again.course.cold_to
