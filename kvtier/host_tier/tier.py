"""A host tier for an engine that owns its device memory, its block ids, its keys and its scheduler.

Owns       its books (``HostBooks``) and its bytes (``HostBytes``).
Promises   what they promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.engines.by_name import MakesEngine
from kvtier.geometry.options import check_identity, refuse, seconds
from kvtier.geometry.outside import OutsideGroup
from kvtier.host_tier.books import HostBooks
from kvtier.host_tier.memory import HostBytes, memory_bytes
from kvtier.host_tier.plan import HostPlan
from kvtier.remote.backends.contract import Backend
from kvtier.remote.check import check_remote
from kvtier.remote.opening import open_outside

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
    ``remote_uri``     a remote tier, such as "file:///var/kv": engines with the same groups, ``model_id`` and
                      ``key_secret`` share it (``HostText.match``).
    ``model_id``      names all that shapes the bytes of blocks, and the making of keys: weights, dtype, kernels.
    ``key_secret``    bytes that name the remote's objects, the same in all engines that share it.

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
        remote_uri: str | Backend | None = None,
        model_id: str = "",
        key_secret: bytes | None = None,
        **unknown: Any,
    ) -> None:
        refuse("HostTier", unknown)
        limit = seconds(deadline_s, "deadline_s")
        check_identity(model_id, key_secret)
        if remote_uri is not None:
            check_remote(remote_uri, True, "cpu", model_id, key_secret)
        plan = HostPlan(groups, memory_bytes(memory), host_memory, verify)
        self._bytes = HostBytes(plan, memory, copy_engine)
        try:
            super().__init__(plan, self._bytes.engine, limit)
            if remote_uri is not None and key_secret is not None:
                self._open_backend(remote_uri, model_id, key_secret)
        except BaseException:
            self._bytes.close()
            raise

    def _open_backend(self, uri: str | Backend, model_id: str, secret: bytes) -> None:
        parts = self.spec, self._pools, self._bytes.blocks, self._connector, self._deadline_s
        remote = open_outside(uri, model_id, secret, *parts)
        self._bytes.also(remote.close)
        self._parts.door.open(remote)

    def close(self) -> None:
        """Ends all copies, in 30 s at most, and gives the host memory back, unless a copy may still write there.

        Called again, it looks again, for a moment, if memory could not be given back. From any thread. What is still to
        be spilled is given up: see ``flush_remote``.
        """
        self._parts.is_closed = True
        self._connector.wake()
        self._bytes.close()

    def __enter__(self) -> HostTier:
        self._parts.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
