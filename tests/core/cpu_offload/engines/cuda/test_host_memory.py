"""Host memory for a GPU: really mapped, faulted in and advised here; only the registration with a driver is played."""

from __future__ import annotations

import errno
import mmap
import weakref
from itertools import pairwise
from pathlib import Path

import inside
import numpy as np
import pytest

from kvtier import MemoryUnavailable
from kvtier.cpu_offload.engines.cuda import host_memory, numa
from kvtier.cpu_offload.engines.cuda.host_memory import HostMemory, Registration, pieces_of
from kvtier.geometry.layout import Layout

PAGE = mmap.PAGESIZE


class Pins:
    """A driver that pins; it refuses the ``fail``-th registration, and two that share a page."""

    def __init__(self, fail: int = -1) -> None:
        self.live: dict[int, int] = {}
        self.made: list[tuple[int, int]] = []
        self._fail = fail
        self.api = Registration(self.register, self.unregister)

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.made) == self._fail:
            raise RuntimeError("out of memory")
        for at, n in self.live.items():
            assert address // PAGE > (at + n - 1) // PAGE or (address + num_bytes - 1) // PAGE < at // PAGE
        self.live[address] = num_bytes
        self.made.append((address, num_bytes))

    def unregister(self, address: int) -> None:
        del self.live[address]


