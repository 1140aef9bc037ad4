"""Bad input: a typed error that says what to do, raised before any state changes, and the engine goes on."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from functools import partial
from pathlib import Path

import inside
import numpy as np
import pytest

from core.driving import assert_same, prompt, snapshot
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
    KVTierError,
    MemoryUnavailable,
    Request,
    RequestTooLarge,
    Scheduler,
    SlidingWindow,
    StepError,
)
from kvtier.coordinator import running, scheduler
from kvtier.coordinator.advance import advance
from kvtier.coordinator.plan import valid_ids
from kvtier.geometry.keys import KeyChain
from kvtier.machine.loops import aligned as _aligned
from kvtier.pools.arena import Arena
from kvtier.testing import canary_spec

SPEC = CacheSpec([GroupSpec("full", FullAttention(), 1, 1, 8)])


class Elsewhere:
    """Like a tensor on another device: only torch knows how to get at it."""

    def __repr__(self) -> str:
        return "Elsewhere"

    def __array__(self, *_, **__):
        raise TypeError("can't convert a device tensor to numpy")


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        np.empty(0, np.int64),
        [-1],
        [2**31],
        [2**63],
        [2**70],
        [1.0],
        ["1"],
        [True],
        [1, True],
        [np.True_, 1],
        [None],
        [[1, 2]],
        [[1], [1, 2]],
        None,
        5,
        "12",
        b"12",
        {1: 2},
        {1, 2},
        object(),
        (i for i in (1, 2)),
        np.ones((2, 2), np.int64),
        np.ones(3),
        Elsewhere(),
    ],
    ids=lambda tokens: str(tokens).split(" at 0x")[0],
)
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(tokens):
    with pytest.raises(InvalidRequest, match=r"request 'r'"):
        Request("r", tokens, 4)


@pytest.mark.parametrize("tokens", [[0], [2**31 - 1], (1, 2), range(3), np.ones(3, np.int64), np.ones(3, np.uint8)])
def test_a_prompt_may_be_any_sequence_of_ints(tokens):
    request = Request("r", tokens, 4)
    assert list(request.prompt_token_ids) == [int(t) for t in tokens]
    assert request.tokens.dtype == np.int32


def test_a_prompt_stays_what_was_given():
    """It was an int32 array of the list, and ``+ [5]`` added 5 to every id."""
    ids = Request("r", [1, 2, 3], 4).prompt_token_ids
    ids += [5]
    assert ids == [1, 2, 3, 5]
    array = Request("r", np.arange(3), 4).prompt_token_ids
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 7


def test_a_request_does_not_change_with_the_array_it_was_made_of():
    tokens = np.arange(5, dtype=np.int32)
    request = Request("r", tokens, 4)
    tokens[:] = 9
    assert request.prompt_token_ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("field", "value"),
    {
        "request_id": "s",
        "prompt_token_ids": [],
        "tokens": np.empty(0, np.int32),
        "max_new_tokens": None,
        "eos_token_ids": 5,
        "cache_salt": "s",
        "priority": None,
        "adapter": "a",
        "extra_keys": ("k",),
    }.items(),
)
def test_a_request_never_changes(field, value):
    """One that was changed after its construction killed the engine for everybody, or ran as nonsense."""
    request = Request("r", [1, 2, 3], 2)
    before = getattr(request, field)
    with pytest.raises(AttributeError, match=field):
        setattr(request, field, value)
    with pytest.raises(AttributeError):
        delattr(request, field)
    assert np.array_equal(getattr(request, field), before)


def test_a_request_can_be_copied_and_carries_what_its_owner_adds():
    request = Request("r", [1, 2, 3], 2, eos_token_ids=[7], cache_salt="s")
    request.note = "mine"
    for twin in (copy.deepcopy(request), pickle.loads(pickle.dumps(request))):
        assert (twin.prompt_token_ids, twin.eos_token_ids, twin.cache_salt, twin.note) == ([1, 2, 3], (7,), "s", "mine")


@pytest.mark.parametrize("bad", [0, -1, 1.5, None, "4", True, [1]])
def test_max_new_tokens_must_be_a_positive_int(bad):
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        Request("r", [1], bad)


@pytest.mark.parametrize("bad", [None, "", 5, b"r", ["r"]])
def test_a_request_id_must_be_a_non_empty_string(bad):
    with pytest.raises(InvalidRequest, match="request_id"):
        Request(bad, [1], 1)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("eos_token_ids", 5),
        ("eos_token_ids", None),
        ("eos_token_ids", [-1]),
        ("eos_token_ids", ["a"]),
        ("eos_token_ids", [1.5]),
        ("eos_token_ids", (2, True)),
        ("cache_salt", 5),
        ("cache_salt", b"salt"),
        ("adapter", 5),
        ("priority", 1.5),
        ("priority", None),
        ("priority", "high"),
        ("extra_keys", 5),
        ("extra_keys", None),
        ("extra_keys", [1.5]),
        ("extra_keys", [object()]),
        ("extra_keys", {"image": "cat"}),
        ("extra_keys", {"cat", "dog"}),
        ("eos_token_ids", {5: 6}),
    ],
)
def test_other_fields_are_refused_by_name(make_serving, field, bad):
    """Some at construction, some when added; never later, and never by another type of error."""
    serving = make_serving(blocks=8)
    with pytest.raises(InvalidRequest, match=field):
        serving.scheduler.add(Request("r", [1], 1, **{field: bad}))
    assert not serving.scheduler.has_work()
    assert serving.serve("next", prompt(1, 5), 2).finish_reason == "length"


@pytest.mark.parametrize("new", [2**31, 2**62, sys.maxsize])
def test_a_request_may_ask_for_more_tokens_than_will_ever_fit(make_serving, new):
    """People write sys.maxsize for "until it ends": it does, with capacity."""
    serving = make_serving(blocks=4)
    try:
        serving.add("r", prompt(0, 5), new)
    except KVTierError:
        assert new >= 2**62, "a number of tokens that fits in 32 bits is no nonsense"
    else:
        assert serving.run()["r"].finish_reason == "capacity"
    assert serving.serve("next", prompt(1, 5), 2).finish_reason == "length"


@pytest.mark.parametrize("priority", [-(2**70), 2**70, np.int64(3)])
def test_priorities_may_be_any_ints(make_serving, priority):
    serving = make_serving(blocks=8)
    assert serving.serve("r", prompt(0, 5), 2, priority=priority).finish_reason == "length"


def test_extra_keys_may_be_any_ints(make_serving):
    serving, keys = make_serving(blocks=8), [0, -1, 2**64 - 1, 2**64, -(2**64), 2**128]
    roots = {inside.coordinator(serving.cache).chain.root(None, None, (key,)).tobytes() for key in keys}
    assert len(roots) == len(keys)
    assert serving.serve("r", prompt(0, 5), 2, extra_keys=keys).finish_reason == "length"


@pytest.mark.parametrize("bad", [None, "request", 5, Request])
def test_only_requests_can_be_added(make_serving, bad):
    serving = make_serving(blocks=8)
    with pytest.raises(InvalidRequest, match="Request"):
        serving.scheduler.add(bad)


@pytest.mark.parametrize("bad", ["duplicate", "too large"])
def test_a_refused_request_leaves_no_trace(make_serving, bad):
    serving = make_serving(blocks=8, host=16, hold=[])
    serving.add("A", prompt(0, 9), 6)
    serving.step()
    before = snapshot(serving.cache)
    request = {
        "duplicate": Request("A", [1], 1),
        "too large": Request("B", prompt(1, 33), 1),
    }[bad]
    with pytest.raises(KVTierError):
        serving.scheduler.add(request)
    assert_same(before, snapshot(serving.cache))
    serving.run()
    assert list(serving.finished) == ["A"]


def test_errors_say_what_to_do():
    with pytest.raises(InvalidRequest, match="at least one token"):
        Request("r", [], 1)
    with pytest.raises(InvalidRequest, match="at least 1"):
        Request("r", [1], 0)
    with pytest.raises(MemoryUnavailable, match="raise device_bytes"):
        KVCache(SPEC, device_bytes=10)
    with pytest.raises(ConfigError, match="use device='cpu'"):
        KVCache(SPEC, device="cuda:7", device_bytes="1MiB")


# --- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({}, ConfigError, "device_bytes"),
        ({"device_bytes": 1 << 20, "device_blocks": {"full": 4}}, ConfigError, "device_bytes"),
        ({"device_bytes": "much"}, ConfigError, "device_bytes"),
        ({"device_bytes": 0}, MemoryUnavailable, "device_bytes"),
        ({"device_bytes": -1}, ConfigError, "device_bytes"),
        ({"device_bytes": 500}, MemoryUnavailable, "device_bytes"),
        ({"device_blocks": {}}, ConfigError, "device_blocks"),
        ({"device_blocks": {"full": 0}}, MemoryUnavailable, "full"),
        ({"device_blocks": {"fool": 4}}, ConfigError, "full"),
        ({"device_bytes": 1 << 20, "host_bytes": 100}, MemoryUnavailable, "host_bytes"),
        ({"device_bytes": 1 << 20, "host_bytes": "some"}, ConfigError, "host_bytes"),
        ({"device_bytes": 1 << 20, "host_bytes": 1 << 20, "host_blocks": {"full": 4}}, ConfigError, "host_bytes"),
        ({"device_bytes": 1 << 20, "host_blocks": {"full": 0}}, MemoryUnavailable, "full"),
        ({"device_bytes": 1 << 20, "device": "cuda:0"}, ConfigError, "cuda:0"),
        ({"device_bytes": 1 << 20, "device": "cuda"}, ConfigError, "cuda"),
        ({"device_bytes": 1 << 20, "device": "tpu"}, ConfigError, "tpu"),
        ({"device_bytes": 1 << 20, "device": "cuda:x"}, ConfigError, "cuda:x"),
        ({"device_bytes": 1 << 20, "device": "cuda:²"}, ConfigError, "device must be"),
        ({"device_bytes": 1 << 20, "device": "cuda:" + "9" * 5000}, ConfigError, "device must be"),
        ({"device_bytes": 1 << 20, "device": "cpu:1"}, ConfigError, "device must be"),
        ({"device_bytes": 1 << 20, "device": None}, ConfigError, "device"),
        ({"device_bytes": 1 << 20, "store": "always"}, ConfigError, "store"),
        ({"device_bytes": 1 << 20, "store": None}, ConfigError, "store"),
        ({"device_bytes": 1 << 20, "verify": True}, ConfigError, "verify"),
        ({"device_bytes": 1 << 20, "on_load_error": "raise"}, ConfigError, "on_load_error"),
        ({"device_bytes": 1 << 20, "deadline_s": 0}, ConfigError, "deadline_s"),
        ({"device_bytes": 1 << 20, "deadline_s": -1.0}, ConfigError, "deadline_s"),
        ({"device_bytes": 1 << 20, "deadline_s": float("nan")}, ConfigError, "deadline_s"),
        ({"device_bytes": 1 << 20, "deadline_s": "30"}, ConfigError, "deadline_s"),
        ({"device_bytes": 1 << 20, "deadline_s": 10**400}, ConfigError, "deadline_s"),
        ({"device_bytes": "9" * 400}, ConfigError, "device_bytes"),
        ({"device_blocks": {"full": 2**57}}, MemoryUnavailable, "device_blocks"),
        ({"device_bytes": 1 << 20, "key_secret": "secret"}, ConfigError, "key_secret"),
        ({"device_bytes": 1 << 20, "model_id": 1.5}, ConfigError, "model_id"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(options, error, named):
    import torch

    if "cuda" in str(options.get("device", "")) and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(error, match=named):
        KVCache(SPEC, **options)


@pytest.mark.parametrize(
    "ids",
    [
        Elsewhere(),
        None,
        "7",
        [[7]],
        [7, 7],
        [7.0],
        [-1],
        [2**31],
        [2**70],
        [True],
        np.array([2**63], np.uint64),
    ],
    ids=str,
)
def test_sampled_ids_that_are_none_are_refused_and_the_step_can_still_be_committed(make_serving, ids):
    serving = make_serving(blocks=8)
    serving.add("r", prompt(0, 5), 1)
    step, good = serving.begin()
    with pytest.raises(StepError):
        serving.scheduler.commit(step, ids)
    assert [done.request_id for done in serving.end(step, good)] == ["r"]


@pytest.mark.parametrize(
    "form",
    [
        lambda ids: np.stack([ids, ids], axis=1)[:, 0],
        lambda ids: np.frombuffer(ids.tobytes(), np.int64),
        lambda ids: ids.astype(np.uint16),
        lambda ids: ids.astype(">i8"),
        lambda ids: np.frombuffer(b"-" + ids.tobytes(), np.uint8)[1:].view(np.int64),
        lambda ids: ids.tolist(),
    ],
    ids=["column", "read-only", "narrow", "other byte order", "unaligned", "list"],
)
def test_sampled_ids_may_come_in_any_form_and_nothing_is_compiled_for_it(make_serving, form):
    """A column of a top-k took two seconds at its first commit."""
    serving = make_serving(blocks=8)
    serving.add("r", prompt(0, 5), 2)
    loops = [loop for loop in (advance, valid_ids) if hasattr(loop, "signatures")]  # none where they are not compiled
    compiled = [len(loop.signatures) for loop in loops]
    while serving.scheduler.has_work():
        step, ids = serving.begin()
        serving.end(step, form(ids))
    assert len(serving.finished["r"].token_ids) == 2
    assert [len(loop.signatures) for loop in loops] == compiled


@pytest.mark.parametrize("others", [0, 1])
def test_blocks_beyond_64_bits_are_refused(others):
    groups = [GroupSpec(f"huge {i}", FullAttention(), 2**10, 2**30, 2**30) for i in range(1 + others)]
    with pytest.raises(MemoryUnavailable, match="raise device_bytes"):
        KVCache(CacheSpec(groups), device_bytes="1GiB")


def test_tables_have_room_for_no_more_than_the_pools_hold(make_serving):
    """Blocks that end together only after 36 million tokens: 256 rows of 64 times as many took 190 GiB."""
    sizes = [16, 127, 131, 137]
    spec = CacheSpec([GroupSpec(f"g{n}", FullAttention(), 1, 1, 4, "float32", n) for n in sizes])
    serving = make_serving(spec, {f"g{n}": -(-1600 // n) for n in sizes}, scheduler={"max_running": 256})
    assert inside.coordinator(serving.cache).tables.arrays.table.nbytes < 2**20
    assert serving.serve("r", prompt(0, 1300), 100).finish_reason == "length"


def test_bytes_beyond_64_bits_are_refused():
    """They would wrap around to few."""
    group = GroupSpec("full", FullAttention(), 1, 2**20, 2**20, block_tokens=2**20)
    with pytest.raises(MemoryUnavailable, match="device_blocks"):
        KVCache(CacheSpec([group]), device_blocks={"full": 2**64 // group.block_bytes - 1})


def test_a_scheduler_that_cannot_be_made_leaves_the_cache_as_it_was(make_cache):
    cache = make_cache({"long": (FullAttention(), 4096), "short": (SlidingWindow(3), 1)}, 4)
    with pytest.raises(MemoryUnavailable, match="max_running"):
        Scheduler(cache, max_running=2**24)
    assert cache.stats().requests["running"] == 0
    assert cache.audit() == []
    assert Scheduler(cache, max_running=1).has_work() is False


@pytest.mark.parametrize("part", ["Roster", "Entries"])
@pytest.mark.parametrize("sizes", [(2**20, 2), (2, 2**20)], ids=["tokens", "requests"])
def test_a_scheduler_whose_arrays_do_not_fit_leaves_the_one_there_is_at_work(make_serving, monkeypatch, part, sizes):
    """The cache was left with one that lacked half of its parts."""

    def refused(*_):
        raise MemoryError("Unable to allocate 2.0 GiB")

    serving = make_serving(blocks=8)
    monkeypatch.setattr(running, part, refused)
    lower = ("max_batched_tokens", "max_running")[sizes[1] > sizes[0]]
    with pytest.raises(MemoryUnavailable, match=f"2.0 GiB.*; lower {lower}") as kept:
        Scheduler(serving.cache, *sizes)
    assert isinstance(kept.value.__cause__, MemoryError)
    assert serving.cache.stats().requests["running"] == 0
    assert serving.serve("r", prompt(0, 5), 2).finish_reason == "length"


@pytest.mark.parametrize("part", ["Inbox", "Running", "Admission", "Reports"])
def test_a_scheduler_that_is_being_made_is_not_seen_by_other_threads(make_cache, monkeypatch, part):
    """``stats`` of another thread met one without its parts."""
    cache, seen = make_cache(), []
    made = getattr(scheduler, part)
    monkeypatch.setattr(scheduler, part, lambda *given: seen.append(cache.stats()) or made(*given))
    Scheduler(cache)
    assert [stats.requests["waiting"] for stats in seen] == [0]


@pytest.mark.parametrize("bad", [None, 5, KVCache, SPEC], ids=lambda bad: type(bad).__name__)
def test_what_is_no_cache_is_not_driven(bad):
    with pytest.raises(ConfigError, match=r"cache must be a kvtier.KVCache, got"):
        Scheduler(bad)


def test_a_spec_must_be_a_spec():
    with pytest.raises(ConfigError, match="CacheSpec"):
        KVCache([GroupSpec("full", FullAttention(), 1, 1, 8)], device_bytes="1MiB")


def test_memory_beyond_the_machine_is_refused_by_the_name_of_the_setting():
    huge = CacheSpec([GroupSpec("full", FullAttention(), 64, 64, 1024, block_tokens=256)])
    with pytest.raises(MemoryUnavailable, match=r"host_bytes.*lower host_bytes"):
        KVCache(huge, device_bytes="8GiB", host_bytes="900TiB")
    with pytest.raises(MemoryUnavailable, match="device_bytes"):
        KVCache(huge, device_bytes="900TiB")
    with pytest.raises(MemoryUnavailable, match="host_blocks"):
        KVCache(huge, device_bytes="8GiB", host_blocks={"full": 1 << 18})


@pytest.mark.parametrize(
    ("options", "nth", "setting"),
    [
        ({"device_bytes": "1MiB"}, 1, "device_bytes"),
        ({"device_blocks": {"full": 8}}, 1, "device_blocks"),
        ({"device_bytes": "1MiB", "host_bytes": "2MiB"}, 2, "host_bytes"),
        ({"device_bytes": "1MiB", "host_blocks": {"full": 8}}, 2, "host_blocks"),
        ({"device_bytes": "1MiB", "host_bytes": "2MiB"}, 3, "device_bytes"),
    ],
)
def test_books_that_do_not_fit_are_refused_by_the_name_of_the_setting(monkeypatch, options, nth, setting):
    """Tiny blocks on the meta device: nothing asks for the bytes, but the books of the blocks take as many. The third
    books are made when the copy engine's threads run already."""
    arenas, calls, threads = [], [], threading.active_count()
    allocate, zeros = Arena.allocate, _aligned.zeros

    def remembered(arena, named):
        arenas.append(arena)
        allocate(arena, named)

    def refused(shape, dtype):
        calls.append(shape)
        if len(calls) == nth:
            raise MemoryError("Unable to allocate 50.0 GiB")
        return zeros(shape, dtype)

    monkeypatch.setattr(Arena, "allocate", remembered)
    monkeypatch.setattr(_aligned, "zeros", refused)
    with pytest.raises(MemoryUnavailable, match=rf"^{setting}: [\d,]+ bytes are .*50.0 GiB.*lower {setting}") as kept:
        KVCache(SPEC, **options)
    assert not any(arena.has_bytes for arena in arenas)
    assert threading.active_count() == threads
    assert isinstance(kept.value.__cause__, MemoryError)


