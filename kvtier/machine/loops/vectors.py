"""The processor's vectors of float32, for the loop of ``products``: what numba cannot say of arrays.

Arguments are addresses and sizes. What must be aligned is so to a vector.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from kvtier.machine.loops.jit import compiles, floats

_settings: Any = config
_host: Any = get_host_cpu_features
_features = (_host() if _settings.CPU_FEATURES is None else _settings.CPU_FEATURES).split(",")
LANES = 16 if "+avx512f" in _features else 8 if "+avx" in _features else 4
"""Numbers in a vector of the processor that numba compiles for."""
_ACROSS = 4 if "+neon" in _features else 2
WIDTH = _ACROSS * LANES
"""Columns of a tile."""
ROWS = {16: 14, 8: 6, 4: 4}[LANES]
"""Rows of a tile at most, up to LANES: its sums, a row of weights and one factor are in registers."""
HALF = 8 if ROWS > 8 else 4
"""Two tiles of so many take less time than one of ROWS and a small one."""

_LINE = 64
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_ZEROS = ir.Constant(_VECTOR, [_F32(0.0)] * LANES)
_utils: Any = cgutils


def _tile(rows: int) -> Any:
    """A function for loops: ``add(sums, x, weight, inner, ahead, step)``.

    x [inner, rows] times weight [inner, WIDTH], summed in the order of ``inner``, is added to sums [rows, WIDTH]. The
    last two are aligned, and ``inner`` is positive. Meanwhile memory from ``ahead`` on is fetched into the second
    cache: ``step`` bytes, up to two lines, for each of ``inner``.
    """

    def add(sums: int, x: int, weight: int, inner: int, ahead: int, step: int) -> None:
        for k in range(inner):
            a, b = floats(x)[k * rows : (k + 1) * rows], floats(weight)[k * WIDTH : (k + 1) * WIDTH]
            floats(sums)[: rows * WIDTH] += np.outer(a, b).reshape(-1)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        sums, x, weight, inner, ahead, step = arguments
        to = builder.inttoptr(sums, _VECTOR.as_pointer())
        factors = builder.inttoptr(x, _F32.as_pointer())
        weights = builder.inttoptr(weight, _VECTOR.as_pointer())
        alone = builder.icmp_signed(">", step, _I64(_LINE))
        before, body, done = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(body)

        builder.position_at_end(body)
        k = builder.phi(_I64)
        held = [builder.phi(_VECTOR) for _ in range(rows * _ACROSS)]
        line = builder.inttoptr(builder.add(ahead, builder.mul(k, step)), _utils.voidptr_t)
        _fetch(builder, line)
        with builder.if_then(alone):
            _fetch(builder, builder.gep(line, [_I64(_LINE)]))
        row = [_load(builder, weights, builder.add(builder.mul(k, _I64(_ACROSS)), _I64(j))) for j in range(_ACROSS)]
        after = []
        for i in range(rows):
            at = builder.add(builder.mul(k, _I64(rows)), _I64(i))
            factor = _spread(builder, builder.load(builder.gep(factors, [at])))
            after += [_fused(builder, factor, row[j], held[i * _ACROSS + j]) for j in range(_ACROSS)]
        following = builder.add(k, _I64(1))
        last = builder.block
        builder.cbranch(builder.icmp_signed("<", following, inner), body, done)
        for phi, first, then in zip([k, *held], [_I64(0), *[_ZEROS] * len(held)], [following, *after], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(then, last)

        builder.position_at_end(done)
        for i, total in enumerate(after):
            _store(builder, builder.fadd(_load(builder, to, _I64(i)), total), to, _I64(i), 4 * LANES)
        return context.get_dummy_value()

    def typed(_context: Any, sums: Any, x: Any, weight: Any, inner: Any, ahead: Any, step: Any) -> Any:
        return _none(6), generate

    return intrinsic(typed) if compiles else add


def _turned(to: int, source: int, stride: int, real: int, rows: int) -> None:
    """``turn``, as Python runs it."""
    for i in range(rows):
        floats(to)[i : LANES * rows : rows] = floats(source + 4 * min(i, real - 1) * stride)[:LANES]


def _turn(_context: Any, to: Any, source: Any, stride: Any, real: Any, rows: Any) -> Any:
    return _none(5), _turn_code


def _turn_code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    to, source, stride, real, rows = arguments
    numbers = builder.inttoptr(source, _F32.as_pointer())
    last = builder.sub(real, _I64(1))
    block = []
    for i in range(LANES):
        row = builder.select(builder.icmp_signed("<", _I64(i), last), _I64(i), last)
        start = builder.gep(numbers, [builder.mul(row, stride)])
        block.append(_load(builder, builder.bitcast(start, _VECTOR.as_pointer()), _I64(0), 4))
    n = LANES // 2
    while n:  # what is off the diagonal of 2 x 2 parts, of n x n numbers each, changes places
        first = [j + LANES - n if j & n else j for j in range(LANES)]
        second = [j + LANES if j & n else j + n for j in range(LANES)]
        for i in range(LANES):
            if not i & n:
                pair = block[i], block[i | n]
                masks = (ir.Constant(ir.VectorType(_I32, LANES), places) for places in (first, second))
                block[i], block[i | n] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        n //= 2
    out = builder.inttoptr(to, _F32.as_pointer())
    for i, vector in enumerate(block):
        place = builder.bitcast(builder.gep(out, [builder.mul(_I64(i), rows)]), _VECTOR.as_pointer())
        _store(builder, vector, place, _I64(0), 4)
    return context.get_dummy_value()


def _streamed(to: int, source: int) -> None:
    """``stream``, as Python runs it."""
    floats(to)[:LANES] = floats(source)[:LANES]


def _stream(_context: Any, to: Any, source: Any) -> Any:
    return _none(2), _stream_code


def _stream_code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    to, source = (builder.inttoptr(address, _VECTOR.as_pointer()) for address in arguments)
    stored = _store(builder, _load(builder, source, _I64(0)), to, _I64(0), 4 * LANES)
    stored.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
    return context.get_dummy_value()


def _none(arguments: int) -> Any:
    """The type of a function of so many integers that returns nothing."""
    return types.none(*[types.int64] * arguments)




def _load(builder: Any, vectors: Any, index: Any, align: int = 4 * LANES) -> Any:
    loaded = builder.load(builder.gep(vectors, [index]))
    loaded.align = align
    return loaded


def _store(builder: Any, vector: Any, vectors: Any, index: Any, align: int) -> Any:
    stored = builder.store(vector, builder.gep(vectors, [index]))
    stored.align = align
    return stored


def _spread(builder: Any, number: Any) -> Any:
    """A vector of one number."""
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(nothing, number, _I32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(_utils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32"), [a, b, c])


def _fetch(builder: Any, line: Any) -> None:
    flags = [_I32(flag) for flag in (0, 2, 1)]  # to read, into the second cache, data
    kind = ir.FunctionType(ir.VoidType(), [_utils.voidptr_t, *(_I32,) * 3])
    builder.call(_utils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8"), [line, *flags])


add1, add2, add4, add_half, add_most = (_tile(rows) for rows in (1, 2, 4, HALF, ROWS))
turn: Any = intrinsic(_turn) if compiles else _turned
"""``turn(to, source, stride, real, rows)``: LANES numbers of each row go to [LANES, rows]. Rows are ``stride`` numbers
apart; those beyond ``real`` are like the one before. Up to LANES numbers behind the result are written, too."""
stream: Any = intrinsic(_stream) if compiles else _streamed
"""``stream(to, source)``: LANES numbers, past the caches; both aligned."""
