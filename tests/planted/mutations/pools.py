"""Pools and rows: places of blocks, the ring of cached ones, references."""

from __future__ import annotations

from .base import CACHE, LOOPS, POOL, TABLE, Mutation, core, field_bugs, regressions

_POOLS = (
    Mutation(
        "double_free_goes_unnoticed",
        LOOPS,
        "if block.refs <= 0 or b == 0:",
        "if block.refs < 0 or b == 0:",
        "a block that nobody holds is released once more",
        "I3",
        (*field_bugs("a_accounting"), *core("block_pool")),
    ),
    Mutation(
        "free_list_push_without_counter",
        LOOPS,
        "    meta[g, _FIRST_EMPTY] = b\n    meta[g, _N_EMPTY] += 1\n",
        "    meta[g, _FIRST_EMPTY] = b\n",
        "blocks leave the count of free ones for ever",
        "I1",
        core("block_pool"),
    ),
    Mutation(
        "lru_order_reversed",
        LOOPS,
        "if cold and meta[g, _TAIL] - meta[g, _HEAD] < meta[g, _RSIZE]:",
        "if not cold and meta[g, _TAIL] - meta[g, _HEAD] < meta[g, _RSIZE]:",
        "the newest content is evicted first",
        "I21",
        core("block_pool"),
    ),
    Mutation(
        "prefix_evicted_from_its_beginning",
        TABLE,
        "for j in range(span[r, g, 1] - 1, span[r, g, 0] - 1, -1):",
        "for j in range(span[r, g, 0], span[r, g, 1]):",
        "an evicted first block makes the rest of the prefix useless",
        "I21",
        core("match"),
    ),
    Mutation(
        "unfence_without_ticket_check",
        LOOPS,
        "if block.fence != ticket and block.fence != -ticket:",
        "if block.fence == 0:",
        "an old store's end clears a newer store's fence",
        "I17 I18",
        core("block_pool", "connector"),
    ),
    Mutation(
        "index_deletion_leaves_a_gap",
        LOOPS,
        "if ((slot - home) & mask) >= ((slot - hole) & mask):",
        "if ((slot - home) & mask) > ((slot - hole) & mask):",
        "keys behind a deleted one are not found any more",
        "I21",
        core("block_pool"),
    ),
    Mutation(
        "fenced_blocks_count_as_clean",
        POOL,
        "return self.arrays.meta[:, Col.EMPTY] + self.arrays.meta[:, Col.CACHED]",
        "return self.arrays.meta[:, [Col.EMPTY, Col.CACHED, Col.FENCED]].sum(axis=1)",
        "blocks that a store reads are counted on without an order",
        "I4 I17",
        core("block_pool", "stores"),
    ),
    Mutation(
        "row_not_cleared",
        TABLE,
        "            table[_U(at + j)] = 0\n        span[r, g, 0] = 0",
        "        span[r, g, 0] = 0",
        "the tail of a reused row names blocks of its last occupant",
        "I15",
        regressions("f_stale_block_ids"),
    ),
    Mutation(
        "window_block_not_nulled",
        TABLE,
        "        table[_U(at + j)] = 0\n    span[r, g, 0] = max(first, stop)",
        "    span[r, g, 0] = max(first, stop)",
        "a row names blocks that have left its window",
        "I15",
        regressions("f_stale_block_ids"),
    ),
    Mutation(
        "late_twin_merged_without_a_reference",
        TABLE,
        "        acquire(meta, blocks, ring, g, twin)\n",
        "",
        "a row uses a block that it does not hold",
        "I2",
        (*field_bugs("a_accounting"), *regressions("e_identical_prompts")),
    ),
)

_MEMORY = (
    Mutation(
        "memory_is_freed_under_a_copy_that_has_not_ended",
        CACHE,
        "_STILL_WRITTEN.append(memory)",
        "del memory",
        "a copy that goes on after its cache is gone writes memory that belongs to others",
        "I28",
        ("tests/model/test_what_checks_must_see.py",),
    ),
    Mutation(
        "held_blocks_are_not_counted_when_taken_back",
        LOOPS,
        "        meta[g, _N_HELD] -= block.place == _HELD\n        _to_free",
        "        _to_free",
        "the count of held blocks only grows",
        "I1",
        core("block_pool"),
    ),
)

MUTATIONS = (
    *_POOLS,
    *_MEMORY,
)
