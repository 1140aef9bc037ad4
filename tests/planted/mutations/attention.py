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
        "fa3_is_not_counted_before_a_prompt_comes",
        "I24",
        "its wrappers find no memory once pools have taken it",
        "attention/flashinfer_fa3",
        ("FlashInfer.kinds", "self._prompts.expected if self._prompts else set()", "set()"),
    ),
    mutation(
        "k_scale_not_folded",
        "I24",
        "scores of scaled keys are off by their scale",
        "attention/fp8 families/fp8",
        ("_attend", "fold_query(query.float(), k_scale)", "query.float()"),
    ),
    mutation(
        "each_query_of_a_short_prompt_sees_all_of_it",
        "I24",
        "tokens attend to the ones after them",
        "attention/decode",
        ("plan_pieces", "tokens - n + i + 1", "tokens"),
    ),
    mutation(
        "latents_have_a_scale_of_their_own",
        "I24",
        "scores of absorbed queries are off by the scale of the family's heads",
        "attention/flashinfer_latents",
        ("LatentKey.plan", "self.scale", "(self.rank + self.rotated) ** -0.5"),
    ),
    mutation(
        "latents_read_to_the_end_of_their_page",
        "I15 I24",
        "a stale tail of the last page is attended to",
        "attention/flashinfer_latents",
        (
            "LatentKey.plan",
            "pages * self.block_tokens + indices.kv_last_page_len",
            "(pages + 1) * self.block_tokens",
        ),
    ),
    mutation(
        "latents_heads_are_not_padded",
        "I24",
        "a tile's last query loses a visible key, or the step is refused amid a prompt",
        "attention/flashinfer_latents",
        ("padded_heads", "1 << (heads - 1).bit_length()", "heads"),
    ),
    mutation(
        "latents_and_rotated_keys_share_a_scale",
        "I24",
        "scores over 8-bit latents are wrong",
        "attention/flashinfer_latents",
        (
            "FlashInfer.attend_latent",
            "fold_query(query[..., rank:], v_scale)",
            "fold_query(query[..., rank:], k_scale)",
        ),
    ),
    mutation(
        "picked_rows_are_those_of_another_layer",
        "I24",
        "what an index has picked is read from the next block's rows",
        "attention/flashinfer_latents served/flashinfer_latents",
        ("FlashInfer.attend_picked", "slots // block_tokens * every[0]", "(slots // block_tokens + 1) * every[0]"),
    ),
    mutation(
        "what_comes_later_is_picked",
        "I24",
        "the first tokens of a text attend to tokens behind them",
        "served/flashinfer_latents",
        ("OneRequest._attend_picked", "min(n, picked.shape[2])", "picked.shape[2]"),
    ),
)
