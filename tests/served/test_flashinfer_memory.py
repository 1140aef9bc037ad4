"""Memory beside the pools that models over FlashInfer use counts in the memory asked for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import zoo

from kvtier import ConfigError, MemoryUnavailable
from kvtier.attention.flashinfer import Held, workspace_bytes_for
from runner import LLM, SamplingParams
from runner.engine import memory, service as service_module
from runner.model import graphs
from runner.model.hybrid import HybridModel
from served.over_flashinfer import MIB, flash_model

from .cpu_graph import CpuGraphs


@pytest.mark.parametrize("kv", [{}, {"kv_cache_dtype": "fp8"}], ids=["float16", "fp8"])
def test_workspaces_count_in_the_device_memory_asked_for(kv: Any, flashinfer: Any, tmp_path: Path) -> None:
    model = flash_model(tmp_path)
    with LLM(model, "cpu", 64 * MIB, 0, **kv) as llm:
        pools = llm.stats()["cache"]["device_bytes"]
        llm.generate([[5] * 40, [6] * 9], SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)
        held = llm.stats()["attention"]
    assert held["workspace_bytes"] == 4 * MIB + 2 * 2 * (8 * MIB + 4 * 32768)
    assert 62 * MIB < pools + held["workspace_bytes"] <= 64 * MIB


@pytest.fixture
def rehearsed(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decode steps are captured, here too, and a rehearsal takes 3 MiB; its rows."""
    rows: list[int] = []

    class Rehearsed(CpuGraphs):
        def __init__(self, device: torch.device) -> None:
            super().__init__(flashinfer)

        def rehearse(self, forward: Callable[[], torch.Tensor]) -> int:
            rows.append(len(forward()))
            return 3 * MIB

    for place in (graphs, service_module):
        monkeypatch.setattr(place, "why_eager", lambda model: None)
    monkeypatch.setattr(graphs, "CudaCapture", Rehearsed)
    return rows


def test_captured_steps_count_in_the_device_memory_asked_for(rehearsed: list[int], tmp_path: Path) -> None:
    model = flash_model(tmp_path)
    with LLM(model, "cpu", 96 * MIB, 0, max_running=6) as llm:
        pools = llm.stats()["cache"]["device_bytes"]
        llm.generate([[5] * 40, [6] * 9], SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)
        assert llm.graphs is not None and llm.graphs.stats()["captured"] == [1, 2, 4, 6]
    held, logits = model.attention_memory(2, 4).device_bytes, 6 * model.vocab_size * 4
    assert rehearsed == [6] and 94 * MIB < pools + held + logits + 6 * MIB <= 96 * MIB


def test_what_torch_keeps_for_later_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as what a rehearsal has left: it would count as taken, and once more as what graphs will take."""
    free = [100]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(1000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1], 2000))
    assert memory.automatic_device(torch.device("cuda:0")) == 900


def test_the_workspace_is_large_enough_for_the_rows_of_the_largest_graph(
    rehearsed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is that large it stays so; without graphs it need not be."""
    model = flash_model(tmp_path)
    monkeypatch.setattr(service_module, "captured", lambda *_: None)
    text = model.config.get_text_config()
    few, many = (workspace_bytes_for(text.num_attention_heads, text.num_key_value_heads, 64, n, 1) for n in (6, 400))
    assert few < 4 * MIB < many
    with LLM(model, "cpu", 64 * MIB, 0, max_running=400, cuda_graphs=False):
        assert model.attention_memory(0, 0) == (4 * MIB, 0)
    for rows, has in ((6, 4 * MIB), (400, many), (6, many)):
        with LLM(model, "cpu", 256 * MIB, 0, max_running=rows) as llm:
            pools = llm.stats()["cache"]["device_bytes"]
        assert model.attention_memory(0, 0) == (has, 0)
        held = model.attention_memory(2, len(graphs.bucket_sizes(rows))).device_bytes
        assert 254 * MIB < pools + held + rows * model.vocab_size * 4 + 6 * MIB <= 256 * MIB
    assert rehearsed == [6, 400, 6]


def test_pinned_buffers_count_in_the_host_memory_asked_for(flashinfer: Any, tmp_path: Path) -> None:
    with LLM(flash_model(tmp_path), "cpu", "64MiB", "48MiB") as llm:
        host = llm.stats()["cache"]["host_bytes"]
        llm.generate([[5] * 40, [6] * 9], SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)
        held = llm.stats()["attention"]["pinned_bytes"]
    assert held == 2 * 2 * 8 * MIB and 45 * MIB < host + held <= 48 * MIB


