"""``CuPyApi``: which calls of CuPy's binding it makes, and on which device."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from kvtier import DeviceUnavailable
from kvtier.cpu_offload.engines.cuda import driver as cuda_driver
from kvtier.cpu_offload.engines.cuda.driver import CudaError, CuPyApi, cupy_runtime
from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime


class Runtime:
    """CuPy's runtime binding by name and number of arguments; notes each call and the device that was current."""

    ARGUMENTS: ClassVar[dict[str, int]] = {
        "setDevice": 1, "getDevice": 0, "free": 1, "streamCreateWithPriority": 2, "streamDestroy": 1,
        "streamSynchronize": 1, "streamWaitEvent": 2, "eventCreateWithFlags": 1, "eventDestroy": 1, "eventQuery": 1,
        "eventRecord": 2, "hostRegister": 3, "hostUnregister": 1,
    }  # fmt: skip

    class CUDARuntimeError(RuntimeError):
        def __init__(self, status: int) -> None:
            self.status = status
            super().__init__(f"status {status}")

    def __init__(self) -> None:
        self.device = 0
        self.calls: list[tuple[str, tuple[int, ...], int]] = []
        self.answers: dict[str, int] = {}

    def __getattr__(self, name: str):
        if name not in self.ARGUMENTS:
            raise AttributeError(name)

        def call(*arguments: int) -> int:
            assert len(arguments) == self.ARGUMENTS[name]
            assert all(type(a) is int for a in arguments)
            self.calls.append((name, arguments, self.device))
            if name == "setDevice":
                [self.device] = arguments
            answer = self.answers.get(name, self.device if name == "getDevice" else 0)
            if answer < 0:
                raise self.CUDARuntimeError(-answer)
            return answer

        return call


@pytest.fixture
def made(monkeypatch):
    """(the binding for device 1, what it is played with); the thread's own device is 0."""
    runtime = Runtime()
    driver = SimpleNamespace(cuMemcpyAsync=ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0))
    monkeypatch.setattr(cuda_driver, "cupy_runtime", lambda: runtime)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    return CuPyApi(1), runtime, driver


CALLS = {
    "streamCreateWithPriority": lambda api: api.new_stream(True),
    "streamDestroy": lambda api: api.drop_stream(7),
    "streamSynchronize": lambda api: api.synchronize(7),
    "streamWaitEvent": lambda api: api.wait(1, 7),
    "eventCreateWithFlags": lambda api: api.new_event(),
    "eventDestroy": lambda api: api.drop_event(7),
    "eventRecord": lambda api: api.record(7, 1),
    "hostRegister": lambda api: api.host_register(4096, 8192),
    "hostUnregister": lambda api: api.host_unregister(4096),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_goes_to_the_device_and_the_thread_keeps_its_own(made, name):
    """The null stream's name, 1, means that of whichever device is current."""
    api, runtime, _ = made
    CALLS[name](api)
    assert [device for called, _, device in runtime.calls if called == name] == [1]
    assert runtime.device == 0, "torch.cuda.current_device() has changed under its user"


@pytest.mark.parametrize("name", [*CALLS, "setDevice", "free"])
def test_a_call_that_fails_says_which_and_with_what_error(made, name):
    api, runtime, _ = made
    runtime.answers[name] = -700
    others = {"setDevice": api.bind_thread, "free": api.bind_thread}
    with pytest.raises(CudaError, match="700") as caught:
        others.get(name, lambda: CALLS[name](api))()
    assert caught.value.status == 700
    if name in CALLS:
        assert runtime.device == 0


def test_every_call_of_the_binding_is_looked_at_here():
    assert {*CALLS, "setDevice", "free", "getDevice", "eventQuery"} == set(Runtime.ARGUMENTS)


def test_a_lost_device_ends_copies_and_lets_the_engine_close(made, monkeypatch):
    """The engine's runtime over the very errors that the binding raises."""
    api, runtime, _ = made
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=0))
    released: list[int] = []
    cuda = CudaRuntime(api, np.zeros(1, np.uint64), on_close=lambda: released.append(1))
    stream = cuda.new_stream("store")
    runtime.answers = dict.fromkeys(Runtime.ARGUMENTS, -700) | {"setDevice": 0, "getDevice": 0}
    assert cuda.is_done(cuda.record(stream))
    cuda.wait(cuda.compute_stream(), cuda.record(stream))
    assert cuda.close(1.0)
    assert released == [1]


