"""Modules that run as fewer kernels."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "fused_trial_sees_nothing",
        "",
        "kernels that give other numbers serve the model",
        "kernels/fused",
        ("fused.experts.differs", "found <= _TOLERANCE[dtype]", "found <= 1e9"),
    ),
    mutation(
        "rows_of_a_norm_lie_where_others_do",
        "I24",
        "a head of one token is divided by the root mean square of another's",
        "kernels/fused",
        ("normed", "i, j = row // inner, row % inner", "i, j = row % inner, row // inner"),
    ),
    mutation(
        "halves_of_a_head_have_the_same_angles",
        "I24",
        "a model with an angle for each number of a head answers with other positions",
        "kernels/fused",
        ("turned", "d = c + _U(strides[5])", "d = c"),
    ),
    mutation(
        "a_gate_s_trial_speaks_for_layers_with_other_numbers",
        "",
        "a sparse layer of Gemma 3n is served as a dense one",
        "kernels/gates",
        ("fused.gates.kind", "isinstance(value, int | float | str)", "isinstance(value, bytes)"),
    ),
    mutation(
        "a_gate_is_read_from_the_other_half",
        "I24",
        "a model's feed-forward layers multiply the other half with its own activation",
        "kernels/gates",
        ("gated", "gate = x[g + i]", "gate = x[n + i]"),
    ),
    mutation(
        "a_row_alone_is_summed_otherwise",
        "",
        "an answer depends on whether others run beside it",
        "kernels/packed",
        ("onednn_product", "rows >= least", "rows >= 0"),
    ),
    mutation(
        "the_last_row_of_a_product_s_tile_is_another_one_s",
        "I24",
        "a request gets the logits of the one beside it if their number is odd",
        "kernels/packed",
        (
            "products._turned",
            "turn(columns + _BYTES * (at + j * size), source + _BYTES * (at + j), k, real, size)",
            "turn(columns + _BYTES * (at + j * size), source + _BYTES * (at + j), k, max(real - 1, 1), size)",
        ),
    ),
    mutation(
        "a_product_s_second_part_has_the_first_one_s_weights",
        "I24",
        "layers of more than 1,024 inputs multiply half of them with other weights",
        "kernels/packed",
        ("multiplied", "panel * k + inner", "panel * k"),
    ),
    mutation(
        "a_packed_weight_lies_in_another_one_s_room",
        "",
        "a layer multiplies with numbers of the next one",
        "kernels/packed",
        (
            "fused.room._Room.take",
            "self.left[:numbers], self.left[size:]",
            "self.left[:numbers], self.left[size // 2 :]",
        ),
    ),
    mutation(
        "a_tied_weight_is_let_go",
        "",
        "the embedding of a model with a tied head is gone",
        "kernels/packed",
        ("fused.table.fuse", "users[layer.weight.data_ptr()] == 1", "users[layer.weight.data_ptr()] >= 1"),
    ),
    mutation(
        "mxfp4_of_another_dtype_is_cast",
        "I24",
        "scales that are numbers become other exponents, and the model answers with other weights",
        "families/mxfp4",
        ("mxfp4.damage", 'found[0] != "U8"', 'found[0] == ""'),
    ),
    mutation(
        "an_expert_s_last_rows_are_left_out",
        "",
        "tokens beyond an expert's first tile get what lay in memory",
        "kernels/fused",
        ("_cut", "min(pairs, pairs // tiles.rows + experts)", "min(pairs, experts)"),
    ),
    mutation(
        "the_halves_of_a_byte_are_swapped",
        "",
        "a checkpoint in MXFP4 is read as other weights",
        "kernels/mxfp4",
        ("mxfp4.unpacked", "[blocks & 15, blocks >> 4]", "[blocks >> 4, blocks & 15]"),
    ),
    mutation(
        "each_step_of_a_product_takes_the_first_scales",
        "",
        "weights in MXFP4 beyond the first 256 of a column have the scales of others",
        "kernels/mxfp4",
        ("_product", "ss += INNER // 32 * columns", "ss += 0"),
    ),
    mutation(
        "a_recorded_step_is_not_compared",
        "I24",
        "a recording that lacks something serves the model",
        "served/recorded",
        ("RecordedSteps.forward", "not _same_bits(found, expected)", "found is None"),
    ),
    mutation(
        "what_a_module_keeps_is_a_weight",
        "I24",
        "each step computes with a tensor of the step that was recorded",
        "served/recorded",
        ("Recorder._written", "id(value) not in self._weights", "value is None"),
    ),
    mutation(
        "hooks_of_modules_are_forgotten",
        "",
        "who looks into a module sees nothing from the eighth step on",
        "served/recorded",
        (
            "RecordedSteps.forward",
            'self._problem or not self.is_on or self._parts.have_hooks or torch.is_autocast_enabled("cpu")',
            "self._problem",
        ),
    ),
    mutation(
        "weights_that_were_replaced_go_on_being_used",
        "I24",
        "prompts are computed with new weights, and answers with old ones",
        "served/recorded",
        ("RecordedSteps.forward", "not self._parts.are_same", "False"),
    ),
    mutation(
        "sizes_that_depend_on_values_are_recorded",
        "I24",
        "experts that had no token in the recorded step never get one",
        "served/recorded",
        (
            "_Operations.__torch_dispatch__",
            "not _BY_VALUES.isdisjoint(func.tags) and not _is_gather(func, args)",
            "False",
        ),
    ),
)
