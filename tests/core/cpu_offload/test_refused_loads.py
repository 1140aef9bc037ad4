"""A load that is refused leaves nothing on the device: what it brought is zeros before anybody hears of its failure.

Damage here sets exponents: a number becomes NaN or infinite, and an attention that multiplies what it masks by zero
reads it in any request that gets the block next.
"""

from __future__ import annotations

import random

import inside
import numpy as np
import pytest
from breadth import sample

from core.driving import LOAD, is_zero, prompt
from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, KVCache, Request, Scheduler, SlidingWindow
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.pools.block_pool import Place
from kvtier.testing import Faults, FaultyLink, SimulatedDevice, SimulatedEngine

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(16), 4)}
LENGTH, BLOCKS = 29, 12


def stored(make_serving, engine=None, **options):
    """Prompt 0 is in the host tier only, and every number of its blocks is NaN or infinite."""
    held = {"hold": []} if engine is None else {"copy_engine": engine}
    serving = make_serving(GROUPS, 24, 48, verify="full", **held, **options)
    serving.serve("original", prompt(0, LENGTH), 1)
    inside.pools(serving.cache).forget_all()
    inside.blow_up_host(serving.cache)
    return serving


def wiped(cache, load) -> list[bool]:
    """Of its blocks on the device."""
    return is_zero(cache, load.groups, load.device).tolist()


# --- what is on the device when the failure is told -----------------------------------------------

ENGINES = {
    "held": None,
    "threads": ThreadsEngine,
    "simulated": lambda memory: SimulatedEngine(memory, 5),
    "faulty": FaultyLink(ThreadsEngine, Faults()),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_blocks_of_a_refused_load_are_zeros_when_its_failure_is_told(make_serving, engine):
    serving = stored(make_serving, ENGINES[engine])
    inside.arena(serving.cache).bytes[:] = 0x55
    told = []

    def look(transfer, good):
        told.append(len(good))
        assert not good.any()
        assert is_zero(serving.cache, transfer.groups, transfer.device).all()

    inside.at_end_of_loads(serving.cache, look)
    serving.serve("again", prompt(0, LENGTH), 5)
    assert told == [BLOCKS]


def test_blocks_that_arrived_whole_keep_what_they_hold(make_serving):
    serving = make_serving(GROUPS, 24, 48, hold=[], verify="full")
    serving.serve("original", prompt(0, LENGTH), 1)
    inside.pools(serving.cache).forget_all()
    inside.blow_up_host(serving.cache, at=2)
    told = []
    inside.at_end_of_loads(serving.cache, lambda t, good: told.append((good.tolist(), wiped(serving.cache, t))))
    serving.serve("again", prompt(0, LENGTH), 5)
    [(good, zero)] = told
    assert sum(good) == len(good) - 1
    assert zero == [not whole for whole in good]


@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize("bad", [None, [1, 4]])
def test_what_a_torn_copy_has_brought_is_wiped_whether_blocks_are_verified_or_not(make_serving, verify, bad):
    serving = make_serving(GROUPS, 24, 48, hold=[], verify=verify)
    serving.serve("original", prompt(0, LENGTH), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    inside.arena(serving.cache).bytes[:] = 0x55
    serving.add("again", prompt(0, LENGTH), 5)
    serving.step()
    told = []
    inside.at_end_of_loads(serving.cache, lambda t, good: told.append((good.tolist(), wiped(serving.cache, t))))
    serving.engine.end(error="torn", bad=bad)
    serving.engine.release()
    serving.run()
    good, zero = told[0]
    assert good == [bad is not None and k not in bad for k in range(BLOCKS)]
    assert zero == [not whole for whole in good]


def test_a_load_that_is_said_to_have_failed_after_it_has_landed_leaves_nothing(make_serving):
    """A bad link's word counts, not what it may have done."""
    serving = make_serving(GROUPS, 24, 48, copy_engine=FaultyLink(ThreadsEngine, Faults(), seed=1), verify="off")
    serving.serve("original", prompt(0, LENGTH), 1)
    inside.pools(serving.cache).forget_all()
    inside.use_faults(serving.engine, Faults(fail=1.0))
    told = []
    inside.at_end_of_loads(serving.cache, lambda t, good: told.append(wiped(serving.cache, t)))
    serving.serve("again", prompt(0, LENGTH), 5)
    assert told == [[True] * BLOCKS]


def given_up(make_serving):
    """A damaged load that is overdue: its request goes on without it."""
    serving = stored(make_serving, deadline_s=5.0)
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(0, LENGTH), 1)
    serving.step()
    (transfer,) = serving.engine.live.values()
    serving.engine.clock_s = 5.5
    serving.steps_until(lambda: "again" in serving.finished)
    return serving, transfer


def quarantined(cache) -> int:
    return sum(pool.quarantined for pool in cache.stats().device.values())


@pytest.mark.parametrize("error", ["", "torn"])
def test_a_load_that_was_given_up_and_is_refused_later_leaves_nothing_either(make_serving, error):
    serving, transfer = given_up(make_serving)
    assert quarantined(serving.cache) == BLOCKS
    told = []
    inside.at_end_of_loads(serving.cache, lambda t, good: told.append(wiped(serving.cache, t)))
    serving.engine.end(transfer.ticket, error=error, bad=[3] if error else None)
    assert not is_zero(serving.cache, transfer.groups, transfer.device).all()
    inside.connector(serving.cache).poll()
    assert quarantined(serving.cache) == 0
    assert told == [[True] * BLOCKS]
    serving.run()


def test_a_reset_while_a_damaged_load_is_under_way_leaves_nothing_either(make_serving):
    serving = stored(make_serving)
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(0, LENGTH), 1)
    serving.step()
    serving.cache.reset_prefix_cache()
    told = []
    inside.at_end_of_loads(serving.cache, lambda t, good: told.append(wiped(serving.cache, t)))
    serving.engine.release()
    serving.run()
    assert told == [[True] * BLOCKS]


