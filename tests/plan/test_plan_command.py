"""``kvtier plan`` as a user runs it: text, JSON, picture, and what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from families import zoo
from rich.console import Console
from transformers import AutoConfig

import kvtier
from benchmarks import models
from kvtier import CacheSpec, ConfigError
from kvtier.geometry import capacity
from kvtier.geometry.sizing import layout_of
from runner.cli import main
from runner.display.units import count, seconds, size
from runner.needle import weights_path
from runner.plan import Options, run
from runner.plan.show import show

MEMORY = ["--device-memory", "80GiB", "--host-memory", "200GiB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma-3-27B's config.json and nothing else."""
    path = tmp_path_factory.mktemp("gemma")
    models.gemma_3_27b().save_pretrained(path)
    assert [file.name for file in path.iterdir()] == ["config.json"]
    return path


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def words(text: str) -> str:
    return " ".join(text.split())


# --- what it says -------------------------------------------------------------------------------------


def test_json_is_all_that_is_printed_and_is_what_capacity_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(
        capsys, folder, *MEMORY, "--context", 200_000, "--link-gbps", 10, "--tflops", 100, "--utilisation", 0.5
    )
    spec = CacheSpec.from_config(models.gemma_3_27b())
    device, host = (layout_of(spec, n << 30, "memory") for n in (80, 200))
    assert [group["name"] for group in found["groups"]] == list(spec.names)
    assert [group["token_bytes"] for group in found["groups"]] == [group.token_bytes for group in spec.groups]
    assert found["device"]["longest_tokens"] == capacity.longest(device, spec) == 1_042_496
    assert (found["host"]["num_slabs"], found["host"]["slab_bytes"]) == (host.num_slabs, host.slab_bytes)
    assert found["transient"]["longest_tokens"] == capacity.longest(device, spec, 8192)
    assert [row["tokens"] for row in found["lengths"]] == [2_048, 8_192, 32_768, 90_112, 131_072, 200_000]
    for row in found["lengths"]:
        n = row["tokens"]
        held, running = capacity.held_blocks(spec, n), capacity.running_blocks(spec, n)
        assert list(row["held_bytes"].values()) == list(capacity.bytes_of(spec, held))
        assert row["full_bytes"] == sum(capacity.bytes_of(spec, capacity.full_blocks(spec, n)))
        assert row["factor"] == capacity.saving_factor(spec, n)
        assert row["device"]["requests"] == capacity.requests(device, running, capacity.peak_blocks(spec, n + 1))
        assert row["device"]["at_worst"] == capacity.requests(device, capacity.peak_blocks(spec, n + 1))
        assert row["host"]["requests"] == capacity.requests(host, capacity.stored_blocks(spec, n))
        assert [row[tier]["tokens"] for tier in ("device", "host")] == [
            n * row[t]["requests"] for t in ("device", "host")
        ]
        assert row["load_bytes"] == sum(capacity.bytes_of(spec, capacity.hit_blocks(spec, n)))
        assert row["load_s"] == row["load_bytes"] / 10e9
        assert row["recompute_s"] == row["recompute_flops"] / 50e12
        assert row["beyond_model"] == (n > 131_072)
    assert found["transient"]["peak_bytes"] == {"sliding": 577 * spec.groups[1].block_bytes}
    assert found["transient"]["extra_bytes"] == (577 - 65) * spec.groups[1].block_bytes


def test_the_tables_fit_80_columns_and_say_units(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), *MEMORY, "--context", "120000"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if "gemma" not in line) <= 80
    assert "…" not in out, "something is cut off"
    text = words(out)
    assert "full full 10 16 128 81,920 B 1.25 MiB" in text
    assert "sliding window 1,024 52 16 128 425,984 B 6.50 MiB" in text
    assert "90,112 7.28 GiB 42.6 GiB 5.85x 10 10 901 k 27 2.43 M" in text
    assert "90,112 7.28 GiB 142 ms 5.36 PFLOP 14% 13.5 s 95x" in text
    assert "120,000 " in text
    assert (
        "Largest context of one request: 1,042,496 tokens by memory, 131,072 tokens by the model's positions." in text
    )
    assert "Assumed, not measured: a link of 55 GB/s (--link-gbps); 989 TFLOP/s" in text
    assert "27.0 billion weights (50.3 GiB in bfloat16) come on top" in text