def test_blocks_by_name_and_no_host_tier_are_taken_as_they_are(flashinfer: Any, tmp_path: Path) -> None:
    model = flash_model(tmp_path)
    blocks = dict.fromkeys(model.spec().names, 9)
    with LLM(model, "cpu", blocks, blocks) as llm, LLM(model, "cpu", blocks, 0) as other:
        stats = llm.stats()["cache"], other.stats()["cache"]
    assert stats[0]["host_bytes"] > 0 == stats[1]["host_bytes"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            ("30MiB", 0),
            r"device_memory is 31,457,280 bytes, and what serves the pools \(FlashInfer's .*\) takes 38,\d+,\d+; raise",
        ),
        (
            ("64MiB", 32 * MIB),
            r"host_memory is 33,554,432 bytes, and what serves the pools \(FlashInfer's .*\) takes 34,\d+,\d+; raise",
        ),
    ],
)
def test_memory_that_workspaces_use_up_is_refused(
    sizes: Any, message: str, flashinfer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = flash_model(tmp_path)
    monkeypatch.setattr("runner.engine.service.KVCache", lambda *_, **__: pytest.fail("a cache was built"))
    with pytest.raises(MemoryUnavailable, match=message):
        LLM(model, "cpu", *sizes)
    with pytest.raises(ConfigError, match="device_memory must be bytes"):
        LLM(model, "cpu", "lots", 0)


def test_index_arrays_count_in_the_memory_asked_for(rehearsed: list[int], tmp_path: Path) -> None:
    """As large as steps can have them: what every row may see, in each of the steps that are alive at once."""
    model = flash_model(tmp_path)
    spec, asked, none = model.spec(), 128 * MIB, Held(0, 0)
    given: list[Held] = []
    for max_running in (4, 40):
        with LLM(model, "cpu", asked, asked, max_running=max_running, max_batched_tokens=512) as llm:
            stats = llm.stats()["cache"]
            assert llm.graphs is not None
            captured = [b for bucket, _ in llm.graphs._buckets.values() for b in bucket._batches.values()]
        buffers = {id(b._buffers.kv_indices): b._buffers.kv_indices.nbytes for b in captured}
        assert len(buffers) == len(spec.groups), "all sizes share them"
        own = sum(t.nbytes for b in captured for t in (*b._buffers, b.slot_mapping)) - len(captured) // 2 * sum(
            buffers.values()
        )
        slots = 8 * max(512, max_running) * len(spec.groups)
        counted = memory.index_arrays(spec, asked, max_running, 512, model.max_tokens, True)
        assert counted.device_bytes >= 3 * (sum(buffers.values()) + slots) + sum(buffers.values()) + own
        assert counted.pinned_bytes >= 4 * 3 * (sum(buffers.values()) + slots)
        attention = model.attention_memory(2, len(graphs.bucket_sizes(max_running)))
        graph = Held(max_running * model.vocab_size * 4 + 6 * MIB, 0)
        sizes = memory.pool_sizes(asked, asked, memory.total(attention, graph, counted))
        for tier in ("device", "host"):
            assert 0 <= sizes[f"{tier}_bytes"] - stats[f"{tier}_bytes"] < 2 * MIB
        given.append(counted)
    assert given[0] < given[1]
    assert memory.index_arrays(spec, asked, 4, 512, model.max_tokens, False).device_bytes < given[0].device_bytes
    assert memory.pool_sizes("1KiB", {"full": 3}, none) == {"device_bytes": 1024, "host_blocks": {"full": 3}}


def test_requests_that_share_a_long_document_stay_in_graphs(rehearsed: list[int], tmp_path: Path) -> None:
    """Each of them lists the document's pages: together more than the pool has."""
    model = flash_model(tmp_path)
    document = list(range(5, 125)) * 4
    with LLM(model, "cpu", dict.fromkeys(model.spec().names, 60), 0, max_running=8, max_batched_tokens=512) as llm:
        params = SamplingParams(max_tokens=6, temperature=0)
        llm.generate([document], params, use_tqdm=False)
        llm.generate([[*document, i] for i in range(7)], params, use_tqdm=False)
        assert llm.graphs is not None and llm.graphs.stats()["reasons"] == []
        assert llm.graphs.stats()["replayed"] >= 10


