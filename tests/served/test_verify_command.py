"""The equivalence kit: it passes, it finds planted bugs where they are, and nothing passes that did not happen."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inside
import numpy as np
import pytest
import torch
from breadth import breadth, covering, sample, sized
from families import zoo
from families.conftest import Family

from kvtier import KVCache
from kvtier.attention import reference
from kvtier.cache.warmup import warm_up
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.geometry.keys import KeyChain
from kvtier.geometry.kinds import Kind
from kvtier.testing import Faults, SimulatedEngine
from runner.cli import main
from runner.model.hybrid import HybridModel
from runner.verify import kit, scenarios
from runner.verify.cold import Cold
from runner.verify.compare import Comparing
from runner.verify.plan import Plan
from runner.verify.report import Report, Result, Status
from runner.verify.scenarios import SCENARIOS
from runner.verify.serving import Outcome, Serving

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
SMALL = {"tokens": 120, "prompts": 2, "new_tokens": 4}
SMALL_ARGUMENTS = ["--tokens", "120", "--prompts", "2", "--new-tokens", "4"]
BLOCK = 16
SLOW = {"batch", "recompute", "resume", "bad copies"}
QUICK = [scenario for scenario in SCENARIOS if scenario.name not in SLOW]
"""Which can be equal bit by bit, and other chunks."""


def of_the_command(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """These scenarios alone: what a command makes of them does not depend on the others."""
    run = partial(kit.run, scenarios=[BY_NAME[name] for name in names])
    monkeypatch.setattr(kit, "run", run)


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that never fail are not waited for as long."""
    monkeypatch.setattr(scenarios, "_ROUNDS", 4)


def only(result: Report, name: str) -> Result:
    return next(r for r in result.results if r.name == name)


# --- it passes ----------------------------------------------------------------------------------------


def test_the_bundled_model_passes_and_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--tokens", "300", *SMALL_ARGUMENTS[2:], "--json"]) == 0
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if " of " in line]
    assert (len(told), told[0]) == (2 + len(BY_NAME), f"cold (0 of {2 + len(BY_NAME)})"), "there is no bar here"
    report = json.loads(out)
    assert report["ok"] and report["repeats"]
    assert [r["name"] for r in report["results"]] == ["cold", "cold again", *BY_NAME]
    assert {r["status"] for r in report["results"]} == {"equal"}
    assert all(r["compared"] >= 2 * 4 and r["other_tokens"] == 0 for r in report["results"])


@pytest.mark.parametrize(
    "name", sample(["gemma3", "gpt_oss", "llama4", "ministral", "deepseek_v3", "qwen3_next"], ["ministral"])
)
def test_families_pass(family: Callable[[str], Family], name: str) -> None:
    """Window and full, chunk and full, window alone, latents, states; full alone is below, all kinds above."""
    small = SMALL | ({"tokens": 192} if name == "qwen3_next" else {})  # whose states are 64 tokens apart
    report = kit.run(family(name).model, **small, scenarios=sized(QUICK, SCENARIOS))
    assert report.ok, [(r.name, r.missing, r.violations) for r in report.results if r.status is not Status.EQUAL]
    assert report.repeats
    bits = {"cold again", "device hit", "host hit", "mixed hit", "salts", "lazy stores", "reset"}
    assert bits <= {r.name for r in report.results if r.exact}
    assert all(r.largest_difference == 0 for r in report.results if r.exact)
    if name != "ministral":  # whose windows are so short that each query is computed alone
        assert only(report, "other chunks").largest_difference > 0, "rounding of this model should show somewhere"


@pytest.mark.parametrize(
    ("name", "tokens", "prompts", "new_tokens"),
    sample(
        [("llama", 136, 3, 2), ("ministral", 154, 3, 3), ("ministral", 148, 2, 8), ("ministral", None, 2, 24)],
        [("llama", 136, 3, 2)],
    ),
)
def test_requests_are_interrupted_whatever_their_lengths(
    family: Callable[[str], Family], name: str, tokens: int | None, prompts: int, new_tokens: int
) -> None:
    interrupted = [BY_NAME["recompute"], BY_NAME["resume"]]
    report = kit.run(family(name).model, tokens=tokens, prompts=prompts, new_tokens=new_tokens, scenarios=interrupted)
    assert report.ok, [(r.name, r.missing, r.violations) for r in report.results if r.status is not Status.EQUAL]


