"""Products of a query's heads with keys, each a chain of fused multiply-adds in the order of the dimensions.

Promises   the order of every sum, and one rounding a step. A compiler may reorder a sum in a loop, but not this one.
           oneDNN sums in this order, too, as far as the inner size is not large.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

HEADS = 4
KEYS = 8
"""Keys of one call: so many sums are under way at the same time that no unit of the processor waits for another."""


def chains(out: Any, query: Any, q: Any, keys: Any, places: Any, at: Any, dim: Any) -> None:
    """In a compiled loop: ``out`` [KEYS * HEADS] of 8 keys and 4 heads, all arrays float32 but int64 ``places``.

    out[4 j + h] sums query[q + 4 i + h] * keys[places[at + j] + i] over i < dim, from i = 0 on.
    """
    for j in range(KEYS):
        for h in range(HEADS):
            total = 0.0
            for i in range(dim):
                total += float(query[q + HEADS * i + h]) * float(keys[places[at + j] + i])
            out[HEADS * j + h] = total


def _chains(_context: Any, out: Any, query: Any, q: Any, keys: Any, places: Any, at: Any, dim: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def data(which: int) -> Any:
            return context.make_array(signature.args[which])(context, builder, arguments[which]).data

        word, real = ir.IntType(64), ir.FloatType()
        lanes = ir.VectorType(real, HEADS)
        utils: Any = cgutils
        kind = ir.FunctionType(lanes, [lanes] * 3)
        fma = utils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{HEADS}f32")
        heads = builder.gep(data(1), [arguments[2]])
        rows = []
        for j in range(KEYS):
            place = builder.gep(data(4), [builder.add(arguments[5], word(j))])
            rows.append(builder.gep(data(3), [builder.load(place)]))
        before = builder.block
        head, body, end = (builder.append_basic_block(name) for name in ("chains", "chains.step", "chains.end"))
        builder.branch(head)
        builder.position_at_end(head)
        i = builder.phi(word)
        i.add_incoming(word(0), before)
        sums = [builder.phi(lanes) for _ in rows]
        for total in sums:
            total.add_incoming(ir.Constant(lanes, [0.0] * HEADS), before)
        builder.cbranch(builder.icmp_signed("<", i, arguments[6]), body, end)
        builder.position_at_end(body)
        four = builder.gep(heads, [builder.mul(i, word(HEADS))])
        x = builder.load(builder.bitcast(four, lanes.as_pointer()), align=4)
        for total, row in zip(sums, rows, strict=True):
            one = builder.insert_element(ir.Constant(lanes, ir.Undefined), builder.load(builder.gep(row, [i])), word(0))
            key = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), HEADS), [0] * HEADS))
            total.add_incoming(builder.call(fma, [x, key, total]), body)
        i.add_incoming(builder.add(i, word(1)), body)
        builder.branch(head)
        builder.position_at_end(end)
        for j, total in enumerate(sums):
            place = builder.bitcast(builder.gep(data(0), [word(HEADS * j)]), lanes.as_pointer())
            builder.store(total, place, align=4)
        return context.get_dummy_value()

    index = types.int64
    return types.none(out, query, index, keys, places, index, index), generate


_instruction: Any = intrinsic(_chains)


_OF_CHAINS: Any = {"forceinline": True, "_nrt": False}


@overload(chains, jit_options=_OF_CHAINS)
def _compiled_chains(out: Any, query: Any, q: Any, keys: Any, places: Any, at: Any, dim: Any) -> Any:
    def compiled(out: Any, query: Any, q: Any, keys: Any, places: Any, at: Any, dim: Any) -> Any:
        return _instruction(out, query, q, keys, places, at, dim)

    return compiled
