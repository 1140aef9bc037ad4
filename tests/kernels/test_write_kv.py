"""K and V of new tokens land in their slots, rounded as they should be, and nothing else changes: kernel and twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier.attention.kernels import write_kv
from kvtier.attention.kernels.write_kv import write_kv_torch
from kvtier.machine.errors import StepError

from .memory import DEVICE, Layer

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.float16, torch.bfloat16, torch.float32, E4M3]


def kernel(*args: object) -> None:
    pytest.importorskip("triton", reason="triton is not installed; `make test` installs it")
    from kvtier.attention.kernels.triton_write_kv import launch

    with np.errstate(over="ignore"):  # the interpreter divides in NumPy
        launch(*args)  # type: ignore[arg-type]


IMPLEMENTATIONS = {"kernel": kernel, "twin": write_kv_torch}


@pytest.fixture(params=IMPLEMENTATIONS)
def write(request: pytest.FixtureRequest):
    return IMPLEMENTATIONS[request.param]


def rounded_to_e4m3(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest e4m3 value of each float64, ties to the even mantissa, from the format's definition."""
    bits = np.arange(127)  # 0x7F is NaN
    exponent, mantissa = bits >> 3, bits & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    assert values[-1] == 448
    magnitude = np.minimum(np.abs(x), 448)
    above = np.minimum(np.searchsorted(values, magnitude), 126)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - magnitude, magnitude - values[below]
    nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    found = np.where(np.isnan(x), 0x7F, nearest)
    return (found | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def expected_bits(new: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a pool of ``dtype`` should hold of ``new`` [T, H, D], as integers of its size."""
    if dtype is not E4M3:
        return new.to(dtype).view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    values = new.float().numpy()
    if scale is not None:
        with np.errstate(over="ignore"):
            values = values / scale.numpy()[:, None]  # float32, as the contract says
    return torch.from_numpy(rounded_to_e4m3(values.astype(np.float64)))


def filled(layer: Layer, key: Tensor, value: Tensor, slots: Tensor, scales: tuple[Tensor | None, Tensor | None]):
    """The layer's bytes as they should be after the write, one token at a time."""
    after = Layer(layer.dtype, layer.blocks, layer.block_tokens, layer.heads, layer.dims, layer.layers, layer.pad)
    after.memory.copy_(layer.memory)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[layer.dtype.itemsize]
    for cache, new, scale in ((after.k, key, scales[0]), (after.v, value, scales[1])):
        bits = expected_bits(new, scale, layer.dtype)
        for t, slot in enumerate(slots.tolist()):
            if layer.block_tokens <= slot < layer.blocks * layer.block_tokens:
                cache.view(integers)[slot // layer.block_tokens, slot % layer.block_tokens] = bits[t].to(DEVICE)
    return after.bytes()


def cases() -> list[tuple[Layer, Tensor, Tensor, Tensor]]:
    """Layers of all dtypes, layouts and odd sizes, with tokens for them."""
    made = []
    shapes = [(1, (1, 1)), (2, (16, 16)), (3, (5, 5)), (2, (24, 16)), (5, (64, 64)), (1, (128, 128)), (40, (64, 64))]
    for n, (heads, dims) in enumerate(shapes):
        for i, dtype in enumerate(DTYPES):
            rng = torch.Generator().manual_seed(100 * n + i)
            block_tokens, blocks = [1, 3, 16, 8][(n + i) % 4], 5 + n
            layer = Layer(dtype, blocks, block_tokens, heads, dims, layers=1 + n % 3, pad=16 * (i % 3), seed=n)
            slots = torch.randperm(blocks * block_tokens, generator=rng)[: [7, 1, 12][i % 3]]
            slots = torch.cat([slots, torch.tensor([-1, 0, blocks * block_tokens])])[
                torch.randperm(len(slots) + 3, generator=rng)
            ]
            source = [torch.float32, torch.bfloat16, torch.float16][(n + i) % 3] if dtype is E4M3 else dtype
            # As a model gives them: heads first in memory, and other tokens around.
            key, value = (
                (torch.randn(heads, len(slots) + 2, d, generator=rng) * 40).to(source).transpose(0, 1)[1:-1]
                for d in dims
            )
            made.append((layer, key, value, slots))
    return made


@pytest.mark.parametrize("scaled", [False, True])
def test_every_token_lands_in_its_slot_and_nothing_else_changes(write, scaled: bool) -> None:
    for layer, key, value, slots in cases():
        scales: tuple[Tensor | None, Tensor | None] = (None, None)
        if scaled and layer.dtype is not E4M3:
            continue
        if scaled:
            scales = 0.03 + torch.rand(layer.heads), 7 * torch.rand(layer.heads) + 0.1
        expected = filled(layer, key, value, slots, scales)
        on = [None if s is None else s.to(DEVICE) for s in scales]
        write(layer.k, layer.v, key.to(DEVICE), value.to(DEVICE), slots.to(DEVICE), *on)
        assert torch.equal(layer.bytes(), expected), (layer.dtype, layer.heads, layer.dims)


def hard_values() -> Tensor:
    """float32 [1, 1, n]: every e4m3 value, every midpoint, their neighbours, both ends of the range, and no numbers."""
    exact = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    exact = exact[exact.isfinite()].sort().values
    middle = (exact[1:] + exact[:-1]) / 2
    edges = torch.tensor([449.0, 463.9, 464.0, 480.0, 1e30, torch.inf, torch.nan, 1e-45, 2.0**-10, 1.1754944e-38])
    points = torch.cat([exact, middle, edges, -edges])
    infinity = torch.tensor(torch.inf)
    return torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])[None, None]


@pytest.mark.parametrize("scale", [None, 1.0, 0.75, 1e-3])
def test_float8_rounds_to_nearest_even_saturates_and_keeps_nan(write, scale: float | None) -> None:
    x = hard_values()
    layer = Layer(E4M3, 2, 1, 1, (x.shape[2], x.shape[2]))
    scales = None if scale is None else torch.tensor([scale], device=DEVICE)
    write(
        layer.k, layer.v, x.to(DEVICE), -x.to(DEVICE), torch.ones(1, dtype=torch.int64, device=DEVICE), scales, scales
    )
    cpu_scale = None if scales is None else scales.cpu()
    for cache, new in ((layer.k, x), (layer.v, -x)):
        found = cache.view(torch.uint8)[1].cpu()
        assert torch.equal(found, expected_bits(new, cpu_scale, E4M3))


def test_a_batch_of_padding_writes_nothing(write) -> None:
    for dtype in DTYPES:
        layer = Layer(dtype, 3, 4, 2, (16, 16))
        before = layer.bytes()
        new = torch.ones(6, 2, 16, device=DEVICE, dtype=torch.float32 if dtype is E4M3 else dtype)
        write(layer.k, layer.v, new, new, torch.tensor([-1, 0, 3, 12, 2**40, -(2**40)], device=DEVICE))
        assert torch.equal(layer.bytes(), before)
        write(layer.k, layer.v, new[:0], new[:0], torch.empty(0, dtype=torch.int64, device=DEVICE))
        assert torch.equal(layer.bytes(), before)


def test_offsets_of_two_gibibytes_and_more_do_not_wrap() -> None:
    """Strides beyond int32, on memory that nobody touches elsewhere."""
    pytest.importorskip("triton", reason="triton is not installed; `make test` installs it")
    step = 2**31 + 16
    memory = torch.empty(2 * step + 64, dtype=torch.uint8, device=DEVICE)
    k = memory.as_strided((3, 1, 1, 16), (step, 16, 16, 1)).view(E4M3)
    v = memory.as_strided((3, 1, 1, 16), (step, 16, 16, 1), 16).view(E4M3)
    new = torch.arange(32.0, device=DEVICE).view(2, 1, 16)
    kernel(k, v, new, -new, torch.tensor([2, 1], device=DEVICE))
    for slot, token in ((2, 0), (1, 1)):
        assert torch.equal(k[slot, 0, 0].float(), new[token, 0].to(E4M3).float())
        assert torch.equal(v[slot, 0, 0].float(), (-new[token, 0]).to(E4M3).float())


# --- the public function --------------------------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE != "cpu", reason="slots on a device are not read back: run it without a GPU")
def test_audited_slots_outside_the_usable_blocks_are_refused_before_a_byte_is_written() -> None:
    layer = Layer(torch.float32, 3, 4, 1, (8, 8))
    new = torch.ones(2, 1, 8, device=DEVICE)
    before = layer.bytes()
    for bad in (0, 3, 12, -2):
        with pytest.raises(StepError, match=rf"token 1 goes to slot {bad},"):
            write_kv(layer.k, layer.v, new, new, torch.tensor([5, bad]), audit=True)
        assert torch.equal(layer.bytes(), before)
    write_kv(layer.k, layer.v, new, new, torch.tensor([5, -1]).to(DEVICE), audit=True)
    assert not torch.equal(layer.bytes(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.ones(3, 2, 8)}, "key is"),
        ({"value": torch.ones(2, 2, 9)}, "value is"),
        ({"key": torch.ones(2, 1, 8)}, "key is"),
        ({"k_scale": torch.ones(1)}, "2 KV heads"),
        ({"v_scale": torch.ones(2, 1)}, "2 KV heads"),
        ({"k_scale": torch.ones(2, dtype=torch.float64)}, "float32"),
        ({"slot_mapping": torch.tensor([4, 5], dtype=torch.int32)}, "int64"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_before_a_byte_is_written(change: dict[str, Tensor], message: str) -> None:
    layer = Layer(E4M3, 3, 4, 2, (8, 8))
    before = layer.bytes()
    given = {"key": torch.ones(2, 2, 8), "value": torch.ones(2, 2, 8), "slot_mapping": torch.tensor([4, 5]), **change}
    with pytest.raises(StepError, match=message):
        write_kv(layer.k, layer.v, **{name: x.to(DEVICE) for name, x in given.items()})
    assert torch.equal(layer.bytes(), before)


def test_tensors_of_two_devices_are_refused() -> None:
    layer = Layer(torch.float32, 3, 4, 2, (8, 8))
    new = torch.ones(1, 2, 8, device=DEVICE)
    with pytest.raises(StepError, match="one device"):
        write_kv(layer.k, layer.v, new, new, torch.ones(1, dtype=torch.int64, device="meta"))


def test_scales_are_for_float8_only() -> None:
    layer = Layer(torch.float32, 3, 4, 2, (8, 8))
    new = torch.ones(1, 2, 8, device=DEVICE)
    with pytest.raises(StepError, match="float8 pools"):
        write_kv(layer.k, layer.v, new, new, torch.tensor([4], device=DEVICE), torch.ones(2, device=DEVICE))


def test_strided_views_are_what_the_arena_gives() -> None:
    """The layouts of these tests are the real ones."""
    from kvtier import CacheSpec, FullAttention, GroupSpec
    from kvtier.geometry.layout import Layout
    from kvtier.pools.arena import Arena

    for dims in ((16, 16), (24, 16)):
        spec = CacheSpec([GroupSpec("full", FullAttention(), 2, 3, dims[0], "float32", 4, dims[1])])
        arena = Arena(spec, Layout.fixed([spec.groups[0].block_bytes], [5]), "meta")
        k, v = arena.views(0)[-1]
        layer = Layer(torch.float32, 6, 4, 3, dims, layers=2, pad=0)
        for ours, theirs in ((layer.k, k), (layer.v, v)):
            assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        assert layer.v.storage_offset() - layer.k.storage_offset() == v.storage_offset() - k.storage_offset()
