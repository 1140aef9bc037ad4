"""The program that looks for races on a GPU, `tests/gpu/test_order.py`, is right itself."""

from __future__ import annotations

import time

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from core.fake_cuda import COMPUTE, FakeCuda, Stream


class LateForwards:
    """The compute stream of a played GPU, which is at most ``ahead`` parts of forwards behind the host."""

    def __init__(self, cuda: FakeCuda, ahead: int = 40) -> None:
        self.cuda, self.ahead, self.left = cuda, ahead, 0
        cuda.streams[COMPUTE] = Stream(False)

    def launch(self, part):
        def run():
            part()
            self.left -= 1

        self.left += 1
        self.cuda.enqueue(COMPUTE, run)
        while self.left > self.ahead:
            if not self.cuda.progress(1):
                time.sleep(0)  # a thread has not given its stream yet what another one waits for


@pytest.fixture
def amplified(linked):
    """Where `tests/gpu/test_order.py` runs here: `is_noticed` and `amplify` take it."""

    def where(seed: int = 0) -> dict:
        options, cuda = linked(seed=seed)
        late = LateForwards(cuda)
        return {"device": "cpu", "num_layers": 2, "launch": late.launch, "finish": cuda.run, **options}

    return where


@pytest.mark.parametrize(("store", "verify"), [("eager", "off"), ("lazy", "full")])
def test_the_race_amplifier_finds_nothing_and_its_pools_are_full(amplified, monkeypatch, store, verify):
    from gpu.test_order import amplify

    monkeypatch.setenv("KVTIER_AUDIT", "0")
    seen = amplify(0, 150, store=store, verify=verify, **amplified())
    assert not seen.wrong
    assert seen.loaded_blocks > 150
    assert seen.violations == []
    assert (seen.full > 0.5).all(), "how full they are depends on when copies end"


@pytest.mark.parametrize("edge", range(1, 7))
def test_the_race_amplifier_sees_each_order_that_is_removed(amplified, edge):
    from gpu.test_order import REMOVED, is_noticed

    name = next(name for name in REMOVED if name.startswith(f"edge {edge}"))
    assert any(is_noticed(name, seed, 60, **amplified(seed)) for seed in range(4))
    assert not is_noticed(name, 0, 60, remove=False, **amplified())


class SentUp(TorchDispatchMode):
    """Notes numbers that are written through indices: on a GPU torch copies such a number there, and waits for it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("aten::index_put") and args[2].dim() == 0:
            self.found.append(args[2])
        return func(*args, **kwargs or {})


def test_the_forwards_of_the_race_amplifier_do_not_wait_for_the_device(monkeypatch):
    """Else no forward is ever late, and edges 1 and 2 are not missed."""
    from gpu.test_order import amplify

    monkeypatch.setenv("KVTIER_AUDIT", "0")
    with SentUp() as sent:
        amplify(0, 60, device="cpu", num_layers=2, finish=lambda: None)
    assert sent.found == []


def test_the_race_amplifier_lets_the_host_run_ahead_where_only_that_is_noticed():
    """A GPU of 2 GHz: a step takes the host 1 to 2 ms there."""
    from gpu.test_order import REMOVED

    spins = [options["spin"] for name, (_, options) in REMOVED.items() if name.startswith(("edge 1", "edge 2"))]
    assert [spin / 2 / 2e9 >= 2e-3 for spin in spins] == [True, True]


def test_the_race_amplifier_does_not_take_a_crash_for_a_race(amplified, monkeypatch):
    from gpu.canary import DeviceCanary
    from gpu.test_order import REMOVED, is_noticed

    monkeypatch.setattr(DeviceCanary, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        is_noticed(next(iter(REMOVED)), 0, 60, **amplified())
