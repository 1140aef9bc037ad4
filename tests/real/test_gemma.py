"""Gemma 3 270M: windows and full layers with trained weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner import LLM, SamplingParams, cli
from runner.demo import job as demo
from runner.demo.questions import ask
from runner.model.hybrid import HybridModel
from runner.verify import kit

from .conftest import Transformers

pytestmark = pytest.mark.timeout(3600)

LONG = 8192
CHUNK = 2048


def test_its_text_is_that_of_generate(gemma: HybridModel, gemma_file: Path) -> None:
    own = Transformers(gemma_file)
    story, _ = ask(own.tokenizer, 1300, seed=7) or pytest.fail("no prompt")
    prompts = [
        own.tokenizer("The capital of France is")["input_ids"],
        own.tokenizer("def fibonacci(n):\n")["input_ids"],
        story[:300],
        story,
    ]
    wanted = [own.generate(ids, 24) for ids in prompts]
    del own
    greedy = SamplingParams(max_tokens=24, temperature=0)
    with LLM(gemma, device_memory="512MiB", host_memory=0, max_batched_tokens=700) as llm:
        alone = [llm.generate([{"prompt_token_ids": ids, "cache_salt": "alone"}], greedy, False)[0] for ids in prompts]
        batch = llm.generate(prompts, greedy, use_tqdm=False)
        again = llm.generate(prompts, greedy, use_tqdm=False)
    assert [out.token_ids for out in alone] == wanted
    assert [out.token_ids for out in batch] == wanted
    assert [out.token_ids for out in again] == wanted
    assert [out.cached_tokens["device"] for out in alone] == [0, 0, 0, 288], "the last two begin equally"
    assert again[3].cached_tokens["device"] >= 1280


def test_long_prompts_back_to_back(gemma: HybridModel) -> None:
    """A, B, A, B, B with room for one and a half of them: what comes from the host is what was computed."""
    asked = [ask(gemma.tokenizer, LONG, seed) or pytest.fail("no prompt") for seed in (0, 1)]
    pools = [demo.pool_blocks(gemma.spec(), LONG, requests, CHUNK) for requests in (1.5, 2.5)]
    greedy = SamplingParams(max_tokens=8, temperature=0)
    with LLM(gemma, device_memory=pools[0], host_memory=pools[1], max_batched_tokens=CHUNK) as llm:
        served = [llm.generate([asked[i][0]], greedy, use_tqdm=False)[0] for i in (0, 1, 0, 1, 1)]
    assert [out.text.split(".")[0].strip() for out in served] == [asked[i][1] for i in (0, 1, 0, 1, 1)]
    assert [out.token_ids for out in served[2:]] == [served[i].token_ids for i in (0, 1, 1)]
    cached = [out.cached_tokens for out in served]
    assert cached[0] == cached[1] == {"device": 0, "host": 0}
    assert all(sum(one.values()) == LONG - 16 for one in cached[2:])
    assert cached[2]["host"] > LONG // 4 and cached[3]["host"] > LONG // 4
    assert cached[4]["host"] == 0


def test_it_says_the_same_whatever_its_cache_went_through(gemma: HybridModel) -> None:
    report = kit.run(gemma, tokens=640, prompts=2, new_tokens=2)
    assert report.ok, report


def test_the_demo_asks_and_it_answers(gemma_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--model", str(gemma_file), "--tokens", "4096", "--requests", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["model"] == gemma_file.stem
    assert report["right_answers"] and report["same_answers"]
    assert all(request["expected"] in request["answer"] for request in report["requests"])
    assert report["requests"][2]["host_tokens"] > 0
    assert "quantizing" not in err, "bars of others between ours"


def test_a_plan_knows_its_layers(gemma_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(gemma_file), "--device-memory", "1GiB", "--json"]) == 0
    groups = {group["attention"]: group["num_layers"] for group in json.loads(capsys.readouterr().out)["groups"]}
    assert groups == {"window 512": 15, "full": 3}
