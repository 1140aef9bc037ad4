"""The command line: what is refused at once, in other engines' words, and what a closed pipe does."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner import cli
from runner.cli import main
from runner.commands import foreign_flags
from runner.engine.foreign import FOREIGN

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "numba"}

BAD_OPTIONS = [
    (["serve", "--device-memory", "lots"], "--device-memory must be bytes or text such as '8GiB', got 'lots'"),
    (["serve", "--host-memory", "4 gigs"], "--host-memory must be bytes"),
    (["serve", "/nope"], "/nope is not there"),
    (["serve", "missing.gguf"], "missing.gguf is not there"),
    (["serve", "0.9"], "'0.9' is a number, and no model"),
    (["serve", "a b"], "neither a folder here nor a hub id"),
    (["serve", "./empty"], "has no config.json"),
    (["serve", "bad.gguf"], "does not begin with GGUF"),
    (["serve", "--port", "99999"], "'99999' is no port"),
    (["serve", "--port", "BUSY"], "cannot listen on 127.0.0.1:BUSY"),
    (["serve", "--kv-remote", "file:///tmp/kv"], "needs a secret"),
    (["serve", "--kv-remote", "files:///tmp/kv"], "is no URI of a remote tier"),
    (["serve", "--kv-remote", "file:///tmp/kv", "--kv-remote-secret-file", "none"], "none: No such file"),
    (["serve", "--kv-remote-secret-file", "none"], "give --kv-remote as well"),
    (["serve", "--chat-template", "none.jinja"], "--chat-template none.jinja: No such file"),
    (["serve", "--kv-cache-dtype", "fp8", "--kv-scales", "none.json"], "none.json"),
    (["serve", "--kv-cache-dtype", "fp8", "--kv-scales", "none.safetensors"], "none.safetensors"),
    (["serve", "--kv-scales", "bad.json"], 'use kv_cache_dtype="fp8" with them'),
    (["serve", "--kv-cache-dtype", "fp8", "--kv-scales", "bad.json"], "bad.json must hold"),
    (["serve", "--ssl-certfile", "none.pem"], "--ssl-certfile none.pem"),
    (["serve", "--ssl-keyfile", "none.pem"], "give --ssl-certfile as well"),
    (["serve", "--dtype", "fp4"], "unknown dtype 'fp4'; use float32, float16 or bfloat16"),
    (["serve", "--dtype", "fp8"], 'for K and V in 8 bits use kv_cache_dtype="fp8"'),
    (["serve", "--kv-cache-dtype", "int3"], "kv_cache_dtype: unknown dtype 'int3'"),
    (["serve", "--attention", "flash"], "attention must be one of auto, flashinfer, reference"),
    (["serve", "--device", "gpu"], "device must be 'cpu' or 'cuda:N'"),
    (["serve", "--device", "meta"], "no model runs on device 'meta'"),
    (["serve", "--kv-events-config", "{"], "kv_events_config is no JSON"),
    (["serve", "--kv-events-config", '{"port": 1}'], "kv_events_config has no 'port'"),
    (["serve", "--served-model-name", ""], "a served name is empty"),
    (["serve", "--api-key", ""], "--api-key is empty"),
    (["serve", "--tensor-parallel-size", "2"], "one device serves the model"),
    (["serve", "--verify", "some"], "invalid choice"),
    (["demo", "--device-memory", "lots"], "--device-memory must be bytes"),
    (["demo", "--model", "/nope"], "/nope is not there"),
    (["demo", "--dtype", "fp4"], "unknown dtype 'fp4'"),
    (["verify", "--model", "/nope"], "/nope is not there"),
    (["verify", "--attention", "flash"], "attention must be one of"),
    (["verify", "--device", "gpu"], "device must be 'cpu' or 'cuda:N'"),
    (["calibrate", "--model", "/nope", "--text", "bad.json", "--out", "o.json"], "/nope is not there"),
    (["calibrate", "--model", "MODEL", "--text", "none.txt", "--out", "o.json"], "--text none.txt: No such file"),
    (["plan", "/nope", "--device-memory", "1GiB"], "/nope is not there"),
    (["plan", "MODEL", "--device-memory", "lots"], "--device-memory must be bytes"),
    (["plan", "MODEL", "--device-memory", "1GiB", "--dtype", "fp4"], "unknown dtype 'fp4'"),
    (["plan", "MODEL", "--device-memory", "1GiB", "--trace", "none.jsonl"], "--trace none.jsonl: No such file"),
]


def test_what_cannot_be_meant_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    """One process, so that what one command line imports is seen at the next one's cost too: none imports any."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("[]")
    (tmp_path / "bad.gguf").write_text("GGML, not GGUF")
    code = f"""if True:
        import contextlib, io, json, sys
        from runner.cli import main
        for given in json.loads(sys.stdin.read()):
            told = io.StringIO()
            try:
                with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
                    status = main(given)
            except SystemExit as end:
                status = end.code
            print(json.dumps([status, told.getvalue(), sorted({HEAVY!r} & set(sys.modules))]))
    """
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        names = {"BUSY": port, "MODEL": str(ROOT / "runner" / "needle" / "weights")}
        lines = [[names.get(word, word) for word in given] for given, _ in BAD_OPTIONS]
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        ran = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(lines),
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env=env | {"PYTHONPATH": str(ROOT)},
        )
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(found) == len(BAD_OPTIONS)
    for (given, says), (status, told, heavy) in zip(BAD_OPTIONS, found, strict=True):
        assert (status, heavy) == (2, []), (given, told)
        assert says.replace("BUSY", port) in told.splitlines()[-1], (given, told)