def smaps(address: int) -> dict[str, str]:
    """What the kernel says of the mapping that holds this address."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(x, 16) for x in first.split("-"))
            inside = start <= address < end
            if inside:
                found["bytes"] = str(end - start)
        elif inside:
            name, _, value = line.partition(":")
            found[name] = value.strip()
    return found


@pytest.mark.parametrize("num_bytes", [1, PAGE, 3 * PAGE + 5, 9 << 20])
def test_memory_is_as_large_as_asked_for_and_faulted_in(num_bytes):
    pins = Pins()
    memory = HostMemory(num_bytes, pins.api, piece_bytes=2 << 20)
    whole = -(-num_bytes // PAGE) * PAGE
    seen = smaps(memory.address)
    assert len(memory.array) == num_bytes
    assert not memory.array.any()
    assert int(seen["Rss"].split()[0]) * 1024 >= whole, "not faulted in"
    assert int(seen["bytes"]) < whole + (4 << 20), "rounded up (neighbouring mappings may count too)"
    assert sum(n for _, n in pins.made) == num_bytes
    assert memory.starts.tolist() == [at for at, _ in pins.made]
    memory.release()
    assert pins.live == {}
    memory.release()


def test_the_kernel_has_taken_the_advice():
    memory = HostMemory(4 << 20, Pins().api, huge_pages=True)
    flags = smaps(memory.address)["VmFlags"].split()
    assert "dc" in flags, "a child would share the pages, and copying on write would move them away from the device"
    assert "hg" in flags or any("HUGEPAGE" in note for note in memory.report.notes)


def test_a_kernel_that_cannot_populate_has_its_pages_touched(monkeypatch):
    monkeypatch.setattr(host_memory, "MADV_POPULATE_WRITE", 9999)  # EINVAL, as before 5.14
    memory = HostMemory(5 * PAGE + 1, Pins().api)
    assert int(smaps(memory.address)["Rss"].split()[0]) * 1024 >= 6 * PAGE


def test_progress_is_told_up_to_the_end(monkeypatch):
    monkeypatch.setattr(host_memory, "TOUCH_BYTES", 1 << 20)
    told: list[tuple[str, int, int]] = []
    HostMemory(5 << 20, Pins().api, piece_bytes=2 << 20, progress=lambda *news: told.append(news), threads=3)
    for what, count in (("faulting in", 5), ("pinning", 3)):
        done = [n for w, n, total in told if w == what and total == 5 << 20]
        assert done == sorted(done)
        assert (len(done), done[-1]) == (count, 5 << 20)


@pytest.mark.parametrize("fail", [0, 1, 2])
def test_a_failure_to_pin_leaks_nothing_and_says_what_to_do(fail):
    pins = Pins(fail)
    with pytest.raises(MemoryUnavailable) as caught:
        HostMemory(5 << 20, pins.api, piece_bytes=2 << 20, setting="host_bytes")
    assert pins.live == {}, "a registration is left behind"
    assert len(pins.made) == fail
    for text in ("pinning 5,242,880 bytes", "out of memory", "host_bytes='", "MiB"):
        assert text in str(caught.value)


def test_memory_that_cannot_be_faulted_in_is_explained_and_never_pinned(monkeypatch):
    monkeypatch.setattr(host_memory, "TOUCH_BYTES", 1 << 20)
    touch = HostMemory._touch

    def touched(self, at, num_bytes):
        if at == 3 << 20:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        touch(self, at, num_bytes)

    monkeypatch.setattr(HostMemory, "_touch", touched)
    pins = Pins()
    with pytest.raises(MemoryUnavailable, match=r"faulting in 8,388,608 bytes .* Cannot allocate memory"):
        HostMemory(8 << 20, pins.api, threads=3)
    assert pins.made == []


def test_the_mapping_goes_with_its_last_view():
    memory = HostMemory(1 << 20, Pins().api)
    gone, view = weakref.ref(inside.mapping(memory)), memory.array[:10]
    memory.release()
    assert gone() is not None
    view[:] = 1
    del view
    assert gone() is None


def test_a_mapping_that_the_system_refuses_is_explained():
    with pytest.raises(MemoryUnavailable, match=r"mapping 1,\d+,.* host_blocks='"):
        HostMemory(1 << 60, Pins().api, setting="host_blocks")


# --- cutting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [16, PAGE, 48, 3 * PAGE, 393_216, 7 * 16, 10_007 * 16])
@pytest.mark.parametrize("start", [0, PAGE, 3 * PAGE, 5 * 16])
@pytest.mark.parametrize("num_bytes", [1, PAGE, 1_000_001, 64 << 20])
def test_pieces_cover_everything_and_share_no_page(unit, start, num_bytes):
    cuts = pieces_of(num_bytes, [(start, unit)], 4 << 20)
    assert (cuts[0], cuts[-1]) == (0, num_bytes)
    assert all(0 < b - a <= 4 << 20 for a, b in pairwise(cuts))
    assert all(cut % PAGE == 0 for cut in cuts[:-1])
    if start % np.gcd(unit, PAGE) == 0 and np.lcm(unit, PAGE) <= 2 << 20:
        assert all((cut - start) % unit == 0 for cut in cuts[1:-1])


@pytest.mark.parametrize(
    "layout",
    [
        Layout.of_slabs([3 * PAGE, 5 * PAGE], 40 << 20),
        Layout.of_slabs([3 * PAGE, 5 * PAGE, 7 * PAGE], 40 << 20),
        Layout.fixed([3 * PAGE, 5 * PAGE, 1040], [1001, 997, 5000]),
    ],
    ids=["two kinds", "three kinds", "fixed"],
)
def test_no_block_is_cut_apart_wherever_the_first_slab_begins(layout):
    memory = HostMemory(layout.num_bytes, Pins().api, seams=layout.seams, piece_bytes=2 << 20)
    cuts = (memory.starts - np.uint64(memory.address)).astype(np.int64)
    memory.release()
    assert len(cuts) > 10
    for g, size in enumerate(layout.block_bytes.tolist()):
        starts = layout.origins[g] + np.arange(1, layout.rows[g]) * layout.strides[g]
        first, behind = np.searchsorted(cuts, starts, "right"), np.searchsorted(cuts, starts + size)
        assert np.array_equal(first, behind), f"blocks of group {g} in two registrations"


# --- near the device ------------------------------------------------------------------------------


def system(tmp_path: Path, node: str | None, nodes: int) -> str:
    for k in range(nodes):
        (tmp_path / f"devices/system/node/node{k}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{k}/meminfo").write_text(
            f"Node {k} MemTotal: 1000 kB\nNode {k} MemFree: 300 kB\nNode {k} Inactive(file): 40 kB\n"
        )
    device = tmp_path / "bus/pci/devices/0000:1a:00.0"
    device.mkdir(parents=True)
    if node is not None:
        (device / "numa_node").write_text(node)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("text", "nodes", "expected"), [("1\n", 2, 1), ("-1\n", 2, None), ("0\n", 1, None), (None, 2, None)]
)
def test_the_node_is_read_by_pci_bus_id(tmp_path, text, nodes, expected):
    node, why = numa.node_of("0000:1A:00.0", system(tmp_path, text, nodes))
    assert node == expected
    assert bool(why) is (expected is None)


def test_free_memory_of_a_node(tmp_path):
    root = system(tmp_path, "0", 2)
    assert numa.free_bytes(1, root) == 340 * 1024
    assert numa.free_bytes(7, root) is None


def test_pages_are_bound_to_a_node_that_is_there_and_a_refusal_is_said():
    memory = HostMemory(4 * PAGE, Pins().api)
    if not Path("/sys/devices/system/node/node0").exists():
        pytest.skip("/sys/devices/system/node is missing: run it on Linux with NUMA")
    if why := numa.bind(memory.address, 4 * PAGE, 0):
        pytest.skip(f"this system forbids mbind ({why}): run it outside a container, or with `--cap-add SYS_NICE`")
    maps = Path("/proc/self/numa_maps")
    if maps.exists():
        assert any("bind:0" in line for line in maps.read_text().splitlines() if f"{memory.address:x}" in line)
    assert "node 63" in numa.bind(memory.address, 4 * PAGE, 63)


@pytest.mark.parametrize(("free", "policy"), [(1 << 30, numa.BIND), (PAGE, numa.PREFERRED)])
def test_a_node_without_room_is_preferred_not_insisted_on(monkeypatch, free, policy):
    asked = []
    monkeypatch.setattr(numa, "node_of", lambda bus: (1, ""))
    monkeypatch.setattr(numa, "free_bytes", lambda node: free)
    monkeypatch.setattr(numa, "bind", lambda address, n, node, policy: asked.append((n, node, policy)) or "")
    memory = HostMemory(3 * PAGE - 1, Pins().api, pci_bus_id="0000:1a:00.0")
    assert asked == [(3 * PAGE, 1, policy)]
    assert memory.report.numa_node == 1
    assert bool(memory.report.notes) is (policy == numa.PREFERRED)