def test_a_thread_that_copies_is_bound_for_good(made):
    api, runtime, _ = made
    api.bind_thread()
    assert runtime.device == 1
    assert runtime.calls[-1][0] == "free", "the context is made current, which driver calls need"


def test_streams_do_not_follow_the_null_stream_and_loads_come_first(made):
    api, runtime, _ = made
    for urgent in (True, False):
        api.new_stream(urgent)
    (_, load, _), (_, store, _) = [c for c in runtime.calls if c[0] == "streamCreateWithPriority"]
    assert load[0] == store[0] == 1
    assert load[1] < store[1]
    api.new_event()
    assert next(c[1] for c in runtime.calls if c[0] == "eventCreateWithFlags") == (2,), "no timing"


@pytest.mark.parametrize(("handle", "stream"), [(0, 1), (0x55, 0x55)])
def test_the_compute_stream_is_torchs_and_the_null_stream_is_named(made, monkeypatch, handle, stream):
    asked = []
    current = lambda index: (asked.append(index), SimpleNamespace(cuda_stream=handle))[1]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    assert made[0].compute_stream() == stream
    assert asked == [1], "that of the engine's device, whichever is current"


@pytest.mark.parametrize(("answer", "happened"), [(0, True), (600, False), (-600, False)])
def test_an_event_is_asked_without_waiting(made, answer, happened):
    api, runtime, _ = made
    runtime.answers["eventQuery"] = answer
    assert api.has_happened(5) is happened


@pytest.mark.parametrize("answer", [900, -904, -906])
def test_a_capture_elsewhere_in_the_process_is_no_lost_device(made, answer):
    api, runtime, _ = made
    runtime.answers["eventQuery"] = answer
    assert not api.has_happened(5)
    runtime.answers["eventQuery"] = 0
    assert api.has_happened(5)


@pytest.mark.parametrize("answer", [700, -700])
def test_any_other_answer_means_that_the_device_is_lost(made, answer):
    api, runtime, _ = made
    runtime.answers["eventQuery"] = answer
    with pytest.raises(CudaError, match="lost") as caught:
        api.has_happened(5)
    assert caught.value.status == 700


def test_the_other_calls(made):
    api, runtime, _ = made
    runtime.calls.clear()
    api.record(3, 4)
    api.wait(4, 3)
    api.synchronize(4)
    api.drop_event(3)
    api.drop_stream(4)
    api.host_unregister(4096)
    assert [c[:2] for c in runtime.calls if c[0] not in ("getDevice", "setDevice")] == [
        ("eventRecord", (3, 4)),
        ("streamWaitEvent", (4, 3)),
        ("streamSynchronize", (4,)),
        ("eventDestroy", (3,)),
        ("streamDestroy", (4,)),
        ("hostUnregister", (4096,)),
    ]


def test_copies_are_the_drivers_own_function(made):
    api, _, driver = made
    assert api.copy_function() == ctypes.cast(driver.cuMemcpyAsync, ctypes.c_void_p).value


def test_the_calls_have_as_many_arguments_as_cupys():
    """CuPy's binding says its signatures in its docstrings; it can be imported without a GPU."""
    try:
        runtime = cupy_runtime()
    except DeviceUnavailable:
        pytest.skip("CuPy is not installed; pip install cupy-cuda13x")
    for name, count in Runtime.ARGUMENTS.items():
        parameters = re.match(rf"{name}\((.*?)\)", getattr(runtime, name).__doc__)[1]
        needed = [p for p in parameters.split(",") if p.strip() and "=" not in p]
        assert len(needed) <= count <= len([p for p in parameters.split(",") if p.strip()]), name
    assert issubclass(runtime.CUDARuntimeError, RuntimeError)
