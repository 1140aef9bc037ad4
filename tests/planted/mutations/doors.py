"""Doors for other engines: ``HostTier`` and ``CacheManager``."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "host_tier_loads_over_what_a_store_still_reads",
        "I17",
        "a store takes bytes of another block to the host",
        "core/host_tier",
        ("HostText.load", "parts.overwrite(hit.groups, blocks)", "pass"),
    ),
    mutation(
        "host_tier_forgets_where_others_have_parted",
        "I11",
        "windows are never kept where many prompts part, so nobody hits there",
        "core/host_tier",
        ("HostText.match", "self._course.branches.add(found.full_tokens)", "pass"),
    ),
    mutation(
        "host_tier_gives_back_what_a_late_load_still_writes",
        "I18",
        "the engine uses device blocks again while an overdue load still writes there",
        "core/host_tier_damage core/host_tier",
        ("HostBooks.poll", "self._connector.ledger.is_known(ticket)", "False"),
    ),
    mutation(
        "host_tier_knows_damage_by_fragment",
        "I20",
        "a damaged block is found again, and another one is taken out instead",
        "core/host_tier_damage",
        ("FragmentEngine._by_block", "np.unique(of[outcome.bad])", "np.unique(of[outcome.bad]) * 0"),
    ),
    mutation(
        "host_tier_takes_every_hit_for_a_conversation",
        "I1",
        "what many prompts begin with is the first to go",
        "core/host_tier",
        ("Keeping.begin", "known.want(found[0])", "True"),
    ),
    mutation(
        "manager_starts_on_a_prefix_that_is_still_coming",
        "I13",
        "a sequence reads blocks that a copy still writes",
        "core/coordinator/manager",
        ("CacheManager.start", "match.pending", "False"),
    ),
    mutation(
        "host_tier_fences_by_group_where_groups_share_memory",
        "I17",
        "a writer of another group's block overtakes the store that reads it",
        "core/host_tier",
        ("_Fences.__init__", "(np.cumsum(num_blocks) - num_blocks)[shares_with]", "np.cumsum(num_blocks) - num_blocks"),
    ),
    mutation(
        "manager_starts_under_a_step",
        "I15",
        "blocks that the step under way names are moved",
        "core/coordinator/manager",
        ("CacheManager.start", 'self._check_no_step("start")', "pass"),
    ),
    mutation(
        "manager_plans_a_sequence_twice",
        "I16",
        "two entries of a step write the same slots",
        "core/coordinator/manager",
        (
            "CacheManager.plan",
            "seq.state is not State.RUNNING or entries.placed[seq.row] or not 1 <= n <= known",
            "seq.state is not State.RUNNING or not 1 <= n <= known",
        ),
    ),
    mutation(
        "manager_keeps_what_has_failed",
        "I14",
        "K and V that are wrong are found by others",
        "core/coordinator/manager",
        ("CacheManager.close", "self._coordinator.disown(seq)", "pass"),
    ),
    mutation(
        "host_tier_loads_over_what_a_load_still_writes",
        "I18",
        "two copies write the same device blocks, in no order",
        "core/bad_doors",
        ("HostText.load", "t.direction is Direction.LOAD", "False"),
    ),
    mutation(
        "host_tier_takes_two_equal_keys_of_a_text",
        "I21",
        "two host blocks have one name, and texts of others are not found",
        "core/bad_doors",
        ("joined_keys", "len(np.unique(keys, axis=0)) < len(keys)", "False"),
    ),
    mutation(
        "host_tier_drops_what_it_holds_before_it_looks_at_the_call",
        "I27",
        "a call that is refused has given up the hit",
        "core/bad_doors",
        ("HostText.match", "self._check_open()", "(self._check_open(), self.drop())"),
    ),
    mutation(
        "worker_takes_less_memory_than_its_plan",
        "I22",
        "copies go beyond the end of the engine's memory",
        "core/bad_doors",
        ("HostBytes.__init__", "size < plan.memory_bytes", "False"),
    ),
    mutation(
        "forked_child_ends_its_parents_copies",
        "I23",
        "memory is given back in a process that does not own it",
        "core/forks",
        ("MemoryGuard.on_fork", "self._is_free = self._is_elsewhere = True", "self._is_elsewhere = True"),
    ),
    mutation(
        "forked_child_waits_for_copies",
        "I18",
        "a child waits for threads that only its parent has",
        "core/forks",
        ("Core.on_fork", 'self.is_closed, self._why = True, of_another_process("this cache")', "pass"),
    ),
    mutation(
        "forked_child_frees_its_parents_memory_when_it_drops_it",
        "I23",
        "memory is given back in a process that does not own it",
        "core/forks",
        ("MemoryGuard.on_fork", "last.detach()", "pass"),
    ),
    mutation(
        "estimate_raises_what_the_engine_raises",
        "I18",
        "an engine's own function ends its step",
        "core/bad_doors",
        ("Estimate.__call__", 'self._fail(start, end, f"raised {type(problem).__name__}: {problem}")', "raise"),
    ),
)
