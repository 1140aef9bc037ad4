"""Mistakes in kvtier/capacity.py: what requests take, and how many of them fit."""

from __future__ import annotations

from .base import LAYOUT, Mutation, core

CAPACITY = "kvtier/capacity.py"
TESTS = core("capacity")

MUTATIONS = (
    Mutation(
        "held_window_off_by_one",
        CAPACITY,
        "return tuple(group.blocks_needed(num_tokens, num_tokens) for",
        "return tuple(group.blocks_needed(max(0, num_tokens - 1), num_tokens) for",
        "what a request holds includes a token that no later one sees",
        "I6",
        TESTS,
    ),
    Mutation(
        "running_without_the_next_token",
        CAPACITY,
        "group.blocks_needed(num_tokens, num_tokens + 1)",
        "group.blocks_needed(num_tokens, num_tokens)",
        "the next token has no block",
        "I6",
        TESTS,
    ),
    Mutation(
        "peak_of_an_aligned_window",
        CAPACITY,
        "(span - 1 + step_tokens + bt - 1)",
        "(span - 1 + step_tokens)",
        "a window that does not begin with a block takes one more",
        "I6",
        TESTS,
    ),
    Mutation(
        "peak_of_a_step_within_a_chunk",
        CAPACITY,
        "(span - 1 + step_tokens) // bt",
        "max(span, step_tokens) // bt",
        "a step that begins at the end of a chunk holds two",
        "I6",
        TESTS,
    ),
    Mutation(
        "stored_without_the_second_anchor",
        CAPACITY,
        " | _anchor(group, max(0, num_tokens - 1) // unit * unit)",
        "",
        "the same tokens sent again need an anchor before the last one",
        "I6",
        TESTS,
    ),
    Mutation(
        "hit_that_is_no_multiple",
        CAPACITY,
        "hit = num_tokens // spec.hit_tokens * spec.hit_tokens",
        "hit = num_tokens",
        "a hit ends where a block of every group does",
        "I6",
        TESTS,
    ),
    Mutation(
        "no_slab_for_null_blocks",
        LAYOUT,
        "num_slabs = (num_bytes - null) // slab",
        "num_slabs = num_bytes // slab",
        "the null blocks take a slab",
        "I22",
        core("layout"),
    ),
    Mutation(
        "slabs_with_few_divisors",
        LAYOUT,
        "*_multiples(sizes), *_divisors(sizes, num_bytes)]",
        "*_multiples(sizes)]",
        "pools of many groups do not share an arena, or blocks are padded by half",
        "I22",
        core("layout"),
    ),
    Mutation(
        "slabs_of_several_groups",
        CAPACITY,
        "[-(-n // per_slab) for n, per_slab in",
        "[n // per_slab for n, per_slab in",
        "a slab that is begun serves no other group",
        "I22",
        TESTS,
    ),
    Mutation(
        "last_request_as_the_others",
        CAPACITY,
        "[(n - 1) * a + b for a, b in",
        "[n * a for a, b in",
        "the request that is admitted last still has to run its prompt",
        "I6",
        TESTS,
    ),
    Mutation(
        "last_request_is_free",
        CAPACITY,
        "[(n - 1) * a + b for a, b in",
        "[(n - 1) * a for a, b in",
        "in fixed pools the last request takes room as well",
        "I6",
        TESTS,
    ),
)
