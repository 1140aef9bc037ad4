"""Recorded decode steps on a CPU: the model's bits without its modules, or the model itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from breadth import sample
from families import zoo
from torch import Tensor, nn
from torch.nn import functional as F

from runner import LLM, SamplingParams
from runner.model import recorded
from runner.model.recorded import AFTER, RecordedSteps, visible

HIDDEN, VOCABULARY = 8, 11
NAMES = sample(list(zoo.ZOO), ["gemma3", "gpt_oss", "llama4", "deepseek_v3", "gemma4_shared", "gemma3n", "qwen3_5"])
LOOKS = "what it does depends on values of tensors"
ASKS = "it asks a tensor for more than its shape"


class Small(nn.Module):
    """A model of a few calls; ``more`` is done to its hidden states [rows, HIDDEN]."""

    def __init__(self, more: Callable[[Small, Tensor], Tensor] = lambda self, x: x) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head, self.more, self.calls = nn.Linear(HIDDEN, VOCABULARY), more, 0
        self.kept = torch.ones(HIDDEN)

    def forward(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        self.calls += 1
        x = self.mix(self.embed(token_ids)) + positions[:, None].float() / 10
        return self.head(self.more(self, x)[rows])


class Steps:
    """Random steps of a ``Small`` model, by its recordings and by itself."""

    def __init__(self, model: Small) -> None:
        self.model, self.recorded = model, RecordedSteps(model)
        self._random = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def take(self, count: int, rows: int = 3) -> None:
        """Checks the bits of each step."""
        for _ in range(count):
            ids, positions = (torch.randint(0, VOCABULARY, (rows,), generator=self._random) for _ in range(2))
            context, every = SimpleNamespace(positions=positions), torch.arange(rows)
            found = self.recorded.forward(lambda i, c, r: self.model(i, c.positions, r), ids, context, every)
            calls = self.model.calls
            assert torch.equal(found, self.model(ids, positions, every))
            self.model.calls = calls


def test_the_model_is_called_until_its_steps_are_recorded_and_once_to_compare() -> None:
    steps = Steps(Small())
    steps.take(AFTER)
    assert steps.model.calls == AFTER and steps.recorded.stats()["replayed"] == 0
    steps.take(10)
    assert steps.model.calls == AFTER + 1
    assert steps.recorded.stats() == {"recorded": [3], "replayed": 10, "reason": ""}
    steps.take(AFTER + 2, rows=2)
    assert steps.model.calls == 2 * AFTER + 2 and steps.recorded.stats()["recorded"] == [2, 3]


def inside(self: Small, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:3] = x[:, 2:4] * 2.5
    x.add_(1.0).mul_(x.shape[0])
    a, b = x.chunk(2, dim=-1)
    best, _ = x.max(dim=-1, keepdim=True)
    return torch.cat([b, a], -1) - best + F.softmax(x, dim=-1) + torch.arange(HIDDEN, dtype=torch.float32) / x.size(0)


@visible
def loop(x: Tensor, scale: float, add: float = 0.0) -> Tensor:
    """Reads values, as compiled loops do."""
    return torch.from_numpy(x.numpy() * scale + add).to(x)


@pytest.mark.parametrize(
    "more",
    [
        inside,
        lambda self, x: loop(x, 1.5, add=0.25),
        lambda self, x: x[..., :4].T.mT.repeat(1, 2) + F.dropout(x, 0.5, training=self.training),
        lambda self, x: x.to(torch.float64).contiguous().to(x.dtype) if x.dim() == 2 and x.is_floating_point() else x,
    ],
    ids=["views and calls in place", "a loop", "properties", "questions about sizes"],
)
def test_what_can_be_recorded(more: Callable[[Small, Tensor], Tensor]) -> None:
    steps = Steps(Small(more).eval())
    steps.take(AFTER + 5)
    assert steps.recorded.stats() == {"recorded": [3], "replayed": 5, "reason": ""}


def keeps(self: Small, x: Tensor) -> Tensor:
    self.kept = self.kept * 1.5
    return x * self.kept


def numbers(self: Small, x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.numpy() * 2)


def experts(self: Small, x: Tensor) -> Tensor:
    """Experts without tokens are skipped, of which no value is asked."""
    out, chosen = torch.zeros_like(x), x.argmax(-1)
    for expert in range(HIDDEN):
        (tokens,) = torch.where(chosen == expert)
        if tokens.shape[0]:
            out[tokens] += expert * x[tokens]
    return out


def counts(self: Small, x: Tensor) -> Tensor:
    self.kept += 1
    return x


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (lambda self, x: x * 2 if x.sum() > 0 else x, f"{LOOKS} (_local_scalar_dense)"),
        (lambda self, x: x * x.abs().max().item(), f"{LOOKS} (_local_scalar_dense)"),
        (lambda self, x: x[:, [int(x.argmax()) % HIDDEN] * HIDDEN], f"{LOOKS} (_local_scalar_dense)"),
        (lambda self, x: x + sum(x.argmax(-1).tolist()), f"{ASKS} (tolist)"),
        (numbers, f"{ASKS} (numpy)"),
        (experts, f"{LOOKS} (nonzero)"),
        (lambda self, x: x * 3 if x[x > 1].shape[0] else x, f"{LOOKS} (index)"),
        (lambda self, x: x + sum(torch.unique(x.argmax(-1))), f"{LOOKS} (_unique2)"),
        (lambda self, x: x[:, : x.argmax() + 1].sum(-1, keepdim=True) + x, f"{LOOKS} (_local_scalar_dense)"),
        (lambda self, x: x + F.one_hot(x.argmax(-1)).sum(), f"{LOOKS} (_local_scalar_dense)"),
        (lambda self, x: x * self.kept, "it reads a tensor [8] that is none of its weights"),
    ],
    ids=["branch", "number", "index", "list", "numpy", "experts", "mask", "unique", "slice", "one hot", "elsewhere"],
)
def test_what_cannot_be_recorded_runs_as_it_is(more: Callable[[Small, Tensor], Tensor], why: str) -> None:
    steps = Steps(Small(more))
    steps.take(AFTER + 5)
    assert steps.recorded.stats() == {"recorded": [], "replayed": 0, "reason": why}
    assert steps.model.calls == AFTER + 5, "once each"


def test_a_buffer_that_is_changed_is_changed_once_a_step() -> None:
    model = Small(counts)
    del model.kept
    model.register_buffer("kept", torch.zeros(1))
    steps = Steps(model)
    steps.take(AFTER + 5)
    assert steps.recorded.reason == "it changes a weight or buffer [1] (add_)"
    assert model.kept.item() == 2 * (AFTER + 5), "in the step, and in the comparison"


def test_a_tensor_that_is_kept_from_step_to_step_is_no_constant() -> None:
    model = Small(keeps)
    steps = RecordedSteps(model)
    with torch.no_grad():
        for _ in range(AFTER + 2):
            ids = torch.zeros(2, dtype=torch.long)
            context = SimpleNamespace(positions=ids)
            steps.forward(lambda i, c, r: model(i, c.positions, r), ids, context, torch.arange(2))
    assert steps.stats()["recorded"] == [] and "none of its weights" in steps.reason


def test_an_error_of_the_model_is_the_callers() -> None:
    def breaks(self: Small, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("out of order")
        return x

    steps = Steps(Small(breaks).eval())
    steps.take(AFTER - 1)
    steps.model.train()
    with pytest.raises(RuntimeError, match="out of order"):
        steps.take(1)


def test_a_recording_that_gives_other_bits_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recorded.Recorder.recording

    def wrong(self: recorded.Recorder, result: Tensor) -> Callable[..., Tensor]:
        right = recording(self, result)
        return lambda *given: right(*given) * (1 + 2**-23)

    monkeypatch.setattr(recorded.Recorder, "recording", wrong)
    steps = Steps(Small())
    steps.take(AFTER + 3)
    why = "a recorded step of 3 rows gave other logits"
    assert steps.recorded.stats() == {"recorded": [], "replayed": 0, "reason": why}


def test_while_there_are_hooks_the_modules_run() -> None:
    steps, seen = Steps(Small()), []
    steps.take(AFTER + 2)
    hook = steps.model.mix.register_forward_hook(lambda *given: seen.append(given))
    calls = steps.model.calls
    steps.take(3)
    assert steps.model.calls == calls + 3 and len(seen) == 6, "3 by the steps, 3 by the comparison"
    hook.remove()
    steps.take(3)
    assert steps.model.calls == calls + 3 and steps.recorded.stats()["replayed"] == 5


def test_weights_may_change_where_they_lie() -> None:
    steps = Steps(Small())
    steps.take(AFTER + 2)
    calls = steps.model.calls
    steps.model.load_state_dict({name: x * 1.25 for name, x in steps.model.state_dict().items()})
    steps.take(2)
    assert steps.model.calls == calls


def assigned(model: Small) -> None:
    model.load_state_dict({name: x * 1.25 for name, x in model.state_dict().items()}, assign=True)


def another_forward(model: Small) -> None:
    model.mix.forward = lambda x: 2 * nn.Linear.forward(model.mix, x)  # type: ignore[method-assign]


def another_module(model: Small) -> None:
    model.mix = nn.Sequential(model.mix, nn.Tanh())  # type: ignore[assignment]


def hook_of_a_new_module(model: Small) -> None:
    another_module(model)
    model.mix.register_forward_hook(lambda module, given, found: found * 2)


@pytest.mark.parametrize("change", [assigned, another_forward, another_module, nn.Module.eval])
def test_a_model_with_other_parts_is_recorded_anew(change: Callable[[Small], Any]) -> None:
    steps = Steps(Small(lambda self, x: x if self.training else 2 * x))
    steps.take(AFTER + 2)
    change(steps.model)
    steps.take(AFTER + 2)
    assert steps.recorded.stats() == {"recorded": [3], "replayed": 4, "reason": ""}


def test_a_new_modules_hook_is_seen() -> None:
    steps = Steps(Small())
    steps.take(AFTER + 2)
    hook_of_a_new_module(steps.model)
    steps.take(AFTER + 2)
    assert steps.recorded.stats() == {"recorded": [], "replayed": 2, "reason": "modules have hooks"}


def test_parts_that_change_from_step_to_step_are_not_recorded_again_and_again() -> None:
    def changes(self: Small, x: Tensor) -> Tensor:
        self.register_buffer("made", x[:1].clone())
        return x + self.made

    model = Small(changes)
    model.register_buffer("made", torch.zeros(1, HIDDEN))
    steps = Steps(model)
    steps.take(AFTER * AFTER)
    assert steps.recorded.stats()["recorded"] == [] and "replaced from step to step" in steps.recorded.reason


def test_a_recording_that_raises_is_given_up() -> None:
    steps = Steps(Small())
    steps.take(AFTER + 2)

    def wrong(*given: Any) -> Tensor:
        raise ValueError("not enough values to unpack")

    steps.recorded._recordings[3] = wrong
    steps.take(2)
    why = "a recorded step of 3 rows raised ValueError: not enough values to unpack"
    assert steps.recorded.stats() == {"recorded": [], "replayed": 2, "reason": why}


def test_autocast_is_no_recording_s_business() -> None:
    steps = Steps(Small())
    steps.take(AFTER + 2)
    with torch.autocast("cpu", torch.bfloat16):
        steps.take(3)
    assert steps.recorded.stats()["replayed"] == 2


def test_a_row_that_is_not_finite_is_no_difference() -> None:
    steps = Steps(Small(lambda self, x: x / (x[:1] - x[:1])))
    with torch.no_grad():
        for _ in range(AFTER + 2):
            ids = torch.arange(3)
            context = SimpleNamespace(positions=ids)
            steps.recorded.forward(lambda i, c, r: steps.model(i, c.positions, r), ids, context, torch.arange(3))
    assert steps.recorded.stats() == {"recorded": [3], "replayed": 2, "reason": ""}


# --- the families -----------------------------------------------------------------------------------------------------


def answers(llm: LLM) -> list[Any]:
    """Tokens and logprobs of prompts of several lengths, whose answers end one after another."""
    draw = random.Random(3)
    prompts = [[draw.randrange(5, zoo.VOCAB) for _ in range(9 + 7 * i)] for i in range(3)]
    params = [
        SamplingParams(max_tokens=2 * AFTER + 9 * i, temperature=0, ignore_eos=True, detokenize=False, logprobs=2)
        for i in range(3)
    ]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [(o.token_ids, [[(k, v.logprob) for k, v in one.items()] for one in o.logprobs or ()]) for o in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_a_family_answers_alike(name: str, tmp_path: Path) -> None:
    check_answers(name, tmp_path, "float32")


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_half_types_are_recorded_too(name: str, tmp_path: Path) -> None:
    assert check_answers(name, tmp_path, "bfloat16")["reason"] == ""


def check_answers(name: str, tmp_path: Path, dtype: str) -> dict[str, Any]:
    """The same answers with and without recordings, of which ``stats`` are returned."""
    folder = zoo.build(name, tmp_path / name)
    with LLM(str(folder), "cpu", "64MiB", 0, max_running=4, dtype=dtype) as llm:
        steps = llm.model.recorded
        if steps is None:
            assert llm.model.mixers.layers or llm.model.compressed.layers
            return {}
        found = answers(llm)
        told = llm.stats()["recorded"]
        assert told["recorded"] == [1, 2, 3] or LOOKS in told["reason"] or ASKS in told["reason"]
        assert bool(told["replayed"]) is not bool(told["reason"])
        llm.reset_prefix_cache()
        steps.is_on = False
        assert answers(llm) == found
        return told
