"""Where a conversation's system prompt ends: told to the cache, and never a reason for a chat to fail."""

from __future__ import annotations

import itertools
from datetime import date
from typing import Any

import pytest

from kvtier import InvalidRequest
from runner import LLM, SamplingParams
from runner.engine import stems

GREEDY = SamplingParams(max_tokens=2, temperature=0)
SYSTEM = {"role": "system", "content": " ".join(f"w{k % 120}" for k in range(200))}
TOOL = {"type": "function", "function": {"name": " ".join(f"S{k % 64}" for k in range(100))}}
PLAIN = (
    "{% if tools %}{{ tools[0].function.name }} {% endif %}"
    "{% for m in messages %}{{ '<bos> ' + m.content + ' . ' }}{% endfor %}{{ '->' if add_generation_prompt }}"
)
FOLDED = (
    "{% set system = messages[0].content + ' ' if messages[0].role == 'system' %}"
    "{% for m in messages if m.role != 'system' %}<bos> {{ system if loop.first }}{{ m.content }} . {% endfor %}->"
)
STRICT = (
    "{% if messages | length == 1 and messages[0].role != 'user' %}{{ raise_exception('nobody asks') }}{% endif %}"
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ m.role == 'system' }} {{ m.content }} . {% endfor %}"
)
OF_HUMANS = PLAIN + "{% if messages[-1].role == 'user' %}{{ raise_exception('human is the role') }}{% endif %}"
ODD = "{{ messages[-1].content }} {{ messages[0].content }}"


