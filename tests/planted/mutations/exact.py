"""Answers that depend on the cache after all, with ``exact=True``."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "a_split_begins_at_the_hit",
        "I24",
        "after a hit, sums of a query's weights are cut elsewhere than in a cold run",
        "attention/exact served/exact",
        (
            "PagedBatch._splits",
            "int(first[0]) // SPLIT * SPLIT",
            "int(first[0]) - (int(first[0]) - int(last[0])) % SPLIT",
        ),
    ),
    mutation(
        "a_piece_begins_a_tile_at_its_first_token",
        "I24",
        "the weights of a window are added up in other tiles by loops than by products",
        "attention/exact",
        ("exact.PagedBatch._splits", "lo // TILE * TILE", "lo"),
    ),
    mutation(
        "the_trial_compares_nothing",
        "",
        "a model is called exact whatever its bits are",
        "served/exact",
        ("exact.trial._difference", "not all(map(torch.equal, expected, _outcome(model, run)))", "False"),
    ),
    mutation(
        "a_router_s_rows_are_multiplied_by_torch",
        "",
        "a token's experts are chosen by other bits if it runs alone",
        "served/exact",
        ("Weights.times", "self._packed[key](x)", "F.linear(x, weight)"),
    ),
    mutation(
        "exact_and_other_blocks_have_one_name",
        "I14",
        "an exact engine takes blocks that another arithmetic has computed",
        "served/exact",
        ("service._named", "model.exact", "False"),
    ),
    mutation(
        "an_exact_state_goes_on_token_by_token",
        "I24",
        "what was decoded first and is prefilled later has other bits",
        "families/states served/exact",
        ("runner.model.states.Mixer.__call__", "state.parts[-1].name == INPUTS", "state.parts[-1].name == ''"),
    ),
    mutation(
        "an_unfinished_chunk_forgets_its_inputs",
        "I24",
        "a decode goes on from the last boundary as if nothing was since then",
        "families/states served/exact",
        (
            "Call.write_unfinished",
            "self.inputs[block, : len(inputs)] = inputs",
            "self.inputs[block, : len(inputs)] = 0",
        ),
    ),
    mutation(
        "an_unfinished_chunk_keeps_the_state_of_the_block_s_last_owner",
        "I24",
        "after a boundary a request goes on from another one's state",
        "families/states served/exact",
        ("Call.write_unfinished", "states is not None", "states is not None and not len(inputs)"),
    ),
)
