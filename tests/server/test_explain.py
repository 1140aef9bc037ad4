"""``explain``: over HTTP, from Python and on the command line, of requests that the real engine has served."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from kvtier import ConfigError, Journal
from kvtier.machine.journal import Admitted, Arrived, Ended, Runs, Waits
from kvtier.remote.pace import Pace
from runner import AsyncLLM, UnknownRequest, needle
from runner.cli import main
from runner.engine.explanations import MOST_NAMES, MOST_PARTS, Explanations
from server.running import Running, serving


def complete(web: httpx.Client, **body: object) -> dict:
    answer = web.post("/v1/completions", json={"max_tokens": 4, "temperature": 0, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def explained(web: httpx.Client, name: str) -> dict:
    answer = web.get(f"/v1/requests/{name}/explain")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_served_request_is_explained_by_the_id_of_its_answer(web: httpx.Client) -> None:
    prompt = needle.make_prompt(400, seed=71).text
    complete(web, prompt=prompt)
    told = complete(web, prompt=prompt)
    found = explained(web, told["id"])
    assert (found["request_id"], found["state"]) == (told["id"], "finished")
    [part] = found["parts"]
    assert part["request_id"] == told["id"]
    tiers = told["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert {tier: part["hit"][f"{tier}_tokens"] for tier in tiers} == tiers
    assert part["hit"]["tokens"] > 300
    assert part["hit"]["sources"][-1] == [part["hit"]["tokens"], 400, "computed"]
    assert part["hit"]["recompute_s"] > 0
    assert (part["prompt_tokens"], part["generated_tokens"], part["finish_reason"]) == (400, 4, "length")
    assert "tokens would have taken about" in found["text"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_clients_own_id_finds_it_too(web: httpx.Client, path: str) -> None:
    ask = {"prompt": "w1 w2"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "w1 w2"}]}
    name = f"mine-{path.count('/')}"
    answer = web.post(path, json={"max_tokens": 2, **ask}, headers={"X-Request-Id": name})
    assert explained(web, name)["request_id"] == answer.json()["id"]


def test_several_prompts_and_answers_are_parts(web: httpx.Client) -> None:
    told = complete(web, prompt=["w1 w2", "w3 w4"], n=2)
    parts = explained(web, told["id"])["parts"]
    assert [part["request_id"].removeprefix(told["id"]) for part in parts] == [
        f" ({prompt} of 2) ({answer} of 2)" for prompt in (1, 2) for answer in (1, 2)
    ]


def test_an_unknown_request_is_a_404(web: httpx.Client, llm: AsyncLLM) -> None:
    for name in ("nobody", "cmpl-", "a/b", "%00", "x" * 5000):
        answer = web.get(f"/v1/requests/{name}/explain")
        assert answer.status_code == 404, name
        assert answer.json()["error"]["code"] == "request_not_found"
    with pytest.raises(UnknownRequest, match="no request 'nobody' is known here"):
        llm.explain("nobody")
    with pytest.raises(KeyError):
        llm.explain(["nobody"])  # type: ignore[arg-type]


def test_the_command_prints_what_the_server_says(web: httpx.Client, running: Running, capsys) -> None:
    told = complete(web, prompt="w1 w2 w3")
    assert main(["explain", told["id"], "--url", running.url]) == 0
    assert capsys.readouterr().out.startswith(f"request {told['id']}: finished, 4 generated tokens, ")
    assert main(["explain", told["id"], "--url", f"{running.url}/v1/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request_id"] == told["id"]
    assert main(["explain", "nobody", "--url", running.url]) == 2
    assert "no request 'nobody' is known here" in capsys.readouterr().err
    assert main(["explain", "nobody", "--url", "http://127.0.0.1:9"]) == 2
    assert "no explanation from http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["explain", "nobody", "--url", "127.0.0.1"]) == 2
    assert "--url must begin with http://" in capsys.readouterr().err


def test_the_key_of_a_server_is_asked_for(llm: AsyncLLM, capsys, monkeypatch) -> None:
    with serving(llm, api_keys=("sesame",)) as running:
        headers = {"Authorization": "Bearer sesame"}
        told = httpx.post(f"{running.url}/v1/completions", json={"prompt": "w1", "max_tokens": 1}, headers=headers)
        name = told.json()["id"]
        assert httpx.get(f"{running.url}/v1/requests/{name}/explain").status_code == 401
        assert main(["explain", name, "--url", running.url]) == 2
        assert "a valid API key is needed" in capsys.readouterr().err
        assert main(["explain", name, "--url", running.url, "--api-key", "sesame"]) == 0
        monkeypatch.setenv("KVTIER_API_KEY", "sesame,other")
        assert main(["explain", name, "--url", running.url]) == 0


def events(journal: Journal, name: str, behind: str = "") -> None:
    journal.add(name, Arrived(9, 1, 0))
    if behind:
        journal.add(name, Waits("twin", "", {}, behind))
    journal.add(name, Admitted(9, 0, 0, "full", 0, (), {}, {}, 0, 0))
    journal.add(name, Runs())
    journal.add(name, Ended("length", 1))


def test_others_are_called_as_their_callers_call_them() -> None:
    journal = Journal(100)
    explanations = Explanations(journal, lambda start, end: None)
    for name, own in (("first", "a#0"), ("second", "b#1")):
        explanations.name(own.partition("#")[0], [own])
        explanations.name(f"cmpl-{name}", [own.partition("#")[0]])
    events(journal, "a#0")
    events(journal, "b#1", behind="a#0")
    assert "waited" in str(explanations.explain("cmpl-second"))
    assert "request cmpl-first computes its prefix" in str(explanations.explain("cmpl-second"))
    assert "a#0" not in json.dumps(explanations.explain("cmpl-second").to_dict())


def test_a_request_that_bears_its_own_name_is_no_circle() -> None:
    journal = Journal(100)
    explanations = Explanations(journal, lambda start, end: None)
    explanations.name("0", ["0"])
    events(journal, "0")
    assert explanations.explain("0").parts[0].request_id == "0"


@pytest.mark.parametrize("is_used_again", [False, True])
def test_names_are_bounded(is_used_again) -> None:
    explanations = Explanations(Journal(4), lambda start, end: None)
    for k in range(2 * MOST_NAMES):
        explanations.name("again" if is_used_again else f"n{k}", [f"p{k}"], "somebody")
    if is_used_again:
        assert len(explanations._parts) == len(explanations._wholes) == 1
        return
    assert len(explanations._parts) == len(explanations._wholes) == MOST_NAMES
    assert not explanations.knows("n0", "somebody")
    assert explanations.knows(f"n{2 * MOST_NAMES - 1}", "somebody")


def test_requests_are_their_owners_alone() -> None:
    journal = Journal(100)
    explanations = Explanations(journal, lambda start, end: None)
    explanations.name("mine", ["a"], "me")
    explanations.name("yours", ["b"], "you")
    events(journal, "a")
    events(journal, "b", behind="a")
    assert explanations.explain("mine", "me").parts[0].request_id == "mine"
    for name, owner in (("mine", "you"), ("mine", ""), ("yours", "me")):
        with pytest.raises(UnknownRequest):
            explanations.explain(name, owner)
    story = str(explanations.explain("yours", "you"))
    assert "of another caller" in story
    assert "mine" not in story


def test_with_several_keys_each_explains_its_own(llm: AsyncLLM) -> None:
    with serving(llm, api_keys=("one", "two")) as running:
        keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
        body = {"prompt": "w1", "max_tokens": 1}
        name = httpx.post(f"{running.url}/v1/completions", json=body, headers=keys[0]).json()["id"]
        codes = [httpx.get(f"{running.url}/v1/requests/{name}/explain", headers=key).status_code for key in keys]
    assert codes == [200, 404]


def test_of_many_parts_the_first_are_explained_in_one_pass(monkeypatch) -> None:
    journal = Journal(4000)
    explanations = Explanations(journal, lambda start, end: None)
    names = [f"p{k}" for k in range(500)]
    explanations.name("many", names)
    for name in names:
        events(journal, name)
    passes = []
    monkeypatch.setattr(journal, "since", lambda *given: passes.append(given) or Journal.since(journal, *given))
    told = explanations.explain("many")
    assert (len(told.parts), len(passes)) == (MOST_PARTS, 1)
    assert told.parts[0].request_id == "many (1 of 500)"


def test_without_a_journal_it_says_how_to_have_one() -> None:
    explanations = Explanations(Journal(0), lambda start, end: None)
    explanations.name("a", ["a"])
    with pytest.raises(ConfigError, match="journal_events=32768"):
        explanations.explain("a")


def test_the_pace_of_prompts_is_fitted_to_tokens_and_pairs() -> None:
    pace = Pace()
    assert pace.seconds(0, 100) is None
    rng = np.random.default_rng(0)
    for _ in range(60):
        lengths, starts = rng.integers(1, 2000, 4), rng.integers(0, 20_000, 4)
        ends = starts + lengths
        pairs = (ends**2 - starts**2) / 2
        pace.note(lengths, ends, float(0.004 + 2e-5 * lengths.sum() + 3e-9 * pairs.sum()))
    for start, end in ((0, 100), (0, 4000), (1000, 4000)):
        expected = 0.004 + 2e-5 * (end - start) + 3e-9 * (end**2 - start**2) / 2
        assert pace.seconds(start, end) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("step_s", [16.0, 0.1, 0.3, 0.7, 1e-3, 7e-5])
def test_a_share_that_is_nothing_but_for_rounding_is_nothing(step_s: float) -> None:
    """Steps that take equally long, whatever they compute: rounding may put the share of tokens a little below zero."""
    pace, ends = Pace(), [16, 32, 48, 64, 68]
    for start, end in pairwise([0, *ends]):
        pace.note(np.array([end - start]), np.array([end]), step_s)
    assert pace.seconds(0, 160) == pytest.approx(10 * step_s, rel=1e-3)


def test_short_steps_after_hits_do_not_make_long_prompts_look_dear() -> None:
    pace = Pace()
    for _ in range(8):
        pace.note(np.array([512]), np.array([512]), 0.004 + 512e-4)
    before = pace.seconds(0, 4000)
    for _ in range(60):
        pace.note(np.array([16]), np.array([4000]), 0.004 + 16e-4)
    assert pace.seconds(0, 4000) == pytest.approx(before, rel=0.1)


def test_a_pace_that_fits_no_line_is_the_mean() -> None:
    pace = Pace()
    one = SimpleNamespace(lengths=np.array([100]), ends=np.array([100]))
    pace.note(one.lengths, one.ends, 1.0)
    assert pace.seconds(0, 50) == pytest.approx(0.5)
    pace.note(one.lengths, one.ends + 1000, 0.1)  # longer and quicker: pairs cannot cost less than nothing
    assert 0 < pace.seconds(0, 50) < 0.6
