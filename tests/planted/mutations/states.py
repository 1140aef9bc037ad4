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
