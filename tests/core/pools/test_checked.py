"""``CheckedPools``: a batch that its caller should not have asked for is named, and changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier import FullAttention, InvariantBroken, KVCache
from kvtier.geometry.layout import Layout
from kvtier.pools.block_pool import BlockPools, Mark
from kvtier.pools.checked import CheckedPools
from kvtier.testing import canary_spec


def ids(*values):
    return np.array(values, np.int32)


def keys(*values):
    return np.array([[v, v] for v in values], np.uint64)


G = ids(0)


def ready(pools):
    """Block 1 is held and findable, block 2 cached, block 3 held and nameless, block 4 quarantined, the rest empty."""
    for k in (1, 2, 3, 4):
        assert pools.take(G).tolist() == [k]
    for k in (1, 2):
        pools.publish(G, ids(k), keys(k), Mark.READY)
    pools.release(G, ids(2))
    pools.quarantine(G, ids(4))
    pools.release(G, ids(4))


WRONG = {
    "take": (lambda p: p.take(np.zeros(6, np.int32)), "I4 more than can be handed out, in group 0"),
    "acquire an empty block": (lambda p: p.acquire(G, ids(5)), "I2 holds nothing, nobody has it: block 5"),
    "acquire a null block": (lambda p: p.acquire(G, ids(0)), "I22 outside its pool: block 0"),
    "release twice": (lambda p: p.release(ids(0, 0), ids(1, 1)), "I2 held less often than released: entry 1"),
    "release beyond the pool": (lambda p: p.release(G, ids(9)), "I22 outside its pool: block 9"),
    "publish a named block": (lambda p: p.publish(G, ids(1), keys(7), Mark.READY), "I21 has a name already: block 1"),
    "publish a known name": (lambda p: p.publish(G, ids(3), keys(2), Mark.READY), "I21 another block has this name"),
    "make ready": (lambda p: p.make_ready(G, ids(3)), "I19 nothing is on its way to block 3"),
    "fence twice": (lambda p: p.fence(G, ids(1), 8), "I17 a store reads already block 1"),
    "fence an empty block": (lambda p: p.fence(G, ids(5), 7), "I17 there is nothing to store in block 5"),
    "quarantine a cached block": (lambda p: p.quarantine(G, ids(2)), "I1 nobody holds block 2"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_caller_has_to_see_to(what):
    act, problem = WRONG[what]
    pools = CheckedPools(Layout.fixed([64], [8]))
    ready(pools)
    if what == "fence twice":
        pools.fence(G, ids(1), 7)
    before = [array.copy() for array in pools.arrays]
    with pytest.raises(InvariantBroken, match=problem):
        act(pools)
    assert all(np.array_equal(old, new) for old, new in zip(before, pools.arrays, strict=True))


@pytest.mark.parametrize(("level", "kind"), [("2", CheckedPools), ("1", BlockPools), ("0", BlockPools)])
def test_a_cache_checks_its_batches_where_all_is_audited(monkeypatch, level, kind):
    monkeypatch.setenv("KVTIER_AUDIT", level)
    spec = canary_spec({"full": (FullAttention(), 4)})
    with KVCache(spec, device_blocks={"full": 8}, host_blocks={"full": 8}) as cache:
        assert type(cache.core.coordinator.pools) is type(cache.core.host) is kind
