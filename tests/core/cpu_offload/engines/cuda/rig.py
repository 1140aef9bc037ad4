"""A CUDA copy engine on a played driver, over two real arenas."""

from __future__ import annotations

import numpy as np
from patience import PATIENCE_S

from core.cpu_offload.engines.test_engines import SPEC, Tiers
from core.fake_cuda import FakeCuda, FakeSums
from kvtier import (
    CacheSpec,
)
from kvtier.cpu_offload.engines.cuda.host_memory import HostMemory, Registration
from kvtier.cpu_offload.engines.cuda.link import CudaEngine
from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime
from kvtier.cpu_offload.engines.submission import SubmissionThreads
from kvtier.geometry.layout import Layout

PAGE = 4096


class Rig:
    """Two tiers, a played GPU and the engine on it. The host tier is registered in pieces of ``piece_bytes``."""

    def __init__(
        self,
        verify: bool = False,
        spec: CacheSpec = SPEC,
        sizes=([6, 5], [3, 9]),
        piece_bytes: int = PAGE,
        threads: bool = True,
        paced: bool = False,
        **options,
    ) -> None:
        from kvtier.cpu_offload.tier_memory import TierMemory
        from kvtier.pools.arena import Arena

        self.cuda = FakeCuda(**options)
        self.tiers = Tiers.__new__(Tiers)
        device, host = (Arena(spec, Layout.fixed([g.block_bytes for g in spec.groups], n), "cpu") for n in sizes)
        device.allocate("device_blocks")
        pins = Registration(self.cuda.host_register, self.cuda.host_unregister)
        self.pinned = HostMemory(host.num_bytes, pins, piece_bytes=piece_bytes)
        host.use(self.pinned.array)
        self.tiers.device, self.tiers.host, self.tiers.tickets = device, host, 0
        self.tiers.memory = TierMemory(device, host, verify)
        device.bytes[:] = np.random.default_rng(0).integers(0, 256, device.num_bytes, np.uint8)
        self.cuda.device_ranges.append((device.address, device.num_bytes))
        self.runtime = CudaRuntime(
            self.cuda,
            self.pinned.starts,
            FakeSums(self.cuda) if verify else None,
            host=self.pinned.report,
            on_close=self.pinned.release,
            paced=paced,
        )
        retire = self.runtime.retire

        def retired(event: int) -> None:  # whoever waits for it from now on waits for nothing, and is told
            self.cuda.events[event] = None
            retire(event)

        self.runtime.retire = retired
        submission = SubmissionThreads(self.runtime.bind_thread) if threads else None
        self.engine = CudaEngine(self.tiers.memory, self.runtime, submission)

    def close(self) -> None:
        assert self.engine.close(PATIENCE_S)
        assert self.cuda.problems == []
        assert self.cuda.registered == {}, "a registration is left behind"
        assert self.cuda.streams == {}
        assert self.cuda.events == {}, "an event was lost"
