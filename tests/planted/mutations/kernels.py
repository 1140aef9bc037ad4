"""Kernels and 8-bit K and V: which bytes are written, how they are rounded, and where scales go."""

from __future__ import annotations

from .base import KEYS, SPEC, Mutation, core

_KERNELS = "kvtier/attention/kernels"
WRITE, WRITE_TWIN = f"{_KERNELS}/triton_write_kv.py", f"{_KERNELS}/write_kv.py"
SUM, SUM_TWIN = f"{_KERNELS}/triton_checksum.py", f"{_KERNELS}/checksum.py"
HOST_SUM = "kvtier/cpu_offload/engines/_blocks.py"
FP8 = "kvtier/attention/fp8.py"
REFERENCE = "kvtier/attention/reference.py"
SCALES = "kvtier/kv_scales.py"


def kernels(*names: str) -> tuple[str, ...]:
    """Test modules of tests/kernels."""
    return tuple(f"tests/kernels/test_{name}.py" for name in names)


_SCALE_TESTS = ("tests/attention/test_fp8.py", "tests/families/test_fp8.py")

_WRITES = (
    Mutation(
        "kernel_writes_the_null_block",
        WRITE,
        "usable = (slot >= BLOCK_TOKENS) & (slot < slots)",
        "usable = (slot >= 0) & (slot < slots)",
        "null rows of a captured graph write to the null block",
        "I16",
        kernels("write_kv"),
    ),
    Mutation(
        "kernel_writes_past_the_pool",
        WRITE,
        "usable = (slot >= BLOCK_TOKENS) & (slot < slots)",
        "usable = slot >= BLOCK_TOKENS",
        "a slot past the pool writes into the next group's",
        "I16 I22",
        kernels("write_kv"),
    ),
    Mutation(
        "kernel_takes_k_strides_for_v",
        WRITE,
        "_put(v_cache, value, v_scale, token, block, offset, usable, first_head, v_block, v_token, v_head,",
        "_put(v_cache, value, v_scale, token, block, offset, usable, first_head, v_block, v_head, v_token,",
        "V of a token lies where another head's should",
        "I16",
        kernels("write_kv"),
    ),
    Mutation(
        "kernel_masks_no_heads",
        WRITE,
        "mask = (heads < tl.where(usable, HEADS, 0))[:, None] & (dims < DIM)[None, :]",
        "mask = (heads < tl.where(usable, TILE_HEADS + first_head, 0))[:, None] & (dims < DIM)[None, :]",
        "what a tile has too many heads is written over the next token",
        "I16",
        kernels("write_kv"),
    ),
    Mutation(
        "kernel_masks_no_dims",
        WRITE,
        "mask = (heads < tl.where(usable, HEADS, 0))[:, None] & (dims < DIM)[None, :]",
        "mask = (heads < tl.where(usable, HEADS, 0))[:, None] & (dims >= 0)[None, :]",
        "head sizes that are no power of two are written over the next head",
        "I16",
        kernels("write_kv"),
    ),
    Mutation(
        "kernel_scales_every_head_alike",
        WRITE,
        "tl.load(scales + heads, mask=heads < HEADS, other=1.0)[:, None]",
        "tl.load(scales + heads * 0, mask=heads < HEADS, other=1.0)[:, None]",
        "all heads take the first one's scale",
        "I24",
        kernels("write_kv"),
    ),
    Mutation(
        "kernel_swaps_the_scales_of_k_and_v",
        WRITE,
        "_put(k_cache, key, k_scale, token",
        "_put(k_cache, key, v_scale, token",
        "K is divided by V's scales",
        "I24",
        kernels("write_kv"),
    ),
    Mutation(
        "e4m3_rounds_half_up",
        WRITE,
        "+ 0x7FFFF + ((clamped >> 20) & 1)) >> 20",
        "+ 0x80000) >> 20",
        "ties do not go to the even mantissa",
        "I24",
        kernels("write_kv"),
    ),
    Mutation(
        "e4m3_does_not_saturate",
        WRITE,
        "clamped = tl.minimum(magnitude, 0x43E00000)",
        "clamped = tl.minimum(magnitude, 0x43F00000)",
        "480 and more become NaN",
        "I24",
        kernels("write_kv"),
    ),
    Mutation(
        "e4m3_forgets_nan",
        WRITE,
        "rounded = tl.where(magnitude > 0x7F800000, 0x7F, rounded)",
        "rounded = tl.where(magnitude > 0x7FFFFFFE, 0x7F, rounded)",
        "NaN becomes 448 and is never noticed",
        "I24",
        kernels("write_kv"),
    ),
    Mutation(
        "e4m3_has_no_subnormals",
        WRITE,
        "rounded = tl.where(clamped < 0x3C800000, tiny, normal)",
        "rounded = tl.where(clamped < 0x3C800000, 0, normal)",
        "small values become zero",
        "I24",
        kernels("write_kv"),
    ),
    Mutation(
        "kernel_is_annotated",
        WRITE,
        "def to_e4m3(x):",
        "def to_e4m3(x: Tensor):",
        "Triton's compiler reads annotations, its interpreter does not",
        "I24",
        kernels("compile"),
    ),
    Mutation(
        "twin_writes_the_null_block",
        WRITE_TWIN,
        "kept = (slot_mapping >= block_tokens) &",
        "kept = (slot_mapping >= 0) &",
        "without a GPU the null block is written",
        "I16",
        kernels("write_kv"),
    ),
    Mutation(
        "audited_slots_are_not_checked",
        WRITE_TWIN,
        'if audit and slot_mapping.device.type == "cpu":',
        'if audit and slot_mapping.device.type == "meta":',
        "a slot in the null block is passed over in silence where it could be reported",
        "I16",
        kernels("write_kv"),
    ),
)

