"""Products with a weight on a CPU, the weight in a layout of its own: by kvtier's loops, or by oneDNN.

torch gives float32 products to MKL, which leaves AVX-512 unused on AMD. All but the loops wait for a weight that comes
from memory. Which way is the fastest here is tried once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvtier.attention.workers import over_rows
from kvtier.machine.loops.jit import compiles
from kvtier.machine.loops.products import multiplied, scratch_numbers
from kvtier.machine.loops.vectors import LANES, WIDTH
from runner.model.fused import room
from runner.model.recorded import visible

Product = Callable[[Tensor], Tensor]
"""x [..., k] to [..., n], without gradients."""
Way = Callable[[Tensor, Tensor | None], Product]
"""From a weight [n, k], and a bias [n] or None, to the product of their transpose."""

DTYPES = torch.float32, torch.bfloat16
_CACHE = 2 << 20
"""Bytes of a core's second cache. A larger result goes past it: it would be read from memory before it is written."""
_PACKED_FOR = 64
"""Rows that oneDNN chooses the layout for."""
_LEAST_ROWS = 2
_LEAST_ROWS_FROM_MEMORY, _CACHED = 4, 1 << 20
"""oneDNN's product of 4 rows takes three quarters of the time of one of 2 if the weight, of more bytes than these,
comes from memory, and up to 1.3 times as long if it is in a core's cache."""
_FASTER = 0.9
"""A way is worth its while if it takes less than this share of the time of one before it: torch's, the loops'. Few rows
and many count alike."""
_TRIED, _SIDE = ((16, 8), (256, 1)), 1024
"""The trial of speed: rows and weights, each of so many columns and rows. Few rows take theirs from memory."""
_REPEATS = 7
_ROWS = 1, 7, 16, 61, 101, 243, 359
"""Rows whose bits are compared."""


def packed(weight: Tensor, bias: Tensor | None = None) -> Product:
    """The product with ``weight`` [n, k], of one of ``DTYPES``. No row's bits depend on other rows."""
    return chosen(weight.dtype)(weight, bias)


def chosen(dtype: torch.dtype) -> Way:
    """The way of packed weights of ``dtype`` here."""
    if dtype is torch.float32:
        return fastest() or (by_loops if compiles else by_onednn)
    return by_onednn if not compiles or _has_rows_of_their_own() else by_loops


def by_loops(weight: Tensor, bias: Tensor | None) -> Product:
    """kvtier's loops, which compute in float32: other weights are packed as float32, and results rounded."""
    dtype = weight.dtype
    (n, k), panels = weight.shape, in_panels(weight.detach())
    plus = None if bias is None else bias.detach().to(panels).expand(n).contiguous()

    @visible
    def product(x: Tensor) -> Tensor:
        is_there = x.is_cpu and (x.data_ptr() or not x.numel())
        if x.dtype is not dtype or x.shape[-1] != k or not is_there:
            given = f"{list(x.shape)}, {x.dtype}, on {x.device}"
            raise RuntimeError(f"a product of {dtype} [..., {k}] on a CPU got {given}")
        x = x.float().resolve_neg().contiguous()
        out = x.new_empty(*x.shape[:-1], n)
        rows = x.numel() // k
        past = n % LANES == 0 and out.nbytes > _CACHE

        def compute(begin: int, end: int) -> bool:
            scratch = x.new_empty(scratch_numbers(rows, k))
            added = 0 if plus is None else plus.data_ptr()
            addresses = out.data_ptr(), x.data_ptr(), panels.data_ptr(), added, scratch.data_ptr()
            return bool(multiplied(*addresses, (rows, k, n), begin, end, past))

        over_rows(compute, len(panels), weight_work(n * k, rows))
        return out.to(dtype)

    return product


def weight_work(numbers: int, rows: int) -> int:
    """What a product takes, in elements of a simple loop. Reading a weight takes as long as multiplying 16 rows."""
    return numbers * (16 + rows) // 32


