"""The CUDA copy engine's checksums: every changed block is found, beside copies and in stream order."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import inside
import numpy as np
import pytest
from patience import PATIENCE_S, wait_until

from core.cpu_offload.engines.test_engines import LOAD, STORE, drain
from core.fake_cuda import COMPUTE, FakeSums, Stream
from kvtier.cpu_offload.engines.cuda import runtime as cuda_module
from kvtier.cpu_offload.engines.cuda.device_sums import TorchSums
from kvtier.cpu_offload.engines.cuda.driver import CudaError
from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime


def test_each_block_that_changed_in_the_host_tier_is_found(make_rig):
    rig = make_rig(verify=True, piece_bytes=1 << 20)
    tiers = rig.tiers
    pairs = [(0, 1, 1), (0, 2, 2), (1, 1, 5), (1, 4, 9)]
    rig.engine.submit(tiers.transfer(STORE, *pairs))
    assert [o.error for o in drain(rig.engine, 1)] == [""]
    for k, (g, _, h) in enumerate(pairs):
        block = tiers.block(tiers.host, g, h)
        for at in (0, len(block) // 2, len(block) - 1):
            block[at] ^= 16
            rig.engine.submit(tiers.transfer(LOAD, *pairs))
            [outcome] = drain(rig.engine, 1)
            assert outcome.corrupt
            assert outcome.bad.tolist() == [k]
            block[at] ^= 16
    rig.engine.submit(tiers.transfer(LOAD, *pairs))
    assert [o.error for o in drain(rig.engine, 1)] == [""]


def test_a_stores_checksums_go_beside_its_copies_and_a_loads_after_each_piece_of_them(make_rig, monkeypatch):
    rig, calls = make_rig(verify=True, piece_bytes=1 << 20), []
    monkeypatch.setattr(cuda_module, "PIECE_BYTES", int(rig.tiers.device.block_bytes[0]))
    send, begin = CudaRuntime.send, FakeSums.begin
    monkeypatch.setattr(CudaRuntime, "send", lambda *a: (calls.append(("copy", a[-1])), send(*a))[1])
    monkeypatch.setattr(FakeSums, "begin", lambda *a: (calls.append(("sum", a[1])), begin(*a))[1])
    blocks = (0, 1, 1), (0, 2, 2), (0, 3, 3)
    for direction, parts in ((STORE, ["sum", "copy"]), (LOAD, ["copy", "sum"] * 3)):
        calls.clear()
        rig.engine.submit(rig.tiers.transfer(direction, *blocks))
        assert [o.error for o in drain(rig.engine, 1)] == [""]
        assert [what for what, _ in calls] == parts
        assert {stream for what, stream in calls if what == "copy"} == {inside.streams(rig.engine)[direction]}
        assert not {stream for what, stream in calls if what == "sum"} & set(inside.streams(rig.engine).values())


@pytest.mark.parametrize("removed", [None, (STORE, 0), (STORE, 1), (LOAD, 0), (LOAD, 1), (LOAD, 2)])
def test_every_order_between_copies_and_their_checksums_is_needed(make_rig, monkeypatch, removed):
    """A forward that has yet to write two blocks, a store of them, and a load of what was stored, again and again."""
    rig, calls, follow, copy = make_rig(verify=True, piece_bytes=1 << 20), [], CudaRuntime._follow, CudaRuntime.copy
    monkeypatch.setattr(cuda_module, "PIECE_BYTES", 1)
    compute = rig.cuda.streams[COMPUTE] = Stream(False)

    def copying(self, stream, memory, transfer):
        calls[:] = [transfer.direction]
        return copy(self, stream, memory, transfer)

    def following(self, later, earlier):
        calls.append(1)
        if (calls[0], len(calls) - 2) != removed:
            follow(self, later, earlier)

    monkeypatch.setattr(CudaRuntime, "copy", copying)
    monkeypatch.setattr(CudaRuntime, "_follow", following)
    wrong, blocks = [], ((0, 1, 1), (0, 2, 2))
    for k in range(40):
        for _, b, _ in blocks:
            rig.cuda.enqueue(COMPUTE, lambda b=b, k=k: rig.tiers.block(rig.tiers.device, 0, b).fill(k + b))
        for direction in (STORE, LOAD):
            rig.engine.submit(rig.tiers.transfer(direction, *blocks))
            wrong += [o.error for o in drain(rig.engine, 1) if o.error]
            for _, b, _ in blocks:
                rig.tiers.block(rig.tiers.device, 0, b)[:] = 255
    assert (wrong == []) is (removed is None)
    rig.cuda.run()
    assert not compute.queue
    del rig.cuda.streams[COMPUTE]


def test_what_a_load_that_fails_half_way_has_under_way_is_kept(make_rig, monkeypatch):
    rig, used = make_rig(verify=True, piece_bytes=1 << 20), []
    send, begin = CudaRuntime.send, FakeSums.begin
    monkeypatch.setattr(cuda_module, "PIECE_BYTES", 1)

    def sending(*arguments):
        if used:
            raise CudaError("cuMemcpyAsync", 1, "refused")
        return send(*arguments)

    def begun(*arguments):
        sums = begin(*arguments)
        used.append(weakref.ref(sums))
        return sums

    monkeypatch.setattr(CudaRuntime, "send", sending)
    monkeypatch.setattr(FakeSums, "begin", begun)
    rig.cuda.held = True
    rig.engine.submit(rig.tiers.transfer(LOAD, (0, 1, 1), (0, 2, 2)))
    assert inside.waits_until_given(rig.engine, inside.first_copy(rig.engine, LOAD))
    assert used[0]() is not None, "the first piece's checksums are still to be taken"
    rig.cuda.held = False
    [outcome] = drain(rig.engine, 1)
    assert "refused" in outcome.error


def test_a_load_that_is_verified_is_cut_into_a_few_pieces_that_cover_it():
    sizes = np.full(1000, 1 << 20, np.uint64)
    for n, count in ((0, 1), (1, 1), (100, 1), (128, 2), (1000, cuda_module.MOST_PIECES)):
        pieces = cuda_module.pieces(sizes[:n], cuda_module.PIECE_BYTES, cuda_module.MOST_PIECES)
        assert len(pieces) == count
        assert [i for at in pieces for i in range(n)[at]] == list(range(n))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_paced_stream_gets_a_piece_once_it_has_made_the_one_before(make_rig, monkeypatch, direction, verify):
    """So its copy engine serves others in between. Nobody paces while somebody waits until all is given."""
    monkeypatch.setattr(cuda_module, "PACED_BYTES", 1)
    rig = make_rig(paced=True, verify=verify, piece_bytes=1 << 20)
    pairs = [(0, 1, 1), (0, 2, 3), (1, 1, 5), (0, 3, 2)]
    rig.engine.submit(rig.tiers.transfer(STORE, *pairs))
    drain(rig.engine, 1)
    stored = [rig.tiers.block(rig.tiers.host, g, h).copy() for g, _, h in pairs]
    tier, column = (rig.tiers.host, 2) if direction is STORE else (rig.tiers.device, 1)
    for pair in pairs:
        rig.tiers.block(tier, pair[0], pair[column])[:] = 0
    copies, behind = len(rig.cuda.copies), []
    send = CudaRuntime.send

    def sending(self, copies, stream):
        behind.append(len([job for job in rig.cuda.streams[stream].queue if callable(job)]))
        send(self, copies, stream)

    monkeypatch.setattr(CudaRuntime, "send", sending)
    rig.engine.submit(rig.tiers.transfer(direction, *pairs))
    assert [o.error for o in drain(rig.engine, 1)] == [""]
    found = [rig.tiers.block(tier, pair[0], pair[column]) for pair in pairs]
    assert all(np.array_equal(a, b) for a, b in zip(found, stored, strict=True))
    assert len(rig.cuda.copies) - copies == len(behind) == len(pairs)
    assert behind == [0] * len(pairs)


def test_nobody_paces_while_somebody_waits_until_all_is_given(make_rig, monkeypatch):
    monkeypatch.setattr(cuda_module, "PACED_BYTES", 1)
    rig = make_rig(paced=True, piece_bytes=1 << 20)
    rig.cuda.held = True  # no piece ever ends
    store = rig.tiers.transfer(STORE, (0, 1, 1), (0, 2, 3), (1, 1, 5))
    rig.engine.submit(store)
    wait_until(lambda: rig.cuda.copies, "the first piece is given")
    assert not inside.copy_of(rig.engine, store).is_given()
    assert inside.waits_until_given(rig.engine, inside.copy_of(rig.engine, store))
    assert len(rig.cuda.copies) == 3
    rig.cuda.held = False
    assert [o.error for o in drain(rig.engine, 1)] == [""]


def test_checksums_that_cannot_be_read_are_a_failure(make_rig, monkeypatch):
    def begin(self, stream, *blocks):
        return lambda: 1 / 0

    monkeypatch.setattr(FakeSums, "begin", begin)
    rig = make_rig(verify=True)
    rig.engine.submit(rig.tiers.transfer(LOAD, (0, 1, 1)))
    assert "ZeroDivisionError" in drain(rig.engine, 1)[0].error


def test_a_kernel_for_checksums_is_given_addresses(make_rig):
    rig, asked = make_rig(verify=True), []

    def kernel(addresses, block_bytes, device):
        import torch

        asked.append((addresses.tolist(), block_bytes, str(device)))
        return torch.arange(len(addresses), dtype=torch.int64)

    t = rig.tiers.transfer(STORE, (0, 2, 1), (1, 3, 1), (0, 1, 2))
    sums = TorchSums(kernel).begin(0, rig.tiers.memory, t.groups, rig.tiers.memory.addresses(t)[0])()
    d = rig.tiers.device
    first, second = d.address, d.address + int(d.origins[1])
    size = d.block_bytes.tolist()
    assert asked == [([first + 2 * size[0], first + size[0]], size[0], "cpu"), ([second + 3 * size[1]], size[1], "cpu")]
    assert sums.tolist() == [0, 0, 1]


def test_on_a_gpu_checksums_are_launched_on_the_stream_that_they_are_given_and_come_back_pinned(make_rig, monkeypatch):
    import torch

    from kvtier.cpu_offload.engines.cuda import device_sums

    rig, now, pinned, given = make_rig(verify=True), list[int](), list[bool](), list[weakref.ref]()
    empty, d = torch.empty, rig.tiers.device
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda:0")
    memory = SimpleNamespace(arenas=[SimpleNamespace(storage=on_gpu, address=d.address, block_bytes=d.block_bytes)])

    @contextmanager
    def on(stream, device):
        now.append(stream)
        yield
        now.clear()

    def kernel(addresses, block_bytes, device):
        assert now == [77]
        return torch.arange(len(addresses), dtype=torch.int64)

    def pin(tensor):
        copy = tensor.clone()
        given.append(weakref.ref(copy))
        return copy

    def made(*sizes, pin_memory=False, **options):
        assert now == [77]
        pinned.append(pin_memory)
        return empty(*sizes, **options)

    t = rig.tiers.transfer(STORE, (0, 2, 1), (1, 3, 1))
    at = rig.tiers.memory.addresses(t)[0]
    monkeypatch.setattr(device_sums, "_on", on)
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    read = TorchSums(kernel).begin(77, memory, t.groups, at)
    assert pinned == [True] and not now
    assert len(given) == 2 and all(addresses() is not None for addresses in given), (
        "what is let go early holds up others"
    )
    read()
    assert all(addresses() is None for addresses in given)


def test_memory_that_torch_keeps_for_streams_is_given_back_before_they_end(make_rig, monkeypatch):
    import torch

    rig, left = make_rig(verify=True), list[int]()
    monkeypatch.setattr(FakeSums, "close", lambda self: self._sums.close())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(len(rig.cuda.streams)))
    assert rig.engine.close(PATIENCE_S)
    assert len(left) == 1 and left[0] > 0 and not rig.cuda.streams


def test_events_of_a_close_that_is_tried_again_are_used_again(make_rig):
    rig = make_rig()
    rig.cuda.held = True
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1)))
    assert inside.waits_until_given(rig.engine, inside.first_copy(rig.engine, STORE))
    assert not rig.runtime.close(0.0)
    made = len(rig.cuda.events)
    assert not any(rig.runtime.close(0.0) for _ in range(5))
    assert len(rig.cuda.events) == made
    rig.cuda.held = False
