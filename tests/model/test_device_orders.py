"""The simulated device reports orders between copies and kernels that nobody asked for."""

from __future__ import annotations

import inside
import numpy as np
import pytest

from kvtier import FullAttention, KVCache
from kvtier.cpu_offload.transfer import Direction
from kvtier.testing import SimulatedDevice, canary_spec


def watched_device(**options) -> SimulatedDevice:
    """A simulated device that knows the memory of a cache, which is closed."""
    device = SimulatedDevice(0, **options)
    KVCache(
        canary_spec({"full": (FullAttention(), 2)}),
        device_blocks={"full": 4},
        host_blocks={"full": 4},
        copy_engine=device.engine,
    ).close()
    return device


def test_the_device_reports_orders_that_nobody_asked_for():
    """Two streams on one block: unordered is reported, ordered by an event or by the host is not."""
    groups, blocks = np.zeros(1, np.int32), np.ones(1, np.int32)
    none = np.empty(0, np.int32)

    def touch(device: SimulatedDevice, stream, writes: bool) -> None:
        inside.touch(device, stream, groups, blocks, writes=writes)

    for writes_first, writes_then, reported in (
        (True, True, True), (True, False, True), (False, True, True), (False, False, False),
    ):  # fmt: skip
        alone = watched_device()
        other = alone.new_stream("store")
        touch(alone, alone.compute_stream(), writes_first)
        touch(alone, other, writes_then)
        assert bool(alone.missing_edges) is reported
        by_event = watched_device()
        other = by_event.new_stream("store")
        event = by_event.launch((none, none), (groups, blocks), lambda: None)
        by_event.wait(other, event)
        touch(by_event, other, writes_then)
        assert by_event.missing_edges == []
        by_host = watched_device()
        other = by_host.new_stream("store")
        by_host.synchronize(by_host.launch((none, none), (groups, blocks), lambda: None))
        touch(by_host, other, writes_then)
        assert by_host.missing_edges == []


def test_c16_a_wait_that_is_left_out_is_reported():
    device = watched_device()
    groups, blocks, none = np.zeros(1, np.int32), np.ones(1, np.int32), np.empty(0, np.int32)
    early, other = device.record(device.compute_stream()), device.new_stream("store")
    device.launch((none, none), (groups, blocks), lambda: None)
    device.wait(other, early)
    inside.touch(device, other, groups, blocks, writes=False)
    assert [text.split(":")[0] for text in device.missing_edges] == ["edge 1"]


@pytest.mark.parametrize("put_late", [False, True])
def test_a_late_copy_is_not_ordered_by_what_the_host_has_learned_since_it_was_put(put_late):
    """The host sees the forward end, and only then does the submission thread give the stream its copy."""
    device = watched_device(forward_s=0.0, lag_s=5.0)
    groups, blocks, none = np.zeros(1, np.int32), np.ones(1, np.int32), np.empty(0, np.int32)
    store, given = device.new_stream("store"), list[bool]()

    def read() -> None:
        inside.touch(device, store, groups, blocks, writes=False)
        given.append(True)

    written = device.launch((none, none), (groups, blocks), lambda: None)
    if put_late:
        device.synchronize(written)
    inside.put_late(device, Direction.STORE, read)
    device.synchronize(written)
    assert not given
    device.advance(10.0)
    assert given
    assert [text.split(":")[0] for text in device.missing_edges] == ([] if put_late else ["edge 1"])