# --- a device that takes no zeros -----------------------------------------------------------------


def refusing(serving) -> list[int]:
    """The engine fails to wipe blocks; how many it was asked to."""
    asked: list[int] = []

    def wipe(groups, blocks):
        asked.append(len(blocks))
        raise RuntimeError("cudaMemset")

    serving.engine.wipe = wipe
    return asked


def test_a_load_has_not_ended_while_its_blocks_cannot_be_wiped(make_serving):
    serving = stored(make_serving)
    asked = refusing(serving)
    serving.add("again", prompt(0, LENGTH), 5)
    for _ in range(3):
        serving.step()
        assert serving.cache.stats().transfers.failed_loads == 0
        assert serving.cache.stats().transfers.live == 1
    del serving.engine.wipe  # it can be, from now on
    serving.run()
    assert set(asked) == {BLOCKS}
    assert len(asked) >= 3
    assert serving.cache.stats().transfers.failed_loads == 1


def test_blocks_that_cannot_be_wiped_are_not_handed_out(make_serving):
    serving = stored(make_serving, deadline_s=5.0)
    asked = refusing(serving)
    serving.add("again", prompt(0, LENGTH), 1)
    serving.step()
    serving.engine.clock_s = 5.5
    serving.steps_until(lambda: "again" in serving.finished)
    assert quarantined(serving.cache) == BLOCKS
    for k in range(4):
        serving.add(str(k), prompt(k + 1, LENGTH), 1)
        serving.steps_until(lambda k=k: str(k) in serving.finished)
    assert quarantined(serving.cache) == BLOCKS
    places = inside.pools(serving.cache).arrays.place
    assert (places == Place.QUARANTINED).sum() == BLOCKS
    del serving.engine.wipe
    serving.run()
    assert quarantined(serving.cache) == 0
    assert len(asked) > 4


