"""Engines and caches on played drivers, which are looked at and closed after the test."""

from __future__ import annotations

import pytest

from core.cpu_offload.engines.cuda.rig import Rig
from core.fake_cuda import FakeCuda, FakeSums
from kvtier.cpu_offload.engines.cuda import link as cuda_link
from kvtier.cpu_offload.engines.cuda.link import CudaLink


@pytest.fixture
def make_rig():
    made: list[Rig] = []

    def make(**options) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for rig in made:
        rig.cuda.held = False
        rig.close()


@pytest.fixture
def linked(monkeypatch):
    """Options for a cache on a played GPU whose arena is in this process's memory; checks the driver afterwards."""
    made: list[FakeCuda] = []

    def link(**options):
        cuda = FakeCuda(**options)
        made.append(cuda)
        factory = CudaLink(api=cuda, sums=FakeSums(cuda), pci_bus_id="0000:00:00.0")
        build = CudaLink.__call__

        def with_arena(self, memory):
            device = memory.arenas[0]
            cuda.device_ranges.append((device.address, len(device.storage)))
            return build(self, memory)

        monkeypatch.setattr(CudaLink, "__call__", with_arena)
        monkeypatch.setattr(cuda_link, "MEASURED", 1)
        return {"copy_engine": factory}, cuda

    yield link
    for cuda in made:
        assert cuda.problems == []
