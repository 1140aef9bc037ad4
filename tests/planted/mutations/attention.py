"""Attention, kernels and 8-bit K and V."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "attention_window_one_wider",
        "I24",
        "window_left is inclusive: a query sees one token too many, of a block that may be another's",
        "attention/flashinfer",
        ("_plan_key", "group.attention.span_tokens - 1", "group.attention.span_tokens"),
    ),
    mutation(
        "attention_stale_plan",
        "I15",
        "a step runs the plan of an earlier one",
        "attention/flashinfer_plans attention/flashinfer",
        (
            "eager",
            "ring[turn].plan(owner, indices, self._split_kv)",
            """
            if ring[turn].owner is None:
                ring[turn].plan(owner, indices, self._split_kv)
            ring[turn].owner = weakref.ref(owner)
            """,
        ),
    ),
    mutation(
        "attention_plan_overwritten_in_flight",
        "I17",
        "planning changes the bytes of a plan whose copy to the device is queued",
        "attention/flashinfer_plans",
        ("plan", "self.planned.synchronize()", "pass"),
    ),
    mutation(
        "attention_pages_out_of_reach_allowed",
        "I15",
        "a page before the window, which may be another's by now, is read",
        "attention/flashinfer_refusals",
        ("_unreachable", "bounds.block_tokens", "2 * bounds.block_tokens"),
    ),
    mutation(
        "attention_old_flashinfer_taken",
        "I23",
        "a FlashInfer is used that reads indices nobody wrote",
        "attention/choice",
        ("too_old", "release(version) >= OLDEST", "True"),
    ),
    mutation(
        "kernel_writes_the_null_block",
        "I16",
        "null rows of a captured graph write to the null block",
        "kernels/write_kv",
        ("write_kv_kernel", "slot >= BLOCK_TOKENS", "slot >= 0"),
    ),
    mutation(
        "kernel_writes_past_the_pool",
        "I16 I22",
        "a slot past the pool writes into the next group's",
        "kernels/write_kv",
        ("write_kv_kernel", "(slot >= BLOCK_TOKENS) & (slot < slots)", "slot >= BLOCK_TOKENS"),
    ),
    mutation(
        "e4m3_rounds_half_up",
        "I24",
        "ties do not go to the even mantissa",
        "kernels/write_kv",
        ("to_e4m3", "clamped - 0x3C000000 + 0x7FFFF + ((clamped >> 20) & 1)", "clamped - 0x3C000000 + 0x80000"),
    ),
    mutation(
        "checksum_without_positions",
        "I29",
        "words that have changed places are not noticed",
        "kernels/checksum",
        ("checksum", "key += golden", "key = golden"),
    ),
    mutation(
        "fa3_without_a_trial",
        "I24",
        "prompts are attended by kernels that give other numbers here",
        "attention/flashinfer_fa3",
        ("_differs", "found <= _TOLERANCE", "found <= 1e9"),
    ),
    mutation(
        "k_scale_not_folded",
        "I24",
        "scores of scaled keys are off by their scale",
        "attention/fp8 families/fp8",
        ("_attend", "fold_query(query.float(), k_scale)", "query.float()"),
    ),
)