def test_a_load_that_has_failed_without_bad_blocks_ends(make_serving):
    serving = make_serving(GROUPS, 24, 48, hold={LOAD}, verify="full")
    serving.serve("original", prompt(0, LENGTH), 1)
    inside.pools(serving.cache).forget_all()
    serving.add("again", prompt(0, LENGTH), 1)
    serving.step()
    (transfer,) = serving.engine.live.values()
    serving.engine.end(transfer.ticket, error="a wire is loose", bad=[])
    inside.connector(serving.cache).poll()
    assert serving.cache.stats().transfers.live == 0
    serving.run()


def test_a_poll_that_breaks_loses_no_load_that_was_to_be_wiped(make_serving):
    serving = stored(make_serving)
    refusing(serving)
    serving.add("again", prompt(0, LENGTH), 1)
    serving.step()
    poll = serving.engine.poll

    def breaks():
        serving.engine.poll = poll
        raise RuntimeError("once")

    serving.engine.poll = breaks
    with pytest.raises(RuntimeError, match="once"):
        serving.step()
    del serving.engine.wipe
    serving.run()
    assert serving.cache.stats().transfers.failed_loads == 1


def test_an_engine_that_breaks_while_a_load_begins_leaves_nothing(make_serving):
    """One that copies here and now may have written before it raised."""
    serving = make_serving(GROUPS, 24, 48, hold=[], verify="full")
    serving.serve("original", prompt(0, LENGTH), 1)
    inside.pools(serving.cache).forget_all()
    engine, submit = serving.engine, serving.engine.submit

    def breaks(transfer):
        if transfer.direction is not LOAD:
            submit(transfer)
            return
        engine.memory.copy(transfer)
        raise RuntimeError("half-way")

    engine.submit = breaks
    told = []
    inside.at_end_of_loads(serving.cache, lambda t, good: told.append(wiped(serving.cache, t)))
    serving.serve("again", prompt(0, LENGTH), 5)
    assert told == [[True] * BLOCKS]


# --- on streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lag_s", [0.0, 9.0])
@pytest.mark.parametrize("seed", sample(range(6), [0, 1]))
def test_on_streams_a_forward_that_is_launched_at_once_reads_zeros(make_cache, seed, lag_s):
    device = SimulatedDevice(seed, Faults(max_delay_s=6.0), look_s=0.2, lag_s=lag_s)
    cache = make_cache(GROUPS, 24, 48, copy_engine=device.engine, verify="full")
    run(cache, ["original"], prompt(0, LENGTH), device)
    inside.pools(cache).forget_all()
    inside.blow_up_host(cache)
    read = []

    def look(transfer, good):
        assert not good.any()
        blocks = transfer.groups, transfer.device
        nothing = np.empty(0, np.int32), np.empty(0, np.int32)
        device.launch(blocks, nothing, lambda: read.extend(wiped(cache, transfer)))

    inside.at_end_of_loads(cache, look)
    run(cache, ["again"], prompt(0, LENGTH), device)
    assert read == [True] * BLOCKS
    assert device.missing_edges == []


def run(cache, names, text, device):
    """Requests on forwards that write nothing: what is stored is zeros, and sound."""
    scheduler = Scheduler(cache)
    for name in names:
        scheduler.add(Request(name, text, 1))
    while scheduler.has_work():
        step = scheduler.schedule()
        if not step.num_tokens:
            device.advance(1.0)
        scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
    device.advance(1e3)


# --- an attention that multiplies what it masks ---------------------------------------------------

WIDTH = 4
FLOATS = CacheSpec(
    [GroupSpec(name, kind, 1, 1, WIDTH, dtype="float32", block_tokens=size) for name, (kind, size) in GROUPS.items()]
)


def numbers(g: int, tokens: list[int]) -> np.ndarray:
    """K and V of the last token; small integers, so that the order of a sum does not matter."""
    bits = hash((g, *tokens))
    return np.array([(bits >> 4 * n & 15) - 8 for n in range(2 * WIDTH)], np.float32).reshape(2, WIDTH)


