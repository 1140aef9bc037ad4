"""The trial of a large model: its first layers have the whole text, and all of them a short one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import zoo

from kvtier import NotExact
from runner.model.exact import trial
from runner.model.hybrid import HybridModel

Spoil = Callable[[Any], None]
Load = Callable[..., HybridModel]
MANY = 333
"""Rows of the text's first step: the families read 512 tokens."""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """``load(name, spoil)``: a family as if it were large, with what is done to it before its trial."""
    inner = trial.make_exact

    def get(name: str, spoil: Spoil = lambda model: None) -> HybridModel:
        def make_exact(model: Any) -> None:
            layers = trial._layers(model)[: trial._unlike(model, trial._layers(model))]
            weights = sum(weight.numel() for layer in layers for weight in layer.parameters())
            monkeypatch.setattr(trial, "_WORK", 5 * sum(trial._ROWS) * weights)
            spoil(model)
            inner(model)

        monkeypatch.setattr(trial, "make_exact", make_exact)
        return HybridModel.load(zoo.build(name, tmp_path / name), "cpu", "float32", exact=True)

    return get


def spoiled(layer: int, rows: int) -> Spoil:
    """A product of one layer that depends on how many rows it has."""

    def spoil(model: Any) -> None:
        module = model.model.model.layers[layer].mlp.down_proj
        own = module.forward
        module.forward = lambda x: own(x) * (1 + 1e-6 * (x.shape[-2] == rows))

    return spoil


def test_all_layers_are_computed_six_times_and_the_first_ones_for_the_whole_text(load: Load) -> None:
    calls = [0] * 4

    def count(model: Any) -> None:
        def counted(i: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                calls[i] += 1

            return hook

        for i, layer in enumerate(model.model.model.layers):
            layer.register_forward_pre_hook(counted(i))

    model = load("llama", count)
    steps = 1 + 1 + len(trial._DEEP)  # a look for elementwise functions, the text in one step, and in several
    assert calls == [steps + 1 + 2 * len(trial._ROWS)] + [steps] * 3
    first, deep = trial.trials(model)
    assert [run.layers for run in (*first, *deep)] == [1, 1, 1, 0, 0]
    assert first[1].steps[0][0] == (0, MANY)


@pytest.mark.parametrize(
    ("name", "unlike"), [("llama", 1), ("gemma3", 2), ("gpt_oss", 2), ("llama4", 2), ("deepseek_v3", 2)]
)
def test_layers_are_like_each_other_if_nothing_but_their_number_tells_them_apart(
    load: Load, name: str, unlike: int
) -> None:
    model = load(name)
    assert trial._unlike(model, trial._layers(model)) == unlike


@pytest.mark.parametrize(
    ("layer", "rows", "said"), [(0, MANY, f"{MANY} rows alone"), (3, 18, "13 and 3 and 1 rows|1 and 3 and 13 rows")]
)
def test_what_depends_on_its_rows_is_named_wherever_it_is(load: Load, layer: int, rows: int, said: str) -> None:
    """At the first layer by the many rows of the text, at the last by the few of the short one."""
    with pytest.raises(NotExact, match=rf"layers\.{layer}\.mlp\.down_proj \(Linear\) gives other bits for ({said})"):
        load("llama", spoiled(layer, rows))


def test_a_model_whose_layers_are_not_told_is_tried_whole(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("llama")
    monkeypatch.setattr(trial, "_layers", lambda model: [])
    (runs,) = trial.trials(model)
    assert [run.layers for run in runs] == [0, 0, 0]
    assert len(runs[1].steps) == len(trial._ROWS)
