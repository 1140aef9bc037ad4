"""For engines that embed kvtier: a canary engine that notices any wrong slot, and simulated devices and copy engines.

from kvtier.testing import CanaryEngine, SimulatedDevice, canary_spec, expected_tokens

device = SimulatedDevice(seed=1)
cache = KVCache(canary_spec({"full": (FullAttention(), 4)}), device_blocks=..., copy_engine=device.engine)
done = CanaryEngine(cache, device=device).run(Scheduler(cache), requests)   # texts: expected_tokens(...)
assert device.missing_edges == []
"""

from kvtier.cpu_offload.engines.simulated import Faults, SimulatedEngine
from kvtier.testing.canary import CanaryEngine, canary_spec, expected_tokens
from kvtier.testing.device import SimulatedDevice

__all__ = ["CanaryEngine", "Faults", "SimulatedDevice", "SimulatedEngine", "canary_spec", "expected_tokens"]
