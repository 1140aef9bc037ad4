"""The host tier in two halves, and the connector that puts it into vLLM."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "vllm_blocks_that_have_left_the_table_are_stored",
        "I13",
        "a window's key names what another request has written there since",
        "integrations/vllm_connector",
        ("SchedulerSide._there.blocks_of", "at < gone[g]", "at < 0"),
    ),
    mutation(
        "vllm_writers_are_not_ordered_after_stores",
        "I17",
        "a step overwrites what a store still reads",
        "integrations/vllm_connector",
        (
            "SchedulerSide._order_writers",
            "self.books.overwrite(*map(np.concatenate, zip(*parts, strict=True)))",
            "pass",
        ),
    ),
    mutation(
        "vllm_the_targets_of_a_load_are_not_held",
        "I20",
        "a load that was given up writes into another request's blocks",
        "integrations/vllm_connector",
        ("SchedulerSide._load", "self._pool.touch(held)", "pass"),
    ),
    mutation(
        "vllm_a_reset_does_not_reach_the_workers",
        "I13",
        "a request reads what was outdated while it was loaded",
        "integrations/vllm_connector",
        ("SchedulerSide.reset", "set(self._held)", "set()"),
    ),
    mutation(
        "relay_one_worker_speaks_for_all",
        "I26",
        "another worker's copy has not ended",
        "core/relayed_books integrations/vllm_connector",
        ("RelayEngine.report", "self._partial.take_whole(self._workers)", "self._partial.take_whole(1)"),
    ),
    mutation(
        "vllm_stored_names_forget_the_workers_kernels",
        "I14 S2",
        "an engine with another layout of K reads what it cannot understand",
        "integrations/vllm_identity",
        ("identity.model_id", "[facts[rank] for rank in sorted(facts)]", "[]"),
    ),
    mutation(
        "vllm_a_worker_does_not_wipe_what_was_refused",
        "I20",
        "vLLM's attention multiplies NaN by 0",
        "core/relayed_books integrations/vllm_connector",
        (
            "HostTierWorker.poll",
            "self._wiper.poll(lambda ticket: self._under_way[ticket].transfer)",
            "self._engine.poll()",
        ),
    ),
    mutation(
        "vllm_a_requests_last_logits_are_not_looked_at",
        "I20",
        "K and V that gave no numbers are found by others",
        "integrations/vllm_connector",
        ("SchedulerSide.finished", "self._left.append(follow)", "pass"),
    ),
    mutation(
        "vllm_adapters_are_stored_by_their_path",
        "I14 S2",
        "K and V of weights that were under the same path before",
        "integrations/vllm_remote",
        ("TrackedRequest.__init__", 'getattr(request, "lora_request", None) is None', "True"),
    ),
    mutation(
        "vllm_a_store_is_opened_after_a_reset",
        "I13",
        "new weights, and the store of the old ones",
        "integrations/vllm_remote",
        ("RemoteSide.take_facts", "self._is_off", "False"),
    ),
    mutation(
        "vllm_blocks_whose_heads_lie_outside_are_copied_as_they_are_not",
        "I13",
        "a key's bytes are half of its block, and half of another one's",
        "integrations/vllm_refusals integrations/vllm_connector",
        ("geometry.geometry_of", "stride < page", "stride < 0"),
    ),
    mutation(
        "vllm_adapters_of_one_name_share_blocks",
        "I14",
        "another adapter under an old name finds the old one's K and V",
        "integrations/vllm_refusals",
        ("settings.check_engine", "(_numbers(version) or VERSIONS[1]) < ADAPTERS_BY_PATH", "False"),
    ),
    mutation(
        "vllm_the_hub_has_moved_on_and_nobody_asks",
        "I14 S2",
        "K and V of loaded weights under the name of newer ones",
        "integrations/vllm_identity",
        ("identity._folders", "len(commits) == 1", "found"),
    ),
    mutation(
        "relay_a_store_whose_source_was_written_counts",
        "I13",
        "a late store brings other content under its keys",
        "core/relayed_books",
        ("HostTierWorker.begin", "self._under_way[ticket].is_spoiled = True", "pass"),
    ),
    mutation(
        "host_tier_the_measurement_loads_first",
        "I29",
        "an engine's memory loses its content when the tier is built",
        "core/cpu_offload/engines/cuda/link",
        ("CudaLink._measure", "(STORE, LOAD)", "(LOAD, STORE)"),
    ),
)