def user(words: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": words}


def shared(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def ids(llm: LLM, messages: list[Any], **options: Any) -> list[int]:
    options = {"add_generation_prompt": not options.get("continue_final_message"), **options}
    return list(llm.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def with_template(llm: LLM, monkeypatch: pytest.MonkeyPatch, template: str | None) -> None:
    if template is not None:
        monkeypatch.setattr(llm.tokenizer, "chat_template", template)


@pytest.mark.parametrize("template", [None, PLAIN, FOLDED, STRICT])
@pytest.mark.parametrize("said", ["w7 w8 w9", "0 w8 w9", "1", "w7 " * 300])
def test_a_chat_tells_the_place_where_other_users_part(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, template: str | None, said: str
) -> None:
    """Whatever the user says, and later in the conversation too."""
    with_template(llm, monkeypatch, template)
    parts = shared(ids(llm, [SYSTEM, user("K1 w8 w9")]), ids(llm, [SYSTEM, user("K2 w8 w9")]))
    assert parts >= 200
    for more in ([], [user("w1", "assistant"), user("w3")], [user(said, "system"), user("w3")]):
        for turns in ([SYSTEM, user(said), *more], [SYSTEM, user("K2 w8 w9"), *more]):
            told = llm.inputs.chat(turns)
            assert told == {"prompt_token_ids": ids(llm, turns), "boundaries": (parts,)}


def test_tools_belong_to_it_with_and_without_a_system_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with_template(llm, monkeypatch, PLAIN)
    for turns in ([user("w7")], [SYSTEM, user("w7")], [{**SYSTEM, "role": "developer"}, SYSTEM, user("w7")]):
        other = ids(llm, [*turns[:-1], user("w8")], tools=[TOOL])
        told = llm.inputs.chat(turns, tools=[TOOL])
        assert told["boundaries"] == (shared(told["prompt_token_ids"], other),)
        assert told["boundaries"][0] == 100 + 1 + 202 * (len(turns) - 1)


@pytest.mark.parametrize("options", [{"continue_final_message": True}, {"add_generation_prompt": False}])
def test_how_a_prompt_ends_does_not_matter(llm: LLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]) -> None:
    with_template(llm, monkeypatch, PLAIN)
    told = llm.inputs.chat([SYSTEM, user("w7"), user("w1 w2", "assistant")], **options)
    assert told["boundaries"] == llm.inputs.chat([SYSTEM, user("w7")])["boundaries"] == (203,)
    alone = llm.inputs.chat([SYSTEM], **options)
    assert alone["boundaries"] == (len(ids(llm, [SYSTEM], **options)),)


@pytest.mark.parametrize(
    ("template", "turns", "options"),
    [
        (PLAIN, [user("w7 " * 200)], {}),
        (PLAIN, [user("w7 " * 200)], {"tools": []}),
        ("{{ 'w1 ' * 100 }}" + PLAIN, [user("w7 " * 200)], {}),
        (PLAIN, [user("w7 " * 200), SYSTEM], {}),
        (PLAIN, [{**SYSTEM, "content": "w1 " * 60}, user("w7 " * 200)], {}),
        (PLAIN, [{**SYSTEM, "content": "w1"}, user("w7")], {}),
        (OF_HUMANS, [SYSTEM, user("w7", "human")], {}),
        (ODD, [SYSTEM, user("w7")], {}),
    ],
)
def test_else_it_tells_nothing_and_is_answered_all_the_same(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, template: str, turns: list[Any], options: dict[str, Any]
) -> None:
    """No system prompt; a short one; a template that knows no "user", or begins with what the user says."""
    with_template(llm, monkeypatch, template)
    assert llm.inputs.chat(turns, **options) == {"prompt_token_ids": ids(llm, turns, **options), "boundaries": ()}
    assert len(llm.chat(turns, GREEDY, use_tqdm=False, **options)[0].token_ids) > 0


@pytest.mark.parametrize("turns", [[[SYSTEM, user("w7")]] * 2, [SYSTEM, 5], [{**SYSTEM, "content": None}, user("w7")]])
def test_what_was_refused_is_refused_as_before(llm: LLM, monkeypatch: pytest.MonkeyPatch, turns: list[Any]) -> None:
    with_template(llm, monkeypatch, PLAIN)
    with pytest.raises(InvalidRequest):
        llm.chat([turns], GREEDY, use_tqdm=False, tools=[TOOL])


def test_a_stem_is_rendered_once_until_it_is_forgotten(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = list[str]()
    render = llm.tokenizer.apply_chat_template

    def spied(turns: list[Any], **options: Any) -> Any:
        rendered.append(turns[-1]["content"])
        return render(turns, **options)

    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", spied)
    monkeypatch.setattr(stems, "MOST", 3 * (200 + 64 + 20))

    def extra(system: str, **options: Any) -> int:
        """Renderings beside the prompt's own."""
        rendered.clear()
        assert llm.inputs.chat([{**SYSTEM, "content": SYSTEM["content"] + system}, user("w7")], **options)["boundaries"]
        return len(rendered) - 1

    assert [extra(""), extra(""), extra("", add_generation_prompt=False)] == [2, 0, 0]
    assert [extra("", style="x"), extra(" w1"), extra(""), extra(" w2")] == [2, 2, 0, 2]
    assert [extra("", style="x"), extra("")] == [2, 0], "the one that was used last stays"
    with_template(llm, monkeypatch, PLAIN)
    assert [extra(""), extra("")] == [2, 0], "by this template"
    monkeypatch.setattr(stems, "MOST", 100)
    assert [extra(" w3"), extra(" w3")] == [2, 2], "too long to be kept"


def test_a_template_that_writes_the_date_is_rendered_anew_every_day(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with_template(llm, monkeypatch, PLAIN)
    render = llm.tokenizer.apply_chat_template

    class Today(date):
        @classmethod
        def today(cls) -> date:
            return date(2026, 11, day)

    def dated(turns: list[Any], **options: Any) -> Any:
        return render([user(f"K{day}"), *turns], **options)

    monkeypatch.setattr(stems, "date", Today)
    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", dated)
    told = list[Any]()
    for day in (1, 2, 2):  # noqa: B007
        told.append(llm.inputs.chat([SYSTEM, user("w7")])["boundaries"])
    assert told == [(206,)] * 3


@pytest.mark.parametrize(("least", "found"), [(stems.LEAST, 192), (10_000, 0)])
def test_the_second_user_of_a_system_prompt_hits(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, least: int, found: int
) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, n=2, ignore_eos=True)
    monkeypatch.setattr(stems, "LEAST", least)
    llm.chat([SYSTEM, user("w7 " * 290)], params, use_tqdm=False)
    [second] = llm.chat([SYSTEM, user("w8 " * 290)], params, use_tqdm=False)
    assert sum(second.cached_tokens.values()) == found


@pytest.mark.parametrize(("told", "found"), [({}, 0), ({"boundaries": ()}, 0), ({"boundaries": [200]}, 192)])
def test_a_prompt_as_a_dict_tells_where_others_part(llm: LLM, told: dict[str, Any], found: int) -> None:
    text = [llm.tokenizer(SYSTEM["content"])["input_ids"], *llm.tokenizer(["w7 " * 290, "w8 " * 290])["input_ids"]]
    prompts = [{"prompt_token_ids": text[0] + end} for end in text[1:]]
    llm.generate(prompts[0] | told, GREEDY, use_tqdm=False)
    [second] = llm.generate(prompts[1], GREEDY, use_tqdm=False)
    assert sum(second.cached_tokens.values()) == found


@pytest.mark.parametrize("wrong", [[0], [4], [1.5], [True], "12", 3, None, {1: 2}])
def test_boundaries_that_are_no_places_in_the_prompt_are_refused(llm: LLM, wrong: Any) -> None:
    good = {"prompt": "w1 w2 w3", "boundaries": [3]}
    with pytest.raises(InvalidRequest, match="boundaries must be"):
        llm.generate([good, {**good, "boundaries": wrong}], GREEDY, use_tqdm=False)
    assert not llm.engine.has_requests()
