"""Log-probabilities against the definition in float64: the chosen token, its rank and the best ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runner import SamplingParams
from runner.sampling import weights
from runner.sampling.draw import SamplingState
from runner.sampling.logprobs import Logprobs, logprobs
from served.drawing import choose

INF = float("inf")


def rows_of(n: int, vocabulary: int) -> torch.Tensor:
    """Rounded, so that some are equal."""
    values = np.round(3 * np.random.default_rng(n).standard_normal((n, vocabulary)), 1)
    values[:, 2] = -INF
    return torch.tensor(values, dtype=torch.float32)


def check(found: Logprobs, logits: torch.Tensor, tokens: list[int], k: int) -> None:
    """Of all rows."""
    exact = torch.log_softmax(logits.double(), dim=-1).numpy()
    for row, token in enumerate(tokens):
        order = sorted(range(logits.shape[1]), key=lambda t: (-logits[row, t], t))
        assert found.ids[row].tolist() == [token, *order[:k]]
        assert np.allclose(found.logprobs[row], exact[row, found.ids[row]], rtol=1e-6, atol=1e-6)
        assert found.ranks[row] == order.index(token) + 1


@pytest.mark.parametrize(("vocabulary", "k"), [(7, 0), (7, 20), (1000, 5)])
def test_they_are_those_of_the_definition(vocabulary: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = rows_of(9, vocabulary)
    tokens = [0, 1, 2, 3, 4, 5, 6, vocabulary - 1, 2]
    monkeypatch.setitem(weights.SLAB, "cpu", 4 * vocabulary)
    found = logprobs(logits, torch.tensor(tokens), k)
    assert (found.ids.dtype, found.logprobs.dtype, found.ranks.dtype) == (np.int32, np.float32, np.int32)
    assert found.rows.tolist() == list(range(9))
    check(found, logits, tokens, min(k, vocabulary))
    one = logprobs(logits[3:4], torch.tensor(tokens[3:4]), k)
    assert one.logprobs.tobytes() == found.logprobs[3:4].tobytes(), "the same bits in any company"


def test_rows_that_ask_get_those_of_the_models_own_logits() -> None:
    logits = rows_of(4, 500)
    asks = [{}, {"logprobs": 3, "temperature": 0, "logit_bias": {9: 100}}, {}, {"logprobs": 0, "top_k": 1}]
    states = [SamplingState.of(SamplingParams(seed=1, **ask)) for ask in asks]
    chosen = choose(logits, states)
    found = chosen.logprobs
    assert found is not None and found.rows.tolist() == [1, 3] and found.ids.shape == (2, 4)
    assert chosen.ids[1] == 9 and found.ids[0, 0] == 9
    check(found, logits[[1, 3]], chosen.ids[[1, 3]].tolist(), 3)
    assert choose(logits[[0, 2]], [states[0], states[2]]).logprobs is None