# --- other engines' words -----------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["serve", *given])
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size: one device serves the model"),
        (["-tp", "2"], "one device serves the model"),
        (["--gpu-memory-utilization", "0.9"], "use --device-memory, such as '8GiB'"),
        (["--gpu-memory-utilization=0.9", "model"], "use --device-memory"),
        (["--swap-space", "4"], "use --host-memory"),
        (["--cpu-offload-gb", "4"], "use --host-memory"),
        (["--kv-transfer-config", '{"kv_connector": "X"}'], "use --host-memory"),
        (["--num-gpu-blocks-override", "4"], "use --device-memory"),
        (["--no-enable-prefix-caching"], "it is always on"),
        (["--trust-remote-code", "model"], "only transformers' own code runs"),
        (["--quantization", "awq"], "--kv-cache-dtype fp8"),
        (["--seed", "1"], "each request"),
        (["--max-batched-tokens", "64"], "use --max-num-batched-tokens"),
        (["--tool-call-parser", "hermes"], "tools are written into the prompt"),
        (["--model", "some/model"], "give it without --model"),
    ],
)
def test_flags_of_vllm_are_refused_with_what_to_use_here(
    given: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, *given)


def test_flags_of_vllm_that_say_how_it_is_here_are_taken() -> None:
    parser = cli.parser()
    for given in (["--enable-prefix-caching"], ["--tensor-parallel-size", "1"], ["--no-trust-remote-code"],
                  ["--load-format", "safetensors"], ["--disable-log-requests"]):  # fmt: skip
        args = parser.parse_args(["serve", *given, "model"])
        assert args.model == "model"


def test_every_name_of_another_engine_is_a_flag_or_an_option_of_serve_and_help_has_none_of_them() -> None:
    parser = cli.parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    serve = commands.choices["serve"]
    flags = {f"--{name.replace('_', '-')}" for name in FOREIGN}
    assert flags <= serve._option_string_actions.keys()
    hidden = flags - {a for a in flags if serve._option_string_actions[a].help != argparse.SUPPRESS}
    assert len(hidden) >= 30
    assert not [flag for flag in hidden if f"{flag} " in serve.format_help()]
    for said in [row.said for row in FOREIGN.values()]:
        assert "device_memory" not in foreign_flags.translated(said)


def test_a_flag_that_nobody_has_is_told_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is it --max-model-len?" in refused(capsys, "--max-modell-len", "4")
    assert "unrecognized arguments: --colour" in refused(capsys, "--colour", "red")


# --- the command itself -------------------------------------------------------------------------------


def test_without_arguments_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("serve", "verify", "doctor", "--version"))


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("given", [["serve", "--help"], ["--version"]], ids=" ".join)
def test_a_reader_that_has_gone_leaves_no_traceback(given: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command, env = [sys.executable, "-m", "kvtier", *given], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(writer, "wb") as pipe:
        ran = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=300, cwd=ROOT, env=env)
    assert ran.stderr == ""
    assert ran.returncode == 141 or "--help" in given  # argparse passes over what it cannot write


def test_a_pipe_that_breaks_elsewhere_is_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*_: object) -> int:
        raise BrokenPipeError("a socket of the command's own")

    monkeypatch.setattr(cli, "_run", run)
    own = pytest.raises(BrokenPipeError, match="of the command's own")
    with (tmp_path / "out").open("w") as out, contextlib.redirect_stdout(out), own:
        main(["warmup"])


def test_completion_is_asked_only_when_a_shell_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.ArgumentParser] = []
    monkeypatch.setitem(sys.modules, "argcomplete", SimpleNamespace(autocomplete=seen.append))
    main([])
    assert not seen
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    main([])
    assert [parser.prog for parser in seen] == ["kvtier"]


def test_a_shell_completes_subcommands_and_options(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete", reason="argcomplete is not installed; `make test` installs it")
    line = "kvtier serve --device-m"
    out = tmp_path / "out"
    env = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    env = os.environ | env | {"_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    subprocess.run([sys.executable, "-m", "kvtier"], env=env, cwd=ROOT, check=True, timeout=300)
    assert "--device-memory" in out.read_text()


def test_the_example_for_ray_says_what_it_needs() -> None:
    code = "import runpy, sys; sys.modules['msgspec'] = None; runpy.run_path('examples/ray_serve.py')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert ran.stderr.strip() == "this example needs msgspec: pip install 'kvtier[events]' 'ray[serve]'"
