"""Two tiers at a model's real block size, and the engine between them."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow
from kvtier.cpu_offload.engines.cuda.driver import CudaApi
from kvtier.cpu_offload.engines.cuda.host_memory import HostMemory
from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime, DeviceSums
from kvtier.cpu_offload.engines.streams import StreamsEngine
from kvtier.cpu_offload.engines.submission import SubmissionThreads
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.geometry.layout import Layout
from kvtier.pools.arena import Arena

TOKENS = 90_112
GROUPS = {
    "gpt-oss-20b": GroupSpec("full", FullAttention(), 12, 8, 64),
    "gpt-oss-20b window": GroupSpec("window", SlidingWindow(128), 12, 8, 64),
    "Gemma-3-12B": GroupSpec("full", FullAttention(), 8, 8, 256),
    "Gemma-3-12B window": GroupSpec("window", SlidingWindow(1024), 40, 8, 256),
    "Llama-4 Scout": GroupSpec("full", FullAttention(), 12, 8, 128),
    "Llama-4 Scout chunk": GroupSpec("chunk", ChunkedLocal(8192), 36, 8, 128),
    "Llama-3.1-8B": GroupSpec("full", FullAttention(), 32, 8, 128),
}
"""The groups of the models of docs/adr/0016; bf16, blocks of 16 tokens."""

Ids = npt.NDArray[np.int32]


def layout(count: int, contiguous: float, seed: int = 0) -> tuple[Ids, Ids]:
    """(device, host) ids 1..count in token order; a share ``contiguous`` of the blocks follow their predecessor in both
    tiers, the rest lie anywhere.
    """
    rng = np.random.default_rng(seed)
    cuts = np.flatnonzero(rng.random(count - 1) >= contiguous) + 1
    pieces = np.split(np.arange(count), cuts)

    def placed() -> Ids:
        order = rng.permutation(len(pieces)) if contiguous < 1.0 else np.arange(len(pieces))
        lengths = np.array([len(piece) for piece in pieces])
        starts = np.empty(len(pieces), np.int64)
        starts[order] = np.cumsum([0, *lengths[order][:-1]])
        return np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).astype(np.int32) + 1

    return placed(), placed()


class Rig:
    """``count`` blocks of one group in either tier, on a device and in pinned memory that several rigs share."""

    def __init__(
        self,
        group: GroupSpec,
        count: int,
        pinned: HostMemory,
        api: CudaApi,
        device: str,
        sums: DeviceSums | None = None,
    ) -> None:
        spec = CacheSpec([group])
        layout = Layout.fixed([spec.groups[0].block_bytes], [count])
        self.device, self.host = Arena(spec, layout, device), Arena(spec, layout, "cpu")
        self.device.allocate("device_blocks")
        self.host.use(pinned.array[: self.host.num_bytes])
        self.runtime = CudaRuntime(api, pinned.starts, sums)
        memory = TierMemory(self.device, self.host, verify=sums is not None)
        self.engine = StreamsEngine(memory, self.runtime, SubmissionThreads(self.runtime.bind_thread))
        self.block_bytes = group.block_bytes
        self._tickets = 0

    def transfer(self, direction: Direction, device: Ids, host: Ids) -> Transfer:
        """A transfer of these blocks."""
        self._tickets += 1
        keys, groups = np.zeros((len(device), 2), np.uint64), np.zeros(len(device), np.int32)
        return Transfer(self._tickets, direction, groups, device, host, keys, len(device) * self.block_bytes, 0)

    def seconds(self, *transfers: Transfer) -> float:
        """From the first ``submit`` until the host has seen the last of them end."""
        left, begun = len(transfers), time.perf_counter()
        for transfer in transfers:
            self.engine.submit(transfer)
        while left:
            for outcome in self.engine.poll():
                if outcome.error:
                    raise RuntimeError(outcome.error)
                left -= 1
            if left:
                self.engine.wait(1.0)
        return time.perf_counter() - begun

    def close(self) -> None:
        """Ends the engine and gives the device's memory back; the pinned memory is somebody else's."""
        self.engine.close(30.0)
        self.device.free()
        self.host.free()
