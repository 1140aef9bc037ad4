"""What is found, under which name, and who is told."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "min_instead_of_intersection",
        "I11",
        "a boundary that one group lowers is not checked again in those before it",
        "core/coordinator/match",
        ("_match", "geometry[g, _KIND] == _FULL", "geometry[g, _KIND] == _FULL or (n < full and g < limiter)"),
    ),
    mutation(
        "hit_covers_the_whole_prompt",
        "I11",
        "nothing is left to compute, so there are no logits",
        "regressions/d_block_multiples core/coordinator/match",
        ("match", "num_tokens - 1", "num_tokens"),
    ),
    mutation(
        "pending_counts_as_ready",
        "I13 I17",
        "a block that a load still writes is hit",
        "regressions/g_matched_host_blocks_stay core/cpu_offload/connector",
        ("_probe", "b != 0 and d.blocks[_U(d.meta[g, _BASE] + b)].mark == _PENDING", "False"),
    ),
    mutation(
        "window_off_by_one",
        "I11 I15",
        "the oldest token that a window sees is given up",
        "core/coordinator/step regressions/f_stale_block_ids",
        ("first_position", "position - span + 1", "position - span + 2"),
    ),
    mutation(
        "anchor_released_before_it_is_sealed",
        "I11",
        "window blocks of the last boundary are gone when the request ends",
        "core/coordinator/anchors core/coordinator/match",
        ("_let_windows_go", "(end - 1) // hit_tokens * hit_tokens", "end"),
    ),
    mutation(
        "key_without_salt",
        "I14",
        "tenants share content",
        "core/keys",
        (
            "root",
            'encoded_fields(("adapter", adapter), ("salt", salt), ("extra", tuple(extra_keys)))',
            'encoded_fields(("adapter", adapter), ("extra", tuple(extra_keys)))',
        ),
    ),
    mutation(
        "key_compared_without_its_low_word",
        "I14 I21",
        "half of a key is enough for a hit",
        "core/pools/block_pool core/pools/eviction_order",
        ("locate", "block.low == low and block.high == high", "block.high == high"),
    ),
    mutation(
        "chunk_named_before_it_is_computed",
        "I13",
        "a block is published that the chunk has not filled",
        "regressions/d_block_multiples core/cache core/coordinator/budgets core/coordinator/service_order",
        (
            "seal_prefill",
            "self.tables.seal(row, g, computed // bt, end // bt, seq.keys)",
            """
            stop = min(known // bt, int(t.hi[g, row]))
            self.tables.seal(row, g, computed // bt, stop, seq.keys)
            """,
        ),
    ),
    mutation(
        "sampled_token_published_before_its_forward",
        "I13",
        "the last sampled token counts as computed, so its block is published with a slot that nobody wrote",
        "regressions/d_block_multiples field/c_stream_order",
        (
            "advance._append",
            "state[r, _TOTAL] += 1",
            """
            state[r, _TOTAL] += 1
            state[r, _COMPUTED] += state[r, _TOTAL] >= state[r, _LIMIT]
            """,
        ),
    ),
    mutation(
        "tail_length_of_a_power_of_two_only",
        "I14",
        "with blocks of 6 tokens, decodes lose tokens of their keys",
        "core/coordinator/match core/coordinator/anchors core/fuzz",
        ("_modulo", "divisor & (divisor - 1)", "divisor & 1"),
    ),
    mutation(
        "event_of_a_block_that_changed_hands_missed",
        "I25",
        "content whose block was taken over stays in the router's books",
        "core/events",
        (
            "changed_keys",
            "is_ready != ready[i] or (is_ready and (block.low != keys[i, 0] or block.high != keys[i, 1]))",
            "is_ready != ready[i]",
        ),
    ),
    mutation(
        "a_log_of_changes_that_has_run_over_is_believed",
        "I25",
        "after a burst, routers miss what was pushed out first",
        "core/events",
        ("events._Seen.poll", "since < 0 or now - since > meta[g, Col.LOG_MASK] + 1", "since < 0"),
    ),
    mutation(
        "evictions_are_not_in_the_log_of_changes",
        "I25",
        "routers send requests to content that is gone",
        "core/events",
        ("pool_loops.evict", "changes += 1", "pass"),
    ),
    mutation(
        "content_that_has_arrived_is_not_in_the_log_of_changes",
        "I25",
        "routers never hear of what a load has brought",
        "core/events",
        ("ready_batch", "log_change(p, groups[k], ids[k])", "pass"),
    ),
    mutation(
        "moved_blocks_are_not_in_the_log_of_changes",
        "I25",
        "a block's old place keeps its key in the router's books",
        "core/events",
        ("rename", "log_change(p, g, old)", "pass"),
    ),
)