def test_blocks_by_name_count_as_they_are_given(tmp_path: Path) -> None:
    spec = HybridModel.load(zoo.build("gemma3", tmp_path)).spec()
    blocks = dict.fromkeys(spec.names, 500)
    few = memory.index_arrays(spec, dict.fromkeys(spec.names, 5), 4, 64, None, False)
    assert memory.index_arrays(spec, blocks, 4, 64, None, False).pinned_bytes > few.pinned_bytes
    in_bytes = 500 * len(spec.groups) * min(group.block_bytes for group in spec.groups)
    assert memory.staging(spec, blocks, verifies=True) == memory.staging(spec, in_bytes, verifies=True)


def test_captured_batches_hold_no_arrays_of_steps_gone_by(rehearsed: list[int], tmp_path: Path) -> None:
    model = flash_model(tmp_path)
    with LLM(model, "cpu", 96 * MIB, 0, max_running=6) as llm:
        llm.generate([[5] * 40, [6] * 9], SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)
        assert llm.graphs is not None and llm.graphs.stats()["replayed"] > 0
        bucket, _ = llm.graphs._buckets[2]
        for batch in bucket._batches.values():
            assert not hasattr(batch, "indices") and not hasattr(batch, "_paged") and not hasattr(batch, "_slots")


class HostMemory:
    """Pinned memory as torch and CuPy hand it out: in powers of two, each for requests of its own size, none back."""

    def __init__(self) -> None:
        self.kept_bytes = 0
        self._free: Counter[int] = Counter()

    def take(self, num_bytes: int) -> int:
        """What to give back."""
        power = 1 << (num_bytes - 1).bit_length()
        if self._free[power]:
            self._free[power] -= 1
        else:
            self.kept_bytes += power
        return power

    def give_back(self, powers: Iterable[int]) -> None:
        self._free.update(powers)


def test_page_lists_that_grow_stay_within_what_is_counted(tmp_path: Path) -> None:
    """From step to step each lists a page more, three of them at a time."""
    spec = HybridModel.load(zoo.build("gemma3", tmp_path)).spec()
    blocks = dict.fromkeys(spec.names, 257)
    host, counted = HostMemory(), memory.index_arrays(spec, blocks, 4, 16, None, False)
    for group in spec.groups:
        alive: deque[int] = deque()
        for pages in range(1, graphs.most_pages(group, 257, 4, None) + 1):
            alive.append(host.take(4 * pages))
            if len(alive) > 2:
                host.give_back([alive.popleft()])
    assert counted.pinned_bytes / 2 < host.kept_bytes <= counted.pinned_bytes


def test_what_transfers_of_any_size_stage_stays_within_what_is_counted(tmp_path: Path) -> None:
    """All blocks of the host tier, whatever the device has: first in many transfers, later in ever fewer."""
    spec = HybridModel.load(zoo.build("gemma3", tmp_path)).spec()
    size = min(group.block_bytes for group in spec.groups)
    host, counted = HostMemory(), memory.staging(spec, 1200 * size, verifies=True)
    for n in sorted({*(2**k + 1 for k in range(10)), 1, 171, 342, 683, 1200}):
        taken = []
        for _ in range(1200 // n):
            taken += [host.take(8 * n), host.take(8 * n)]
        host.give_back(taken)
    assert counted.pinned_bytes / 2 < host.kept_bytes <= counted.pinned_bytes
    largest = max(group.block_bytes for group in spec.groups)
    assert counted.device_bytes == 24 * 1200 + 2 * (6 * 8 * MIB + 2 * largest)
    assert memory.staging(spec, 0, verifies=True) == memory.staging(spec, 1200 * size, verifies=False) == (0, 0)


@pytest.mark.parametrize("limits", [{"max_running": 0}, {"max_running": "many"}, {"max_batched_tokens": -1}])
def test_limits_that_no_scheduler_takes_are_refused_first(limits: Any, flashinfer: Any) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(limits))} must be an integer"):
        LLM("no such model", "cpu", "64MiB", 0, **limits)


def test_captured_sizes_have_workspaces_of_their_own(flashinfer: Any, tmp_path: Path) -> None:
    """Each of 1, 2, 4, 8, ... rows a smaller one, on the device and pinned."""
    model = flash_model(tmp_path)
    none, four = (model.attention_memory(2, n) for n in (0, 4))
    assert four.pinned_bytes - none.pinned_bytes == 2 * 4 * MIB
    assert four.device_bytes - none.device_bytes == 2 * 4 * (MIB + 4 * 32768)
    reference = HybridModel(model.model, attention="reference")
    assert reference.try_attention(model.spec()) == 0 and reference.attention_memory(2, 4) == (0, 0)
    assert SimpleNamespace(**reference.attention_stats()).workspace_bytes == 0
