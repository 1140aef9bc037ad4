"""``exact=True``: the bits of every logit are those of a cold run alone, whatever cache and batch went through."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from breadth import sample
from families import zoo

from kvtier import ConfigError, NotExact
from kvtier.attention import choice
from kvtier.geometry.kinds import Kind
from runner import LLM, SamplingParams
from runner.model import identity
from runner.model.exact import trial
from runner.model.exact.products import Weights, _padded, _whole
from runner.model.hybrid import HybridModel

from .recorder import Recorder

BLOCK = 8
LENGTHS = (170, 61, 148)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
Bits = dict[tuple[int, ...], torch.Tensor]


def prompts() -> list[list[int]]:
    """The last goes on after the first 96 tokens of the first."""
    rng = np.random.default_rng(0)
    found = [rng.integers(3, 140, n).tolist() for n in LENGTHS]
    found[2][:96] = found[0][:96]
    return found


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., HybridModel]:
    folders: dict[str, Path] = {}

    def get(name: str, dtype: str, exact: bool = True) -> HybridModel:
        if name not in folders:
            folders[name] = zoo.build(name, tmp_path_factory.mktemp(name.replace("-", "_")))
        return HybridModel.load(folders[name], "cpu", dtype, exact=exact)

    return get


def engine(model: HybridModel, blocks: int = 200, **options: Any) -> LLM:
    spec = model.spec(BLOCK)
    device = dict.fromkeys(spec.names, blocks)
    given: dict[str, Any] = {"host_memory": 0, "max_batched_tokens": 512, "block_tokens": BLOCK, "max_running": 4}
    llm = LLM(model, "cpu", exact=model.exact, **({"device_memory": device} | given | options))
    llm.engine.model = Recorder(model)
    return llm


def bits(llm: LLM, served: list[Any]) -> Bits:
    """The logits of each sample, by the text that it saw."""
    found = {}
    for output in served:
        text = [*output.prompt_token_ids, *output.token_ids]
        for n, logits in llm.engine.model.logits[output.request_id].items():
            found[tuple(text[:n])] = logits
    return found


def ask(llm: LLM, which: list[list[int]], params: SamplingParams = GREEDY) -> Bits:
    return bits(llm, llm.generate(which, params, use_tqdm=False))


def cold(model: HybridModel, params: SamplingParams = GREEDY) -> Bits:
    """Each prompt alone, in one chunk, in a new cache."""
    found: Bits = {}
    for prompt in prompts():
        with engine(model) as llm:
            found |= ask(llm, [prompt], params)
    return found


def check(found: Bits, expected: Bits) -> None:
    """The same texts, and the same bits of all logits."""
    assert found.keys() <= expected.keys()
    assert found.keys() and all(torch.equal(logits, expected[text]) for text, logits in found.items())


def situations(model: HybridModel, folder: Path, params: SamplingParams = GREEDY) -> Iterator[tuple[str, Bits]]:
    """What the logits are after each thing that may happen to a request, which then has happened."""
    with engine(model) as llm:
        yield "all at once", ask(llm, prompts(), params)
        again = llm.generate(prompts()[2], params, use_tqdm=False)
        assert sum(again[0].cached_tokens.values()) > 100
        yield "after a hit", bits(llm, again)
    for chunk in (24, 7):
        with engine(model, max_batched_tokens=chunk) as llm:
            yield f"in chunks of {chunk}, beside others", ask(llm, prompts(), params)
    groups = model.spec(BLOCK).groups
    few = {Kind.FULL: 30, Kind.STATE: 5 if len(groups) > 1 else 3}
    tight = {g.name: few.get(g.attention.kind, 24) for g in groups}
    spacious = dict.fromkeys(tight, 200)
    store = {"remote_uri": f"file://{folder}", "key_secret": b"tests", "model_id": "tests"}
    with engine(model, host_memory=spacious, device_memory=tight, max_batched_tokens=48, **store) as llm:
        for prompt in prompts():
            yield "in a tight cache", ask(llm, [prompt], params)
        back = llm.generate(prompts()[0], params, use_tqdm=False)
        assert back[0].cached_tokens["host"] > 0
        yield "from the host", bits(llm, back)
        served = llm.generate(prompts(), params, use_tqdm=False)
        assert len(groups) == 1 or groups[0].attention.kind is not Kind.FULL or any(of.preemptions for of in served)
        yield "preempted", bits(llm, served)
    with engine(model, host_memory=spacious, **store) as llm:
        llm.engine.cache.estimate_compute(lambda start, end: 1e9)
        back = llm.generate(prompts()[2], params, use_tqdm=False)
        assert back[0].cached_tokens["remote"] > 0
        yield "after a restart, from the remote tier", bits(llm, back)


FAMILIES = ["llama", "gemma3", "gemma2", "gpt_oss", "llama4", "mixtral", "gpt2"]
FAMILIES += ["qwen3_next", "kimi_linear", "granitemoehybrid", "lfm2", "falcon_h1", "mamba2", "deepseek_v3", "minicpm3"]
FAMILIES = [name for name in FAMILIES if name in zoo.ZOO]
DTYPES = ["float32", "bfloat16"]
QUICK = [("llama", "float32"), ("gemma3", "bfloat16"), ("gpt_oss", "bfloat16")]
QUICK += [("qwen3_next", "float32"), ("deepseek_v3", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), sample([(n, d) for n in FAMILIES for d in DTYPES], QUICK))
def test_no_bit_differs_from_a_cold_run(
    load: Callable[..., HybridModel], name: str, dtype: str, tmp_path: Path
) -> None:
    model = load(name, dtype)
    expected = cold(model)
    for what, found in situations(model, tmp_path):
        assert found.keys() <= expected.keys(), what
        assert all(torch.equal(logits, expected[text]) for text, logits in found.items()), what


def test_drawn_answers_are_the_same_too(load: Callable[..., HybridModel], tmp_path: Path) -> None:
    model = load("llama", "float32")
    expected = cold(model, DRAWN)
    for what, found in situations(model, tmp_path, DRAWN):
        assert found.keys() <= expected.keys(), what


def test_without_it_bits_do_differ(load: Callable[..., HybridModel], tmp_path: Path) -> None:
    """So these comparisons can fail."""
    model = load("llama", "float32", exact=False)
    expected = cold(model)
    assert any(
        not torch.equal(logits, expected[text])
        for _, found in situations(model, tmp_path)
        for text, logits in found.items()
        if text in expected
    )


def test_k_and_v_in_8_bits_are_exact_too(load: Callable[..., HybridModel]) -> None:
    model = load("gemma3", "float32")
    with engine(model, kv_cache_dtype="fp8") as llm:
        expected = ask(llm, prompts()[:1])
    with engine(model, kv_cache_dtype="fp8", max_batched_tokens=24) as llm:
        check(ask(llm, prompts()[:1]), expected)
        check(ask(llm, prompts()[:1]), expected)


def test_a_module_that_does_not_keep_its_bits_is_named(load: Callable[..., HybridModel], monkeypatch: Any) -> None:
    """Here one whose rows depend on how many there are."""
    inner = trial.make_exact

    def spoiled(model: Any) -> None:
        module = model.model.model.layers[1].mlp.down_proj
        own = module.forward
        module.forward = lambda x: own(x) * (1 + 1e-6 * (x.shape[-2] == 3))
        inner(model)

    monkeypatch.setattr(trial, "make_exact", spoiled)
    with pytest.raises(NotExact, match=r"layers\.1\.mlp\.down_proj \(Linear\) gives other bits for 3 rows alone"):
        load("llama", "float32")


def test_a_layer_whose_product_depends_on_its_rows_is_found_by_the_trial(
    load: Callable[..., HybridModel], monkeypatch: Any
) -> None:
    """And computed in the exact way, in all places."""
    monkeypatch.setattr("runner.model.fused.linears.is_one", lambda module, exact=False: False)
    monkeypatch.setattr(trial, "needs_it", lambda module: False)
    model = load("llama", "float32")
    assert "forward" in vars(model.model.model.layers[0].mlp.down_proj)
    assert trial._difference(model) is None


def test_what_cannot_be_exact_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    from runner.needle import weights_path

    (tmp_path / "config.json").write_bytes((weights_path() / "config.json").read_bytes())
    for options in ({"attention": "flashinfer"}, {"dtype": "float16"}):
        with pytest.raises(NotExact, match="exact=True"):
            LLM(tmp_path, "cpu", **options, exact=True)
    with pytest.raises(NotExact, match="only on a CPU"):
        choice.exactly("auto", "cuda:0", torch.bfloat16)
    with pytest.raises(ConfigError, match="exact must be True or False"):
        LLM(tmp_path, "cpu", exact="yes")


def test_a_loaded_model_is_what_it_was_loaded_as(load: Callable[..., HybridModel]) -> None:
    with pytest.raises(ConfigError, match="loaded with exact=False"):
        LLM(load("llama", "float32", exact=False), "cpu", {"full": 20}, 0, exact=True)


def test_exact_and_other_engines_share_nothing(load: Callable[..., HybridModel], tmp_path: Path) -> None:
    """Though they were given one name for the model."""
    store = {"remote_uri": f"file://{tmp_path}", "key_secret": b"tests", "model_id": "mine"}
    before = False
    for exact in (False, True, True):
        model = load("llama", "float32", exact)
        with engine(model, host_memory={"full": 100}, **store) as llm:
            served = llm.generate(prompts()[0], GREEDY, use_tqdm=False)[0]
            hit = served.cached_tokens["remote"]
            assert (hit > 0) is (exact and before)
        before = exact
    assert identity.arithmetic(torch.float32).startswith("exact@")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_a_product_with_weights_is_the_same_alone(dtype: torch.dtype) -> None:
    """Also with so many columns that oneDNN has another kernel for one row; of the model's weights, and of others."""
    weight, x = torch.randn(6, 2048).to(dtype), torch.randn(9, 2048).to(dtype)
    for mine in ([weight], []):
        weights = Weights(mine)
        rows = [weights.times(row[None], weight) for row in x]
        assert torch.equal(torch.cat(rows), weights.times(x, weight))
    assert weights.times(x[:0], weight).shape == (0, 6)