def test_two_tiers_that_fit_one_by_one_but_not_together_are_refused():
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        have = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    huge = CacheSpec([GroupSpec("full", FullAttention(), 64, 64, 1024, block_tokens=16)])
    with pytest.raises(MemoryUnavailable, match="host_bytes"):
        KVCache(huge, device_bytes=int(0.7 * have), host_bytes=int(0.7 * have))


def test_a_deadline_without_end_works(make_serving):
    serving = make_serving(canary_spec({"full": (FullAttention(), 4)}), 6, 32, deadline_s=float("inf"))
    for k in range(4):
        serving.serve(str(k), prompt(k, 20), 2)


def test_options_may_be_of_the_types_of_other_libraries(make_cache):
    import torch

    given = {"deadline_s": np.float32(3), "device": torch.device("cpu", 0), "host_blocks": None, "host_bytes": None}
    cache = make_cache(**given)
    assert cache.device == "cpu"
    assert cache.stats().host == {}
    Scheduler(cache).wait(np.float32(0))


@pytest.mark.parametrize("bad", [[0] * 300_000, "x" * 3_000_000, {"a": [1] * 99}], ids=list("abc"))
def test_messages_are_short_and_ours_whatever_a_value_is(make_serving, bad):
    cache, scheduler = (serving := make_serving()).cache, serving.scheduler
    group = {"name": "full", "attention": FullAttention(), "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
    whole = {"request_id": "r", "prompt_token_ids": [1], "max_new_tokens": 1}
    of_cache = ("device", "device_bytes", "host_bytes", "host_blocks", "store", "verify", "on_load_error", "deadline_s")
    for make in (
        *(
            partial(Request, **(whole | {field: bad}))
            for field in ("max_new_tokens", "priority", "eos_token_ids", "adapter", "prompt_token_ids")
            if not (isinstance(bad, list) and field in ("eos_token_ids", "prompt_token_ids"))
            and not (isinstance(bad, str) and field == "adapter")
        ),
        *(partial(KVCache, SPEC, **({"device_bytes": 1 << 20} | {name: bad})) for name in of_cache),
        lambda: KVCache(SPEC, device_blocks={"full": bad}),
        *(partial(GroupSpec, **(group | {field: bad})) for field in group if field != "name"),
        lambda: CacheSpec(SPEC.groups, layers=[("full", bad)]),
        lambda: SPEC.with_kv_scales({0: bad}),
        lambda: cache.kv("full", bad),
        lambda: Scheduler(cache, max_running=bad),
        lambda: scheduler.wait(bad),
        lambda: scheduler.add(bad),
    ):
        with pytest.raises(KVTierError) as refused:
            make()
        assert len(str(refused.value)) < 500


def test_a_value_is_shown_from_its_beginning():
    with pytest.raises(ConfigError, match=r"got 'much much .*\.\.\. \(5,002 characters\)$"):
        KVCache(SPEC, device_bytes="much " * 1000)
    with pytest.raises(ConfigError, match="got a list that cannot be shown"):
        KVCache(SPEC, device_bytes=[10**5000])


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([2**70], "got 1180591620717411303424"),
        ([1, 2**63, -1], "got 9223372036854775808"),
        ([1, 2.5], "got 2.5"),
        ([1, None], "got None"),
        ([[1, 2]], r"got \[1, 2\]"),
        ("12", "got <U2 of shape"),
        (np.ones((2, 2), np.int64), r"got int64 of shape \(2, 2\)"),
        (np.ma.masked_equal([1, 2, 3], 2), "is a masked array"),
    ],
    ids=lambda value: "",
)
def test_a_prompt_that_is_refused_is_told_which_token_is_wrong(ids, found):
    with pytest.raises(InvalidRequest, match=f"prompt_token_ids .*{found}"):
        Request("r", ids, 4)


