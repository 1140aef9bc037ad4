"""The audit can fail: planted damage to moves between the host tier and a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from remote.fake_backend import FakeBackend, Shared

from core.audit.damage import GROUPS, assert_reported
from core.driving import HeldEngine, Serving, prompt
from kvtier import KVCache
from kvtier.cpu_offload.transfer import TransferState
from kvtier.pools.block_pool import Mark
from kvtier.remote.moves import Move, Way
from kvtier.testing import canary_spec


def move(s: Serving, way: Way) -> Move:
    return next(m for m in s.cache.core.coordinator.door.remote.moves() if m.way is way)


def plant_move_that_has_ended_and_stays(s: Serving) -> None:
    move(s, Way.SPILL).state = TransferState.SETTLED


def plant_block_without_a_name(s: Serving) -> None:
    fetch = move(s, Way.FETCH)
    fetch.keys = fetch.keys[:-1]


def plant_fetched_block_that_is_found_too_early(s: Serving) -> None:
    fetch = move(s, Way.FETCH)
    s.cache.core.host.make_ready(fetch.groups[:1], fetch.hosts[:1])


def plant_fetch_under_another_key(s: Serving) -> None:
    fetch = move(s, Way.FETCH)
    fetch.keys = fetch.keys ^ np.uint64(1)


def plant_two_fetches_into_one_block(s: Serving) -> None:
    fetch = move(s, Way.FETCH)
    fetch.groups[1], fetch.hosts[1] = fetch.groups[0], fetch.hosts[0]


def plant_pending_block_that_no_store_brings(s: Serving) -> None:
    fetch = move(s, Way.FETCH)
    fetch.epoch = -1
    assert (s.cache.core.host.arrays.mark == Mark.PENDING).any()


PLANTED: dict[Callable[[Serving], None], list[str]] = {
    plant_move_that_has_ended_and_stays: ["I18 and still listed"],
    plant_block_without_a_name: ["I18 has blocks without a name, or without an object"],
    plant_fetched_block_that_is_found_too_early: ["I19 blocks that it brings are not PENDING"],
    plant_fetch_under_another_key: ["I14 blocks carry other keys than its content's"],
    plant_two_fetches_into_one_block: ["I17 two fetches write one block of the host"],
    plant_pending_block_that_no_store_brings: ["I19 PENDING, but no transfer brings it"],
}


@contextmanager
def moving() -> Iterator[Serving]:
    """A spill and a fetch are under way."""
    sizes, shared = dict.fromkeys(GROUPS, 40), Shared()

    def made() -> Serving:
        cache = KVCache(
            canary_spec(GROUPS),
            device_blocks=sizes,
            host_blocks=sizes,
            copy_engine=lambda memory: HeldEngine(memory, []),
            remote_uri=FakeBackend(shared),
            model_id="m",
            key_secret=b"s",
        )
        return Serving(cache, max_batched_tokens=64)

    before, serving = made(), made()
    before.serve("a", prompt(0, 50), 1)
    store = serving.cache.core.coordinator.door.remote.backend
    store.hold = True
    serving.add("b", prompt(1, 30), 1)
    serving.steps_until(lambda: store.end("look") or any(what == "put" for what, _ in store.calls.values()))
    serving.add("a", prompt(0, 50), 1)
    serving.step()
    store.end("look")
    serving.step()
    try:
        yield serving
    finally:
        before.cache.close()
        serving.cache.close()


@pytest.mark.usefixtures("damaged")
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_audit_sees_it(monkeypatch, plant):
    monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", 300)
    with moving() as serving:
        assert serving.cache.audit() == []
        plant(serving)
        assert_reported(serving.cache, *PLANTED[plant])
