"""Compiles the kernels for a GPU that need not be there, and prints their PTX as JSON; run without TRITON_INTERPRET.

``python compiled.py 90`` takes the compute capability, and after it the kernels that are left out. Arguments are
specialised as a launch on a real pool does: pointers, strides and sizes that are multiples of 16 are known to be.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier.attention.kernels import triton_checksum, triton_words, triton_write_kv
from runner.model.fused import triton_experts, triton_rope

STRIDES = ["block", "token", "head"]


def ptx(
    capability: int,
    kernel: Any,
    pointers: dict[str, str],
    sizes: dict[str, str],
    options: dict[str, int] | None = None,
    **constants: Any,
) -> str:
    """``pointers`` and ``sizes``: Triton types by argument; all but floats are multiples of 16."""
    signature = {**pointers, **sizes, **dict.fromkeys(constants, "constexpr")}
    signature = {name: signature[name] for name in kernel.arg_names}
    whole = {name for name, kind in sizes.items() if kind != "fp32"}
    aligned = [i for i, name in enumerate(kernel.arg_names) if name in pointers or name in whole]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return str(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"])


def write_kv(capability: int, new: str, pool: str, scaled: bool) -> str:
    """A layer of 8 KV heads of 128, as Llama 3.1 has; heads come first in the model's memory."""
    pointers = {"k_cache": pool, "v_cache": pool, "key": new, "value": new, "slot_mapping": "*i64"}
    constants = {"k_scale": None, "v_scale": None}
    if scaled:
        pointers |= dict.fromkeys(constants, "*fp32")
        constants = {}
    sizes = {f"{x}_{s}": "i32" for x in ("k", "v") for s in STRIDES} | {"slots": "i32"}
    sizes |= {f"{x}_{s}": "i32" for x in ("key", "value") for s in ("token", "head")}
    return ptx(
        capability,
        triton_write_kv.write_kv_kernel,
        pointers,
        sizes,
        **constants,
        key_dim=1,
        value_dim=1,
        BLOCK_TOKENS=16,
        HEADS=8,
        DIM=128,
        DIM_V=128,
        TILE_HEADS=8,
        TILE_DIM=128,
        TILE_DIM_V=128,
        QUANTIZE=pool == "*u8",
        K_SCALED=scaled,
        V_SCALED=scaled,
    )


def experts(capability: int, product: str, amount: str, packed: bool = False) -> str:
    """A product of gpt-oss-20b's experts; ``packed``: in MXFP4, as they are published."""
    tiles = getattr(triton_experts.HOPPER, amount)[product == "down"]
    cut, _ = triton_experts._cut(tiles, 2880, 256, 32, packed)
    options = {name: cut.pop(name) for name in ("num_warps", "num_stages")}
    pointers = dict.fromkeys(("x", "weight", "bias", "out"), "*bf16") | dict.fromkeys(("order", "starts"), "*i32")
    sizes = dict.fromkeys(("experts", "inner", "columns", "w_expert"), "i32")
    constants = {"EXPERTS": 32, "BIAS": True, "MXFP4": packed, **cut}
    if packed:
        pointers |= {"weight": "*u8", "scales": "*u8"}
        sizes["w_column"], constants["w_inner"] = "i32", 1
    else:
        sizes["w_inner"], constants["w_column"], constants["scales"] = "i32", 1, None
    if product == "down":
        return ptx(capability, triton_experts._down, pointers | {"share": "*bf16"}, sizes, options, **constants)
    sizes |= {"x_row": "i32", "limit": "fp32", "alpha": "fp32"}
    constants |= {"TOP_K": 4, "ACT": int(triton_experts.Act.CLAMPED), "INTERLEAVED": True}
    return ptx(capability, triton_experts._up, pointers, sizes, options, **constants)


def rope(capability: int) -> str:
    """gpt-oss-20b's."""
    strides = [f"{x}_{s}" for x in ("q", "k", "q_out", "k_out") for s in ("head", "token")] + ["cos_token", "sin_token"]
    pointers = dict.fromkeys(("q", "k", "cos", "sin", "q_out", "k_out"), "*bf16")
    constants = {"Q_HEADS": 64, "Q_TILE": 64, "K_HEADS": 8, "K_TILE": 8, "HALF": 32, "TILE": 32, "SECOND": 0}
    return ptx(
        capability, triton_rope._rope, pointers, dict.fromkeys(strides, "i32"), cos_angle=1, sin_angle=1, **constants
    )


def main(capability: int, *without: str) -> dict[str, str]:
    addresses = {"addresses": "*i64", "sums": "*i64"}
    tiles = {"TILE": triton_checksum.TILE_WORDS, "TILES": triton_checksum.TILES}
    return {
        "write bf16": write_kv(capability, "*bf16", "*bf16", False),
        "write fp8": write_kv(capability, "*bf16", "*u8", True),
        "words": ptx(
            capability,
            triton_words.copy_kernel,
            {"target": "*i32", "source": "*i32"},
            {"count": "i32"},
            TILE=triton_words.TILE_WORDS,
        ),
        "checksum": ptx(capability, triton_checksum.checksum_kernel, addresses, {"block_bytes": "i32"}, **tiles),
        "rope": rope(capability),
        "route": ptx(
            capability,
            triton_experts._route,
            {"ids": "*i64", "order": "*i32", "starts": "*i32"},
            {"pairs": "i32"},
            PAIRS=256,
        ),
        "sum": ptx(
            capability, triton_experts._sum, {"x": "*bf16", "out": "*bf16"}, {"columns": "i32"}, TOP_K=4, COLUMNS=1024
        ),
    } | {
        name: experts(capability, product, amount, packed)
        for product in ("up", "down")
        for amount in ("few", "many")
        for packed in (False, True)
        if (name := f"{product}, {amount}" + (", mxfp4" if packed else "")) not in without
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])))
