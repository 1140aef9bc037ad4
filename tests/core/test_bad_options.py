"""Bad options of caches and schedulers: refused by name, and the process goes on."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import inside
import numpy as np
import pytest

from core.driving import prompt
from kvtier import (
    CacheSpec,
    ConfigError,
    FullAttention,
    GroupSpec,
    InvalidRequest,
    KVCache,
    KVTierError,
    MemoryUnavailable,
    Request,
    Scheduler,
    SlidingWindow,
    StepError,
)
from kvtier.cache.warmup import warm_up
from kvtier.coordinator import running, scheduler
from kvtier.machine.loops import aligned as _aligned
from kvtier.pools.arena import Arena
from kvtier.testing import canary_spec

SPEC = CacheSpec([GroupSpec("full", FullAttention(), 1, 1, 8)])


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
        pytest.skip("this machine has the device: run it on one without a GPU")
    with pytest.raises(error, match=named):
        KVCache(SPEC, **options)


@pytest.mark.parametrize("others", [0, 1])
def test_blocks_beyond_64_bits_are_refused(others):
    groups = [GroupSpec(f"huge {i}", FullAttention(), 2**13, 2**16, 2**30) for i in range(1 + others)]
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
    group = GroupSpec("full", FullAttention(), 1, 2**16, 2**24, block_tokens=2**20)
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
    large = CacheSpec([GroupSpec("full", FullAttention(), 1, 64, 1024, block_tokens=256)])
    with pytest.raises(MemoryUnavailable, match=r"host_bytes.*lower host_bytes"):
        KVCache(large, device_bytes="192MiB", host_bytes="900TiB")
    with pytest.raises(MemoryUnavailable, match="device_bytes"):
        KVCache(large, device_bytes="900TiB")
    with pytest.raises(MemoryUnavailable, match="host_blocks"):
        KVCache(large, device_bytes="192MiB", host_blocks={"full": 1 << 24})


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
    warm_up()  # it builds caches of its own, once a process
    arenas, calls, threads = [], [], set(threading.enumerate())
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
    assert set(threading.enumerate()) <= threads
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
