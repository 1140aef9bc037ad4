"""A kernel that moves small fragments between device memory and registered host memory, which it addresses directly.

Promises   exactly the bytes of the copies. They must be multiples of 16 and aligned to 16, as all blocks are.
Does not   choose when it is used: ``paths`` does.

Few thread blocks suffice to fill a link, and leave the rest of the device to the forward pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.cpu_offload.engines.cuda.descriptors import Copies

SOURCE = r"""
extern "C" __global__ void copy_fragments(const unsigned long long* list, const unsigned long long count) {
  // list: count destinations, then count sources, then count sizes in bytes
  for (unsigned long long k = blockIdx.x; k < count; k += gridDim.x) {
    uint4* dst = (uint4*)list[k];
    const uint4* src = (const uint4*)list[count + k];
    const unsigned long long words = list[2 * count + k] / 16;
    for (unsigned long long base = 0; base < words; base += 4ull * blockDim.x) {
      uint4 held[4];
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned long long at = base + j * (unsigned long long)blockDim.x + threadIdx.x;
        if (at < words) held[j] = src[at];
      }
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned long long at = base + j * (unsigned long long)blockDim.x + threadIdx.x;
        if (at < words) dst[at] = held[j];
      }
    }
  }
}
"""
BLOCKS, THREADS = 16, 256
LIST_BYTES = 3 * 8
"""Bytes of pinned memory for each copy under way."""


class _Handle:
    """A stream that is not CuPy's, by the CUDA stream protocol."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


class FragmentKernel:
    """The kernel, compiled by CuPy when it is first launched."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._streams: dict[int, Any] = {}
        self._kernel = cupy.RawKernel(SOURCE, "copy_fragments")

    def __call__(self, copies: Copies, stream: int) -> object:
        count = len(copies.dst)
        if count == 0:
            return None
        pinned = self._cupy.cuda.alloc_pinned_memory(LIST_BYTES * count)
        listed = np.frombuffer(pinned, np.uint64, 3 * count)
        listed.reshape(3, count)[:] = copies
        arguments = (np.uint64(listed.ctypes.data), np.uint64(count))
        if stream not in self._streams:
            self._streams[stream] = self._cupy.cuda.Stream.from_external(_Handle(stream))
        with self._streams[stream]:
            self._kernel((min(count, BLOCKS),), (THREADS,), arguments)
        return pinned  # the kernel reads the list while it runs
