"""A step's arrays, and what is counted."""

from __future__ import annotations

from .base import CACHE, CONNECTOR, EXPORTS, LOOPS, PLAN, SCHEDULER, Mutation, core, regressions

_STEPS = (
    Mutation(
        "last_page_len_off_by_one",
        EXPORTS,
        "heads[g, 2, e] = b - last * bt",
        "heads[g, 2, e] = b % bt",
        "a full last page has length 0",
        "I15",
        core("step"),
    ),
    Mutation(
        "slot_mapping_off_by_one",
        EXPORTS,
        "slots[row_of, n + i] = first + position + np.int64(i)",
        "slots[row_of, n + i] = first + j * bt + (position + np.int64(i) + 1) % bt",
        "KV of prompts is written one slot further",
        "I15 I16",
        core("step"),
    ),
    Mutation(
        "positions_off_by_one",
        PLAN,
        "positions[_U(at)] = start\n",
        "positions[_U(at)] = start + 1\n",
        "decodes are computed at the position of the next token",
        "I24",
        (*core("step"), *regressions("f_stale_block_ids")),
    ),
    Mutation(
        "positions_forget_the_hit",
        PLAN,
        "positions[_U(at) + i] = start + np.int64(i)",
        "positions[_U(at) + i] = np.int64(i)",
        "a prompt that hits is computed at positions from 0 on",
        "I24",
        (*core("step"), *regressions("c_resume_computes_only_the_rest")),
    ),
    Mutation(
        "chunk_of_a_prompt_is_sampled",
        PLAN,
        "if end == state[r, _TOTAL]:\n            sample[sampled] = k",
        "if end >= state[r, _TOTAL] - 1:\n            sample[sampled] = k",
        "a token is sampled one before the end of the prompt",
        "I24",
        (*core("step"), *regressions("d_block_multiples")),
    ),
    Mutation(
        "virtual_batch_reaches_into_the_next_chunk",
        EXPORTS,
        "return min(end, (start // span + 1) * span)",
        "return min(end, ((start + 1) // span + 1) * span)",
        "queries of two chunks come as one entry",
        "I15",
        core("step"),
    ),
)

_NUMBERS = (
    Mutation(
        "stored_blocks_count_failed_ones",
        CONNECTOR,
        "self.counts.stored_blocks += int(good.sum())",
        "self.counts.stored_blocks += len(good)",
        "blocks that never arrived are counted as stored",
        "I25",
        core("connector", "stats"),
    ),
    Mutation(
        "computed_tokens_count_hits",
        SCHEDULER,
        'self.prompt_tokens["computed"] += prompt - sum(seq.cached_tokens.values())',
        'self.prompt_tokens["computed"] += prompt',
        "prompt tokens by source do not add up",
        "I25",
        core("stats"),
    ),
    Mutation(
        "eviction_not_counted",
        LOOPS,
        "        meta[g, _N_EVICTED] += 1\n",
        "        meta[g, _N_EVICTED] += 0\n",
        "a counter stays at 0",
        "I25",
        core("stats"),
    ),
    Mutation(
        "close_leaves_threads",
        CACHE,
        "if self._connector.close(CLOSE_TIMEOUT_S):",
        "if self._connector.num_live == 0:",
        "the copy engine's threads outlive the cache",
        "I28",
        core("cache"),
    ),
    Mutation(
        "close_keeps_the_memory",
        CACHE,
        "            if self._host_arena is not None:\n                self._host_arena.free()\n",
        "",
        "a closed cache keeps its host tier's memory",
        "I28",
        core("cache"),
    ),
)

MUTATIONS = (
    *_STEPS,
    *_NUMBERS,
)
