"""A remote tier of the real engine: restarts, other engines, options."""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from breadth import sample
from rich.console import Console

from kvtier import ConfigError
from kvtier.remote.keeper.shelf import open_shelf
from kvtier.remote.keeper.upkeep import contents
from runner import LLM, SamplingParams, needle
from runner.cli import main
from runner.commands import serve
from runner.demo.shared import Answered, Report
from runner.demo.show_shared import show
from runner.needle.prompts import make_prompt

PARAMS = SamplingParams(max_tokens=8, temperature=0)
MEMORY = {"device": "cpu", "device_memory": "24MiB", "host_memory": "24MiB"}


def llm(folder: Path, model: object = None, **options: object) -> LLM:
    store = {"remote_uri": f"file://{folder}", "key_secret": b"tests"}
    return LLM(needle.weights_path() if model is None else model, **(MEMORY | store | options))


def served(engine: LLM, prompt: str):
    return engine.generate([prompt], PARAMS, use_tqdm=False)[0]


def test_what_was_computed_before_a_restart_is_a_hit_after_it(tmp_path):
    """And engines of other weights, or with another secret, find nothing of it."""
    prompt = make_prompt(3000, seed=5)
    with llm(tmp_path / "kv") as one:
        first = served(one, prompt.text)
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    assert files, "close has waited for what was on its way"
    with llm(tmp_path / "kv") as again:
        second = served(again, prompt.text)
        assert second.cached_tokens == {"device": 0, "host": 0, "remote": 2992}
        assert second.token_ids == first.token_ids
        assert again.stats()["cache"]["remote"]["kind"] == "file"
        model = again.model
    with llm(tmp_path / "kv", model, key_secret=b"other", model_id="same") as other:
        assert sum(served(other, prompt.text).cached_tokens.values()) == 0


def test_the_start_names_the_store_and_its_namespace(tmp_path):
    uri = f"file://{tmp_path / 'kv'}"
    with llm(tmp_path / "kv") as one:
        one.kv_events = None
        served(one, make_prompt(1500, seed=5).text)
        said = serve._banner(Namespace(kv_remote=uri), False, one, ["m"], ("127.0.0.1", 1))
    (space,) = contents(open_shelf(uri)).by_namespace
    assert f"store {uri}, namespace {space}" in said


def test_the_weights_are_part_of_every_name(tmp_path):
    other = tmp_path / "model"
    shutil.copytree(needle.weights_path(), other)
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    prompt = make_prompt(1500, seed=6).text
    with llm(tmp_path / "kv") as one:
        served(one, prompt)
    with llm(tmp_path / "kv", other) as two:
        assert sum(served(two, prompt).cached_tokens.values()) == 0


def test_a_store_without_a_secret_is_refused_before_weights_are_read():
    with pytest.raises(ConfigError, match="needs model_id and key_secret"):
        LLM(needle.weights_path(), **MEMORY, remote_uri="file:///tmp/x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--kv-remote needs a secret"),
        (["--kv-remote-secret-file", "/nowhere"], "--kv-remote-secret-file /nowhere: No such file"),
    ],
)
def test_serve_asks_for_a_secret(options, message, capsys, monkeypatch):
    monkeypatch.setenv("KVTIER_KEY_SECRET", " \n")
    assert main(["serve", "--port", "0", "--kv-remote", "file:///tmp/x", *options]) == 2
    assert message in capsys.readouterr().err


class WeightsAsked(ConfigError):
    """The options have passed."""


@pytest.fixture
def no_weights(monkeypatch):
    def load(*_args, **_options):
        raise WeightsAsked("weights are asked for")

    monkeypatch.setattr("runner.engine.service.HybridModel.load", load)
    monkeypatch.delenv("KVTIER_KEY_SECRET", raising=False)


def readme_line() -> list[str]:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("kvtier serve MODEL --kv-remote ")]
    return line.partition("#")[0].split()[1:]


