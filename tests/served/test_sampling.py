"""Which tokens are drawn: against the definition, in any batch, beside bad rows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.attention import workers
from runner import SamplingParams
from runner.sampling import draw, weights
from runner.sampling.draw import Sampler, SamplingState
from served.drawing import Drawing

INF = float("inf")
NAN = float("nan")
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 7},
    {"top_k": 1},
    {"top_p": 0.6},
    {"top_p": 0.05},
    {"top_k": 40, "top_p": 0.8, "temperature": 1.5},
    {"min_p": 0.2},
    {"min_p": 0.1, "top_k": 12, "temperature": 2.0},
    {"min_p": 0.05, "top_p": 0.7},
]


def logits(vocabulary: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    """One row, rounded so that some are equal."""
    values = spread * np.random.default_rng(seed).standard_normal(vocabulary)
    return torch.tensor(np.round(values, 1), dtype=torch.float32)


def choose(
    rows: Sequence[torch.Tensor], states: Sequence[SamplingState], drawn: Mapping[SamplingState, int] | None = None
) -> list[int]:
    drawing = Drawing()
    drawing.drawn.update(drawn or {})
    chosen = drawing.choose(torch.stack(list(rows)), states)
    assert chosen.sound.all()
    return chosen.ids.tolist()


def draws(row: torch.Tensor, seeds: int = 1000, each: int = 1, **params: Any) -> np.ndarray:
    """How often each token comes, over ``seeds`` requests of ``each`` tokens."""
    states = [SamplingState.of(SamplingParams(seed=seed, **params)) for seed in range(seeds)]
    drawing, counts = Drawing(), np.zeros(len(row), np.int64)
    for _ in range(each):
        chosen = drawing.choose(row.expand(seeds, -1), states)
        assert chosen.sound.all()
        counts += np.bincount(chosen.ids.numpy(), minlength=len(row))
        for state in states:
            drawing.take(state, 0)
    return counts


def exact(
    row: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Probabilities by the definition, in float64."""
    values = row.double().numpy() / temperature
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))[: top_k if top_k > 0 else None]
    weights = np.exp(values[order] - values[order[0]])
    weights *= weights >= min_p
    before = np.concatenate([[0.0], weights.cumsum()[:-1]])
    kept = (before < top_p * weights.sum()) & (weights > 0)
    kept[0] = True
    probabilities = np.zeros(len(values))
    probabilities[np.array(order)[kept]] = weights[kept] / weights[kept].sum()
    return probabilities


@pytest.mark.parametrize("params", [kind for kind in KINDS if kind.get("temperature") != 0], ids=str)
def test_tokens_come_as_often_as_their_probabilities_say(params: dict[str, Any]) -> None:
    row = logits(200)
    row[150:160] = -INF
    counts, expected = draws(row, each=20, **params), 20_000 * exact(row, **params)
    assert not counts[expected == 0].any()
    often = expected >= 5
    seen = np.append(counts[often], counts[~often].sum())
    due = np.append(expected[often], max(expected[~often].sum(), 1e-9))
    chi_square, freedom = ((seen - due) ** 2 / due).sum(), len(seen)
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_a_nucleus_of_half_of_a_flat_vocabulary() -> None:
    counts = draws(torch.zeros(130), each=4, top_p=0.5)
    assert (counts[:65] > 0).all() and not counts[65:].any()


def test_one_request_draws_as_evenly_as_many_do() -> None:
    state, row, counts = SamplingState.of(SamplingParams(seed=3)), torch.zeros(1, 8), np.zeros(8)
    for drawn in range(800):
        counts[choose(row, [state], {state: drawn})] += 1
    assert abs(counts - 100).max() < 40


