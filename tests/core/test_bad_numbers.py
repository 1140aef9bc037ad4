"""Values of other types: numpy's integers are taken, whatever is none is refused everywhere."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from kvtier import (
    CacheSpec,
    ChunkedLocal,
    ConfigError,
    DuplicateRequest,
    FullAttention,
    GroupSpec,
    InvalidRequest,
    InvariantBroken,
    KVCache,
    Request,
    RequestTooLarge,
    Scheduler,
    SlidingWindow,
)
from kvtier.geometry.keys import KeyChain

SPEC = CacheSpec([GroupSpec("full", FullAttention(), 1, 1, 8)])


def made_of(one, two, four):
    """Everything that takes a number, made of these; what is kept of them comes back."""
    groups = [
        GroupSpec("full", FullAttention(), one, two, four, block_tokens=four, head_dim_v=four),
        GroupSpec("win", SlidingWindow(two), one, two, four, block_tokens=four),
        GroupSpec("chunk", ChunkedLocal(four), one, two, four, block_tokens=four),
    ]
    spec = CacheSpec(groups, layers=[("full", one - one), ("win", one - one), ("chunk", one - one)])
    size = four * 1024
    request = Request("r", [1], two, priority=one, extra_keys=(one, (two,)))
    with KVCache(spec, device_bytes=size, host_bytes=size, deadline_s=one) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=four, max_running=two)
        shape = cache.kv("full", one - one)[0].shape
        scheduler.wait(one - one)
        scheduler.add(request)
        step = scheduler.schedule()
        counts = step.request_ids, len(step.group("full").padded(two)[3])
        scheduler.cancel(step)
        root = KeyChain(spec, "m", b"secret").root(None, None, request.extra_keys).tolist()
        sizes = cache.stats().device_bytes, cache.stats().host_bytes
    blocks = KVCache(spec, device_blocks=dict.fromkeys(spec.names, four), device="meta").stats().device
    return repr((groups, spec, spec.layer(one), request, request.priority, shape, counts, root, sizes, blocks))


@pytest.mark.parametrize("kind", [np.int64, np.int16, np.uint64])
def test_numpy_integers_are_taken_for_plain_ones(kind):
    """Kept as plain ints: keys are made of the geometry's text."""
    assert made_of(*map(kind, (1, 2, 4))) == made_of(1, 2, 4)


def test_scales_may_be_given_by_layers_that_are_numpy_integers():
    group = GroupSpec("full", FullAttention(), 2, 1, 16, dtype="fp8")
    scales = {i: {"k": 0.5, "v": 2.0} for i in range(2)}
    given = {np.int64(i): pair for i, pair in scales.items()}
    assert CacheSpec([group]).with_kv_scales(given) == CacheSpec([group]).with_kv_scales(scales)


@pytest.mark.parametrize("bad", [True, False, np.True_, np.False_, 1.0, np.float64(1), "1", None], ids=repr)
def test_what_is_no_integer_is_refused_everywhere(make_cache, bad):
    spec, cache = CacheSpec([GroupSpec("full", FullAttention(), 2, 1, 8)]), make_cache()
    for make in (
        lambda: GroupSpec("full", FullAttention(), bad, 1, 8),
        lambda: GroupSpec("full", FullAttention(), 1, bad, 8),
        lambda: GroupSpec("full", FullAttention(), 1, 1, bad),
        lambda: GroupSpec("full", FullAttention(), 1, 1, 8, block_tokens=bad),
        lambda: SlidingWindow(bad),
        lambda: ChunkedLocal(bad),
        lambda: CacheSpec(spec.groups, layers=[("full", bad)]),
        lambda: spec.layer(bad),
        lambda: cache.kv("full", bad),
        *([] if bad is None else [lambda: KVCache(spec, device_bytes=1 << 20, host_bytes=bad)]),  # None is no tier
        lambda: KVCache(spec, device_blocks={"full": bad}),
        lambda: Scheduler(cache, max_batched_tokens=bad),
        lambda: Scheduler(cache, max_running=bad),
    ):
        if bad == "1" and make.__code__.co_names[:1] == ("KVCache",):
            continue  # text is a size
        with pytest.raises(ConfigError):
            make()
    for field in ("max_new_tokens", "priority"):
        with pytest.raises(InvalidRequest, match=field):
            Request(**({"request_id": "r", "prompt_token_ids": [1], "max_new_tokens": 1} | {field: bad}))


@pytest.mark.parametrize(
    "error",
    [
        RequestTooLarge({"full": 5}, {"full": 3}, what="the prompt of request 'r'", longest=48),
        InvariantBroken("commit", ["I1", "I2"]),
        DuplicateRequest("a request 'r' is already waiting"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_reach_another_process_whole(error):
    """An engine core in a process of its own died of one that could not be unpickled."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_spec_is_made_of_a_list():
    with pytest.raises(ConfigError, match="takes a list of GroupSpec"):
        CacheSpec(np.array(5))


@pytest.mark.parametrize(
    "bad", [[], {}, None, 5, b"full", np.array(["full"]), np.array([1, 2])], ids=lambda x: type(x).__name__
)
def test_what_is_no_name_of_a_group_is_refused_as_an_unknown_one(make_serving, bad):
    serving = make_serving()
    serving.add("A", [1, 2, 3], 1)
    step, ids = serving.begin()
    for look in (step.group, serving.cache.spec.group, serving.cache.spec.index, lambda g: serving.cache.kv(g, 0)):
        with pytest.raises(ConfigError, match=r"no group .* there are full"):
            look(bad)
    serving.end(step, ids)


def test_a_secret_without_bytes_is_refused():
    """An empty environment variable would give keys that anybody can work out."""
    with pytest.raises(ConfigError, match="key_secret"):
        KVCache(SPEC, device_bytes="1MiB", key_secret=b"")
