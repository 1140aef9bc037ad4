"""The first request must not wait for a compiler."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from kvtier import warmup
from kvtier.warmup import warm_up


def test_warm_up_compiles_every_loop() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from core.loops import loops; from kvtier.warmup import warm_up; warm_up();"
        "print([name for name, loop in loops() if len(loop.signatures) != 1])"
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
