"""A step's arrays, what is counted, close, and what watches over tests."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "virtual_batch_reaches_into_the_next_chunk",
        "I15",
        "queries of two chunks come as one entry",
        "core/coordinator/step",
        ("_next_end", "start // span", "(start + 1) // span"),
    ),
    mutation(
        "late_copies_know_what_the_host_has_learned_since",
        "I17",
        "a submission thread that gives a stream its copy unordered is taken for one that the host has ordered",
        "model/device_orders",
        (
            "run_due",
            """
            with self._device.knowing(late.known):
                late.job()
            """,
            "late.job()",
        ),
    ),
    mutation(
        "last_page_len_off_by_one",
        "I15",
        "a full last page has length 0",
        "core/coordinator/step",
        ("_fill_pages", "b - last * bt", "b % bt"),
    ),
    mutation(
        "slot_mapping_off_by_one",
        "I15 I16",
        "KV of prompts is written one slot further",
        "core/coordinator/step",
        ("_fill_slots", "first + position + np.int64(i)", "first + j * bt + (position + np.int64(i) + 1) % bt"),
    ),
    mutation(
        "positions_off_by_one",
        "I24",
        "decodes are computed at the position of the next token",
        "core/coordinator/step regressions/f_stale_block_ids",
        ("fill_step", "positions[_U(at)] = start", "positions[_U(at)] = start + 1"),
    ),
    mutation(
        "padding_on_the_first_block",
        "I15",
        "the null rows of a captured graph read somebody's block",
        "core/coordinator/step model/what_the_canary_must_see",
        ("padded", "np.zeros", "np.ones"),
    ),
    mutation(
        "twin_swap_without_a_new_version",
        "I15",
        "an exported row still names the block that a twin has replaced",
        "core/pools/block_pool core/pools/eviction_order",
        ("seal_block", "t.state[r, _VERSION] += 1", "pass"),
    ),
    mutation(
        "seen_row_not_noted",
        "I15",
        "an entry takes another row's block table for its own",
        "core/coordinator/step regressions/f_stale_block_ids",
        (
            "_fill_tables",
            "seen_row[k, 0], seen_row[k, 1] = r, state[r, _VERSION]",
            "seen_row[k, 1] = state[r, _VERSION]",
        ),
    ),
    mutation(
        "room_for_sampled_tokens_off_by_one",
        "I24",
        "the 65th token of a request is written to another one's text",
        "core/coordinator/lifecycle core/coordinator/outgrowing core/coordinator/scheduler",
        (
            "Running.advance",
            "self._most_generated >= tables.arrays.generated.shape[1]",
            "self._most_generated > tables.arrays.generated.shape[1]",
        ),
    ),
    mutation(
        "stored_blocks_count_failed_ones",
        "I25",
        "blocks that never arrived are counted as stored",
        "core/cpu_offload/connector core/stats",
        ("Ends.store", "int(good.sum())", "len(good)"),
    ),
    mutation(
        "close_keeps_the_memory",
        "I28",
        "a closed cache keeps its host tier's memory",
        "core/cache",
        ("MemoryGuard.close", "arena.free()", "pass"),
    ),
    mutation(
        "close_leaves_threads",
        "I28",
        "the copy engine's threads outlive the cache",
        "core/cache",
        ("MemoryGuard.close", "self._engine.close(timeout_s)", "True"),
    ),
    mutation(
        "memory_is_freed_under_a_copy_that_has_not_ended",
        "I28",
        "a copy that goes on after its cache is gone writes memory that belongs to others",
        "model/what_checks_must_see",
        ("_stop", "KEPT.append((engine, memory))", "del memory"),
    ),
    mutation(
        "audit_of_counts_overlooks_requests_that_wait",
        "I30",
        "an engine that asks has_work() leaves waiting requests for ever, and no audit of counters says so",
        "core/audit/run",
        (
            "check_counts",
            "running or waiting or under_way or unreported or driver.step",
            "running or under_way or unreported or driver.step",
        ),
    ),
    mutation(
        "canary_does_not_poison_behind_a_text",
        "I15",
        "what a block held before stays behind a text, and may be the very tokens that somebody reads too early",
        "model/what_the_canary_must_see",
        ("_compute", "poison_tails(words, work.tables[g], work.of[g].ends, work.poison)", "pass"),
    ),
)
