"""An engine's memory beside weights and pools; it counts in the memory given to ``LLM``.

Promises   pools and their users stay within the given memory. Users are the attention's workspaces, captured decode
           steps, a step's index arrays, and transfers' staging. Each is an upper bound, known before the pools are
           built.
Does not   count the memory that a forward computes with.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from kvtier import CacheSpec, ConfigError, DeviceUnavailable, MemoryUnavailable
from kvtier.attention.flashinfer import RING, Held
from kvtier.cpu_offload.engines.cuda import device_sums
from kvtier.cpu_offload.engines.cuda.link import check_software
from kvtier.geometry.sizing import fixed_blocks, parse_bytes
from runner.model import graphs

Memory = str | int | Mapping[str, int]

AUTO_SHARE = 0.9
"""Share of free GPU memory that the pools take by default. The host tier takes a quarter of free RAM, as does the
device tier on a CPU."""

STEPS_ALIVE = RING + 1
"""Steps whose arrays are held: the steps that wrappers are planned for, and the next step."""
ROUNDED_UP = 2
"""Pinned memory comes in powers of two (torch's allocator): less than this many times the requested
size."""
OUTGROWN = 2
"""Pinned buffers are kept per power of two, so growing requests leave up to twice the final size."""


def index_arrays(
    spec: CacheSpec,
    device_memory: Memory,
    max_running: int,
    max_batched_tokens: int,
    max_tokens: int | None,
    captures: bool,
) -> Held:
    """FlashInfer's inputs of steps beside the pools: page lists, int32, and slots, int64, as large as they can be.

    ``max_tokens``: of a request; None: all that the pool holds. Longer requests, which no model is made for, may take
    more.
    """
    rows, tokens = max_running, max(max_batched_tokens, max_running)
    kept = STEPS_ALIVE * ROUNDED_UP * OUTGROWN
    held = [
        Held(graphs.bucket_bytes(rows, len(spec.groups)), kept * graphs.FILLED_BYTES * rows) if captures else Held(0, 0)
    ]
    for group, blocks in zip(spec.groups, _most_blocks(spec, device_memory, "device_memory"), strict=True):
        decodes = 4 * graphs.most_pages(group, blocks, rows, max_tokens)
        chunks = 4 * (tokens // group.block_tokens + rows)  # more that rows see while they compute a chunk
        step = decodes + chunks + 4 * (3 * (rows + tokens // group.block_tokens) + 2) + 8 * tokens
        held.append(Held(STEPS_ALIVE * step + (decodes if captures else 0), kept * step))
    return total(*held)


def staging(spec: CacheSpec, host_memory: Memory, verifies: bool) -> Held:
    """Memory that a GPU's transfers hold while they are under way: of all blocks of the host tier, at once.

    The bound is no smaller if the device has fewer blocks. A device block may be in a store and, once its next writer
    is ordered behind the store, in the next transfer. A host block is in one transfer at a time. The target of a store
    is not found until the store has ended. The source of a load is looked for on the device from then on, where it is
    under way. Given-up and reset content is found in neither tier while a copy may still read or write it.
    """
    found = _most_blocks(spec, host_memory, "host_memory")
    blocks = sum(found) if isinstance(host_memory, Mapping) else max(found)  # in bytes, groups share them
    if not blocks or not verifies:
        return Held(0, 0)
    on_device, pinned = device_sums.most_bytes(blocks, max(group.block_bytes for group in spec.groups))
    return Held(on_device, _kept(pinned, device_sums.WORD_BYTES))


def _kept(num_bytes: int, smallest: int) -> int:
    """Pinned memory that comes to be held for buffers of ``smallest`` bytes or more, ``num_bytes`` in all at once.

    First there may be many buffers of the smallest power of two, then fewer of the next, and so on to a single one.
    Each power keeps its largest amount.
    """
    powers = (num_bytes - 1).bit_length() - (smallest - 1).bit_length() + 1 if num_bytes >= smallest else 0
    return powers * ROUNDED_UP * num_bytes


def total(*held: Held) -> Held:
    """All of them together."""
    return Held(sum(one.device_bytes for one in held), sum(one.pinned_bytes for one in held))


def _most_blocks(spec: CacheSpec, memory: Memory, setting: str) -> list[int]:
    """Blocks that each group can have at most."""
    if isinstance(memory, Mapping):
        return fixed_blocks(spec, memory, setting)
    num_bytes = parse_bytes(memory, setting)
    return [num_bytes // group.block_bytes for group in spec.groups]


@contextmanager
def named_as_given() -> Iterator[None]:
    """Renames ``KVCache``'s settings to device_memory and host_memory, which the caller knows."""
    try:
        yield
    except (ConfigError, DeviceUnavailable, MemoryUnavailable) as problem:
        text = re.sub(r"\b(device|host)_(bytes|blocks)\b", r"\1_memory", str(problem))
        raise type(problem)(text) from problem


def pool_sizes(device_memory: Memory, host_memory: Memory, held: Held) -> dict[str, Any]:
    """The sizes for ``KVCache``: without the memory held beside the pools, unless they are blocks by name or 0.

    Raises ``MemoryUnavailable`` if nothing is left, ``ConfigError`` for text that is no size.
    """
    return _size("device", device_memory, held.device_bytes) | _size("host", host_memory, held.pinned_bytes)


def _size(tier: str, memory: Memory, taken: int) -> dict[str, Any]:
    if isinstance(memory, Mapping):
        return {f"{tier}_blocks": memory}
    asked = parse_bytes(memory, f"{tier}_memory")
    if 0 < asked <= taken:
        raise MemoryUnavailable(
            f"{tier}_memory is {asked:,} bytes, and what serves the pools (FlashInfer's workspaces, CUDA graphs, index "
            f"arrays, copies under way) takes {taken:,}; raise {tier}_memory, lower max_running or set "
            "cuda_graphs=False (each captured size of decode steps has workspaces of its own), or use "
            "attention='reference'"
        )
    return {f"{tier}_bytes": asked - taken if asked else 0}


def automatic_device(device: torch.device) -> int:
    """Bytes for the device when the caller names none."""
    if device.type != "cuda":
        return _quarter_of_ram()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * AUTO_SHARE)


def automatic_host(device: torch.device) -> int:
    """Bytes for the host tier when the caller names none."""
    if device.type == "cuda":
        try:
            with named_as_given():
                check_software(device.index or 0)
        except DeviceUnavailable as problem:  # the caller has not asked for a host tier, so there need not be one
            warnings.warn(f"there will be no host tier: {problem}", stacklevel=3)
            return 0
    return _quarter_of_ram()


def _quarter_of_ram() -> int:
    """A quarter of the available memory. Raises ``MemoryUnavailable`` if it is next to nothing."""
    from kvtier.machine.memory_limits import available_ram_bytes

    ram = available_ram_bytes()
    if ram < 1 << 20:
        raise MemoryUnavailable(f"only {ram:,} bytes of memory are available; give device_memory and host_memory")
    return ram // 4
