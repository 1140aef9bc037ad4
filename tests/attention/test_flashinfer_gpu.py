"""FlashInfer's own kernels against the torch reference, on the steps that the stand-in kernels are tried on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attention.served_steps import HEADS, Served, assert_close, expected
from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, Scheduler, SlidingWindow
from kvtier.attention import reference
from kvtier.attention.flashinfer import FlashInfer
from kvtier.attention.fp8 import layer_scales
from kvtier.geometry.kv_scales import KVScales

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: `make gpu` on a machine with one"),
]
KINDS = [FullAttention(), SlidingWindow(40), ChunkedLocal(64)]
HOWS = [{}, {"softcap": 3.0}, {"sinks": torch.linspace(-2, 3, HEADS)}, {"scale": 1.0}]


def assert_near(got: torch.Tensor, want: torch.Tensor, softcap: float | None = None) -> None:
    """The kernels round weights to the values' dtype before they multiply; values are of the order of 1.

    Their tanh is the device's own, which is off by up to 2**-11 of its value; so is then a capped score.
    """
    assert_close(got, want, absolute=2 * torch.finfo(got.dtype).eps + 2.0**-10 * (softcap or 0.0))


@pytest.fixture(scope="module")
def flash() -> FlashInfer:
    return FlashInfer("cuda:0", check_indices=True)


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("how", HOWS, ids=["plain", "softcap", "sinks", "scale"])
@pytest.mark.parametrize("shape", [(64, "float16"), (128, "bfloat16")], ids=str)
def test_ragged_steps(flash: FlashInfer, make_cache: Any, attention: Any, how: dict[str, Any], shape: Any) -> None:
    """Prompts in chunks mixed with decodes; every slot that no query sees is NaN."""
    head_dim, dtype = shape
    group = GroupSpec("g", attention, 2, 2, head_dim, dtype, block_tokens=16)
    cache = make_cache(CacheSpec([group]), 120, device="cuda:0")
    served = Served(cache, Scheduler(cache, max_batched_tokens=150, max_running=6))
    rng = np.random.default_rng(0)
    for i in range(6):
        served.add(f"r{i}", rng.integers(3, 100, rng.integers(1, 200)).tolist(), int(rng.integers(1, 9)))
    how = {name: value.to("cuda:0") if isinstance(value, torch.Tensor) else value for name, value in how.items()}
    how = {"scale": 0.2} | how
    for step in served.steps():
        batch = flash.PagedBatch.from_step(step, group, "cuda:0")
        for layer in range(2):
            k, v = cache.kv("g", layer)
            flash.write_kv(k, v, *served.new_kv(step, group, layer), batch)
            got = flash.attend(served.query(step, group, layer), k, v, batch, **how)
            assert_near(got, expected(served, step, group, layer, **how), how.get("softcap"))


@pytest.mark.parametrize("head_dims", [(256, 256), (192, 128)], ids=str)
def test_head_sizes(flash: FlashInfer, make_cache: Any, head_dims: tuple[int, int]) -> None:
    group = GroupSpec("g", SlidingWindow(40), 1, 2, head_dims[0], "bfloat16", head_dim_v=head_dims[1])
    cache = make_cache(CacheSpec([group]), 60, device="cuda:0")
    served = Served(cache, Scheduler(cache, max_batched_tokens=100, max_running=4))
    served.add("r", list(range(3, 150)), 4)
    for step in served.steps():
        batch = flash.PagedBatch.from_step(step, group, "cuda:0")
        k, v = cache.kv("g", 0)
        flash.write_kv(k, v, *served.new_kv(step, group, 0), batch)
        got = flash.attend(served.query(step, group, 0), k, v, batch, scale=0.1)
        assert_near(got, expected(served, step, group, 0, scale=0.1))


@pytest.mark.parametrize(
    ("attention", "how", "head_dim", "half"),
    [
        (KINDS[0], {"softcap": 3.0}, 64, torch.float16),
        (KINDS[1], {"sinks": torch.linspace(-2, 3, HEADS)}, 64, torch.bfloat16),
        (KINDS[2], {}, 128, torch.bfloat16),
        (KINDS[1], {}, 256, torch.bfloat16),
    ],
    ids=["softcap", "sinks", "chunks", "wide"],
)
def test_8_bits_with_scales(
    flash: FlashInfer, make_cache: Any, attention: Any, how: dict[str, Any], head_dim: int, half: torch.dtype
) -> None:
    """Scales that are powers of two, and so fold without rounding; new tokens are written by the Triton kernel.

    Each case is a kernel of its own to compile: one of every way, not all of all.
    """
    scales = KVScales(*([[by * 4.0**i, by * 4.0**i / 2] for i in range(2)] for by in (0.25, 0.5)))
    group = GroupSpec("g", attention, 2, 2, head_dim, "fp8", block_tokens=16, kv_scales=scales)
    cache = make_cache(CacheSpec([group]), 120, device="cuda:0")
    served = Served(cache, Scheduler(cache, max_batched_tokens=150, max_running=6), half=half)
    rng = np.random.default_rng(0)
    for i in range(6):
        served.add(f"r{i}", rng.integers(3, 100, rng.integers(1, 200)).tolist(), int(rng.integers(1, 9)))
    how = {name: value.to("cuda:0") if isinstance(value, torch.Tensor) else value for name, value in how.items()}
    for step in served.steps():
        batch = flash.PagedBatch.from_step(step, group, "cuda:0")
        for layer in range(2):
            k, v = cache.kv("g", layer)
            pair = layer_scales(group, layer, "cuda:0")
            assert pair is not None
            given = {"k_scale": pair[0], "v_scale": pair[1]}
            flash.write_kv(k, v, *served.new_kv(step, group, layer), batch, **given)
            served.assert_written(step, group, layer)
            given = {"scale": 0.2} | how | given
            got = flash.attend(served.query(step, group, layer), k, v, batch, **given)
            want = expected(served, step, group, layer, **given)
            assert_near(got / pair[1].max(), want / pair[1].max(), how.get("softcap"))


@pytest.mark.parametrize(
    ("heads", "dtype", "capability"),
    [
        (16, "bfloat16", None),
        (20, "bfloat16", None),
        (128, "bfloat16", None),
        (16, "bfloat16", (8, 0)),
        (16, "fp8", None),
    ],
    ids=["16 heads", "20 heads", "128 heads", "older kernels", "8 bits"],
)
def test_latents(make_cache: Any, heads: int, dtype: str, capability: Any) -> None:
    """Prompts in chunks mixed with decodes; every slot that no query sees is NaN."""
    flash = FlashInfer("cuda:0", check_indices=True)
    flash._capability = capability or flash._capability
    if dtype == "fp8" and flash._capability[0] != 9:
        pytest.skip("FlashInfer computes latents in 8 bits on Hopper alone")
    group = GroupSpec("g", FullAttention(), 2, 1, 512, dtype, head_dim_v=64, block_tokens=16)
    cache = make_cache(CacheSpec([group]), 120, device="cuda:0")
    served = Served(cache, Scheduler(cache, max_batched_tokens=150, max_running=6), half=torch.bfloat16)
    rng = np.random.default_rng(0)
    for i in range(6):
        served.add(f"r{i}", rng.integers(3, 100, rng.integers(1, 200)).tolist(), int(rng.integers(1, 9)))
    scales = {n: torch.tensor([x], device="cuda:0") for n, x in (("k_scale", 0.5), ("v_scale", 4.0))}
    how = {"scale": 0.07} | (scales if dtype == "fp8" else {})
    for step in served.steps():
        batch = flash.PagedBatch.from_step(step, group, "cuda:0")
        plain = reference.PagedBatch.from_step(step, group, "cuda:0")
        for layer in range(2):
            k, v = cache.kv("g", layer)
            flash.write_kv(k, v, *served.new_kv(step, group, layer), batch, **{n: how[n] for n in scales if n in how})
            query = torch.from_numpy(rng.standard_normal((step.num_tokens, heads, 576))).to("cuda:0", torch.bfloat16)
            got = flash.attend_latent(query, k, v, batch, **how)
            assert_near(got, reference.attend_latent(query, k, v, plain, **how))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_batch_invariant_decodes(make_cache: Any, head_dim: int) -> None:
    """A decode alone gives the bits that it gives beside other decodes."""
    group = GroupSpec("g", FullAttention(), 1, 2, head_dim, "bfloat16")
    cache = make_cache(CacheSpec([group]), 600, device="cuda:0")
    served = Served(cache, Scheduler(cache, max_batched_tokens=4096, max_running=4))
    flash = FlashInfer("cuda:0", batch_invariant=True)
    rng = np.random.default_rng(0)
    for i in range(4):
        served.add(f"r{i}", rng.integers(3, 100, 900 + i).tolist(), 3)
    compared = 0
    for step in served.steps():
        if step.num_tokens != len(step.request_ids):
            continue
        k, v = cache.kv("g", 0)
        batch = flash.PagedBatch.from_step(step, group, "cuda:0")
        flash.write_kv(k, v, *served.new_kv(step, group, 0), batch)
        query = served.query(step, group, 0)
        together = flash.attend(query, k, v, batch, scale=0.1)
        for r in range(len(step.request_ids)):
            alone = flash.attend(query[r : r + 1], k, v, _only(flash, step, group, r), scale=0.1)
            assert torch.equal(alone[0], together[r])
            compared += 1
    assert compared


def _only(flash: FlashInfer, step: Any, group: GroupSpec, r: int) -> Any:
    """Entry ``r`` of a decode step, as a batch."""
    view = step.group(group.name)
    _, kv, pages, last = view.paged()
    own = pages[kv[r] : kv[r + 1]]
    paged = np.array([0, 1], np.int32), np.array([0, len(own)], np.int32), own, last[r : r + 1]
    alone = SimpleNamespace(slot_mapping=view.slot_mapping[r : r + 1], paged=lambda: paged)
    return flash.PagedBatch.from_step(SimpleNamespace(group=lambda name: alone), group, "cuda:0")
