"""The mutations as data, by what they break: plausible mistakes that import, run, and are wrong."""

from __future__ import annotations

from . import (
    attention,
    bench,
    copies,
    cuda,
    doors,
    edges,
    exact,
    fused,
    journal,
    kv_events,
    lookup,
    pools,
    remote,
    scheduling,
    server,
    states,
    steps,
    vllm,
)

MUTATIONS = (
    *doors.MUTATIONS,
    *states.MUTATIONS,
    *edges.MUTATIONS,
    *copies.MUTATIONS,
    *cuda.MUTATIONS,
    *attention.MUTATIONS,
    *fused.MUTATIONS,
    *exact.MUTATIONS,
    *lookup.MUTATIONS,
    *kv_events.MUTATIONS,
    *pools.MUTATIONS,
    *scheduling.MUTATIONS,
    *steps.MUTATIONS,
    *server.MUTATIONS,
    *journal.MUTATIONS,
    *bench.MUTATIONS,
    *remote.MUTATIONS,
    *vllm.MUTATIONS,
)
