"""``python -m benchmarks.vllm.incident``: the incident of vllm#42085, on vLLM's own scheduler, pools and connectors.

DeepSeek-V4-Flash's groups as vLLM makes them, 7.13 GiB of KV, two prompts of 90,112 tokens one after the other in steps
of 16,384, and then the first one again. Of each, no store ends in its first ``HELD`` steps. After each step the free
list is walked. ``dense``: all blocks of windows can be found, as in the vLLM of the incident; else as vLLM has it by
default. Needs an environment with vLLM; nothing is computed and no byte is copied.
"""

from __future__ import annotations

import random
from typing import Any

from benchmarks.output import stdout
from benchmarks.vllm.shapes import DeepSeekV4Flash
from benchmarks.vllm.simulated import CONNECTORS, Simulated

BLOCKS, HOST_BYTES = 7_638, 16 << 30
"""Blocks of 1,002,240 bytes: 7.13 GiB of them."""
PROMPT_TOKENS, STEP_TOKENS = 90_112, 16_384
HELD, MOST_STEPS = 30, 500


class Held:
    """Workers whose stores end when they are told to. Loads end at once."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._kept, self.holds = worker, None, True

    def run(self, orders: Any) -> tuple[set[str], Any]:
        """As any worker's."""
        loaded, told = self._worker.run(orders)
        if told is not None:
            self._kept = told if self._kept is None else self._kept.aggregate(told)
        if self.holds:
            return loaded, None
        told, self._kept = self._kept, None
        return loaded, told


def check(pool: Any) -> str:
    """What is wrong with a pool of vLLM's: "" if nothing is."""
    queue, ids = pool.free_block_queue, list[int]()
    block = queue.fake_free_list_head.next_free_block
    while block is not queue.fake_free_list_tail and len(ids) <= len(pool.blocks):
        ids.append(block.block_id)
        block = block.next_free_block
    if not len(ids) == len(set(ids)) == queue.num_free_blocks:
        return f"{len(ids)} blocks in the free list, {len(set(ids))} of them different, {queue.num_free_blocks} counted"
    free = {block.block_id for block in pool.blocks if not block.ref_cnt and not block.is_null}
    return "" if free == set(ids) else "blocks without a reference are not those in the free list"


def run(connector: str, retention: int | None) -> str:
    """What happened, in a line."""
    try:
        engine = Simulated(connector, DeepSeekV4Flash(retention), BLOCKS, HOST_BYTES, 4, STEP_TOKENS)
    except Exception as problem:
        return f"refused at start: {type(problem).__name__}: {problem}"
    engine.worker = Held(engine.worker)
    pool = engine.scheduler.kv_cache_manager.block_pool
    rng, said = random.Random(0), list[str]()
    texts = [rng.choices(range(512), k=PROMPT_TOKENS) for _ in range(2)]
    for name, tokens in (("first", texts[0]), ("second", texts[1]), ("first again", texts[0])):
        request, steps, empty = engine.add(name, tokens, 4), 0, 0
        while not request.is_finished() and steps < MOST_STEPS:
            engine.worker.holds = steps < HELD
            before = request.num_computed_tokens
            try:
                engine.step()
            except Exception as problem:
                return f"{'; '.join(said)}; {name}: {type(problem).__name__} {problem} in step {steps}"
            steps, empty = steps + 1, empty + (request.num_computed_tokens <= before)
            if wrong := check(pool):
                return f"{'; '.join(said)}; {name}: {wrong} after step {steps}"
        found = engine.found.get(name, 0)
        ended = "" if request.is_finished() else "does not end, "
        said.append(
            f"{name}: {ended}{found} tokens found, {steps} steps, {empty} of them without a token, "
            f"{request.num_preemptions} preemptions"
        )
    return "; ".join(said)


if __name__ == "__main__":
    for each in CONNECTORS:
        for kept, retention in (("default", 0), ("dense", None)):
            stdout().print(f"{each}, {kept}: {run(each, retention)}", soft_wrap=True)
