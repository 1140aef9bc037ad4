"""What ``KvtierConnector`` tells vLLM: sources of hits, statistics, Prometheus, events."""

from __future__ import annotations

from typing import ClassVar

import inside
import pytest

from integrations.fake_vllm import FakeEngine
from integrations.fake_worker import UNIT
from integrations.served_once import OTHER, TEXT, push_out, pushed_out, use
from integrations.standin import HAS_VLLM
from kvtier.pools.block_pool import Mark
from kvtier.testing import Faults


def test_vllm_is_told_that_hits_come_from_host_memory():
    engine = pushed_out()
    engine.serve(TEXT)
    assert engine.hits == {"host": 44}


def test_what_has_happened_is_told_once():
    engine = pushed_out()
    stats = [engine.connector.get_kv_connector_stats()]
    assert engine.connector.get_kv_connector_stats() is None, "nothing has happened since"
    engine.serve(TEXT)
    engine.settle()
    stats.append(engine.connector.get_kv_connector_stats())
    total = stats[0].aggregate(stats[1])
    counts = engine.books.counts
    assert total.data["stored_blocks"] == counts.stored_blocks > 0
    assert total.data["loaded_bytes"] == counts.loaded_bytes > 0
    assert total.data["verified_blocks"] == counts.loaded_blocks
    assert total.data["cached_blocks"] == sum(p.cached for p in engine.books.stats().host.values())
    assert engine.workers[0].connector.get_kv_connector_stats() is None
    assert "kvtier stored blocks" in total.reduce()
    assert type(engine.connector).build_kv_connector_stats({}).is_empty()


class Metric:
    made: ClassVar[dict[str, Metric]] = {}

    def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
        assert documentation.endswith(".")
        self.value = {}
        self.made[name] = self

    def labels(self, *values):
        self.at = values
        return self

    def inc(self, value):
        self.value[self.at] = self.value.get(self.at, 0) + value

    def set(self, value):
        self.value[self.at] = value


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed, whose base class takes other types: run it by `make test`")
def test_prometheus_counts_what_is_told():
    engine = pushed_out()
    types = {"counter": Metric, "gauge": Metric}
    metrics = type(engine.connector).build_prom_metrics(None, types, ["engine"], {0: ["0"]})
    for _ in range(2):
        engine.serve(TEXT)
        engine.settle()
        push_out(engine)
        metrics.observe(engine.connector.get_kv_connector_stats().data)
    counts = engine.books.counts
    assert Metric.made["vllm:kvtier_stored_blocks"].value == {("0",): counts.stored_blocks}
    assert Metric.made["vllm:kvtier_loaded_blocks"].value == {("0",): counts.loaded_blocks}
    assert Metric.made["vllm:kvtier_cached_blocks"].value[("0",)] > 0


def test_events_leave_the_blocks_that_can_be_found(monkeypatch):
    engine, found = FakeEngine(("window", "full"), 21, settings={"events": True}, host_memory=3_000), set()
    monkeypatch.setattr("kvtier.integrations.vllm.events.PERIOD_S", 0.0)
    hashes = {}
    for text in (TEXT, OTHER, [*TEXT, 5, 6, 7, 8], OTHER[:30]):
        request = engine.serve(text)
        hashes |= {h[:16]: h for h in request.block_hashes}
        engine.settle()
        for event in engine.connector.take_events():
            keys = {(event.group_idx, h) for h in event.block_hashes}
            assert event.medium == "CPU"
            if type(event).__name__ == "BlockStored":
                assert not found & keys
                assert event.block_size == UNIT
                found |= keys
            else:
                assert keys <= found
                found -= keys
    pools = engine.books.pools
    ready = pools.arrays.blocks["mark"] == int(Mark.READY)
    keys = {row.tobytes() for row in pools.arrays.key[ready]}
    assert {h[:16] for _, h in found} == keys
    assert {h for _, h in found} <= set(hashes.values())


def test_a_published_block_is_taken_back_though_its_hash_was_forgotten(monkeypatch):
    """Other requests' hashes have pushed it out of the memory of what may be stored."""
    monkeypatch.setattr("kvtier.integrations.vllm.events.PERIOD_S", 0.0)
    engine = FakeEngine(("full",), 40, settings={"events": True}, host_memory=40_000)
    engine.serve(TEXT)
    engine.settle()
    [stored] = engine.connector.take_events()
    inside.forget_hashes(engine.connector)
    engine.reset()
    [removed] = engine.connector.take_events()
    assert type(removed).__name__ == "BlockRemoved"
    assert set(removed.block_hashes) == set(stored.block_hashes)


def test_failed_copies_are_told_with_their_reason(caplog):
    engine = pushed_out()
    inside.host_bytes(inside.vllm_worker(engine.workers[0].connector))[:] ^= 4
    engine.serve(TEXT)
    assert "a load lost 14 of 14 blocks: checksum mismatch in 14 of 14 blocks" in caplog.text
    use(engine, Faults(fail=1.0))
    engine.serve(OTHER[:20])
    engine.settle()
    assert "blocks: simulated failure" in caplog.text