def test_a_refused_cache_leaves_the_process_able_to_make_another(make_serving):
    with pytest.raises(KVTierError):
        KVCache(SPEC, device_bytes="1MiB", host_bytes="900TiB")
    assert make_serving(blocks=8).serve("r", prompt(0, 5), 2).finish_reason == "length"


@pytest.mark.parametrize("timeout_s", [None, "1", -1, float("nan"), True])
def test_a_wait_for_no_number_of_seconds_is_refused(make_serving, timeout_s):
    with pytest.raises(ConfigError, match="timeout_s"):
        make_serving().scheduler.wait(timeout_s)


@pytest.mark.parametrize("rows", [None, 2.5, "3", True, 2**62])
def test_padding_to_no_number_of_entries_is_refused(make_serving, rows):
    serving = make_serving()
    serving.add("A", [1, 2, 3], 1)
    step, ids = serving.begin()
    with pytest.raises(StepError, match="padded"):
        step.group("full").padded(rows)
    serving.end(step, ids)


def test_a_copy_engine_that_is_none_is_refused_when_the_cache_is_built(make_cache):
    with pytest.raises(ConfigError, match="made a object, which does not inherit"):
        make_cache(host=8, copy_engine=lambda memory: object())


# --- integers ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("bad", [np.array([1, 2]), np.array(["off"]), ["off"], {}, Elsewhere()], ids=repr)
@pytest.mark.parametrize("name", ["store", "verify", "on_load_error", "copy_engine", "device"])
def test_a_choice_that_is_no_text_is_refused(name, bad):
    with pytest.raises(ConfigError, match=f"{name} must be"):
        KVCache(SPEC, device_bytes="1MiB", **{name: bad})


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


@pytest.mark.parametrize("bad", [5, None, b"5", ["5"], {}, np.int64(5), np.array(["5"])], ids=repr)
def test_what_is_no_request_id_ends_nothing(make_serving, bad):
    """They were turned into text, so that 5 ended the request "5"."""
    serving = make_serving()
    serving.add(str(bad), [1, 2, 3], 2)
    assert serving.scheduler.abort(bad) is False
    assert serving.scheduler.finish(bad) is False
    assert serving.scheduler.progress(bad) is None
    assert [done.finish_reason for done in serving.run().values()] == ["length"]


def test_a_secret_without_bytes_is_refused():
    """An empty environment variable would give keys that anybody can work out."""
    with pytest.raises(ConfigError, match="key_secret"):
        KVCache(SPEC, device_bytes="1MiB", key_secret=b"")


def test_nobody_can_change_the_tokens_of_a_request_or_of_its_copies():
    request = Request("r", [1, 2, 3], 2)
    for one in (request, copy.copy(request), copy.deepcopy(request), pickle.loads(pickle.dumps(request))):
        assert one.prompt_token_ids == [1, 2, 3]
        with pytest.raises(ValueError):
            one.tokens.flags.writeable = True
