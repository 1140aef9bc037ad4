"""Ways into states from which field bugs start: content that only the host has, and caches that keep books only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import inside
from core.driving import LOAD, Serving

from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow

FULL = {"full": (FullAttention(), 4)}
WINDOW = {"win": (SlidingWindow(6), 4)}
CHUNK = {"chunk": (ChunkedLocal(8), 4)}
GROUPS = {**FULL, **WINDOW, **CHUNK}


def books_only(make_serving: Any, blocks: Any, host: Any, *groups: GroupSpec, **options: Any) -> Serving:
    """A cache of real size without bytes: blocks of 16 tokens, full attention unless ``groups`` says otherwise."""
    spec = CacheSpec(groups or [GroupSpec("full", FullAttention(), 1, 1, 8)])
    limits = {"max_batched_tokens": 8192, "max_running": 8, "audit_every": 16, **options.pop("scheduler", {})}
    return make_serving(spec, blocks, host, hold=[], device="meta", scheduler=limits, **options)


def only_on_host(serving: Serving, *prompts: Sequence[int]) -> None:
    """Serves the prompts; then the host tier has their full blocks and the device has nothing. Loads are held."""
    for k, tokens in enumerate(prompts):
        serving.serve(f"before {k}", tokens, 1)
    device_forgets(serving)
    serving.engine.hold = {LOAD}


def device_forgets(serving: Serving) -> None:
    """Nothing is cached on the device any more; no request may be running."""
    inside.pools(serving.cache).forget_all()


def land(serving: Serving) -> None:
    """The copies under way end, and those that come end at the next poll."""
    serving.engine.release()
