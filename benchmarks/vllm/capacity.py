"""How many tokens of prompts a host tier of the same bytes can bring back: kvtier's beside vLLM's own connectors'.

vLLM's real scheduler stores distinct prompts of one length through each connector, more of them than the tier can
hold; no bytes are copied (``simulated``). Layers are grouped by vLLM's own function. Then each prompt is asked for
again, with one more token, the newest first: capacity is the sum of the tokens that the connector offers. In short
prompts most of the bytes are the windows'.

The three differ in what they store, and in the bytes that a stored block takes:

* kvtier takes a block's own bytes, and stores window blocks at boundaries where hits end.
* ``SimpleCPUOffloadConnector`` takes the same bytes for each group's block: those of the largest group.
* ``OffloadingConnector`` takes the bytes of the device memory per block id, as its issue 56871 says. With groups that
  share memory, as here, these are the largest group's as well; with groups side by side they are the sum of all.

``side_by_side_tokens`` is that worst case: what is left of ``OffloadingConnector``'s capacity if each of its rows has
room for a block of every group. It is computed, not run: these two models do not get such a layout from vLLM.
"""

from __future__ import annotations

import random
from typing import Any

from benchmarks.vllm.shapes import BLOCK_TOKENS, SHAPES, Shape
from benchmarks.vllm.simulated import CONNECTORS, OFFLOADING, Simulated

PROMPT_TOKENS = (4096, 32_768)
HOST_BYTES = 64 << 30
NUM_BLOCKS = 20_000


def measure(model: str, num_tokens: int, host_bytes: int) -> list[dict[str, Any]]:
    """A row for each connector."""
    shape = SHAPES[model]
    layer_bytes = 2 * shape.num_kv_heads * shape.head_dim * 2
    most = host_bytes // (shape.windowed.count(False) * layer_bytes * num_tokens) + 2
    rng = random.Random(0)
    prompts = [rng.choices(range(512), k=num_tokens) for _ in range(most)]
    return [_row(model, shape, name, host_bytes, prompts) for name in CONNECTORS]


def _row(model: str, shape: Shape, name: str, host_bytes: int, prompts: list[list[int]]) -> dict[str, Any]:
    engine = Simulated(name, shape, NUM_BLOCKS, host_bytes)
    for i, prompt in enumerate(prompts):
        engine.add(f"p{i}", prompt, 1)
        engine.finish()
    engine.forget_device()
    hits = [engine.offered(f"q{i}", [*prompts[i], 0]) for i in reversed(range(len(prompts)))]
    groups = [len(group.layer_names) for group in engine.cache_config.kv_cache_groups]
    row = {
        "model": model,
        "connector": name,
        "host_gib": host_bytes >> 30,
        "layers_by_group": groups,
        "prompt_tokens": len(prompts[0]),
        "prompts": len(prompts),
        "whole_hits": sum(hit >= len(prompts[0]) - BLOCK_TOKENS for hit in hits),
        "tokens": sum(hits),
    }
    if name == OFFLOADING:
        row["side_by_side_tokens"] = sum(hits) * max(groups) // sum(groups)
    return row


def run(quick: bool) -> list[dict[str, Any]]:
    """Both models."""
    host_bytes = HOST_BYTES // 8 if quick else HOST_BYTES
    models, lengths = ("Gemma-3-27B", "gpt-oss-120b"), PROMPT_TOKENS
    return [row for model in models for length in lengths for row in measure(model, length, host_bytes)]