@pytest.mark.parametrize("threads", [1, 2, 3, 12, 64])
def test_padded_arrays_are_whole_steps_for_each_thread(threads: int) -> None:
    """For as many threads as get 32,768 elements each, and for all."""
    for size in (1, 63, 64, 100, 32_768, 32_769, 65_537, 411_648, 10**6 + 1):
        padded = _padded(size, threads)
        workers = min(threads, -(-padded // 32_768))
        assert size <= padded <= size + 2 * 64 * math.lcm(threads, workers)
        for n in (workers, threads):
            assert padded % n == 0 and padded // n % 64 == 0


def test_tanh_gelu_has_the_same_bits_for_any_number_of_threads() -> None:
    """torch gives it to all threads, however small their shares are."""
    x, before = torch.randn(10, 2048), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found.append(_whole(torch.nn.functional.gelu, x, approximate="tanh"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.parametrize("name", ["laguna", "afmoe"])
def test_functions_that_attention_and_routers_call_themselves_are_exact(
    name: str, load: Callable[..., HybridModel]
) -> None:
    """A gate's softplus, a router's sigmoid: on narrow rows they end in the middle of what torch computes at once."""
    model, rng = load(name, "float32"), np.random.default_rng(1)
    for length in (65, 130):
        ends = [0, *sorted(rng.choice(np.arange(1, length), 4, replace=False).tolist()), length]
        cuts = tuple(((a, b),) for a, b in pairwise(ends))
        whole, parts = (trial._outcome(model, trial._Run("", steps)) for steps in ((((0, length),),), cuts))
        assert all(map(torch.equal, whole, parts)), ends
