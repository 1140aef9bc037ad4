"""A host tier for an engine that owns its device memory, its block ids, its keys and its scheduler.

Owns       its books (``HostBooks``) and its bytes (``HostBytes``).
Promises   what they promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.engines.by_name import MakesEngine
from kvtier.cpu_offload.outside import OutsideGroup
from kvtier.host_books import HostBooks
from kvtier.host_bytes import HostBytes, memory_bytes
from kvtier.host_plan import HostPlan
from kvtier.options import seconds

if TYPE_CHECKING:
    import torch


class HostTier(HostBooks):
    """Host memory behind an engine's own device memory. See ``examples/own_memory.py``.

    ``groups``        how the engine's blocks lie in its memory.
    ``memory``        the engine's: uint8 [bytes], a NumPy array or a torch tensor, on a CPU or a GPU.
    ``host_memory``   bytes, an int or text such as "64GiB".
    ``verify``        "full": a checksum per stored block, checked after each load before it is reported.
    ``deadline_s``    seconds after which a copy is given up.
    ``copy_engine``   as ``KVCache``'s.

    Raises ``ConfigError`` and ``MemoryUnavailable``.
    """

    def __init__(
        self,
        groups: Sequence[OutsideGroup],
        memory: npt.NDArray[np.uint8] | torch.Tensor,
        host_memory: str | int,
        verify: str = "full",
        deadline_s: float = 30.0,
        copy_engine: MakesEngine | str | None = None,
    ) -> None:
        limit = seconds(deadline_s, "deadline_s")
        plan = HostPlan(groups, memory_bytes(memory), host_memory, verify)
        self._bytes = HostBytes(plan, memory, copy_engine)
        try:
            super().__init__(plan, self._bytes.engine, limit)
        except BaseException:
            self._bytes.close()
            raise

    def close(self) -> None:
        """Ends all copies, in 30 s at most, and gives the host memory back, unless a copy may still write there.

        Called again, it looks again, for a moment, if memory could not be given back. From any thread.
        """
        self._parts.is_closed = True
        self._connector.wake()
        self._bytes.close()

    def __enter__(self) -> HostTier:
        self._parts.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
