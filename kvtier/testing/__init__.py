"""For engines that embed kvtier: a canary engine that notices any wrong slot, and a simulated copy engine."""

from kvtier.cpu_offload.engines.simulated import Faults, SimulatedEngine
from kvtier.testing.canary import CanaryEngine, canary_spec, expected_tokens

__all__ = ["CanaryEngine", "Faults", "SimulatedEngine", "canary_spec", "expected_tokens"]
