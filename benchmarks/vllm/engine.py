"""The real engine, in this process: back to back prompts, and the bytes that the host tier stores for their hits.

Each engine has a process of its own (``in_new_process``): vLLM cannot be started twice in one.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.vllm import tiny

BLOCK_TOKENS = 32
CHUNK_TOKENS = 2048
TEXT_TOKENS = 16
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def in_new_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of ``work(*arguments)``."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def prompt_blocks(num_tokens: int) -> int:
    """Device blocks that a prompt and its text take: one full group, and five groups with a window."""
    full = -(-(num_tokens + TEXT_TOKENS) // BLOCK_TOKENS)
    windowed = -(-(min(num_tokens, tiny.WINDOW + CHUNK_TOKENS)) // BLOCK_TOKENS) + 1
    return full + 5 * windowed


def start(folder: Path, max_tokens: int, num_blocks: int, host_memory: str | None) -> Any:
    """vLLM's ``LLM`` of the tiny model, with kvtier's connector if there is ``host_memory``."""
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    from vllm import LLM

    connector = {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_memory": host_memory, "deadline_s": 60},
    }
    return LLM(
        model=str(tiny.save(folder, max_tokens)),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=max_tokens,
        max_num_batched_tokens=CHUNK_TOKENS,
        max_num_seqs=4,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=num_blocks,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=True,
        seed=0,
        disable_log_stats=False,
        **({"kv_transfer_config": connector} if host_memory else {}),
    )


def ask(llm: Any, prompt: Sequence[int]) -> dict[str, Any]:
    """Greedy text of ``TEXT_TOKENS`` tokens, with the time to its first one."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=TEXT_TOKENS, ignore_eos=True, detokenize=False)
    begun, cpu = time.perf_counter(), time.process_time()
    (answer,) = llm.generate([{"prompt_token_ids": list(prompt)}], parameters, use_tqdm=False)
    return {
        "ttft_s": answer.metrics.first_token_latency,
        "wall_s": time.perf_counter() - begun,
        "cpu_s": time.process_time() - cpu,
        "hit_tokens": answer.num_cached_tokens,
        "text": list(answer.outputs[0].token_ids),
    }


def books_of(llm: Any) -> Any:
    """kvtier's books in the engine's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.books


def back_to_back(num_tokens: int, host_memory: str | None) -> dict[str, Any]:
    """S0, S1, S0 in a device pool of one and a half prompts, after a short prompt that warms the engine up."""
    with tempfile.TemporaryDirectory() as folder:
        num_blocks = prompt_blocks(num_tokens) * 3 // 2
        llm = start(Path(folder), num_tokens + 2 * BLOCK_TOKENS, num_blocks, host_memory)
        for _ in range(2):  # the second one loads, so that copies are warm as well
            ask(llm, tiny.prompt(9, 4 * CHUNK_TOKENS))
            _forget_device(llm)
        answers = [ask(llm, tiny.prompt(seed, num_tokens)) for seed in (0, 1, 0)]
        return {"num_blocks": num_blocks, "answers": answers}


def _forget_device(llm: Any) -> None:
    """Empties vLLM's own prefix cache, and leaves the host tier's content."""
    llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.reset_prefix_cache()


def stored(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """For two prompts of each length: bytes that kvtier stores, bytes of all their blocks, and the hits that follow.

    "All blocks" are every full block of the prompt and of its text but the last token's, in every group: what a tier
    stores that does not know at which boundaries hits can end.
    """
    with tempfile.TemporaryDirectory() as folder:
        longest = max(lengths)
        llm = start(Path(folder), longest + 2 * BLOCK_TOKENS, 2 * prompt_blocks(longest), "1GiB")
        rows = []
        for num_tokens in lengths:
            books, before = books_of(llm), books_of(llm).stats().transfers.stored_bytes
            cold = [ask(llm, tiny.prompt(10 * num_tokens + seed, num_tokens)) for seed in range(2)]
            ask(llm, tiny.prompt(num_tokens, BLOCK_TOKENS - TEXT_TOKENS - 1))  # its steps report the last ends
            num_bytes = books.stats().transfers.stored_bytes - before
            _forget_device(llm)
            warm = [ask(llm, tiny.prompt(10 * num_tokens + seed, num_tokens)) for seed in range(2)]
            _forget_device(llm)
            full = (num_tokens + TEXT_TOKENS - 1) // BLOCK_TOKENS
            rows.append(
                {
                    "prompt_tokens": num_tokens,
                    "stored_bytes": num_bytes,
                    "all_blocks_bytes": 2 * full * sum(group.block_bytes for group in books.spec.groups),
                    "hit_tokens": [answer["hit_tokens"] for answer in warm],
                    "texts_equal": [a["text"] for a in warm] == [a["text"] for a in cold],
                }
            )
        return rows
