"""States of recurrent layers, latents, and the roles of places."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "states_where_prompts_part_are_not_kept",
        "S4",
        "others who part there compute what somebody has computed",
        "core/states",
        ("row_state.takes", "min(want - span[r, g, 1], np.int64(2)) + _partings(span, g, r, want)", "np.int64(2)"),
    ),
    mutation(
        "no_state_stays_shortly_before_a_prompt_s_end",
        "S4",
        "who parts there computes all of a long text again",
        "core/coordinator/shorts",
        ("Keeping._keep_short", "course.told.add(course.short)", "pass"),
    ),
    mutation(
        "states_of_earlier_turns_stay_until_they_are_old",
        "S4",
        "each conversation has several states that nobody goes on from",
        "core/coordinator/shorts",
        (
            "Retention.cool_states",
            "self._pools.release(groups[there], blocks[there], cold=True)",
            "self._pools.release(groups[there], blocks[there])",
        ),
    ),
    mutation(
        "state_is_cut_one_token_early",
        "S2",
        "a findable state lacks its last token",
        "core/states core/audit/states",
        ("exports._fill_states", "(j + 1) * bt", "(j + 1) * bt - 1"),
    ),
    mutation(
        "state_goes_back_to_where_it_came_from",
        "S3",
        "a state that others find is overwritten by the next token",
        "core/states core/audit/states",
        (
            "exports._fill_states",
            "entry[n], end[n], target[n] = k, b, table[_U(at + last)]",
            "entry[n], end[n], target[n] = k, b, table[_U(at + max(np.int64(0), (a - 1) // bt))]",
        ),
    ),
    mutation(
        "parting_in_the_step_being_made_is_forgotten",
        "S4",
        "prompts that come at once share nothing",
        "core/states",
        ("Coordinator.keep_state", "self.tables.gaps(seq.row, boundary) if self.tables.has_states else ()", "()"),
    ),
    mutation(
        "mixer_begins_each_segment_anew",
        "",
        "what a prompt's piece has computed before a cut is lost",
        "families/states families/logits",
        ("runner.model.states._run", "source = segment.target", "source = step.source[k]"),
    ),
    mutation(
        "single_tokens_take_their_neighbours_state",
        "",
        "a request decodes on with another one's state",
        "families/logits",
        (
            "runner.model.states._run",
            "[step.source[k] for k in single], [step.segments[k][0].target for k in single]",
            "[step.source[k] for k in single[::-1]], [step.segments[k][0].target for k in single]",
        ),
    ),
    mutation(
        "state_of_a_hit_is_read_at_the_next_boundary",
        "S1",
        "a request goes on from a block that it has not written yet",
        "core/states core/audit/states",
        (
            "exports._fill_states",
            "table[_U(at + (a - 1) // bt)]",
            "table[_U(at + a // bt)]",
        ),
    ),
    mutation(
        "states_where_prompts_part_are_named_and_not_written",
        "S2",
        "a state is findable by arithmetic: its block has what was there before",
        "core/states core/audit/states",
        ("exports._fill_states", "range(a // bt, last)", "range(max(a // bt, last - 1), last)"),
    ),
    mutation(
        "a_parting_is_kept_one_boundary_late",
        "S2 S4",
        "others who part there find nothing",
        "core/states",
        ("block_table._spread", "np.int64(t.span[r, g, c]) - 1", "np.int64(t.span[r, g, c])"),
    ),
    mutation(
        "a_gap_is_taken_for_a_state_by_a_step",
        "S5 I16",
        "a step writes to the null block",
        "core/states core/audit/states",
        ("exports._fill_states", "table[_U(at + j)] != 0", "table[_U(at + j)] >= 0"),
    ),
    mutation(
        "a_gap_is_taken_for_a_state_by_names",
        "S5 I13",
        "the null block is findable",
        "core/states",
        ("seals.seal_range", "table[_U(at + j)] == 0", "table[_U(at + j)] < 0"),
    ),
    mutation(
        "rows_that_pad_a_step_write_to_the_null_block",
        "S8",
        "who goes on from nothing goes on from what a padded row has left",
        "core/states",
        ("States.padded", "np.full_like(null, spare)", "np.zeros_like(null)"),
    ),
    mutation(
        "rows_that_pad_a_step_write_to_a_block_of_the_pool",
        "S8",
        "a padded row writes over a request's state",
        "core/states",
        ("Step.spare", "int(self._tables.pools.layout.rows[g])", "int(self._tables.pools.layout.rows[g]) - 1"),
    ),
    mutation(
        "what_a_failed_request_has_computed_is_sealed_first",
        "S6",
        "a state that is not finite is findable and stored for a moment",
        "core/states served/states",
        ("Running.advance", 'reason == "error"', 'reason == "failed"'),
    ),
    mutation(
        "states_of_a_chunk_may_be_nonsense",
        "S6",
        "a prompt's chunk leaves a state that is not finite, and others find it",
        "served/states",
        ("runner.model.states._is_finite", "all(bool(state.isfinite().all()) for state in states)", "True"),
    ),
    mutation(
        "a_mixer_forgets_what_its_convolution_saw",
        "",
        "the first tokens after a hit are computed as if nothing was before them",
        "families/states families/logits",
        (
            "runner.model.states._Call.read",
            "[tensor[at] for tensor in self._tensors]",
            "[tensor[at] * (part.name[:4] != 'conv') for part, tensor in zip(self._parts, self._tensors, strict=True)]",
        ),
    ),
    mutation(
        "rotated_keys_take_the_scale_of_latents",
        "I24",
        "scores over 8-bit latents are wrong",
        "families/latents",
        ("reference.attend_latent", "query[..., rank:].float() * v_scale", "query[..., rank:].float() * k_scale"),
    ),
    mutation(
        "names_forget_roles",
        "I14 S2",
        "two models that use their places otherwise share a namespace",
        "remote/names",
        (
            "names._named",
            "[[role, *place] for role, place in places.items()]",
            "[[*place] for place in places.values()]",
        ),
    ),
)