@pytest.mark.parametrize(
    ("secret", "more", "says"),
    [
        (b"s", [], "weights are asked for"),
        (b"\xff\x00", [], "weights are asked for"),
        (b"s", ["--host-memory", "1MiB"], "weights are asked for"),
        (b"s", ["--host-memory", "0"], "--kv-remote needs a host tier, which --host-memory 0 turns off"),
        (b" \n", [], "secret is empty"),
    ],
)
def test_the_line_of_the_readme_serves_a_store(tmp_path, no_weights, capsys, secret, more, says):
    (tmp_path / "secret").write_bytes(secret)
    words = {"MODEL": str(needle.weights_path()), "FILE": str(tmp_path / "secret")}
    line = [words.get(word, word) for word in readme_line()]
    assert main([*line, "--port", "0", "--device", "cpu", *more]) == 2
    assert says in capsys.readouterr().err


def test_a_store_needs_no_size_of_the_host_tier(no_weights):
    with pytest.raises(WeightsAsked):
        LLM(needle.weights_path(), device="cpu", remote_uri="file:///tmp/x", key_secret=b"s")
    with pytest.raises(ConfigError, match="needs a host tier"):
        LLM(needle.weights_path(), device="cpu", host_memory=0, remote_uri="file:///tmp/x", key_secret=b"s")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s4://x", "is no URI of a remote tier"),
        ("s3://b?thread=8", "unknown option 'thread'"),
        ("file:///v?digest=sha", "digest=sha is none of"),
        ("mooncake://h:1?foo=1", "no option 'foo'"),
        ("mooncake://h:1", r"pip install 'kvtier\[mooncake\]'"),
        ("s3://v", r"pip install 'kvtier\[remote\]'"),
    ],
)
def test_a_store_that_cannot_be_opened_is_refused_before_weights_are_read(monkeypatch, no_weights, uri, says):
    for package in ("obstore", "mooncake", "mooncake.store"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=says):
        LLM(needle.weights_path(), **MEMORY, remote_uri=uri, key_secret=b"s")


def test_a_secret_is_bytes_and_of_use_only_with_a_store(no_weights, capsys, monkeypatch):
    monkeypatch.setitem(os.environb, b"KVTIER_KEY_SECRET", b"\xff\xfe")
    assert main(["serve", "--port", "0", "--device", "cpu", "--kv-remote", "file:///tmp/x"]) == 2
    assert "weights are asked for" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--kv-remote-secret-file", "/nowhere"]) == 2
    assert "give --kv-remote as well" in capsys.readouterr().err


class InProcess:
    """In place of a server's process: the same engine, here."""

    def __init__(self, name: str, store: str, log: Path, tokens: int) -> None:
        self.name = name
        self.llm = LLM(needle.weights_path(), **MEMORY, remote_uri=store, key_secret=b"of the demo")

    def complete(self, prompt: str, max_tokens: int) -> tuple[str, float, dict[str, int]]:
        done = self.llm.generate([prompt], SamplingParams(max_tokens=max_tokens, temperature=0), use_tqdm=False)[0]
        return done.text, done.ttft_s, dict(done.cached_tokens)

    def wait_until_stored(self) -> None:
        self.llm.settle()

    def kill(self) -> None:
        self.llm.close()

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


def test_the_demo_takes_the_next_shorter_length_of_a_prompt(monkeypatch):
    asked = []

    def engine(_name, _uri, _log, tokens):
        asked.append(tokens)
        raise ConfigError("no engine")

    monkeypatch.setattr("runner.demo.shared.Engine", engine)
    assert main(["demo", "--shared", "--tokens", "20000"]) == 2
    assert asked == [needle.usable_length(20000)] and asked[0] < 20000
    assert main(["demo", "--shared", "--tokens", "3"]) == main(["demo", "--shared", "--tokens", "2000000"]) == 2
    assert len(asked) == 1


@pytest.mark.parametrize("engines", sample(["in this process", "killed"], quick=["in this process"]))
def test_the_demo_kills_an_engine_and_finds_its_blocks_again(capsys, monkeypatch, engines):
    if engines == "in this process":
        monkeypatch.setattr("runner.demo.shared.Engine", InProcess)
    assert main(["demo", "--shared", "--tokens", "1500", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["cached"].get("remote", 0) > 1400 for one in report["answers"]] == [False, True, True, False, True]
    long = [Answered(**one | {"ttft_s": 100.0, "tokens": 90_112}) for one in report["answers"]]
    console = Console(width=80, record=True)
    show(Report(90_112, "a folder", long, True), console)
    rows = [line.split() for line in console.export_text().splitlines()]
    assert sum("100.00" in row and "A" in row for row in rows) == 3, "a table, not a line for each value"
