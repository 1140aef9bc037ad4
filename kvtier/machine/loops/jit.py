"""Compile a bookkeeping loop with numba; ``machine_code`` keeps the result."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic, overload
from numba.np.arrayobj import populate_array

from kvtier.machine.loops.machine_code import keep
from kvtier.machine.loops.parts import Part, make_part

F = TypeVar("F", bound=Callable[..., Any])
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
_ANY_ORDER: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}}


def jit(function: F) -> F:
    """``numba.njit`` that releases the GIL and keeps its machine code on disk, by its sources.

    Loops get every array that they need, scratch space included. Without allocations there are no references to count,
    so numba need not count them on each array at each call (docs/PERFORMANCE.md).
    """
    return _kept(function, _OPTIONS)


def jit_floats(function: F) -> F:
    """``jit`` for arithmetic on floats: sums in the fastest order; NaN and infinity keep their meaning."""
    return _kept(function, _OPTIONS | _ANY_ORDER)


def jit_chains(function: F) -> F:
    """``jit`` for chains of multiplications and additions: in the order in which they are written, fused in pairs."""
    return _kept(function, _OPTIONS | {"fastmath": {"contract"}})


def inlined(function: F) -> F:
    """A small function that loops call, compiled only as a part of each of them. Called from Python it runs as
    Python."""
    return _part(function, _OPTIONS)


def inlined_floats(function: F) -> F:
    """``inlined`` with the arithmetic of ``jit_floats``."""
    return _part(function, _OPTIONS | _ANY_ORDER)


def _kept(function: F, options: dict[str, Any]) -> F:
    compiled: Any = numba.njit(**options)(function)
    if compiled is not function:
        keep(compiled)
    return cast(F, compiled)


def _part(function: F, options: dict[str, Any]) -> F:
    options = {**options, "forceinline": True, "no_cpython_wrapper": True}
    compiled: Any = numba.njit(pipeline_class=Part, **options)(function)
    if compiled is not function:
        make_part(compiled)
    return cast(F, compiled)


def records(array: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """A structured array whose fields the loops can reach by attribute, also if they run as Python."""
    return array.view(np.recarray) if _settings.DISABLE_JIT else array


def prefetch(array: Any, index: Any) -> None:
    """In a compiled loop: prefetches the cache line of array[index], which must exist; waits for nothing."""


def _prefetch(_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        line = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        flags = [context.get_constant(types.int32, flag) for flag in (0, 3, 1)]  # to read, keep it, data
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *(ir.IntType(32),) * 3])
        utils: Any = cgutils
        builder.call(utils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8"), [line, *flags])
        return context.get_dummy_value()

    return types.none(array, index), generate


def touch(array: Any, index: Any) -> None:
    """In a compiled loop: reads array[index], of 4 bytes or more, and does nothing with it. It must exist."""


def _touch(_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        line = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(32).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
        builder.asm(kind, "", "r", [builder.load(line)], True)
        return context.get_dummy_value()

    return types.none(array, index), generate


def _floats(_context: Any, address: Any) -> Any:
    kind = types.Array(types.float32, 1, "C")

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array = context.make_array(kind)(context, builder)
        size, length = (context.get_constant(types.intp, n) for n in (4, _ENDLESS))
        populate_array(array, builder.inttoptr(arguments[0], array.data.type), [length], [size], size, None)
        return array._getvalue()

    return kind(types.int64), generate


def _as_python(address: int) -> npt.NDArray[np.float32]:
    numbers: Any = (ctypes.c_float * _ENDLESS).from_address(int(address) or 1)
    return np.frombuffer(numbers, np.float32)


_ENDLESS = 1 << 40
_settings: Any = config
compiles = not _settings.DISABLE_JIT
"""Whether loops are compiled, and do not run as Python."""
floats: Any = intrinsic(_floats) if compiles else _as_python
"""In a loop: the float32 numbers from an address on, as an array. Its length says nothing, and no index is checked."""
_instruction: Any = intrinsic(_prefetch)
_load: Any = intrinsic(_touch)
_AS_A_PART: Any = {"forceinline": True, "_nrt": False}


@overload(prefetch, jit_options=_AS_A_PART)
def _compiled_prefetch(array: Any, index: Any) -> Any:
    def compiled(array: Any, index: Any) -> Any:
        return _instruction(array, index)

    return compiled


@overload(touch, jit_options=_AS_A_PART)
def _compiled_touch(array: Any, index: Any) -> Any:
    def compiled(array: Any, index: Any) -> Any:
        return _load(array, index)

    return compiled


_FOREIGN = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_uint64] * 4)


def foreign(address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """In a compiled loop: calls the C function at ``address`` with four integers of 64 bits; its result has 32."""
    return _FOREIGN(int(address))(int(a), int(b), int(c), int(d))


def _foreign(_context: Any, address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * 4)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int32(*[types.uint64] * 5), generate


_call: Any = intrinsic(_foreign)


@overload(foreign, jit_options=_AS_A_PART)
def _compiled_foreign(address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    def compiled(address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return _call(address, a, b, c, d)

    return compiled
