"""The soak's memory figures see what a process keeps."""

from __future__ import annotations

import numpy as np

from model.memory import Memory, slopes


def test_what_is_kept_shows_where_it_was_handed_out() -> None:
    kept: list[object] = []
    seen = [(0, Memory.now())]
    for step in (1_000_000, 2_000_000, 3_000_000):
        kept.append(np.ones(2**20))  # 8 MiB each
        kept.extend([object() for _ in range(20_000)])
        seen.append((step, Memory.now()))
    slope = slopes(seen)
    assert 8 < slope["malloc"] < 9  # and the list itself
    assert 20 < slope["objects"] < 21
    assert slope["resident"] > 8


def test_what_is_given_back_does_not_show() -> None:
    seen = []
    for step in range(0, 4_000_000, 1_000_000):
        np.ones(2**20)
        [object() for _ in range(20_000)]
        seen.append((step, Memory.now()))
    slope = slopes(seen[1:])
    assert abs(slope["malloc"]) < 0.1
    assert abs(slope["objects"]) < 0.1
