"""Log lines that clients can cause by the thousand."""

from __future__ import annotations

import logging

import pytest

from runner.server.sparing import Sparing


def test_one_line_stands_for_many(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    news = Sparing(logging.getLogger("kvtier.server"), 10.0, lambda: now[0])
    for at in (0.0, 1.0, 9.9, 10.0, 11.0, 30.0, 50.0):
        now[0] = at
        news.warning("at %g", at)
    told = ["at 0", "at 10 (2 more since the last line)", "at 30 (1 more since the last line)", "at 50"]
    assert caplog.messages == told