@pytest.mark.parametrize("columns", [60, 40])
def test_nothing_is_cut_off_in_a_narrow_terminal(
    columns: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["plan", str(folder), *MEMORY]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= columns
    lines = [line.strip() for line in out.splitlines()]
    for line in ("group: sliding", "bytes per token: 425,984 B", "tokens: 90,112", "device tokens: 901 k"):
        assert line in lines
    assert "time to recompute: 13.5 s" in lines


def test_the_document_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models.gemma_3_27b().save_pretrained(tmp_path / "gemma-3-27b")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "gemma-3-27b", *MEMORY]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    shown = (Path(__file__).parents[2] / "docs" / "COMMANDS.md").read_text(encoding="utf-8")
    figures, _, _ = printed.partition("\n\none request:")
    assert f"```\n{figures}\n```" in shown


def test_without_host_memory_nothing_is_said_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder / "config.json"), "--device-memory", "80GiB"]) == 0
    out = capsys.readouterr().out
    assert "host" not in out and "Assumed" not in out
    assert plan(capsys, folder, "--device-memory", "80GiB")["host"] is None


def test_options_change_what_they_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = plan(capsys, folder, *MEMORY)
    half = plan(capsys, folder, *MEMORY, "--dtype", "float8_e4m3fn")
    assert [g["token_bytes"] * 2 for g in half["groups"]] == [g["token_bytes"] for g in usual["groups"]]
    large = plan(capsys, folder, *MEMORY, "--block-tokens", 64)
    assert [g["block_bytes"] for g in large["groups"]] == [4 * g["block_bytes"] for g in usual["groups"]]
    short = plan(capsys, folder, *MEMORY, "--max-batched-tokens", 512)
    assert short["transient"]["peak_bytes"]["sliding"] == 97 * usual["groups"][1]["block_bytes"]


def test_a_model_of_windows_alone_has_no_longest_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.mistral_7b().save_pretrained(tmp_path)
    assert plan(capsys, tmp_path, *MEMORY)["device"]["longest_tokens"] is None
    assert main(["plan", str(tmp_path), *MEMORY]) == 0
    out = words(capsys.readouterr().out)
    assert "any length by memory, 32,768 tokens by the model's positions" in out
    assert "90,112* " in out and "* more than the model's 32,768 positions" in out


def test_every_family_of_the_zoo_can_be_planned_for() -> None:
    for name in zoo.ZOO:
        found = run(zoo.config(name), Options("1GiB", "1GiB"))
        assert found.lengths[0].device.requests > 0, name
        assert found.assumptions.weights_unknown is None, name


def test_states_are_told_by_request_and_snapshot() -> None:
    config = zoo.config("qwen3_next")
    group = CacheSpec.from_config(config).group("state")
    options = Options("1GiB", "1GiB", link_gb_per_s=1e-3, peak_tflops=1e-3, utilisation=1.0)
    plan = run(config, options)
    assert plan.states is not None
    assert plan.states.snapshot_bytes == group.block_bytes
    assert plan.states.running_bytes == 2 * group.block_bytes
    assert plan.states.as_tokens == -(-group.block_bytes // CacheSpec.from_config(config).token_bytes)
    assert plan.states.restore_s == group.block_bytes / 1e6
    first, before = (n for n in (plan.states.break_even_tokens, (plan.states.break_even_tokens or 0) - 64))
    assert first is not None and first > 64
    rows = {n: run(config, replace(options, context=n)).lengths for n in (first, before)}
    for n, is_sooner in ((first, True), (before, False)):
        (row,) = (length for length in rows[n] if length.tokens == n)
        assert row.recompute_s is not None and (row.load_s < row.recompute_s) == is_sooner
    console = Console(width=80, file=StringIO())
    show(plan, console)
    text = words(console.file.getvalue())  # type: ignore[attr-defined]
    assert "States: a request holds 36.0 KiB while it decodes. A snapshot takes 18.0 KiB, as much as K and V of" in text
    assert f"a hit is sooner loaded than computed from {first:,} tokens on." in text
    show(run(config, Options("1GiB")), alone := Console(width=80, file=StringIO()))
    assert "Restoring" not in alone.file.getvalue()  # type: ignore[attr-defined]
    assert run(zoo.config("llama"), options).states is None


def test_weights_that_cannot_be_counted_leave_recomputing_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    AutoConfig.for_model("qwen2_vl").save_pretrained(tmp_path)  # its decoder alone is no model of transformers
    assert main(["plan", str(tmp_path), *MEMORY]) == 0
    out = words(capsys.readouterr().out)
    assert "Recomputing is not estimated: qwen2_vl_text: its weights cannot be counted" in out
    assert "FLOP" not in out
    assert plan(capsys, tmp_path, *MEMORY)["lengths"][0]["recompute_s"] is None


def test_a_tiny_model_is_spoken_of_in_units_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(weights_path()), *MEMORY]) == 0
    out = capsys.readouterr().out
    assert " 5.84 GFLOP " in out and " 2.55 TFLOP " in out  # two of its four layers have one query head, two have eight
    assert "the decoder's 0.96 million weights" in out and "0.72 million weights" in words(out)