def in_panels(weight: Tensor) -> Tensor:
    """``weight`` [n, k] as [panels, k, WIDTH], zeros after the last column."""
    n, k = weight.shape
    whole, left = divmod(n, WIDTH)
    panels = room.place((whole + bool(left)) * k * WIDTH).view(whole + bool(left), k, WIDTH)
    panels[:whole] = weight[: whole * WIDTH].unflatten(0, (whole, WIDTH)).transpose(1, 2)
    if left:
        panels[whole, :, :left] = weight[whole * WIDTH :].T
        panels[whole, :, left:] = 0
    return panels


def by_onednn(weight: Tensor, bias: Tensor | None) -> Product:
    """oneDNN's products. One row alone is summed in another order; as one of several it has the bits of a batch."""
    operations: Any = torch.ops.mkldnn
    layout = operations._reorder_linear_weight(weight.detach(), _PACKED_FOR)
    return visible(lambda x: onednn_product(x, layout, bias, _least_rows(weight)))


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, least: int = _LEAST_ROWS) -> Tensor:
    """oneDNN's product with a weight [n, k] as it is, or packed. Fewer rows than ``least`` are the first of so many."""
    operations: Any = torch.ops.mkldnn
    rows = x.numel() // x.shape[-1]
    if rows >= least:
        out: Tensor = operations._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")
        return out
    several = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, least - rows))
    out = operations._linear_pointwise(several, weight, bias, "none", [], "")[:rows]
    return out.reshape(*x.shape[:-1], out.shape[-1])


def by_torch(weight: Tensor, bias: Tensor | None) -> Product:
    """torch's own."""
    return lambda x: F.linear(x, weight, bias)


@cache
def fastest() -> Way | None:
    """The way of float32 that takes the least time here, each of which is tried once; None if it is torch's own."""
    with room.side_by_side():  # not among a model's: these weights go with the trial
        ways = [by_torch, *[way for way in (by_loops, by_onednn) if _runs(way)]]
        weights = [_random(_SIDE) for _ in range(max(count for _, count in _TRIED))]
        products = [[way(weight, None) for weight in weights] for way in ways]
    shares = [0.0] * len(ways)
    for rows, count in _TRIED:
        x = _random(rows)
        seconds = _least_s([partial(_each, each[:count], x) for each in products])
        shares = [share + s / min(seconds) for share, s in zip(shares, seconds, strict=True)]
    best = 0
    for i in range(1, len(ways)):
        if shares[i] < _FASTER * shares[best]:
            best = i
    return ways[best] if best else None


@cache
def _has_rows_of_their_own() -> bool:
    """Whether oneDNN's rows in bfloat16 have the same bits alone and among others: of AMX's tiles they have not."""
    if not _runs(by_onednn):
        return False
    product, x = by_onednn(_random(_SIDE).bfloat16(), None), _random(max(_ROWS)).bfloat16()
    whole = product(x)
    return all(torch.equal(product(x[:rows]), whole[:rows]) for rows in _ROWS)


def _random(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, _SIDE, generator=generator, dtype=torch.float32, device="cpu")


def _each(products: list[Product], x: Tensor) -> None:
    for product in products:
        product(x)


def _runs(way: Way) -> bool:
    """Whether it is there: a torch may have no oneDNN, or others of these private operations; loops run as Python."""
    try:
        ones = torch.ones(2, 2, dtype=torch.float32, device="cpu")
        way(ones, None)(ones)
        return way is not by_loops or compiles
    except (AttributeError, RuntimeError):
        return False


def _least_rows(weight: Tensor) -> int:
    """How many rows oneDNN's product with this weight has at least."""
    return _LEAST_ROWS if weight.nbytes <= _CACHED else _LEAST_ROWS_FROM_MEMORY


def _least_s(works: list[Callable[[], object]]) -> list[float]:
    """Seconds of the shortest run of each. They take turns, so what else the machine does hinders all."""
    least = [float("inf")] * len(works)
    for _ in range(_REPEATS):
        for i, work in enumerate(works):
            begun = time.perf_counter()
            work()
            least[i] = min(least[i], time.perf_counter() - begun)
    return least
