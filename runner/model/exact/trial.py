"""A trial at load: are the bits of K, V, states and logits the same however a text is cut, and whoever runs beside it?

Owns       the steps that are compared, and which modules are computed in the exact way (``products``). They call
           elementwise functions, or multiply with weights and are no packed linear layer, or the trial finds them.
Promises   a model passes only if no bit differed. Else ``NotExact`` names the first module whose output differed for
           equal inputs, and the numbers of rows.
Does not   prove: it compares steps of 1 to 401 rows (fewer where a model is large), of one text of 591 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kvtier.machine.errors import NotExact
from runner.model.exact.products import Weights, bmm, callers, exactly, needs_it
from runner.model.selfcheck import scratch_cache, step_of

_ROWS = 401, 101, 64, 13, 7, 3, 1, 1
"""Rows of the steps that the text is cut into: at its end few queries see a new split of attention (``SPLIT``)."""
_LEAST = 5
"""Rows that a step keeps however large the model is."""
_BESIDE = 30, 5
"""Tokens of two other prompts, which run beside it and then decode."""
_WORK = 60e9
"""Weights times tokens that the trial of a large model may take; its steps are shorter then, by a common factor."""
_ROUNDS = 12
"""Kinds of modules that are found, at most."""


class _Run(NamedTuple):
    """A text computed in some steps: [start, end) of each, and of the prompts beside it."""

    what: str
    steps: tuple[tuple[tuple[int, int], ...], ...]


class _Found(NamedTuple):
    name: str
    module: nn.Module
    rows: str


def make_exact(model: Any) -> None:
    """Makes ``model``, a HybridModel of the exact attention, exact. Raises ``NotExact`` if its bits still differ."""
    if hasattr(model.model, "set_experts_implementation") and any(map(_has_experts, model.model.modules())):
        model.model.set_experts_implementation("eager")  # others compute all experts in one product
    absorbed = [matrices for of in model.latents.values() for matrices in (of.keys, of.values)]
    weights, done = Weights([*model.model.parameters(), *absorbed]), set[type]()
    for layer, of in model.latents.items():
        model.latents[layer] = replace(of, times=partial(bmm, weights))
    with callers(model.model) as calling:
        for step, cache in _steps(model, _Run("", (((0, _LEAST),),))):
            model.forward(step, cache)
    for module in model.model.modules():
        if (needs_it(module) or module in calling) and module not in model.mixers.modules:  # whose calls are all alike
            done.add(type(module))
            module.forward = exactly(module.forward, weights)
    for _ in range(_ROUNDS):
        found = _difference(model)
        if found is None:
            return
        kind = type(found.module)
        if kind in done or found.module is model.model:
            break
        done.add(kind)
        for module in model.model.modules():
            if type(module) is kind:
                module.forward = exactly(module.forward, weights)
    assert found is not None
    raise NotExact(
        f"exact=True cannot be kept: {model.config.model_type}: {found.name} ({type(found.module).__name__}) gives "
        f"other bits for {found.rows} in {str(model.dtype).removeprefix('torch.')}; load it without exact=True"
    )


def _has_experts(module: nn.Module) -> bool:
    return any(weight.ndim == 3 for weight in module.parameters(recurse=False))


def _difference(model: Any) -> _Found | None:
    """The first module that does not keep its bits; None if K, V, states and logits of all runs are the same."""
    first, *others = runs(model)
    expected = _outcome(model, first)
    for run in others:
        if not all(map(torch.equal, expected, _outcome(model, run))):
            return _blame(model, first, run)
    return None


def runs(model: Any) -> list[_Run]:
    """The text in one step; in several; and in several with others beside it."""
    most = _WORK / max(1, sum(weight.numel() for weight in model.model.parameters()))
    share = min(1.0, most / (5 * sum(_ROWS)))
    if model.max_tokens:
        share = min(share, (model.max_tokens - 4 * _LEAST) / sum(_ROWS))
    sizes = [max(min(n, _LEAST), int(n * share)) for n in _ROWS]
    ends = np.cumsum(sizes).tolist()
    cuts = list(zip([0, *ends], ends, strict=False))
    a, b = _BESIDE
    beside = [((0, a), (0, b)), *(((a + i, a + i + 1), (b + i, b + i + 1)) for i in range(len(cuts) - 1))]
    return [
        _Run("", (((0, ends[-1]),),)),
        _Run("alone", tuple((cut,) for cut in cuts)),
        _Run("beside others", tuple((cut, *other) for cut, other in zip(cuts, beside, strict=True))),
    ]


def _steps(model: Any, run: _Run) -> Iterator[tuple[Any, Any]]:
    """Each step of a run, and its cache."""
    rng = np.random.default_rng(0)
    lengths = [max(step[r][1] for step in run.steps) for r in range(len(run.steps[0]))]
    most = min(model.vocab_size, 20_000)
    prompts = [rng.integers(min(3, most - 1), most, n) for n in lengths]
    cache = scratch_cache(model.spec(block_tokens=1), model.device, sum(lengths))
    for ranges in run.steps:
        yield step_of(cache.spec, prompts, ranges), cache


def _outcome(model: Any, run: _Run) -> list[Tensor]:
    """K and V of the text in each layer, its last state, and the logits of its last token."""
    for step, cache in _steps(model, run):
        logits = model.forward(step, cache)
    tokens = run.steps[-1][0][1]
    kv = [x[1 : 1 + tokens].float() for x in cache.all_kv()]
    return [*kv, *cache.all_states(tokens), logits[0]]


def _blame(model: Any, first: _Run, run: _Run) -> _Found:
    """The innermost module, of those that end first, that turns equal rows into other ones."""
    expected, got = _digests(model, first), _digests(model, run)
    for key, (before, after) in got.items():
        whole = expected.get(key)
        if whole is None or len(whole[1]) != len(after):
            continue
        differs = whole[1] != after
        if before is not None and whole[0] is not None and len(before) == len(after):
            differs &= whole[0] == before
        if differs.any():
            ends = np.array([step[0][1] for step in run.steps])
            rows = sorted(
                {
                    run.steps[i][0][1] - run.steps[i][0][0]
                    for i in np.searchsorted(ends, np.flatnonzero(differs), "right")
                }
            )
            return _Found(
                key[0],
                model.model.get_submodule(key[0]),
                f"{' and '.join(map(str, rows))} rows {run.what} than for {ends[-1]}",
            )
    return _Found("", model.model, f"steps {run.what}")


Digests = dict[tuple[str, int], tuple[np.ndarray | None, np.ndarray]]


def _digests(model: Any, run: _Run) -> Digests:
    """Digests by module and number of its call, in the order in which calls end: a number a row, in and out.

    Rows are the text's tokens; calls without them are left out.
    """
    found: dict[tuple[str, int], tuple[list[np.ndarray], list[np.ndarray]]] = {}
    with _watching(model.model) as (calls, begin):
        for step, cache in _steps(model, run):
            begin(len(step.token_ids), int(step.query_start[1]))
            model.forward(step, cache)
            for key, (before, after) in calls.items():
                parts = found.setdefault(key, ([], []))
                parts[1].append(after)
                if before is not None:
                    parts[0].append(before)
    return {key: (np.concatenate(a) if a else None, np.concatenate(b)) for key, (a, b) in found.items()}


@contextmanager
def _watching(model: nn.Module) -> Iterator[tuple[dict[tuple[str, int], Any], Any]]:
    """Calls of the step under way, and what begins a step of so many tokens, of which the first ones count."""
    calls: dict[tuple[str, int], tuple[np.ndarray | None, np.ndarray]] = {}
    counts: dict[str, int] = {}
    size = [0, 0]

    def begin(tokens: int, mine: int) -> None:
        calls.clear()
        counts.clear()
        size[:] = tokens, mine

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, named: Any, out: Any) -> None:
            given = [rows for x in (*args, *named.values()) if (rows := _rows(x, *size)) is not None]
            made = out[0] if isinstance(out, tuple) else out
            rows = _rows(made, *size)
            if rows is not None:
                number = counts[name] = counts.get(name, -1) + 1
                calls[name, number] = (sum(given[1:], given[0]) if given else None), rows

        return hook

    hooks = [
        module.register_forward_hook(after(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        yield calls, begin
    finally:
        for hook in hooks:
            hook.remove()


def _rows(x: Any, tokens: int, mine: int) -> np.ndarray | None:
    """A number for each of the first ``mine`` tokens, from all bits that ``x`` has of it; None if it has no rows."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    if x.ndim > 2 and x.shape[0] == 1 and x.shape[1] == tokens:
        x = x[0]
    if x.ndim < 2 or x.shape[0] != tokens:
        return None
    bits = x[:mine].reshape(mine, -1).double().view(torch.int64)
    factors = torch.arange(1, 2 * bits.shape[1], 2, dtype=torch.int64) * 0x9E3779B97F4A7C1
    return (bits * factors).sum(1).numpy()
