"""How long tests wait for what must happen. None compares with real time, so a machine may be as busy as it likes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

PATIENCE_S = 120.0
"""Until an event that is under way."""
FOREVER_S = 3600.0
"""For a wait that something must end before its time: if nothing does, pytest's own limit ends the test."""


def wait_until(is_so: Callable[[], object], what: str) -> None:
    """Looks again and again, for ``PATIENCE_S``."""
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, f"not so after {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.005)


def be_patient_with_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in a store is a hit, however long it takes to ask for it and to fetch it."""
    monkeypatch.setattr("kvtier.coordinator.seek.LEAST_S", PATIENCE_S)
    monkeypatch.setattr("kvtier.remote.tier.RemoteTier.recent_speed", lambda *_: 0.0)  # all are worth their time
    monkeypatch.setattr("kvtier.remote.tier.ANSWER_S", PATIENCE_S)
    monkeypatch.setattr("kvtier.remote.tier.FETCH_S", PATIENCE_S)
