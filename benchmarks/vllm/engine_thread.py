"""``PYTHONPATH=. PYTHON -m benchmarks.vllm.engine_thread RUNNING``: what the vLLM of PYTHON does beside the forward.

Its real scheduler and its real ``OutputProcessor`` for requests that decode, with tokens given, no detokenization, and
statistics on. CPU microseconds a step of one thread, as JSON. ``schedule`` and ``update_from_output`` are of the
engine's process, ``process_outputs`` is of the frontend's. What carries outputs between the two is not in it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import numpy as np

from benchmarks.vllm import shapes

STEPS, WARM_UP = 100, 20
PROMPT_TOKENS = 600


def scheduler(running: int) -> Any:
    """vLLM's own, on full attention without a connector."""
    from vllm.v1.structured_output import StructuredOutputManager

    config = shapes.engine_config(1 << 17, running, 8192 + running, None)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=shapes.cache_config(config, shapes.SHAPES["Llama-3.1-8B"]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=shapes.BLOCK_TOKENS,
        hash_block_size=shapes.BLOCK_TOKENS,
        log_stats=True,
    )


def requests(running: int) -> tuple[list[Any], list[Any]]:
    """The scheduler's requests, and the frontend's of the same."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

    hash_of = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hash_of)
    hasher = kv_cache_utils.get_request_block_hasher(shapes.BLOCK_TOKENS, hash_of)
    mine, theirs = [], []
    for k in range(running):
        tokens = np.random.default_rng(k).integers(0, 100_000, PROMPT_TOKENS + k % 16).tolist()
        params = SamplingParams(
            max_tokens=10**5, temperature=0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        mine.append(Request(f"{k}", tokens, params, None, block_hasher=hasher))
        theirs.append(
            EngineCoreRequest(
                request_id=f"{k}",
                prompt_token_ids=tokens,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                external_req_id=f"{k}",
            )
        )
    return mine, theirs


def main(running: int) -> dict[str, float]:
    """Microseconds by part."""
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.metrics.stats import IterationStats
    from vllm.v1.outputs import ModelRunnerOutput

    books, frontend = scheduler(running), OutputProcessor(None, log_stats=True)
    mine, theirs = requests(running)
    queues = []
    for ours, other in zip(mine, theirs, strict=True):
        queues.append(RequestOutputCollector(other.sampling_params.output_kind, request_id=other.request_id))
        frontend.add_request(other, None, queue=queues[-1])
        books.add_request(ours)
    spent = defaultdict[str, list[float]](list)

    def step() -> int:
        clock = [time.thread_time()]
        made = books.schedule()
        clock.append(time.thread_time())
        names = list(made.num_scheduled_tokens)
        known = [books.requests[name] for name in names]
        sampled = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in known]
        ran = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        clock.append(time.thread_time())
        outputs = books.update_from_output(made, ran)
        clock.append(time.thread_time())
        for of_client in outputs.values():
            frontend.process_outputs(of_client.outputs, time.monotonic(), IterationStats())
        clock.append(time.thread_time())
        for queue in queues:
            queue.get_nowait()
        parts = ("schedule", "", "update_from_output", "process_outputs")
        for part, begun, ended in zip(parts, clock, clock[1:], strict=False):
            spent[part].append(1e6 * (ended - begun))
        return sum(map(len, sampled))

    while step() < running:
        pass
    for _ in range(WARM_UP):
        step()
    spent.clear()
    for _ in range(STEPS):
        step()
    return {part: statistics.median(of) for part, of in spent.items() if part}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
