"""How long before the end of new prompts others part from them, and whether the windows there are worth their bytes."""

from __future__ import annotations

import pytest

from core.driving import prompt
from kvtier import FullAttention, GroupSpec, Part, RecurrentState, SlidingWindow
from kvtier.coordinator.boundaries import Boundaries, End
from kvtier.coordinator.partings import FADES, REACHES, SLACK, Partings
from kvtier.coordinator.returns import TextBytes
from kvtier.testing import canary_spec


def asked(early: int, times: int = 40, size: float = 100.0, again: bool = True) -> Partings:
    """New texts of 100 tokens, from each of which another one parts ``early`` tokens before its end."""
    known = Partings()
    for _ in range(times):
        known.begin(size, is_new=True, has_stem=False)
        if again:
            known.begin(size, is_new=False, has_stem=True)
            known.find(100, early, of_new=True)
    return known


def test_nothing_is_known_at_first() -> None:
    assert Partings().reach(1.0) == 0
    assert asked(0, again=False).reach(1.0) == 0


@pytest.mark.parametrize(("early", "reach"), [(1, 1), (SLACK, 1), (SLACK + 1, 2), (3 * SLACK, 4), (32 * SLACK, 32)])
def test_the_least_reach_that_finds_others_is_kept(early: int, reach: int) -> None:
    assert asked(early).reach(1.0) == reach * SLACK


def test_what_is_found_at_ends_or_too_early_needs_no_reach() -> None:
    assert asked(0).reach(1.0) == 0
    assert asked(SLACK * 2 ** (REACHES - 1) + 1).reach(1.0) == 0


def test_a_reach_must_be_worth_its_bytes() -> None:
    known = asked(4 * SLACK)
    assert known.reach(10.0) == 4 * SLACK
    for _ in range(40):  # others, of which a byte finds ten times as much
        known.begin(100.0, is_new=False, has_stem=True)
        known.find(1000, 0, of_new=False)
    assert known.reach(10.0) == 0


def test_a_reach_that_finds_a_few_more_is_not_kept_for_them() -> None:
    known = asked(SLACK, 40)
    known.begin(100.0, is_new=True, has_stem=False)
    known.find(100, 16 * SLACK, of_new=True)
    assert known.reach(10.0) == SLACK
    assert known.reach(0.01) == 16 * SLACK, "where windows cost next to nothing"


def test_few_texts_do_not_decide() -> None:
    assert asked(SLACK, 1).reach(200.0) == 0
    assert asked(SLACK, 40).reach(200.0) == SLACK
    known = asked(0, 20)
    known.begin(100.0, is_new=False, has_stem=True)
    known.find(100, 16 * SLACK, of_new=True)
    assert known.reach(20.0) == 0


def test_what_parts_from_texts_that_are_not_new_needs_no_reach() -> None:
    known = asked(0)
    for _ in range(40):
        known.begin(100.0, is_new=False, has_stem=True)
        known.find(100, SLACK, of_new=False)
    assert known.reach(1.0) == 0


def test_what_was_long_ago_is_forgotten() -> None:
    known = asked(SLACK, 40)
    assert known.reach(5.0) == SLACK
    for _ in range(500):
        known.begin(100.0, is_new=True, has_stem=False)
        known.begin(100.0, is_new=False, has_stem=True)
        known.find(100, 0, of_new=True)
    assert known.reach(5.0) == 0


def behind(tokens: int, times: int = 40, size: float = 100.0) -> Partings:
    """Texts that share a stem, each of which another one goes on with for ``tokens`` tokens more."""
    known = Partings()
    for _ in range(times):
        known.begin(size, is_new=False, has_stem=True)
        known.find(100, 0, of_new=False)
        known.begin(size, is_new=False, has_stem=True)
        known.find(100 + tokens, 0, of_new=False, behind=tokens)
    return known


@pytest.mark.parametrize(("tokens", "kept"), [(1, 1), (SLACK, 1), (SLACK + 1, 2), (32 * SLACK, 32)])
def test_content_behind_a_stem_stays_as_far_as_others_find_it(tokens: int, kept: int) -> None:
    assert behind(tokens).behind(1.0) == kept * SLACK
    assert behind(tokens).reach(1.0) == 0, "these are no new texts"


def test_content_behind_a_stem_must_be_worth_its_bytes() -> None:
    assert Partings().behind(1.0) == 0
    assert behind(SLACK).behind(0.0) == 0, "no windows"
    assert behind(2 * SLACK * 2 ** (REACHES - 1)).behind(1.0) == 0, "too far behind"
    assert behind(SLACK).behind(50.0) == SLACK
    assert behind(SLACK).behind(200.0) == 0, "a byte of the cache finds more"
    known = behind(SLACK)
    for _ in range(500):
        known.begin(100.0, is_new=False, has_stem=True)
        known.find(100, 0, of_new=False)
    assert known.behind(50.0) == 0, "long ago"
    assert known._behind[-1] <= 1 / (1 - FADES), "some hundred texts count"


@pytest.mark.parametrize("kept", [0, SLACK])
def test_a_document_behind_a_system_prompt_is_found_as_far_as_it_is_kept(make_serving, monkeypatch, kept: int) -> None:
    monkeypatch.setattr(Partings, "behind", lambda self, slack_bytes: kept)
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": end is End.PROMPT)
    serving = make_serving(canary_spec({"full": (FullAttention(), 4), "near": (SlidingWindow(8), 4)}), 400, 400)
    system, document = prompt(0, 40), prompt(1, 48)
    for number, text in enumerate([prompt(2, 200), [*document, *prompt(3, 200)], [*document, *prompt(4, 40)]]):
        serving.serve(f"{number}", [*system, *text], 1)
    found = serving.finished["2"].cached_tokens["device"]
    assert found == (88 if kept else 40), "two have parted behind the system prompt, the third 48 tokens later"
    assert serving.cache.audit() == []


def test_windows_alone_have_a_reach() -> None:
    def slack(**groups: object) -> float:
        return TextBytes(canary_spec(groups).groups).slack  # type: ignore[arg-type]

    full, near = (FullAttention(), 4), (SlidingWindow(8), 4)
    state = RecurrentState((Part("conv0", (3,), "float32"),))
    groups = [*canary_spec({"near": near}).groups, GroupSpec("state", state, 2, block_tokens=4)]
    assert TextBytes(groups).slack == 0, "a state is one position"
    assert slack(full=full) == 0
    of_one = slack(full=full, near=near)
    assert of_one == SLACK / 4 * canary_spec({"near": near}).groups[0].block_bytes
    assert slack(full=full, near=near, far=(SlidingWindow(100), 4)) == 2 * of_one
