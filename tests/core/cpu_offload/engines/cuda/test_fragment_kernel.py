"""The fragment kernel's very source, compiled as C++ and run one thread after another on this machine."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from kvtier.cpu_offload.engines.cuda.descriptors import Copies
from kvtier.cpu_offload.engines.cuda.fragment_kernel import SOURCE, FragmentKernel

SHIM = """
struct uint4 { unsigned x, y, z, w; };
struct dim { unsigned x; };
static dim blockIdx, blockDim, gridDim, threadIdx;
#define __global__
"""
LAUNCH = """
extern "C" void launch(unsigned blocks, unsigned threads, const unsigned long long* list, unsigned long long count) {
  gridDim.x = blocks; blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) copy_fragments(list, count);
}
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(SHIM + SOURCE + LAUNCH)
    command = [compiler, "-O1", "-w", "-shared", "-fPIC", "-o", str(folder / "kernel.so"), str(folder / "kernel.cpp")]
    subprocess.run(command, check=True, timeout=300)
    return ctypes.CDLL(str(folder / "kernel.so")).launch


class FakeStream:
    """What CuPy 14 makes of a stream that is not its own: by CUDA's stream protocol, current while it is entered."""

    current: FakeStream | None = None
    made = 0

    @classmethod
    def from_external(cls, stream) -> FakeStream:
        assert stream.__cuda_stream__() == (0, 7), "version, handle"
        cls.made += 1
        return cls()

    def __enter__(self) -> None:
        FakeStream.current = self

    def __exit__(self, *_) -> None:
        FakeStream.current = None


class FakeCuPy:
    """Runs the compiled source in place of a GPU. It has no ExternalStream, which warns since CuPy 14."""

    def __init__(self, launch) -> None:
        self._launch, self.made = launch, []
        self.cuda = SimpleNamespace(alloc_pinned_memory=self._pinned, Stream=FakeStream)

    def _pinned(self, num_bytes: int) -> bytearray:
        self.made.append(bytearray(num_bytes))
        return self.made[-1]

    def RawKernel(self, source: str, name: str):  # noqa: N802
        assert name in source

        def run(grid, block, arguments) -> None:
            assert FakeStream.current is not None
            address, count = (int(a) for a in arguments)
            assert [a.dtype for a in arguments] == [np.uint64, np.uint64], "the kernel takes 64-bit integers"
            self._launch(grid[0], block[0], ctypes.c_void_p(address), ctypes.c_uint64(count))

        return run


@pytest.mark.parametrize("sizes", [[16], [16, 32, 4096, 16 * 1024, 16 * 1023, 48], [112] * 100, []])
def test_the_kernel_moves_exactly_the_fragments(launch, sizes):
    rng = np.random.default_rng(len(sizes))
    room = sum(sizes) + 64 * len(sizes) + 64
    src = rng.integers(0, 256, room, np.uint8)
    dst = np.zeros(room, np.uint8)
    at = (np.cumsum([0, *[n + 64 for n in sizes]])[:-1]).astype(np.uint64)
    shuffled = rng.permutation(len(sizes))
    copies = Copies(
        at[shuffled] + np.uint64(dst.ctypes.data),
        at[shuffled] + np.uint64(src.ctypes.data),
        np.array(sizes, np.uint64)[shuffled],
    )
    cupy = FakeCuPy(launch)
    kept = FragmentKernel(cupy)(copies, 7)
    assert (kept is None) is (not sizes), "the list lives until the kernel has read it"
    expected = np.zeros(room, np.uint8)
    for a, n in zip(at.tolist(), sizes, strict=True):
        expected[a : a + n] = src[a : a + n]
    assert np.array_equal(dst, expected)


def test_each_stream_is_wrapped_once(launch, monkeypatch):
    monkeypatch.setattr(FakeStream, "made", 0)
    kernel, nothing = FragmentKernel(FakeCuPy(launch)), np.zeros(16, np.uint8)
    at = np.array([nothing.ctypes.data], np.uint64)
    for _ in range(3):
        kernel(Copies(at, at, np.array([16], np.uint64)), 7)
    assert FakeStream.made == 1 and FakeStream.current is None
