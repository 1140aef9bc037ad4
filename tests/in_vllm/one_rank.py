"""A copy engine with a rank that fails.

Imports nothing of kvtier at first: vLLM unpickles it in its workers before they can bear numba.
"""

from __future__ import annotations

from typing import Any


def fails_on_rank_1(memory: Any) -> Any:
    """``threads``, but every second load fails on rank 1."""
    from kvtier.cpu_offload.engines import Outcome
    from kvtier.cpu_offload.engines.threads import ThreadsEngine
    from kvtier.cpu_offload.transfer import Direction, Transfer

    class Failing(ThreadsEngine):
        num_loads = 0

        def _copy(self, transfer: Transfer) -> Outcome:
            from vllm.distributed import get_tensor_model_parallel_rank

            if transfer.direction is Direction.LOAD and get_tensor_model_parallel_rank() == 1:
                self.num_loads += 1
                if self.num_loads % 2 == 0:
                    return Outcome(transfer.ticket, "planted: failed on one rank")
            return super()._copy(transfer)

    return Failing(memory)
