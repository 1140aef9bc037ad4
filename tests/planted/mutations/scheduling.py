"""Who is admitted, who computes how much, who gives way, and what ends."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "admission_checks_the_first_group_only",
        "I4 I6",
        "a request begins that another group has no blocks for",
        "regressions/b_all_groups_or_none",
        (
            "_find_room",
            "self._pools.fits(used + need)",
            "self._pools.fits(np.where(np.arange(len(need)) == 0, used + need, 0))",
        ),
        hangs=True,
    ),
    mutation(
        "step_checks_the_last_group_only",
        "I4 I5 I8",
        "a step is planned that a group has no blocks for, again and again",
        "regressions/b_all_groups_or_none",
        ("plan_rows", "takes |= more > 0", "takes = more > 0"),
        hangs=True,
    ),
    mutation(
        "nothing_is_promised",
        "I4 I9 I10",
        "two requests are admitted that do not fit together",
        "regressions/deadlocks",
        ("promised", "max(np.int64(0), peak_blocks(geometry, g, state[r, _TOTAL]) - own)", "np.int64(0 * own)"),
        hangs=True,
    ),
    mutation(
        "a_loading_request_is_promised_nothing",
        "I9",
        "others take the blocks that a load's request will need",
        "field/d_deadlocks regressions/deadlocks",
        ("_knows_more", "state[r, _PHASE] != _FREE", "state[r, _PHASE] > 1"),
        hangs=True,
    ),
    mutation(
        "windows_that_others_hold_too_count_as_taken",
        "I10",
        "what a prefill will need once its windows are its own is given to others",
        "core/coordinator/service_order",
        (
            "promised",
            "own, _ = drop(p, t, g, r)",
            "drop(p, t, g, r)",
        ),
    ),
    mutation(
        "window_bound_off_by_one",
        "I6",
        "a window that straddles blocks takes more than admission said",
        "core/spec",
        ("peak_blocks", "span + self.block_tokens - 1", "span"),
    ),
    mutation(
        "running_without_the_next_token",
        "I6",
        "the next token has no block",
        "core/capacity",
        ("running_blocks", "num_tokens + 1", "num_tokens"),
    ),
    mutation(
        "never_depends_on_copies_under_way",
        "I9",
        "a request is refused for ever because loads are under way",
        "core/pools/slab_room",
        ("check_possible", "capacity.room(self.pools.layout, need)", "self.pools.room(np.array(need)).tolist()"),
    ),
    mutation(
        "the_oldest_is_preempted",
        "I8 I10",
        "the first in service order gives way to a later one",
        "core/coordinator/giving_way",
        ("_answer_shortage", "self._roster.younger(seq)", "[other for other in running if other is not seq]"),
        hangs=True,
    ),
    mutation(
        "the_oldest_of_the_younger_is_preempted",
        "I10",
        "the longest waits are made longer",
        "core/coordinator/giving_way",
        ("younger", "reversed(self.running)", "self.running"),
    ),
    mutation(
        "preempted_before_it_has_run",
        "I10",
        "requests push each other out without computing a token",
        "core/coordinator/giving_way",
        (
            "_answer_shortage",
            "room.choose_victims(able, self._need)",
            "room.choose_victims(younger, self._need)",
        ),
        hangs=True,
    ),
    mutation(
        "capacity_finish_missing",
        "I7 I8",
        "a request that has outgrown the pool alone waits for ever",
        "core/coordinator/outgrowing core/coordinator/giving_way",
        (
            "_answer_shortage",
            """
            if others_may_help:
                self._entries.placed[seq.row] = 1
            else:
                self._finish(seq, "capacity")
            """,
            "self._entries.placed[seq.row] = 1",
        ),
        hangs=True,
    ),
    mutation(
        "prefills_leave_decodes_nothing",
        "I8",
        "a long prompt keeps decodes from their token",
        "core/coordinator/budgets",
        ("plan_rows", "max(np.int64(1), spare)", "max(np.int64(1), left)"),
    ),
    mutation(
        "decodes_beyond_the_blocks",
        "I4 I8",
        "a step of decodes alone is planned with blocks that are not there, again and again",
        "core/coordinator/giving_way core/coordinator/budgets core/coordinator/outgrowing "
        "core/coordinator/service_order regressions/b_all_groups_or_none",
        (
            "plan_rows",
            "fresh + prefills == 0 and decodes <= budget and fits(p.meta, len(p.slabs), total)",
            "fresh + prefills == 0 and decodes <= budget",
        ),
        hangs=True,
    ),
    mutation(
        "planned_rows_are_not_marked",
        "I5 I10",
        "a request that has its place in a step is preempted in it",
        "core/coordinator/giving_way core/coordinator/service_order core/coordinator/budgets core/fuzz",
        ("plan_running", "skip[rows[k]] = 1", "skip[rows[k]] |= 0"),
        hangs=True,
    ),
    mutation(
        "table_width_not_looked_at",
        "I5 I15",
        "a long text writes its blocks into the row after its own",
        "core/coordinator/outgrowing core/coordinator/scheduler core/coordinator/lifecycle",
        ("plan_running", "ready = ready and longest <= (geometry[g, _WIDTH] - 1) * geometry[g, _BT]", "pass"),
    ),
    mutation(
        "windows_go_on_a_token_late",
        "I6",
        "a window holds a block more than admission counted, for a step",
        "core/coordinator/anchors core/coordinator/match core/coordinator/service_order core/coordinator/giving_way",
        ("advance", "place == 0 and (end - 1) % hit_tokens == 0", "place == 1 and (end - 1) % hit_tokens == 1"),
    ),
    mutation(
        "windows_go_on_only_while_prefilling",
        "I6",
        "a row that decodes keeps all that has left its window",
        "core/coordinator/anchors core/coordinator/match core/coordinator/service_order core/coordinator/giving_way",
        ("advance", "prefills or (place == 0 and (end - 1) % hit_tokens == 0)", "prefills"),
    ),
    mutation(
        "long_steps_push_out_what_others_left",
        "I21",
        "what a prompt's windows borrow for one step costs the conversation that comes next",
        "core/coordinator/chunk",
        ("longest_chunk", "tokens + end - start > SHORT_STEP", "tokens + end - start > 1_000_000"),
    ),
    mutation(
        "has_work_forgets_transfers",
        "I30",
        "an engine stops while stores are under way",
        "core/coordinator/waking",
        ("Scheduler.has_work", "self._coordinator.door.num_copies > 0", "False"),
    ),
    mutation(
        "wake_up_lost_when_a_transfer_ends",
        "I30",
        "a request that waits for a transfer never looks again",
        "core/coordinator/waiting core/cpu_offload/connector core/cpu_offload/stores_in_flight",
        ("Ledger.settle", "self.num_settled += 1", "pass"),
        hangs=True,
    ),
    mutation(
        "wait_sleeps_over_a_load_that_has_landed",
        "I30",
        "an engine sleeps although its request could run",
        "core/coordinator/waiting",
        ("Scheduler.wait", "self._connector.ledger.num_settled != self._settled_seen and self.has_work()", "False"),
        hangs=True,
    ),
    mutation(
        "two_endings_are_told_true",
        "I5 I18",
        "finish and abort both answer True for one request",
        "core/coordinator/endings",
        ("end", "seq is None or seq.ending is not None", "seq is None"),
    ),
    mutation(
        "limit_off_by_one",
        "I24",
        "a token more than was asked for",
        "core/coordinator/lifecycle core/cache",
        ("advance._append", "state[r, _TOTAL] >= state[r, _LIMIT]", "state[r, _TOTAL] > state[r, _LIMIT]"),
    ),
    mutation(
        "cancelled_step_is_kept",
        "I10 I24",
        "the first request of a failed forward goes on where it was",
        "core/coordinator/lifecycle",
        (
            "Scheduler.cancel",
            "self._preempt(seq, CANCELLED)",
            """
            if seq is not due[0]:
                self._preempt(seq, CANCELLED)
            """,
        ),
    ),
)
