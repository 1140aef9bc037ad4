"""Serves a workload with vLLM's own scheduler and prefix cache; answers are forced. Runs where vLLM is installed.

Layers are grouped, and the number of blocks is found, by vLLM's own functions. With a host memory its own
``OffloadingConnector`` keeps content there; no byte is copied.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from benchmarks.hits.child import Found, Sizes, answer_all
from benchmarks.hits.shapes import Local, Shape
from benchmarks.hits.workloads import Ask
from benchmarks.vllm.shapes import engine_config
from benchmarks.vllm.simulated import CONNECTORS, OFFLOADING, WORKERS
from runner.bench.replay.order import Order

PATIENCE = 8
"""Steps without a token after which the oldest request counts as one that can never run."""


@cache
def _hasher(block_tokens: int) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    hash_of = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hash_of)
    return kv_cache_utils.get_request_block_hasher(block_tokens, hash_of)


def specs(shape: Shape, block_tokens: int) -> dict[str, Any]:
    """vLLM's spec of each layer, in bfloat16."""
    import torch
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

    common: dict[str, Any] = {"block_size": block_tokens, "num_kv_heads": shape.num_kv_heads}
    common |= {"head_size": shape.head_dim, "dtype": torch.bfloat16}
    layers = {f"model.layers.{i}.self_attn.attn": FullAttentionSpec(**common) for i in range(shape.full_layers)}
    for i in range(shape.full_layers, shape.full_layers + shape.local_layers):
        local = (
            SlidingWindowSpec(**common, sliding_window=shape.span_tokens)
            if shape.local is Local.WINDOW
            else ChunkedLocalAttentionSpec(**common, attention_chunk_size=shape.span_tokens)
        )
        layers[f"model.layers.{i}.self_attn.attn"] = local
    return layers


class Engine:
    """Its scheduler, and a model runner that says the given tokens."""

    def __init__(self, shape: Shape, block_tokens: int, sizes: Sizes, at_once: int, step_tokens: int) -> None:
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.structured_output import StructuredOutputManager

        transfer = None
        if sizes.host_bytes:
            transfer = {"kv_role": "kv_both", **CONNECTORS[OFFLOADING](sizes.host_bytes)}
        config = engine_config(1, at_once, step_tokens, transfer)
        config.cache_config.block_size = block_tokens
        config.cache_config.num_gpu_blocks_override = None
        groups = kv_cache_utils.get_kv_cache_groups(config, specs(shape, block_tokens))
        found = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, sizes.device_bytes)
        found = kv_cache_utils.generate_scheduler_kv_cache_config([found])
        config.cache_config.num_gpu_blocks = found.num_blocks
        self.settings = {
            "layers_by_group": [len(group.layer_names) for group in groups],
            "num_blocks": found.num_blocks,
            "prefix_cache_retention_interval": getattr(
                config.cache_config, "prefix_cache_retention_interval", "not there"
            ),
            "disable_hybrid_kv_cache_manager": config.scheduler_config.disable_hybrid_kv_cache_manager,
            "connector": OFFLOADING if transfer else None,
        }
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=found,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            hash_block_size=block_tokens,
            log_stats=False,
        )
        self._hasher = _hasher(block_tokens)
        self.ran = self.computed_tokens = 0
        self._worker = WORKERS[OFFLOADING]() if transfer else None
        self._brought: dict[str, int] = {}
        if transfer:
            self.scheduler.connector.update_state_after_alloc = self._told(
                self.scheduler.connector.update_state_after_alloc
            )

    def _told(self, call: Callable[..., None]) -> Callable[..., None]:
        def told(request: Any, blocks: Any, num_external_tokens: int) -> None:
            call(request, blocks, num_external_tokens)
            self._brought.setdefault(request.request_id, num_external_tokens)

        return told

    def add(self, name: str, ask: Ask) -> Any:
        """vLLM's request."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id=name,
            prompt_token_ids=ask.prompt.tolist(),
            sampling_params=SamplingParams(max_tokens=len(ask.answer), ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def abandon(self, name: str) -> None:
        """Of a request that can never run."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def step(self, answers: dict[str, Any]) -> dict[str, tuple[int, int]]:
        """By request that runs for the first time, tokens that it has found on the device and in the host's memory.

        ``ran``: how many requests ran.
        """
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        moved = None
        if self._worker is not None:
            ended, meta = self._worker.run(output.kv_connector_metadata)
            moved = KVConnectorOutput(finished_recving=ended or None, kv_connector_worker_meta=meta)
        said = [
            [int(answers[name][request.num_output_tokens])] if request.num_computed_tokens >= request.num_tokens else []
            for name, request in zip(names, requests, strict=True)
        ]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=said,
                kv_connector_output=moved,
            ),
        )
        self.ran, self.computed_tokens = len(names), self.computed_tokens + output.total_num_scheduled_tokens
        brought = {new.req_id: self._brought.get(new.req_id, 0) for new in output.scheduled_new_reqs}
        new = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        return {name: (new[name] - brought[name], brought[name]) for name in new}


def serve(
    asked: Sequence[Ask],
    shape: Shape,
    block_tokens: int,
    sizes: Sizes,
    at_once: int = 1,
    queued: int = 0,
    step_tokens: int = 2048,
) -> Found:
    """``at_once``: requests that run at a time; ``queued``: others that wait in the engine meanwhile."""
    engine = Engine(shape, block_tokens, sizes, at_once, step_tokens)
    order, running, idle = Order(asked, at_once + queued), dict[str, Any](), 0
    hits: dict[str, tuple[int, int]] = {}
    found = Found(settings=engine.settings)
    while order:
        for k in order.begin():
            running[str(k)] = engine.add(str(k), asked[k])
        hits |= engine.step({name: asked[int(name)].answer for name in running})
        idle = 0 if engine.ran else idle + 1
        if idle >= PATIENCE:
            oldest, idle = next(iter(running)), 0
            engine.abandon(oldest)
            hits[oldest] = 0, 0
            found.failed += 1
        for name in [name for name, request in running.items() if request.is_finished()]:
            del running[name]
            order.end(int(name))
            found.prompt_tokens += len(asked[int(name)].prompt)
            for tier, count in zip(found.tiers, hits.pop(name), strict=True):
                found.tiers[tier] += count
    found.computed_tokens = engine.computed_tokens
    return found


def versions() -> dict[str, Any]:
    """Of what answers here."""
    from importlib.metadata import version

    import vllm

    return {"vllm": vllm.__version__, "torch": version("torch"), "python": sys.version.split()[0]}


if __name__ == "__main__":
    import logging

    logging.disable(logging.WARNING)
    answer_all(serve, versions())