@pytest.mark.parametrize("vocabulary", [5, 461, 4096])
def test_a_row_draws_the_same_alone_in_any_company_and_at_any_place(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = KINDS * 2
    rows = [logits(vocabulary, seed) for seed in range(len(kinds))]
    states = [SamplingState(SamplingParams(**kind), seed) for seed, kind in enumerate(kinds)]
    drawn = {state: seed % 5 for seed, state in enumerate(states)}
    alone = [choose([row], [state], drawn)[0] for row, state in zip(rows, states, strict=True)]
    assert choose(rows, states, drawn) == alone
    assert choose(rows[::-1], states[::-1], drawn) == alone[::-1]
    assert choose(rows[3:7], states[3:7], drawn) == alone[3:7]
    monkeypatch.setitem(weights.SLAB, "cpu", 3 * vocabulary)
    assert choose(rows, states, drawn) == alone


@pytest.mark.parametrize("threads", [1, 3])
def test_the_likeliest_token_is_torch_s_first_however_rows_are_shared(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1)
    rows = torch.stack([logits(501, seed) for seed in range(64)])
    rows[5], rows[40, 77], rows[40, 300], rows[41, 9] = -INF, NAN, INF, INF
    for given in (rows, rows[:0], rows[:1], rows.T.contiguous().T, rows.clone().requires_grad_()):
        assert torch.equal(draw._best(given)[0], given.argmax(-1, keepdim=True))


def test_a_sampler_sees_that_another_request_has_come_in_place_of_one() -> None:
    sampler, logits, at, none = Sampler(1), torch.zeros(1, 1000), np.array([0]), np.zeros(1, np.uint64)
    ids = set()
    for seed in range(20):
        assert sampler.rows.enter(0, SamplingState(SamplingParams(), seed))
        ids.add(sampler.choose(logits, at, none).ids.item())
    assert len(ids) > 10
    assert not sampler.rows.enter(0, sampler.rows.state(0)), "it has had the row before"
    assert sampler.choose(torch.zeros(1, 3), at, none).ids.item() < 3


@pytest.mark.parametrize("bad", [[0.0, NAN, 1.0], [0.0, INF, 1.0], [-INF] * 3, [NAN] * 3, [INF, -INF, NAN], [INF] * 3])
def test_a_row_without_sound_logits_is_told_and_harms_no_row_beside_it(bad: list[float]) -> None:
    row, spoilt = logits(300), logits(300, seed=1)
    spoilt[100:103] = torch.tensor(bad)
    if bad == [-INF] * 3:
        spoilt[:] = -INF
    states = [SamplingState(SamplingParams(**kind), seed=5) for kind in KINDS]
    healthy = choose([row] * len(KINDS), states)
    sick = [SamplingState(SamplingParams(**kind), seed=5) for kind in KINDS]
    mixed = torch.stack([row, spoilt] * len(KINDS))
    chosen = Drawing().choose(mixed, list(itertools.chain(*zip(states, sick, strict=True))))
    ids, sound = chosen.ids, chosen.sound
    assert ids[::2].tolist() == healthy and sound[::2].all()
    assert not ids[1::2].any() and not sound[1::2].any()


def test_a_mask_that_leaves_few_tokens_is_kept_to() -> None:
    row = torch.full((500,), -INF)
    row[[3, 77, 499]] = torch.tensor([-1.0, 2.0, 0.5])
    for kind in KINDS:
        assert set(draws(row, seeds=50, **kind).nonzero()[0]) <= {3, 77, 499}


def test_equal_logits_at_the_edge_of_top_k_go_by_their_ids() -> None:
    row = torch.zeros(300)
    row[[7, 290]] = 1.0
    assert set(draws(row, top_k=5).nonzero()[0]) == {0, 1, 2, 7, 290}
    assert draws(row, seeds=50, top_k=1)[7] == 50


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_p": 1e-30}, {70}),
        ({"top_p": 5e-324}, {70}),
        ({"top_p": 5e-324, "top_k": 50}, {70}),
        ({"temperature": 1e-4}, {70}),
        ({"temperature": 1e-4, "top_k": 3}, {70}),
        ({"temperature": 1e300, "top_k": 2}, {70, 75}),
        ({"temperature": 1e30, "top_p": 1e-30}, {70}),
        ({"temperature": 1e300, "top_k": 10**40}, set(range(70, 76))),
        ({"temperature": 2.0, "min_p": 1}, {70}),
        ({"temperature": 2.0, "min_p": 1e-300}, {70, 75}),
    ],
    ids=str,
)
def test_extreme_parameters(params: dict[str, Any], kept: set[int]) -> None:
    row = torch.full((200,), -INF)
    row[70:76] = torch.tensor([40.0, -90.0, 0.0, 1.0, 3.0, 39.0])
    assert set(draws(row, seeds=200, **params).nonzero()[0]) == kept