_BYTES = (
    Mutation(
        "checksum_without_positions",
        HOST_SUM,
        "        key += golden\n",
        "        key = golden\n",
        "words that have changed places are not noticed",
        "I29",
        kernels("checksum"),
    ),
    Mutation(
        "checksum_without_a_mix",
        HOST_SUM,
        "        x = (x ^ (x >> half)) * mix\n        x = (x ^ (x >> half)) * mix\n",
        "        x = x * mix\n        x = x * mix\n",
        "words of which only the top bit differs may change places",
        "I29",
        kernels("checksum"),
    ),
    Mutation(
        "checksum_loses_its_last_word",
        HOST_SUM,
        "for i in range(np.uint64(count)):",
        "for i in range(np.uint64(count - 1)):",
        "the end of a block is not covered",
        "I29",
        kernels("checksum"),
    ),
    Mutation(
        "device_checksum_loses_its_tail",
        SUM,
        "mask = at < block_bytes // 8",
        "mask = at < block_bytes // 16",
        "the device covers half of a block",
        "I29",
        kernels("checksum"),
    ),
    Mutation(
        "device_checksum_counts_what_is_not_there",
        SUM,
        "total += tl.where(mask, x, 0)",
        "total += x",
        "words past the end count, as zeros with a key",
        "I29",
        kernels("checksum"),
    ),
    Mutation(
        "device_checksum_counts_from_zero",
        SUM,
        "x ^= (at + 1).to(tl.uint64) * _GOLDEN",
        "x ^= at.to(tl.uint64) * _GOLDEN",
        "host and device disagree",
        "I29",
        kernels("checksum"),
    ),
    Mutation(
        "device_checksum_of_one_part",
        SUM,
        "at = (tl.program_id(1) * TILES + tile) * TILE",
        "at = tile * TILE",
        "every program adds the first part",
        "I29",
        kernels("checksum"),
    ),
)

_SCALES = (
    Mutation(
        "k_scale_not_folded",
        REFERENCE,
        "q = fold_query(query.float(), k_scale)",
        "q = query.float()",
        "scores of scaled keys are off by their scale",
        "I24",
        _SCALE_TESTS,
    ),
    Mutation(
        "v_scale_not_folded",
        REFERENCE,
        "rows = fold_output(mixed.transpose(1, 2).reshape(-1, q.shape[1], mixed.shape[-1]), v_scale).to(query.dtype)",
        "rows = mixed.transpose(1, 2).reshape(-1, q.shape[1], mixed.shape[-1]).to(query.dtype)",
        "what attention gives is off by the values' scale",
        "I24",
        _SCALE_TESTS,
    ),
    Mutation(
        "k_scale_folded_twice",
        REFERENCE,
        "q = fold_query(query.float(), k_scale)",
        "q = fold_query(fold_query(query.float(), k_scale), k_scale)",
        "scores of scaled keys are off by their scale",
        "I24",
        _SCALE_TESTS,
    ),
    Mutation(
        "scales_of_heads_in_turn",
        FP8,
        "by_kv_head = (len(x), kv_heads, heads // kv_heads, x.shape[2])",
        "by_kv_head = (len(x), heads // kv_heads, kv_heads, x.shape[2])",
        "query heads take the scale of a KV head that they do not read",
        "I24",
        _SCALE_TESTS,
        also=(("scale[:, None, None]", "scale[:, None]"),),
    ),
    Mutation(
        "first_head_unscaled",
        FP8,
        "values = values / scale[:, None]",
        "values = torch.cat([values[:, :1], values[:, 1:] / scale[1:, None]], 1)",
        "one head is written without its scale",
        "I24",
        _SCALE_TESTS,
    ),
    Mutation(
        "quantised_without_saturation",
        FP8,
        "return values.clamp(-most, most).to(dtype)",
        "return values.to(dtype)",
        "values beyond 480 become NaN",
        "I24",
        _SCALE_TESTS,
    ),
    Mutation(
        "keys_without_scales",
        KEYS,
        "g.head_dims, g.dtype, g.kv_scales, g.block_tokens)",
        "g.head_dims, g.dtype, g.block_tokens)",
        "caches with other scales share keys",
        "I14",
        core("keys"),
    ),
    Mutation(
        "digest_without_v",
        SCALES,
        "scales = [scale for rows in (self.k, self.v) for row in rows for scale in row]",
        "scales = [scale for rows in (self.k, self.k) for row in rows for scale in row]",
        "scales that differ in V only are taken for the same",
        "I14",
        core("keys"),
    ),
    Mutation(
        "scales_are_not_checked",
        SCALES,
        "if not math.isfinite(rounded) or rounded < _SMALLEST:",
        "if not math.isfinite(rounded):",
        "zero and negative scales are taken",
        "I23",
        core("kv_scales"),
    ),
    Mutation(
        "scales_of_a_wrong_shape",
        SPEC,
        "self.kv_scales.check_shape(self.num_layers, self.num_kv_heads, where)",
        "self.kv_scales.check_shape(self.num_layers, len(self.kv_scales.k[0]), where)",
        "one scale for three heads passes, and fails in the first forward",
        "I23",
        core("kv_scales"),
    ),
    Mutation(
        "e4m3_takes_two_bytes",
        SPEC,
        '"float8_e4m3fn": 1,',
        '"float8_e4m3fn": 2,',
        "8-bit K and V take as much room as 16-bit",
        "I22",
        core("kv_scales"),
    ),
)

MUTATIONS = (
    *_WRITES,
    *_BYTES,
    *_SCALES,
)
