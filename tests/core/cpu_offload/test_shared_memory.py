"""Host memory that processes share: between real ones, which may die, and as a GPU's host tier."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from core.fake_cuda import FakeCuda, FakeSums
from kvtier import (
    ConfigError,
    Fragment,
    FullAttention,
    HostPlan,
    HostTierScheduler,
    HostTierWorker,
    MemoryUnavailable,
    OutsideGroup,
)
from kvtier.cpu_offload.engines.cuda import link as cuda_link
from kvtier.cpu_offload.engines.cuda.link import CudaLink
from kvtier.cpu_offload.shared_memory import PAGE, SharedMemory, SharedName
from kvtier.host_tier.orders import Copy, Orders, Report
from kvtier.testing import SimulatedEngine

MAKER = """
import sys
from kvtier.cpu_offload.shared_memory import SharedMemory
made = SharedMemory.make(10_000, 2)
made.map(0, 10_000)[:3] = [7, 8, 9]
print(*made.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other():
    """A process that has made shared memory, and the memory's name."""
    process = subprocess.Popen([sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    number, descriptor, token, size = process.stdout.readline().split()
    yield process, SharedName(int(number), int(descriptor), token, int(size))
    process.kill()
    process.communicate()


def test_what_one_process_writes_another_one_reads_even_once_the_first_is_dead(other):
    process, name = other
    shared = SharedMemory.open(name, 1, 2)
    memory = shared.map(0, name.num_bytes)
    assert memory[:4].tolist() == [7, 8, 9, 0]
    process.send_signal(signal.SIGKILL)
    process.wait()
    memory[3] = 1
    assert memory[:4].tolist() == [7, 8, 9, 1]
    with pytest.raises(MemoryUnavailable, match="rank 1 cannot open the host memory that rank 0 has made"):
        SharedMemory.open(name, 1, 2)


def test_another_file_of_that_number_is_not_taken_for_it(other):
    _, name = other
    with pytest.raises(MemoryUnavailable, match="rank 1 runs on another machine"):
        SharedMemory.open(name._replace(token="kvtier-" + 32 * "0"), 1, 2)


def test_its_descriptor_is_closed_with_it_and_the_memory_lives_as_long_as_a_view():
    shared = SharedMemory.make(3 * PAGE, 2)
    memory, descriptor = shared.map(PAGE, 2 * PAGE), shared.descriptor
    memory[0] = 5
    assert SharedMemory.open(shared.name, 1, 2).map(0, 3 * PAGE)[PAGE] == 5
    del shared
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert memory[0] == 5


def test_without_the_call_of_linux_it_is_refused(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(MemoryUnavailable, match="needs Linux"):
        SharedMemory.make(10, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [100, 3 * PAGE, 20 * PAGE + 5])
def test_parts_of_ranks_have_no_byte_in_common(ranks, size):
    parts = [SharedMemory(os.memfd_create("t"), SharedName(0, 0, "", size), rank, ranks).own for rank in range(ranks)]
    ends = [first + length for first, length in parts]
    assert all(end <= first for end, (first, _) in zip(ends, parts[1:], strict=False)) and ends[-1] <= size
    assert sum(length for _, length in parts) > size - ranks * PAGE - PAGE


# --- plans and workers that do not fit ------------------------------------------------------------


def plan(sharers: int, host_memory: str | int = "4KiB") -> HostPlan:
    group = OutsideGroup("g", FullAttention(), 4, 8, (Fragment(0, 64, 64),))
    return HostPlan([group], 512, host_memory, sharers=sharers)


def test_a_worker_needs_the_memory_of_its_plan():
    memory, two = np.zeros(512, np.uint8), plan(2)
    for of, shared in ((two, None), (plan(1), SharedMemory.make(two.shared_bytes, 2)), (two, SharedMemory.make(9, 2))):
        with pytest.raises(ConfigError, match="workers that share"):
            HostTierWorker(of, memory, 1.0, SimulatedEngine, shared)
    HostTierWorker(two, memory, 1.0, SimulatedEngine, SharedMemory.make(two.shared_bytes, 2)).close()
    with pytest.raises(ConfigError, match="2 workers that share host memory, and workers is 3"):
        HostTierScheduler(two, workers=3)


def test_a_failed_part_of_a_store_says_which_blocks_of_the_whole_it_was():
    class Bad(SimulatedEngine):
        """Its first block does not arrive."""

        def poll(self):
            return [replace(end, error="no", bad=np.array([0])) for end in super().poll()]

    two = plan(2)
    made = SharedMemory.make(two.shared_bytes, 2)
    for rank, first in ((0, 1), (1, 0)):
        shared = SharedMemory.open(made.name, rank, 2)
        worker = HostTierWorker(two, np.zeros(512, np.uint8), 30.0, Bad, shared)
        hosts = np.array([1, 2, 3, 4], np.int32)
        worker.begin(Orders((Copy(1, False, hosts * 0, hosts, hosts),)))
        while not (ended := worker.poll()).report:
            worker.wait(1.0)
        ((_, end),) = ended.report.ends.values()
        assert (end.error, end.bad.tolist()) == ("no", [first])
        worker.close()


# --- a GPU's link ---------------------------------------------------------------------------------


def test_each_rank_pins_all_of_it_measures_its_own_part_and_stores_its_own_blocks(monkeypatch):
    """Measurements at the same time must not bring one rank's bytes to another one's device."""
    monkeypatch.setattr(cuda_link, "MEASURED", 1)
    size, of = 64 * PAGE, plan(2, host_memory=64 * PAGE)
    made = [SharedMemory.make(of.shared_bytes, 2)]
    made.append(SharedMemory.open(made[0].name, 1, 2))
    content = np.arange(512, dtype=np.uint16).astype(np.uint8)
    cudas, workers, memories = [], [], []
    for shared in made:
        memories.append(content.copy())
        cudas.append(FakeCuda())
        cudas[-1].device_ranges.append((memories[-1].ctypes.data, 512))
        link = CudaLink(api=cudas[-1], sums=FakeSums(cudas[-1]), pci_bus_id="none", shared=shared)
        workers.append(HostTierWorker(of, memories[-1], 30.0, link, shared))
    for rank, cuda in enumerate(cudas):
        ((base, pinned),) = cuda.registered.items()
        assert pinned == size, "all of it"
        first, length = made[rank].own
        places = [at - base for dst, src, _, _ in cuda.copies for at in (dst, src) if base <= at < base + pinned]
        assert len(places) == 2 and all(first <= at < first + length for at in places)
        cuda.copies.clear()

    blocks, hosts = np.arange(8, dtype=np.int32), np.array([9, 1, 2, 4, 6, 8, 3, 5], np.int32)
    whole = Report()
    store, load = (Copy(ticket, ticket == 2, blocks * 0, blocks, hosts) for ticket in (1, 2))
    for orders in (Orders((store,)), Orders((load,))):
        for worker, memory in zip(workers, memories, strict=True):
            worker.begin(orders)
            memory *= orders.copies[0] is store  # another content by the time of the load
            worker.load(orders)
        for worker in workers:
            while not (ended := worker.poll()).report:
                worker.wait(0.01)
            whole.merge(ended.report)
    assert {ticket: (count, end.error) for ticket, (count, end) in whole.ends.items()} == {1: (2, ""), 2: (2, "")}
    for memory, cuda in zip(memories, cudas, strict=True):
        assert memory.tolist() == content.tolist()
        assert sum(size for *_, size, _ in cuda.copies) == (4 + 8) * 64, "half of the blocks out, all of them in"
    assert [worker.close() for worker in workers] == [True, True]
    assert [cuda.registered for cuda in cudas] == [{}, {}] and not cudas[0].problems + cudas[1].problems
