"""One reader of memory's limits: the machine's, and those of all control groups above this process."""

from __future__ import annotations

import os
import resource

import pytest

from kvtier.machine import memory_limits
from kvtier.machine.memory_limits import Limit, available_ram_bytes, explain, limits

MEMINFO = {"proc/meminfo": "MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable:     40 kB\n"}
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Makes the root of a machine of 100 pages, with these files."""

    def make(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return str(tmp_path)

    monkeypatch.setattr(memory_limits.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 100}.__getitem__)
    return make


def test_the_limits_of_this_machine():
    found = {limit.name: limit.num_bytes for limit in limits()}
    assert (
        0 < available_ram_bytes() <= found["MemAvailable"] <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert found.get("memlock (ulimit -l)", -1) == soft or soft == resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("files", "name", "left"),
    [
        ({"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "400"}, "memory.max", 600),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "77",
                "sys/fs/cgroup/a/memory.current": "7",
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/b/memory.current": "7",
            },
            "memory.max",
            70,
        ),
        (
            {
                "proc/self/cgroup": "5:devices:/x\n4:memory:/job/1\n",
                "sys/fs/cgroup/memory/job/1/memory.limit_in_bytes": "500",
                "sys/fs/cgroup/memory/job/1/memory.usage_in_bytes": "600",
            },
            "memory.limit_in_bytes",
            0,
        ),
    ],
)
def test_limits_of_control_groups_of_both_versions(system, files, name, left):
    root = system(files)
    found = [limit for limit in limits(root) if "control group" in limit.name]
    assert [(limit.name, limit.num_bytes) for limit in found] == [(f"the control group's {name}", left)]
    assert available_ram_bytes(root) == left


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 100 * 4096, id="nothing-to-read-all-pages-of-the-machine"),
        pytest.param(MEMINFO, 40 * 1024, id="what-the-kernel-calls-available"),
        pytest.param({**MEMINFO, f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "7\n"}, 40 * 1024, id="no-limit"),
        pytest.param({**MEMINFO, f"{V2}/memory.max": "1000\n", f"{V2}/memory.current": "300\n"}, 700, id="v2"),
        pytest.param(
            {**MEMINFO, f"{V1}/memory.limit_in_bytes": "1000\n", f"{V1}/memory.usage_in_bytes": "300\n"}, 700, id="v1"
        ),
        pytest.param({**MEMINFO, f"{V2}/memory.max": "1000", f"{V2}/memory.current": "1001"}, 0, id="over-the-limit"),
        pytest.param({**MEMINFO, f"{V2}/memory.max": "99999", f"{V2}/memory.current": "1"}, 40 * 1024, id="wide-limit"),
    ],
)
def test_memory_available_is_the_least_that_machine_and_control_group_leave(system, files, expected):
    assert available_ram_bytes(system(files)) == expected


def test_the_smallest_limit_is_named_first_and_a_size_under_it_is_offered():
    gib = 1 << 30
    found = [
        Limit("MemAvailable", 90 * gib, "free memory"),
        Limit("the control group's memory.max", 20 * gib, "give the container more"),
        Limit("memlock (ulimit -l)", 65536, "ulimit -l unlimited", for_pinning=True),
    ]
    text = explain(100 * gib, "host_bytes", "pinning", "status 2", found)
    assert text.index("memlock") < text.index("control group") < text.index("MemAvailable")
    assert "Try host_bytes='18GiB'" in text, "memlock need not bind, so it does not set the offer"
    assert "no limit that kvtier knows" in explain(gib, "host_bytes", "pinning", "x", found[:2])
