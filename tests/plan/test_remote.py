"""``kvtier plan --remote``: sizes as the cache cuts texts into objects, times by the rates that the user gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import zoo

from benchmarks import models
from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow
from kvtier.coordinator.seek import CALL_S
from kvtier.remote.envelope import TRAILER_BYTES
from kvtier.remote.objects import ObjectPlan
from runner.cli import main
from runner.plan import Options, Plan, run
from runner.plan.remote import RemoteSizes

MEMORY = ["--device-memory", "80GiB", "--host-memory", "200GiB"]
STORE = ["--remote", "10TiB", "--remote-gbps", "5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma")
    models.gemma_3_27b().save_pretrained(path)
    return path


def group(name: str, attention: Any, kib: int, block_tokens: int = 16) -> GroupSpec:
    """A group with blocks of ``kib`` KiB."""
    layers = kib * 1024 // (block_tokens * 8)
    made = GroupSpec(name, attention, layers, 1, 1, block_tokens=block_tokens, dtype="float32")
    assert made.block_bytes == kib * 1024
    return made


SPECS = {
    "a tile and windows": [group("full", FullAttention(), 8), group("window", SlidingWindow(100), 16)],
    "chunks": [group("full", FullAttention(), 8), group("chunk", ChunkedLocal(96), 8)],
    "all alone": [group("full", FullAttention(), 256), group("window", SlidingWindow(64), 512)],
    "large windows": [group("full", FullAttention(), 8), group("window", SlidingWindow(64), 256)],
    "large chunks": [group("full", FullAttention(), 64), group("chunk", ChunkedLocal(64), 512)],
    "no full attention": [group("window", SlidingWindow(48), 8), group("chunk", ChunkedLocal(96), 512)],
    "tiles of one block": [group("full", FullAttention(), 128), group("more", FullAttention(), 128)],
    "unequal blocks": [group("full", FullAttention(), 8, 32), group("window", SlidingWindow(100), 16, 16)],
}
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 96, 97, 100, 112, 192, 511, 512, 513, 1000, 1024, 1040]


@pytest.mark.parametrize("spec", [CacheSpec(groups) for groups in SPECS.values()], ids=list(SPECS))
def test_sizes_are_those_of_the_objects_that_texts_are_cut_into(spec: CacheSpec) -> None:
    plan, sizes = ObjectPlan(spec), RemoteSizes(spec)
    block_bytes = np.array([g.block_bytes for g in spec.groups])
    keys = np.arange(2 * 1040 // plan.link, dtype=np.uint64).reshape(-1, 2)
    for n in LENGTHS:
        whole, less = n // plan.unit * plan.unit, (n - 1) // plan.unit * plan.unit
        cut = {at: plan.of_hit(keys, at) for at in (whole, less) if at}
        sizes_of = {at: np.bincount(of.of, block_bytes[of.groups]).astype(int).tolist() for at, of in cut.items()}
        hits = {at: dict(zip(of.names, sizes_of[at], strict=True)) for at, of in cut.items()}
        expected = hits.get(whole, {})
        found = sizes.hit(n)
        assert (found.objects, found.block_bytes) == (len(expected), sum(expected.values())), n
        assert found.num_bytes == found.block_bytes + TRAILER_BYTES * len(expected)
        stored = hits.get(less, {}) | expected
        text = sizes.text(n)
        assert (text.objects, text.block_bytes) == (len(stored), sum(stored.values())), n
        ends = [size for (kind, _), size in expected.items() if kind == "e"]
        assert sum(ends) <= sizes.most_end_bytes(n)


def planned(config: Any, **options: Any) -> Plan:
    return run(config, Options("80GiB", "200GiB", **{"remote": "10TiB", "remote_gb_per_s": 5.0} | options))


def test_times_and_room_follow_from_the_sizes_and_the_rates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), *MEMORY, *STORE, "--link-gbps", "50", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    remote = found["remote"]
    assert remote["num_bytes"] == 10 << 40 and remote["gb_per_s"] == 5
    assert remote["big_blocks"] == {"full": 1280 << 10, "sliding": 6656 << 10} and remote["tile_tokens"] == 0
    for row, of in zip(found["lengths"], remote["lengths"], strict=True):
        assert of["tokens"] == row["tokens"]
        assert of["fetch_bytes"] == row["load_bytes"] + of["fetch_objects"] * TRAILER_BYTES
        assert of["read_amplification"] == of["fetch_bytes"] / row["load_bytes"]
        assert of["fetch_s"] == pytest.approx(CALL_S + of["fetch_bytes"] / 5e9 + row["load_bytes"] / 50e9)
        assert of["texts"] == (10 << 40) // of["text_bytes"] and of["tokens_held"] == of["texts"] * row["tokens"]
        assert of["text_bytes"] > of["fetch_bytes"], "both hits on a prompt that ends with a block are stored"
        assert of["further_end_bytes"] == 64 * ((6656 << 10) + TRAILER_BYTES)


def test_break_even_is_the_first_length_from_which_a_fetch_is_sooner() -> None:
    config = models.gemma_3_27b()
    even = planned(config).remote.break_even_tokens
    assert even == 272
    for context, sooner in ((even, True), (even - 16, False)):
        plan = planned(config, context=context)
        row, of = next((r, s) for r, s in zip(plan.lengths, plan.remote.lengths, strict=True) if r.tokens == context)
        assert (of.fetch_s < row.recompute_s) == sooner
    assert planned(config, remote_gb_per_s=1.0).remote.break_even_tokens > even
    assert planned(config, remote_gb_per_s=0.01).remote.break_even_tokens is None


@pytest.mark.parametrize(
    ("device", "host", "context", "row", "why"),
    [
        ("80GiB", "4GiB", None, 90_112, "does not fit the host"),
        ("4GiB", "200GiB", None, 131_072, "does not fit the device"),
        ("80GiB", "200GiB", 200_000, 200_000, "longer than the model's positions"),
    ],
)
def test_a_hit_that_cannot_be_held_is_not_promised(
    folder: Path, capsys: pytest.CaptureFixture[str], device: str, host: str, context: int | None, row: int, why: str
) -> None:
    plan = run(models.gemma_3_27b(), Options(device, host, context, remote="10TiB", remote_gb_per_s=5.0))
    marked = {of.tokens: of.why_not for of in plan.remote.lengths}
    assert marked[2048] == "" and marked[row] == why
    assert [of.fetch_s is None for of in plan.remote.lengths] == [bool(of.why_not) for of in plan.remote.lengths]
    longest = plan.remote.longest_tokens
    assert 2048 <= longest < row and longest % 16 == 0
    for tokens, reason in ((longest, ""), (longest + 16, why)):
        beside = run(models.gemma_3_27b(), Options(device, host, tokens, remote="10TiB", remote_gb_per_s=5.0))
        assert {of.tokens: of.why_not for of in beside.remote.lengths}[tokens] == reason
    more = [] if context is None else ["--context", str(context)]
    assert main(["plan", str(folder), "--device-memory", device, "--host-memory", host, *STORE, *more]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"from 272 tokens to {longest:,}, the longest that fit." in text
    assert re.search(rf"Not fetched, in tokens: .*{row:,}(, [\d,]+)*: {why}", text)


def test_every_family_of_the_zoo_has_a_plan_with_a_store_and_a_huge_length_costs_no_time() -> None:
    for name in zoo.ZOO:
        remote = planned(zoo.config(name), context=2**31 - 2).remote
        assert remote.lengths[0].texts > 0, name


def test_the_tables_fit_80_columns_and_are_those_of_the_document(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", str(folder), *MEMORY, *STORE]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if "gemma" not in line) <= 80
    text = " ".join(out.split())
    assert "90,112 7.28 GiB 5,696 1.0001x 1.71 s 13.5 s 7.91x" in text
    assert "90,112 7.29 GiB 5,697 416 MiB 1,404 127 M" in text
    assert "A fetch from the remote tier is sooner than computing from 272 tokens on." in text
    assert "Blocks that are objects by themselves: full 1.25 MiB, sliding 6.50 MiB." in text
    document = (Path(__file__).parents[2] / "docs" / "COMMANDS.md").read_text(encoding="utf-8")
    printed = "\n".join(line.rstrip() for line in out.splitlines())
    for begin, end in (("Fetching a request", "What 10.0 TiB"), ("A fetch from", "\n")):
        part = printed[printed.index(begin) :]
        assert part[: part.index(end)].strip() in document


def test_without_weights_times_to_compute_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("qwen2_vl").save_pretrained(tmp_path)  # its decoder alone is no model of transformers
    assert main(["plan", str(tmp_path), *MEMORY, *STORE]) == 0
    out = capsys.readouterr().out
    assert "cannot be told" in out and "sooner by" not in out


def test_without_a_store_nothing_is_said_of_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), *MEMORY]) == 0
    assert "remote" not in capsys.readouterr().out


def test_the_picture_shows_the_times_too(folder: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed; `make test` installs it")
    widths = []
    for arguments in ([], STORE):
        target = tmp_path / f"{len(arguments)}.png"
        assert main(["plan", str(folder), *MEMORY, *arguments, "--plot", str(target)]) == 0
        widths.append(image.imread(target).shape[1])
    assert widths[1] == 2 * widths[0]
