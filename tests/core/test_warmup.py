"""The first request must not wait for a compiler."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from numba.core.dispatcher import Dispatcher

import kvtier
from kvtier import warmup
from kvtier.warmup import warm_up


def loops() -> Iterator[tuple[str, Dispatcher]]:
    """Every compiled loop that an engine calls from Python (inlined ones are compiled into their callers)."""
    for module in pkgutil.walk_packages(kvtier.__path__, "kvtier."):
        if module.name.startswith("kvtier.testing"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            own = isinstance(value, Dispatcher) and value.py_func.__module__ == module.name
            if own and not value.targetoptions.get("forceinline"):
                yield f"{module.name}.{name}", value


def test_warm_up_compiles_every_loop_and_nothing_else_is_compiled_later() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from core.test_warmup import loops, warm_up; warm_up();"
        "print([name for name, loop in loops() if not loop.signatures])"
    )
    root = __file__.rsplit("/core/", 1)[0]
    run = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_it_says_how_long_it_took() -> None:
    assert warm_up() > 0
    assert warm_up() == warm_up()


@pytest.mark.parametrize(("silent_s", "told"), [(0.0, True), (600.0, False)])
def test_a_warm_up_that_takes_long_says_what_it_does(monkeypatch, caplog, silent_s, told):
    threads = threading.active_count()
    monkeypatch.setattr(warmup, "_seconds", None)
    monkeypatch.setattr(warmup, "SILENT_S", silent_s)
    warmup.warm_up()
    assert (warmup.NOTICE in caplog.text) is told
    assert threading.active_count() == threads