def test_numbers_are_written_with_three_digits() -> None:
    assert [size(n) for n in (0, 999, 1000, 1536, 2**20 - 1, 80 << 30)] == [
        "0 B", "999 B", "0.98 KiB", "1.50 KiB", "1.00 MiB", "80.0 GiB",
    ]  # fmt: skip
    assert [count(n) for n in (9_999, 10_000, 99_949, 1_000_000, 2_433_024)] == [
        "9,999",
        "10.0 k",
        "99.9 k",
        "1.00 M",
        "2.43 M",
    ]
    assert [seconds(s) for s in (0.0097, 0.142, 0.9994, 1, 20.77, 45_737)] == [
        "9.70 ms", "142 ms", "999 ms", "1.00 s", "20.8 s", "45,737 s",
    ]  # fmt: skip


# --- the picture --------------------------------------------------------------------------------------


def test_the_picture_is_a_png(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; `make test` installs it")
    target = tmp_path / "out.png"
    assert main(["plan", str(folder), *MEMORY, "--plot", str(target)]) == 0
    data = target.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 10_000
    assert "KV that fits" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nowhere/out.png", "out.tiff7"])
def test_a_picture_that_cannot_be_written(
    folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; `make test` installs it")
    refused(capsys, [str(folder), *MEMORY, "--plot", str(tmp_path / name)], "cannot be written")


@pytest.mark.parametrize("target", ["", " ", "{folder}", "{folder}/", "{folder}/new/"])
def test_a_picture_without_the_name_of_a_file_is_refused_before_any_work(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drawing library writes FOLDER.png beside a folder, and nothing at all where there is no name."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    target = target.format(folder=folder)
    refused(capsys, [str(tmp_path / "no model"), *MEMORY, "--plot", target], "--plot needs the name of a file")
    assert [file.name for file in tmp_path.rglob("*")] == ["pictures"]


def test_without_matplotlib_the_message_has_the_fix(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(capsys, [str(folder), *MEMORY, "--plot", "out.png"], "pip install 'kvtier[plot]'")


# --- what it refuses ----------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    """Status 2, one line on stderr with ``message``, nothing on stdout."""
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("kvtier: "), captured.err
    assert message in lines[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_type": "llama"', "cannot be read as JSON (JSONDecodeError: "),
        ("[1, 2]", "holds a list; it must be a JSON object with a model_type"),
        ("null", "holds null; it must be a JSON object with a model_type"),
        ("5", "holds a number; it must be a JSON object with a model_type"),
        ('"llama"', "holds a string; it must be a JSON object with a model_type"),
        ("true", "holds true or false; it must be a JSON object with a model_type"),
        ("{}", "has no model_type; it must be a JSON object with a model_type"),
        ('{"model_type": null}', "has no model_type; it must be a JSON object with a model_type"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"model_type": "llama", "num_attention_heads": -1}', "num_attention_heads is -1"),
        ('{"model_type": "llama", "hidden_size": 0, "head_dim": 16}', "hidden_size is 0"),
        ('{"model_type": "llama", "vocab_size": -1}', "vocab_size is -1"),
        ('{"model_type": "llama", "intermediate_size": -1}', "intermediate_size is -1"),
        ('{"model_type": "gemma3", "text_config": {"hidden_size": 0}}', "hidden_size is 0"),
        ('{"model_type": "nosuch"}', "nosuch"),
        ('{"model_type": "nosuch", "auto_map": {"AutoConfig": "code.Config"}}', "custom code"),
        ('{"model_type": "llama", "num_hidden_layers": "many"}', "num_hidden_layers"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "no layers to cache"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000000}', "no model has more than 10,000"),
        ('{"model_type": "mistral", "sliding_window": -4}', "window_tokens must be a positive integer"),
        ('{"model_type": "mamba"}', "layer 0 is 'linear_attention', which keeps a recurrent state"),
        ('{"model_type": "jamba"}', "'linear_attention', which keeps a recurrent state"),
        ('{"model_type": "glm5_next"}', "index pools the keys of tokens"),
        ('{"model_type": "t5"}', "no language model"),
        ('{"model_type": "vit"}', "no language model"),
    ],
)
def test_a_config_that_cannot_be_planned_for(
    config: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    refused(capsys, [str(tmp_path), *MEMORY], message)
    refused(capsys, [str(tmp_path / "config.json"), *MEMORY], message)


def test_a_config_with_a_byte_order_mark_is_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Windows' editors write it."""
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + (folder / "config.json").read_bytes())
    marked, plain = (plan(capsys, path, *MEMORY) for path in (tmp_path, folder))
    assert marked | {"model": ""} == plain | {"model": ""}


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvtier {kvtier.__version__}\n"


@pytest.mark.parametrize("rate", ["fast", True, None, 1e-7, float("inf")])
@pytest.mark.parametrize(
    ("name", "option"), [("link_gb_per_s", "link-gbps"), ("peak_tflops", "tflops"), ("utilisation", "utilisation")]
)
def test_rates_that_are_none_are_refused(name: str, option: str, rate: Any) -> None:
    with pytest.raises(ConfigError, match=f"--{option} must be a number, 1e-06 at least"):
        Options("80GiB", **{name: rate})


@pytest.mark.parametrize("positions", [-1, 0])
def test_a_number_of_positions_that_cannot_be_is_none(
    positions: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "max_position_embeddings": {positions}}}')
    assert main(["plan", str(tmp_path), *MEMORY]) == 0
    assert "model's" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-memory", "0"], "--device-memory is 0 bytes"),
        (["--device-memory", "1MiB"], "one block and the null block of every group take"),
        (["--device-memory", "lots"], "--device-memory must be bytes or text such as '8GiB', got 'lots'"),
        (["--device-memory", "9999999TiB"], "--device-memory must be in 0..2**60 bytes"),
        (["--device-memory", "80GiB", "--host-memory", "1k"], "--host-memory is 1,024 bytes"),
        (["--device-memory", "80GiB", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["--device-memory", "80GiB", "--context", "0"], "context must be in 1..2,147,483,646 tokens, got 0"),
        (["--device-memory", "80GiB", "--max-batched-tokens", "-1"], "max_batched_tokens must be in 1.."),
        (["--device-memory", "80GiB", "--link-gbps", "0"], "--link-gbps must be a number, 1e-06 at least, got 0.0"),
        (["--device-memory", "80GiB", "--tflops", "nan"], "--tflops must be a number, 1e-06 at least, got nan"),
        (
            ["--device-memory", "80GiB", "--tflops", "1e-320"],
            "must be a number, 1e-06 at least, got 1e-320",
        ),
        (["--device-memory", "80GiB", "--block-tokens", "0"], "block_tokens must be a positive integer"),
        (["--device-memory", "80GiB", "--context", "9" * 12], "context must be in 1.."),
        (["--device-memory", "80GiB", "--max-batched-tokens", "9" * 12], "max_batched_tokens must be in 1.."),
        (["--device-memory", "80GiB", "--utilisation", "1.5"], "1 at most"),
        ([*MEMORY, "--remote", "10TiB"], "--remote and --remote-gbps go together"),
        ([*MEMORY, "--remote-gbps", "5"], "--remote and --remote-gbps go together"),
        ([*MEMORY, "--remote", "much", "--remote-gbps", "5"], "--remote must be bytes or text such as '8GiB'"),
        ([*MEMORY, "--remote", "10TiB", "--remote-gbps", "0"], "--remote-gbps must be a number, 1e-06"),
        ([*MEMORY, "--remote", "10TiB", "--remote-gbps", "nan"], "--remote-gbps must be a number"),
        (["--device-memory", "80GiB", "--remote", "1TiB", "--remote-gbps", "5"], "--remote needs --host-memory"),
        (["--device-memory", "80GiB", "--block-tokens", "9" * 10], "block_tokens must be a positive integer"),
    ],
)
def test_options_that_cannot_work(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, [str(folder), *arguments], message)


@pytest.mark.parametrize("arguments", [["--context", "x"], ["--link-gbps", "fast"], ["--remote-gbps", "fast"]])
def test_numbers_that_are_none(folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(folder), *MEMORY, *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "is not there"),
        ("/nowhere/config.json", "is not there"),
        ("a b", "neither a folder here nor a hub id"),
        (".", "has no config.json"),
    ],
)
def test_models_that_are_not_there(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(capsys, [model, *MEMORY], message)


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(capsys, ["kvtier-tests/no-such-model", *MEMORY], "is no folder here, and the hub did not give it")
