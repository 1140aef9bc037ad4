"""For engines that embed kvtier: a canary engine that notices any wrong slot, and simulated devices and copy engines.

An example:

    from kvtier import FullAttention, KVCache, Request, Scheduler
    from kvtier.testing import CanaryEngine, SimulatedDevice, canary_spec, expected_tokens

    spec, device = canary_spec({"full": (FullAttention(), 4)}), SimulatedDevice(seed=1)
    cache = KVCache(spec, device_blocks={"full": 8}, host_blocks={"full": 64}, copy_engine=device.engine)
    canary, scheduler = CanaryEngine(cache, device=device), Scheduler(cache)
    for k in range(8):  # four prompts, each twice: the pool holds two, so that they come back from the host
        prompt = list(range(100 * (k % 4), 100 * (k % 4) + 13))
        done = canary.run(scheduler, [Request(f"r{k}", prompt, 3)])
        assert done[f"r{k}"].token_ids == expected_tokens(spec, prompt, 3)
    assert cache.stats().transfers.loaded_blocks > 0
    assert device.missing_edges == []
"""

from kvtier.cpu_offload.engines.simulated import Faults, SimulatedEngine
from kvtier.testing.canary import CanaryEngine
from kvtier.testing.device import SimulatedDevice
from kvtier.testing.faulty import FaultyLink
from kvtier.testing.oracle import canary_spec, expected_tokens

__all__ = [
    "CanaryEngine",
    "Faults",
    "FaultyLink",
    "SimulatedDevice",
    "SimulatedEngine",
    "canary_spec",
    "expected_tokens",
]
