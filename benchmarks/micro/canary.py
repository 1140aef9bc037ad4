"""``python -m benchmarks.micro.canary``: steps a second of the canary engine, which the random walks live on.

Three groups, two tiers, four requests at a time; without audits.
"""

from __future__ import annotations

import time

from kvtier import ChunkedLocal, FullAttention, KVCache, Request, Scheduler, SlidingWindow, Step
from kvtier.testing import CanaryEngine, SimulatedDevice, canary_spec

SPEC = canary_spec(
    {"full": (FullAttention(), 4), "window": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}, num_layers=1
)


def steps_per_second(device: SimulatedDevice | None) -> float:
    """Serves 400 requests; with ``device`` its forwards and copies run on streams."""
    with KVCache(
        SPEC,
        device_blocks=dict.fromkeys(SPEC.names, 40),
        host_blocks=dict.fromkeys(SPEC.names, 80),
        copy_engine=device.engine if device is not None else "simulated",
    ) as cache:
        steps: list[Step] = []
        requests = [Request(f"{i}", [i % 5] * 12, 24) for i in range(400)]
        canary, scheduler = CanaryEngine(cache, device=device), Scheduler(cache, max_batched_tokens=32, max_running=4)
        begun = time.perf_counter()
        canary.run(scheduler, requests, each_step=steps.append)
        return len(steps) / (time.perf_counter() - begun)


def main() -> None:
    steps_per_second(None)  # compiles
    print(f"simulated copy engine: {steps_per_second(None):,.0f} steps/s")
    print(f"simulated device:      {steps_per_second(SimulatedDevice(1)):,.0f} steps/s")


if __name__ == "__main__":
    main()
