"""A trial at load: are the bits of K, V, states and logits the same however a text is cut, and whoever runs beside it?

Owns       the steps that are compared, and which modules are computed in the exact way (``products``). They call
           elementwise functions, or multiply with weights and are no packed linear layer, or the trial finds them.
Promises   a model passes only if no bit differed. Else ``NotExact`` names the first module whose output differed for
           equal inputs, and the numbers of rows.
Does not   prove: it compares steps of 1 to 401 rows, of one text of 591 tokens. Where a model is large, only its first
           layers have that many, as far as each later one is like one of them; all layers have steps of few rows.
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
_DEEP = 13, 3, 1, 1
"""Rows of the steps for all layers of a large model: each reads all weights, which takes longer than computing."""
_NOT_ALIKE = "layer_idx"
"""The attribute of a module that differs from layer to layer without a meaning for what it computes."""
_ROUNDS = 12
"""Kinds of modules that are found, at most."""


class _Run(NamedTuple):
    """A text computed in some steps: [start, end) of each, and of the prompts beside it."""

    what: str
    steps: tuple[tuple[tuple[int, int], ...], ...]
    layers: int = 0
    """How many of the model's layers are computed, from the first one on; 0: all, and the logits."""


class _Enough(Exception):
    """As many layers are computed as a run wants; with what the last one has made."""


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
    for first, *others in trials(model):
        expected = _outcome(model, first)
        for run in others:
            if not all(map(torch.equal, expected, _outcome(model, run))):
                return _blame(model, first, run)
    return None


def trials(model: Any) -> list[list[_Run]]:
    """Runs that must come to the same: the text in one step; in several; and in several with others beside it.

    Of a model that is too large for the whole text, the layers that are unlike each other have it as far as that goes,
    and all layers a short one.
    """
    share = _share(model, model.model)
    layers = _layers(model) if share < _share(model, nn.ModuleList()) else []
    unlike = _unlike(model, layers)
    if unlike == len(layers):
        return [_runs(_sizes(share))]
    whole, _, beside = _runs(list(_DEEP))
    return [_runs(_sizes(_share(model, nn.ModuleList(layers[:unlike]))), unlike), [whole, beside]]


def _share(model: Any, of: nn.Module) -> float:
    """The part of the text that a trial of these modules may have; of none: as far as the model reads."""
    most = _WORK / max(1, sum(weight.numel() for weight in of.parameters()))
    share = min(1.0, most / (5 * sum(_ROWS)))
    return min(share, (model.max_tokens - 4 * _LEAST) / sum(_ROWS)) if model.max_tokens else share


def _sizes(share: float) -> list[int]:
    return [max(min(n, _LEAST), int(n * share)) for n in _ROWS]


def _runs(sizes: list[int], layers: int = 0) -> list[_Run]:
    ends = np.cumsum(sizes).tolist()
    cuts = list(zip([0, *ends], ends, strict=False))
    a, b = _BESIDE
    beside = [((0, a), (0, b)), *(((a + i, a + i + 1), (b + i, b + i + 1)) for i in range(len(cuts) - 1))]
    return [
        _Run("", (((0, ends[-1]),),), layers),
        _Run("alone", tuple((cut,) for cut in cuts), layers),
        _Run("beside others", tuple((cut, *other) for cut, other in zip(cuts, beside, strict=True)), layers),
    ]


def _layers(model: Any) -> list[nn.Module]:
    """The decoder's layers, in their order; none if they are not told."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = [m for m in model.model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return list(lists[0]) if len(lists) == 1 else []


def _unlike(model: Any, layers: list[nn.Module]) -> int:
    """The least number of layers, from the first one on, among which each layer has one that is like it."""
    found: dict[Any, int] = {}
    for i, (layer, roles) in enumerate(zip(layers, model.spec(block_tokens=1).layers, strict=False)):
        alike = tuple((name, type(module), *_told(module)) for name, module in layer.named_modules())
        found.setdefault((alike, tuple(sorted((role, name) for role, (name, _) in roles.items()))), i + 1)
    return max(found.values(), default=0)


def _told(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The shapes of a module's own weights, and what its attributes say in numbers and words."""
    for name, weight in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield name, (weight.shape, weight.dtype)
    for name, value in vars(module).items():
        if isinstance(value, int | float | str | bool) and name != _NOT_ALIKE:
            yield name, value


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
    """K and V of the text in each layer, its last state, and the logits of its last token.

    Of a run of some layers what the last of them makes of each token instead of logits.
    """
    made = []
    for step, cache in _steps(model, run):
        made.append(_forward(model, run, step, cache))
    tokens = run.steps[-1][0][1]
    kv = [x[1 : 1 + tokens].float() for x in cache.all_kv()]
    return [*kv, *cache.all_states(tokens), torch.cat(made) if run.layers else made[-1]]


def _forward(model: Any, run: _Run, step: Any, cache: Any) -> Tensor:
    """Of the first text: its last token's logits [1, vocab], or all its tokens behind the last layer [n, hidden]."""

    def enough(module: nn.Module, args: Any, out: Any) -> None:
        made = out[0] if isinstance(out, tuple) else out
        raise _Enough(made.reshape(-1, made.shape[-1])[: step.query_start[1]])

    hook = _layers(model)[run.layers - 1].register_forward_hook(enough) if run.layers else None
    try:
        logits: Tensor = model.forward(step, cache)
        return logits[:1]
    except _Enough as enough_of_it:
        hidden: Tensor = enough_of_it.args[0]
        return hidden
    finally:
        if hook is not None:
            hook.remove()


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
            _forward(model, run, step, cache)
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