def expected(prompt_tokens: list[int], count: int) -> list[int]:
    """The text of a model that sees only what it may see."""
    text = list(prompt_tokens)
    while len(text) < len(prompt_tokens) + count:
        out = 0.0
        for g, group in enumerate(FLOATS.groups):
            for end in range(group.attention.first_visible(len(text) - 1) + 1, len(text) + 1):
                k, v = numbers(g, text[:end])
                out += float((k * v).sum())
        text.append(int(out) % 97)
    return text[len(prompt_tokens) :]


class Masking:
    """The same model with an attention as many kernels have it: all slots of a table's blocks, times 0 where masked."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.scheduler = Scheduler(cache, max_batched_tokens=24, max_running=4)
        self.texts: dict[str, list[int]] = {}

    def serve(self, prompts: dict[str, list[int]], count: int) -> dict[str, list[int]]:
        for name, text in prompts.items():
            self.texts[name] = list(text)
            self.scheduler.add(Request(name, text, count))
        found = {}
        while self.scheduler.has_work():
            step = self.scheduler.schedule()
            for done in self.scheduler.commit(step, self.forward(step)):
                found[done.request_id] = done.token_ids
        return found

    def forward(self, step) -> np.ndarray:
        outs = np.zeros(len(step.request_ids))
        for g, group in enumerate(FLOATS.groups):
            view, (k, v) = step.group(group.name), (x.numpy() for x in self.cache.kv(group.name, 0))
            bt = group.block_tokens
            for r, name in enumerate(step.request_ids):
                at = slice(int(step.query_start[r]), int(step.query_start[r + 1]))
                for slot, position in zip(view.slot_mapping[at].tolist(), step.positions[at].tolist(), strict=True):
                    k[slot // bt, slot % bt, 0], v[slot // bt, slot % bt, 0] = numbers(
                        g, self.texts[name][: position + 1]
                    )
                end = int(step.seq_lens[r])
                keys, values = (x[view.block_table[r]].reshape(-1, WIDTH) for x in (k, v))
                seen = np.arange(len(keys))
                mask = (seen >= group.attention.first_visible(end - 1)) & (seen < end)
                with np.errstate(invalid="ignore"):
                    outs[r] += float((mask[:, None] * keys * values).sum())
        ids = [int(outs[r]) % 97 if np.isfinite(outs[r]) else -1 for r in step.sample_rows.tolist()]
        for r, token in zip(step.sample_rows.tolist(), ids, strict=True):
            self.texts[step.request_ids[r]].append(token)
        return np.array(ids, np.int64)


LINKS = {
    "threads": ThreadsEngine,
    "faulty": FaultyLink(ThreadsEngine, Faults(fail=0.1, tear=0.1, corrupt=0.4), seed=4),
    "simulated": lambda memory: SimulatedEngine(memory, 4, Faults(fail=0.1, tear=0.1, corrupt=0.1)),
}


@pytest.mark.parametrize("link", LINKS)
def test_texts_of_other_requests_are_right_though_the_host_rots(link):
    """Loads are refused, and other prompts get their blocks."""
    rnd = random.Random(2)
    with KVCache(
        FLOATS,
        device_blocks={"full": 26, "win": 20, "chunk": 20},
        host_blocks={"full": 200, "win": 120, "chunk": 120},
        verify="full",
        copy_engine=LINKS[link],
    ) as cache:
        model = Masking(cache)
        for n in range(12):
            prompts = {f"{n}.{k}": prompt(rnd.randrange(5), rnd.randrange(9, 30)) for k in range(3)}
            found = model.serve(prompts, 2)
            assert found == {name: expected(text, 2) for name, text in prompts.items()}
            inside.pools(cache).forget_all()
            for _ in range(4):
                inside.blow_up_host(cache, at=rnd.randrange(10**6))
        counts = cache.stats().transfers
        assert counts.failed_loads > 3
        assert counts.loaded_blocks > 30
