"""The soak's memory figures see what a process keeps."""

from __future__ import annotations

import gc
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from model import soak
from model.memory import MemoryLog, slopes


@pytest.fixture(autouse=True)
def of_its_own() -> Iterator[None]:
    """Each measurement collects all garbage: it need not look at what was there before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_what_is_kept_shows_where_it_was_handed_out() -> None:
    kept: list[object] = []
    log = MemoryLog()
    for step in range(0, 8_000_000, 1_000_000):
        kept.append(np.ones(2**20))  # 8 MiB each, perhaps of pages that malloc has
        pages = mmap.mmap(-1, 2**22)
        pages.write(bytes(2**22))
        kept.append(pages)
        kept.extend([object() for _ in range(20_000)])
        log.note(step)
    assert [at for at, _ in log.second_half()] == [4_000_000, 5_000_000, 6_000_000, 7_000_000]
    grown = slopes(log.second_half())
    assert grown.malloc == pytest.approx(8, abs=1)
    assert grown.objects == pytest.approx(20, abs=1)
    assert grown.resident > 2  # other pages may be given back meanwhile


def test_what_is_given_back_does_not_show() -> None:
    log = MemoryLog()
    for step in range(0, 8_000_000, 1_000_000):
        np.ones(2**20)
        [object() for _ in range(20_000)]
        log.note(step)
    grown = slopes(log.second_half())
    assert grown.malloc == pytest.approx(0, abs=1)
    assert grown.objects == pytest.approx(0, abs=1)


@pytest.mark.parametrize(("kib", "status"), [(0, 0), (16, 1)])
def test_the_soak_ends_with_status_1_where_the_same_worlds_take_more_and_more(
    kib: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[object] = []

    def walk(seed: int, counts: soak.Counts, bar: Any, has_remote: bool | None) -> None:
        kept.append(np.ones(kib * 2**7) if kib else None)
        counts.seen["steps"] += 1000

    monkeypatch.setattr(soak, "walk", walk)
    monkeypatch.setattr(soak.signal, "signal", lambda *_: None)  # those of this process stay as they are
    monkeypatch.setattr(sys, "argv", ["soak", "--worlds", "2", "--steps", "40000"])
    with pytest.raises(SystemExit) as ended:
        soak.main()
    assert int(ended.value.code or 0) == status
    assert ("memory grows" in capsys.readouterr().out) == bool(status)