@breadth
def test_a_prompt_past_which_its_answer_moves_the_window_is_on_the_device_before_a_reset() -> None:
    report = kit.run(tokens=300, prompts=2, new_tokens=24, scenarios=[BY_NAME["reset"]])
    assert only(report, "reset").missing == [] and report.ok


@breadth
@pytest.mark.usefixtures("unaudited")
def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = zoo.build("llama", tmp_path)
    assert main(["verify", "--model", str(folder), *SMALL_ARGUMENTS]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "All 13 scenarios happened, and none made a difference" in out
    assert all(name in out for name in BY_NAME)
    assert "…" not in out, "the table is cut off at 80 columns"


@pytest.mark.usefixtures("unaudited")
def test_copies_that_fail_because_they_are_told_to_are_no_news(
    family: Callable[[str], Family], caplog: pytest.LogCaptureFixture
) -> None:
    report = kit.run(family("llama").model, **SMALL, scenarios=[BY_NAME["bad copies"]])
    assert only(report, "bad copies").transfers.failed_stores > 0
    assert [record.getMessage() for record in caplog.records if record.name == "kvtier.transfers"] == []


# --- it fails -----------------------------------------------------------------------------------------


def damage_loads(
    monkeypatch: pytest.MonkeyPatch, group: str, layer: int, nth: int, only: int | None = None
) -> list[int]:
    """One byte of K changes in host memory, in the nth block of ``group`` of every load, just before it is copied.

    ``only``: in that load alone, counted from 0. Returns a list that the device's block ids will be put in.
    """
    warm_up()  # the first cache of a process would, and loads blocks for it
    load, hit, loads = TierMemory._load, [], itertools.count()

    def damaged(self: TierMemory, t: Any) -> Any:
        _, arena = self.arenas
        nth_load = next(loads)
        if only is not None and nth_load != only:
            return load(self, t)
        g = arena.spec.index(group)
        of_group = (t.groups == g).nonzero()[0]
        if len(of_group) > nth:
            k, spec = of_group[nth], arena.spec.groups[g]
            at = int(arena.origins[g] + t.host[k] * arena.block_bytes[g])
            layer_bytes = spec.block_tokens * spec.num_kv_heads * sum(spec.head_dims) * 4
            arena.bytes[at + layer * layer_bytes + 2] ^= 0x40
            hit.append(int(t.device[k]))
        return load(self, t)

    monkeypatch.setattr(TierMemory, "_load", damaged)
    return hit


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize(("group", "layer", "nth"), [("full", 0, 3), ("full", 1, 0), ("sliding", 1, 1)])
def test_a_byte_that_changes_in_host_memory_is_found_where_it_is(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch, group: str, layer: int, nth: int
) -> None:
    model = family("gemma3").model
    hit = damage_loads(monkeypatch, group, layer, nth)
    report = kit.run(model, **SMALL, scenarios=[BY_NAME["host hit"], BY_NAME["device hit"]])
    assert not report.ok
    assert only(report, "device hit").status is Status.EQUAL
    result = only(report, "host hit")
    assert result.status is Status.DIFFERS
    assert result.missing == result.violations == []
    assert result.difference is not None and result.difference.kv is not None
    found, boundary = result.difference.kv, report.prompt_tokens[0] - BLOCK
    first = model.spec().group(group).attention.first_visible(boundary) // BLOCK
    assert (result.difference.prompt, result.difference.token) == (0, 0)
    assert (found.group, found.layer, found.what, found.block, found.position) == (
        group,
        layer,
        "K",
        first + nth,
        (first + nth) * BLOCK,
    )
    assert model.spec().layer(found.model_layer) == (group, layer)
    assert found.block_id == hit[0]
    assert not found.computed_now


class Rounding(HybridModel):
    """A forward pass that does not repeat itself bit by bit."""

    forwards = 0

    def forward(self, step: Any, cache: Any) -> Any:
        Rounding.forwards += 1
        return super().forward(step, cache) * (1.0 + 2e-7 * (Rounding.forwards % 7))


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize(
    ("repeats", "name", "group", "layer", "nth"),
    covering([True, False], [("llama", "full", 0, 2), ("gemma3", "sliding", 1, 1)]),
)
def test_what_a_resumed_request_loads_is_compared_at_its_first_token(
    family: Callable[[str], Family],
    monkeypatch: pytest.MonkeyPatch,
    repeats: bool,
    name: str,
    group: str,
    layer: int,
    nth: int,
) -> None:
    """Its hit ends just where its last sample did, so that no token lies between; its logits may hardly change."""
    model = family(name).model
    if not repeats:
        model = Rounding(model.model, name="rounding")
    hit = damage_loads(monkeypatch, group, layer, nth, only=1)
    report = kit.run(model, tokens=120, prompts=2, new_tokens=34, scenarios=[BY_NAME["resume"]])
    assert report.repeats is repeats
    result = only(report, "resume")
    assert result.status is Status.DIFFERS and result.difference is not None
    boundary = report.prompt_tokens[0] + 16
    assert boundary % BLOCK == 0
    found = result.difference
    assert (found.prompt, found.token, found.position) == (0, 17, boundary)
    first = model.spec().group(group).attention.first_visible(boundary) // BLOCK
    assert found.kv is not None
    assert (found.kv.group, found.kv.layer, found.kv.what, found.kv.block) == (group, layer, "K", first + nth)
    assert (found.kv.block_id, found.kv.computed_now) == (hit[0], False)


@pytest.mark.parametrize("what", ["a preemption", "a load", "another block"])
def test_kv_is_compared_anew_after_whatever_may_have_changed_it(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each alone is enough; where nothing happened, what was compared once is not read again."""
    compared: list[int] = []
    monkeypatch.setattr(Comparing, "_first_kv", lambda self, step, *rest: compared.append(int(step.seq_lens[0])))
    spec = family("llama").model.spec()
    cold = Cold([torch.zeros(2)] * 9, [0] * 9, {(n, n + 1) for n in range(40)})
    watched = Comparing(spec, [cold], [20], 1e-4, repeats=True)
    requests, loaded, table = {"preemptions": 0}, 0, np.array([[3, 5, 0]], np.int32)

    def sample(tokens: int) -> None:
        transfers = SimpleNamespace(loaded_blocks=loaded, failed_loads=0)
        cache = SimpleNamespace(stats=lambda: SimpleNamespace(requests=dict(requests), transfers=transfers))
        step = SimpleNamespace(
            request_ids=["r"],
            seq_lens=np.array([tokens]),
            query_start=np.array([0, 1]),
            sample_rows=np.array([0]),
            group=lambda name: SimpleNamespace(block_table=table),
        )
        watched.watch(step, cache, torch.zeros(1, 2), np.zeros(1, np.int64), [(0, 0)])

    sample(21)
    sample(22)
    assert compared == [21], "it goes on"
    if what == "a preemption":
        requests["preemptions"] += 1
    elif what == "a load":
        loaded += 4
    else:
        table[0, 1] = 7
    sample(23)
    sample(24)
    assert compared == [21, 23]


@pytest.mark.usefixtures("unaudited")
def test_a_damaged_byte_ends_with_status_1_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = zoo.build("gemma3", tmp_path)
    damage_loads(monkeypatch, "full", 1, 2)
    of_the_command(monkeypatch, "device hit", "host hit", "bad copies")
    assert main(["verify", "--model", str(folder), *SMALL_ARGUMENTS]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "host hit: prompt 0, generated token 0" in out
    assert "K of position 32 in group full, layer 1 (model layer 3), logical block 2" in out
    assert "bad copies:" not in out, "there restores are verified, so that damage is recomputed"


class Forgetful:
    """Attention whose full-attention layers lose sight of the chunks of prompt before the one that they compute."""

    PagedBatch = reference.PagedBatch
    write_kv = staticmethod(reference.write_kv)

    @staticmethod
    def attend(query: Any, k: Any, v: Any, batch: reference.PagedBatch, **options: Any) -> Any:
        queries = batch.query_start[1] - batch.query_start[0]
        start = batch.seq_lens[0] - queries
        if batch.attention.kind is Kind.FULL and len(batch.seq_lens) == 1 and queries > 1 and start % BLOCK == 0:
            batch = replace(batch, seq_lens=[queries], block_table=batch.block_table[:, start // BLOCK :])
        return reference.attend(query, k, v, batch, **options)


@pytest.mark.usefixtures("unaudited")
def test_a_layer_that_ignores_the_cache_is_found_one_layer_later(family: Callable[[str], Family]) -> None:
    served = family("gemma3").model
    model = HybridModel(served.model, name="forgetful", backend=Forgetful)
    report = kit.run(model, **SMALL, scenarios=[BY_NAME["other chunks"]])
    result = only(report, "other chunks")
    assert result.status is Status.DIFFERS and result.difference is not None
    found = result.difference.kv
    assert found is not None and found.computed_now
    assert model.spec().layer(1)[0] == "full"
    assert (found.model_layer, found.position) == (2, report.chunk_tokens), (
        "the first chunk is right, the second is not"
    )


@pytest.mark.usefixtures("unaudited")
def test_a_forward_that_goes_wrong_by_itself_has_no_wrong_block(family: Callable[[str], Family]) -> None:
    served = family("llama").model

    class Drifting(HybridModel):
        forwards = 0

        def forward(self, step: Any, cache: Any) -> Any:
            Drifting.forwards += 1
            return super().forward(step, cache) + (1e-2 if Drifting.forwards > 60 else 0.0)

    report = kit.run(Drifting(served.model, name="drifting"), **SMALL, scenarios=[BY_NAME["device hit"]])
    difference = only(report, "device hit").difference
    assert difference is not None and difference.kv is None
    assert difference.logits == pytest.approx(1e-2, rel=0.1)


@pytest.mark.usefixtures("unaudited")
def test_salts_that_are_left_out_of_keys_are_found(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = KeyChain.root
    monkeypatch.setattr(KeyChain, "root", lambda self, adapter, salt, extra_keys: root(self, adapter, None, extra_keys))
    report = kit.run(family("gemma3").model, **SMALL, scenarios=[BY_NAME["salts"]])
    result = only(report, "salts")
    assert result.status is Status.UNSOUND and not report.ok
    assert result.violations == ["not kept: nothing is found under another salt"]
    assert result.missing == []


@pytest.mark.usefixtures("unaudited")
def test_a_reset_that_forgets_nothing_is_found(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "reset", lambda self: None)
    report = kit.run(family("gemma3").model, **SMALL, scenarios=[BY_NAME["reset"]])
    result = only(report, "reset")
    assert result.status is Status.UNSOUND and not report.ok
    assert "nothing is found after a reset" in " ".join(result.violations)


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize("tier", [inside.pools, inside.host])
def test_a_reset_that_forgets_one_tier_only_is_found(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch, tier: Callable[[KVCache], Any]
) -> None:
    def reset(self: KVCache) -> None:
        tier(self).forget_all()

    monkeypatch.setattr(KVCache, "reset", reset)
    report = kit.run(family("gemma3").model, **SMALL, scenarios=[BY_NAME["reset"]])
    assert "not kept: nothing is found after a reset" in only(report, "reset").violations


@breadth
@pytest.mark.usefixtures("unaudited", "few_rounds")
def test_checksums_that_find_nothing_are_found(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TierMemory, "check", lambda self, t: np.empty(0, np.int64))
    report = kit.run(family("gemma3").model, **SMALL, scenarios=[BY_NAME["bad copies"]])
    assert not report.ok


@breadth
@pytest.mark.usefixtures("unaudited")
def test_copies_that_nobody_ordered_are_found_though_every_bit_came_out_right(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[SimulatedEngine] = []

    class Unordered(SimulatedEngine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.missing_edges.append("edge 4: store read -> next writer")
            engines.append(self)

    monkeypatch.setattr(kit, "SimulatedEngine", Unordered)
    report = kit.run(family("gemma3").model, **SMALL, scenarios=[BY_NAME["bad copies"]])
    result = only(report, "bad copies")
    assert result.status is Status.UNSOUND and not report.ok
    assert result.violations == ["edge 4: store read -> next writer"]
    assert result.missing == [] and result.difference is None and len(engines) == 1


# --- nothing passes that did not happen ---------------------------------------------------------------


def half_the_host(plan: Plan) -> dict[str, int]:
    return {name: n // 2 for name, n in plan.host().items()}


def reset_of_an_empty_cache(serving: Serving) -> list[Outcome]:
    serving.reset()
    return serving.each()


UNFORCED: list[tuple[str, dict[str, Any]]] = [
    ("other chunks", {"chunk": None}),
    ("device hit", {"device": Plan.tight}),
    ("host hit", {"device": Plan.roomy}),
    ("mixed hit", {"device": Plan.ample}),
    ("salts", {"device": Plan.tight}),
    ("batch", {"serve": Serving.each}),
    ("recompute", {"serve": Serving.each}),
    ("recompute", {"host": Plan.host}),
    ("resume", {"host": None}),
    ("bad copies", {"faults": Faults()}),
    ("bad copies", {"faults": Faults(fail=0.3)}),
    ("lazy stores", {"options": {"store": "off"}}),
    ("reset", {"host": None}),
    ("reset", {"host": half_the_host}),
    ("reset", {"device": Plan.roomy}),
    ("reset", {"serve": reset_of_an_empty_cache}),
    ("reset", {"serve": Serving.each}),
]


def test_of_every_scenario_it_is_tried_whether_it_passes_without_having_happened() -> None:
    assert {name for name, _ in UNFORCED} == set(BY_NAME)


@pytest.mark.parametrize(
    ("blocks", "loaded", "has_happened"), [(1, 1, True), (1, 0, False), (3, 2, True), (3, 3, False)]
)
def test_a_hit_of_one_state_is_mixed_if_it_came_from_the_host(blocks: int, loaded: int, has_happened: bool) -> None:
    plan = SimpleNamespace(hit_blocks=lambda prompt: blocks)
    evidence: Any = SimpleNamespace(plan=plan, outcomes=[SimpleNamespace(prompt=0, loaded_blocks=loaded)])
    *_, is_mixed = scenarios.FROM_BOTH.values()
    assert is_mixed(evidence) == has_happened


@pytest.mark.usefixtures("unaudited", "few_rounds")
@pytest.mark.parametrize(("name", "unforced"), sample(UNFORCED, {row[0]: row for row in reversed(UNFORCED)}.values()))
def test_a_scenario_that_did_not_happen_does_not_pass(
    family: Callable[[str], Family], name: str, unforced: dict[str, Any]
) -> None:
    scenario = replace(BY_NAME[name], **unforced)
    report = kit.run(family("gemma3").model, **SMALL, scenarios=[scenario])
    result = only(report, name)
    assert result.status is Status.NOT_EXERCISED and result.missing
    assert not report.ok


@breadth
@pytest.mark.usefixtures("unaudited", "few_rounds")
def test_without_a_host_tier_the_command_says_what_was_not_exercised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = zoo.build("llama", tmp_path)
    monkeypatch.setattr(kit, "KVCache", lambda spec, **options: KVCache(spec, **{**options, "host_blocks": None}))
    assert main(["verify", "--model", str(folder), *SMALL_ARGUMENTS]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "host hit: not exercised: every block of each prompt's hit came from the host" in out
    assert "6 not exercised" in out


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_where_nothing_can_be_simulated_the_devices_own_copies_go_wrong(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As on a GPU; here they are those of real threads."""
    monkeypatch.setattr(kit._Kit, "_simulates", lambda made: False)
    monkeypatch.setattr(kit, "SimulatedEngine", lambda *_, **__: pytest.fail("it was simulated"))
    report = kit.run(family(name).model, **SMALL, scenarios=[BY_NAME["bad copies"]])
    result = only(report, "bad copies")
    assert report.ok and result.status is Status.EQUAL
    assert result.transfers is not None
    assert min(result.transfers.failed_stores, result.transfers.failed_loads, result.transfers.loaded_blocks) > 0
