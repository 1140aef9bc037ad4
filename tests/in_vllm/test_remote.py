"""A remote tier: engines that are not there at the same time share it, and its faults change no text."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import CONNECTOR, ENGINE, Answer, Engine, Tokens, prompt

SIZE = 1500
HIT = 1472
PROMPTS = [prompt(seed, SIZE) for seed in (1, 2)]
SECRET = "of the tests"


class Place:
    """A directory that engines share, and the file with its secret."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "store"
        self.secret = folder / "secret"
        self.secret.write_text(SECRET + "\n")

    def options(self, **more: Any) -> dict[str, Any]:
        given = {"remote_uri": f"file://{self.folder}", "key_secret_file": str(self.secret)}
        return given | more

    @property
    def objects(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and "#" not in path.name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def opened(model: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    """Engines, one at a time."""
    made: list[Engine] = []

    def make(folder: Path | None = None, blocks: int = 140, **options: Any) -> Engine:
        if made:
            made.pop().close()
        made.append(Engine(folder or model("gemma3"), blocks, **options))
        return made[0]

    yield make
    for engine in made:
        engine.close()


def ask(engine: Engine, tokens: Tokens) -> Answer:
    (answer,) = engine.ask([tokens])
    engine.settle()
    assert engine.books.audit() == []
    return answer


def test_an_engine_hits_what_another_one_has_left(opened: Callable[..., Engine], place: Place) -> None:
    one = opened(**place.options())
    colds = [ask(one, tokens) for tokens in PROMPTS]
    assert [answer.cached for answer in colds] == [0, 0]
    assert one.store.spilled_objects == len(place.objects) > 0
    other = opened(**place.options())
    for cold, tokens in zip(colds, PROMPTS, strict=True):
        answer = ask(other, tokens)
        assert (answer.ids, answer.loaded) == (cold.ids, HIT)
        assert max(abs(a - b) for a, b in zip(answer.logprobs, cold.logprobs, strict=True)) < 1e-4
    assert other.store.fetched_bytes > 0
    assert (other.store.failed_fetches, other.store.missed_objects) == (0, 0)
    assert one.store.spilled_objects == len(place.objects), "the same texts have the same objects"
    other.check_nothing_is_held()
    assert other.llm.reset_prefix_cache(reset_connector=True)
    assert not other.store.is_on
    assert (ask(other, PROMPTS[0]).loaded, other.store.looks) == (0, other.store.looks), "content may be outdated"


def slowly(engine: Engine, step_s: float) -> None:
    """Steps take as long as those of a larger model."""
    connector = engine.scheduler.connector
    plan = connector.build_connector_meta

    def build_connector_meta(output: Any) -> Any:
        made = plan(output)
        time.sleep(step_s if output.total_num_scheduled_tokens else 0.0)
        return made

    connector.build_connector_meta = build_connector_meta


@pytest.mark.parametrize("answer_s", [0.005, 0.04, 0.2])
def test_a_store_that_answers_slowly_hits_all_the_same_and_is_written_once(
    opened: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer_s: float
) -> None:
    """1,500 tokens that take 2.4 s to compute; nothing is patched but the time that answers take."""
    from kvtier.remote.backends.directory import DirectoryBackend

    place, prompts = Place(tmp_path), [prompt(seed, SIZE) for seed in (11, 12, 13)]
    one = opened(chunk=64, **place.options())
    slowly(one, 0.1)
    colds = [engine_answer(one, tokens) for tokens in prompts]
    written = len(place.objects)
    exists = DirectoryBackend._exists
    monkeypatch.setattr(DirectoryBackend, "_exists", lambda *given: time.sleep(answer_s) or exists(*given))
    other = opened(chunk=64, **place.options())
    slowly(other, 0.1)
    answers = [engine_answer(other, tokens) for tokens in prompts]
    assert [answer.ids for answer in answers] == [cold.ids for cold in colds]
    assert [answer.loaded for answer in answers] == [HIT] * 3
    assert (other.store.spilled_objects, len(place.objects)) == (0, written)


def engine_answer(engine: Engine, tokens: Tokens) -> Answer:
    """A text of two tokens."""
    (answer,) = engine.ask([tokens], 2)
    engine.settle()
    return answer


def test_damaged_and_lost_objects_are_computed_anew(opened: Callable[..., Engine], place: Place) -> None:
    one = opened(**place.options())
    cold = ask(one, PROMPTS[0])  # from the remote, or computed if this test runs alone
    for k, path in enumerate(place.objects):
        data = bytearray(path.read_bytes())
        data[(k * 4099) % len(data)] ^= 1
        if k % 4:
            path.write_bytes(data)
        else:
            path.unlink()
    other = opened(**place.options())
    answer = ask(other, PROMPTS[0])
    assert (answer.ids, answer.loaded) == (cold.ids, 0)
    assert other.store.damaged_objects > 0
    other.check_nothing_is_held()
    third = opened(**place.options())
    again = ask(third, PROMPTS[0])
    assert (again.ids, again.loaded) == (cold.ids, HIT), "it was stored again"


def test_requests_that_come_together_share_what_is_fetched(opened: Callable[..., Engine], place: Place) -> None:
    one = opened(blocks=400, **place.options())
    ask(one, PROMPTS[0])
    other = opened(blocks=400, **place.options())
    first, second, third = other.ask([PROMPTS[0], [*PROMPTS[0][:1490], 7, 8, 9], prompt(5, 90)])
    assert min(first.cached, second.cached) >= HIT and third.cached == 0
    other.forget_device()
    assert ask(other, PROMPTS[0]).ids == first.ids
    other.check_nothing_is_held()


def test_what_differs_shares_nothing(
    opened: Callable[..., Engine], model: Callable[[str], Path], place: Place, tmp_path: Path
) -> None:
    cold = ask(opened(**place.options()), PROMPTS[0])
    secret = tmp_path / "secret"
    secret.write_text("another one")
    fine_tune = tmp_path / "gemma3"
    shutil.copytree(model("gemma3"), fine_tune)
    weights = bytearray((fine_tune / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (fine_tune / "model.safetensors").write_bytes(weights)
    for options in (
        {"key_secret_file": str(secret)},
        {"model_id": "by hand"},
        {"folder": fine_tune},
        {"engine": {"prefix_caching_hash_algo": "sha256_cbor"}},
    ):
        other = opened(**place.options(**options))
        answer = ask(other, PROMPTS[0])
        assert (answer.cached, answer.loaded) == (0, 0), options
        assert other.store.spilled_objects > 0
        assert answer.ids == cold.ids or "folder" in options


SCRIPT = """
import json, sys, time
from vllm import LLM, SamplingParams

llm = LLM(**json.loads(sys.argv[1]))
given = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
(answer,) = llm.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], given)
print("ids:", json.dumps(list(answer.outputs[0].token_ids)), flush=True)
time.sleep(300)
"""


def test_an_idle_engine_stores_its_last_text_and_may_be_killed(
    opened: Callable[..., Engine], model: Callable[[str], Path], tmp_path: Path
) -> None:
    place = Place(tmp_path)
    transfer = CONNECTOR | {"kv_connector_extra_config": {"host_memory": "64MiB"} | place.options()}
    arguments = ENGINE | {"model": str(model("gemma3")), "num_gpu_blocks_override": 140, "max_num_batched_tokens": 256}
    command = [sys.executable, "-c", SCRIPT, json.dumps(arguments | {"kv_transfer_config": transfer})]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with subprocess.Popen(
        [*command, json.dumps(PROMPTS[0])], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            assert child.stdout is not None
            line = next(line for line in child.stdout if line.startswith("ids:"))
            count, end_s = -1, time.monotonic() + 60
            while count != len(place.objects) or not count:  # nobody calls the engine any more
                count = len(place.objects)
                time.sleep(0.5)
                assert time.monotonic() < end_s, "nothing reaches the remote"
        finally:
            os.killpg(child.pid, signal.SIGKILL)
    other = opened(**place.options())
    answer = ask(other, PROMPTS[0])
    assert (answer.ids, answer.loaded) == (json.loads(line.removeprefix("ids:")), HIT)


def test_two_ranks_share_with_two_ranks(opened: Callable[..., Engine], place: Place) -> None:
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    before = len(place.objects)
    cold = ask(opened(copy_engine=None, engine=two, **place.options()), PROMPTS[0])
    assert cold.loaded == 0, "what one rank has stored is no share of two"
    mine = len(place.objects) - before
    assert mine > 0 and mine % 2 == 0
    other = opened(copy_engine=None, engine=two, **place.options())
    answer = ask(other, PROMPTS[0])
    assert (answer.ids, answer.loaded) == (cold.ids, HIT)
