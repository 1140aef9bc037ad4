"""``KvtierConnector`` with a remote behind its host tier, in the engine that keeps to vLLM's contract."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import inside
import pytest
from breadth import sized
from remote.fake_backend import FakeBackend, Shared

from integrations.fake_vllm import FakeEngine, stems
from integrations.fake_worker import TICK_S, connector_module
from kvtier import ConfigError
from kvtier.integrations.vllm.geometry import keys_of
from kvtier.integrations.vllm.settings import SECRET_VARIABLE, Settings
from kvtier.integrations.vllm.stats import COUNTERS, GAUGES
from kvtier.remote.names import parse
from kvtier.testing import Faults

UNKIND = Faults(fail=0.04, tear=0.03, corrupt=0.02, lose=0.02, max_delay_s=5.0)
KINDS = ("window", "chunk", "full")
TEXT = stems(1, 1, most=59)[0] + [3] * 40


class Made:
    """Engines that share a remote in memory."""

    def __init__(self, secret: Path) -> None:
        self.shared = Shared()
        self.secret = secret
        self.stores: list[FakeBackend] = []
        self.faults: dict[str, float] = {}
        self.hold = False

    def open(self, uri: str) -> FakeBackend:
        self.stores.append(FakeBackend(self.shared, self.hold, len(self.stores), **self.faults))
        return self.stores[-1]

    def engine(self, kinds=KINDS, blocks=60, hold=False, store=None, **options: Any) -> FakeEngine:
        self.stores, self.faults, self.hold = [], store or {}, hold
        given = {"remote_uri": "file:///nowhere", "key_secret_file": str(self.secret), "model_id": "m"}
        engine = FakeEngine(kinds, blocks, **(given | {"host_memory": 40_000} | options))
        inside.relay_clock(engine.books, lambda: engine.engines[0].now() * TICK_S)
        engine.stores = self.stores
        return engine


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    secret = tmp_path / "secret"
    secret.write_text("s")
    found = Made(secret)
    monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", 100)
    for name in ("kvtier.remote.opening.open_backend", "kvtier.remote.backends.uri.open_backend"):
        monkeypatch.setattr(name, found.open)
    return found


def serve(engine: FakeEngine, text: list[int]) -> int:
    """Cached tokens."""
    found = engine.serve(text)
    engine.settle()
    engine.check()
    return found.cached_tokens


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kinds", [("full",), ("window", "full"), KINDS, ("wide", "window")], ids=str)
def test_what_one_engine_has_stored_another_one_hits(made: Made, kinds, workers):
    one, other = made.engine(kinds, workers=workers), made.engine(kinds, workers=workers)
    assert serve(one, TEXT) == 0
    assert serve(other, TEXT) >= len(TEXT) - 8
    assert (one.wrong, other.wrong, other.loads) == (0, 0, 1)
    assert len({name.split("/")[1] for name in made.shared.objects}) == workers
    news = inside.vllm_side(other.connector).news()
    assert news["remote_fetched_objects"] > 0 and news["remote_is_on"] == 1
    assert news["waits_for_remote"] > 0
    assert set(news) <= {*COUNTERS, *GAUGES}
    assert inside.vllm_side(one.connector).news()["remote_spilled_bytes"] > 0


@pytest.mark.parametrize(
    ("uri", "source"), [("file:///nowhere", "disk"), ("s3://nowhere", "external_unspecified")], ids=["file", "s3"]
)
def test_vllm_is_told_which_tokens_of_a_hit_came_from_the_store(made: Made, uri, source):
    serve(made.engine(("full",)), TEXT)
    engine, pushed_out = made.engine(("full",), remote_uri=uri), []
    for text in (TEXT[:33], TEXT, TEXT):
        pushed_out.append(serve(engine, text))
        for block in engine.pool.blocks:
            engine.pool.forget(block)
    begin, whole, again = pushed_out
    assert (begin, again) == (32, whole) and whole > 48
    assert engine.hits == {source: whole, "host": begin + again}, "by then the host had it"


@pytest.mark.parametrize("kinds", [("full",), ("window", "full"), KINDS, ("state", "full")], ids=str)
def test_events_tell_which_blocks_lie_in_the_remote(made: Made, monkeypatch: pytest.MonkeyPatch, kinds):
    """Of the engine that puts them there, and of one that is told so; after a reset there are none."""
    monkeypatch.setattr("kvtier.integrations.vllm.events.PERIOD_S", 0.0)
    for number in range(2):
        engine, there, can_be = made.engine(kinds, settings={"events": True}), set[tuple[int, bytes]](), {}
        step_of(engine, monkeypatch, there)
        for text in (TEXT, [*TEXT[:40], *range(50, 79)], TEXT):
            request = engine.serve(text)
            engine.settle()
            can_be |= objects_of(engine, request.block_hashes)
        names = [parse(name) for name in made.shared.objects]
        stored = {block for name in names for block in can_be.get((name.kind, name.key), ())}
        assert there == stored if number == 0 else there and there <= stored
        engine.reset()
        follow_events(engine, there)
        assert there == set()


def objects_of(engine: FakeEngine, hashes: list[bytes]) -> dict[tuple[str, bytes], set[tuple[int, bytes]]]:
    """Blocks, (group, hash), of all objects of a text, by name."""
    plan, keys, found = engine.books.remote.plan, keys_of(hashes, 0, len(hashes), 1), {}
    for n in range(plan.unit, len(keys) * plan.link + 1, plan.unit):
        objects, whole = plan.of_hit(keys, n), {one[:16]: one for one in hashes}
        for k, name in enumerate(objects.names):
            mine = objects.of == k
            blocks = zip(objects.groups[mine].tolist(), objects.keys[mine], strict=True)
            found[name] = {(g, whole[key.tobytes()]) for g, key in blocks}
    return found


def step_of(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, there: set[tuple[int, bytes]]) -> None:
    """Asks for events in each step, as vLLM does."""
    step = engine.step

    def step_and_ask() -> None:
        step()
        follow_events(engine, there)

    monkeypatch.setattr(engine, "step", step_and_ask)


def follow_events(engine: FakeEngine, there: set[tuple[int, bytes]]) -> None:
    """Brings ``there``, (group, hash) of what lies in the remote, up to date."""
    for event in engine.connector.take_events():
        if event.medium == "STORAGE":
            blocks = {(event.group_idx, one) for one in event.block_hashes}
            is_stored = type(event).__name__ == "BlockStored"
            assert not there & blocks if is_stored else blocks <= there
            there ^= blocks


def test_a_reset_turns_the_store_off(made: Made):
    one, other = made.engine(), made.engine()
    serve(one, TEXT)
    serve(other, [1, 2, 3])
    other.reset()
    for store in other.stores:
        store.is_to_be_left_alone = True
    assert serve(other, TEXT) == 0
    assert inside.vllm_side(other.connector).news()["remote_is_on"] == 0


def test_what_a_request_has_stored_whose_logits_are_no_numbers_leaves_the_store(made: Made, monkeypatch):
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    engine = made.engine()
    assert serve(engine, TEXT) == 0
    assert made.shared.objects
    engine.nans = {len(TEXT) + 4: 1}
    serve(engine, TEXT)
    assert made.shared.objects == {}
    assert serve(made.engine(), TEXT) == 0


def test_after_a_reset_a_store_is_not_even_opened(made: Made):
    serve(made.engine(), TEXT)
    engine = made.engine()
    engine.reset()
    assert serve(engine, TEXT) == 0
    assert engine.books.stats().remote is None
    assert [call for store in engine.stores for call in store.made] == []


def test_an_adapters_requests_do_without_the_store(made: Made):
    one = made.engine()
    request = one.add("r", TEXT)
    request.lora_request = "an adapter"
    while one.requests:
        one.step()
    one.settle()
    assert made.shared.objects == {}
    assert [call for store in one.stores for call in store.made] == []


def test_workers_that_tell_nothing_of_themselves_hold_up_requests_for_a_moment(made: Made, monkeypatch, caplog):
    engine = made.engine()
    monkeypatch.setattr("kvtier.integrations.vllm.behind.FACTS_S", 0.0)
    inside.forget_facts(engine.workers)
    assert serve(engine, TEXT) == 0
    assert [call for store in engine.stores for call in store.made] == []
    assert "no remote" in caplog.text


def test_a_store_that_does_not_answer_costs_a_request_a_moment(made: Made, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvtier.coordinator.seek.UNKNOWN_S", 0.02)
    engine = made.engine(hold=True)
    assert engine.serve(TEXT).cached_tokens == 0
    assert engine.books.stats().remote.late_looks == 1
    while engine.connector.has_pending_push_work():  # its text is stored once it has answered
        engine.step()
        for store in engine.stores:
            store.end()
    engine.check()


def test_a_client_that_leaves_while_the_store_is_asked_leaves_nothing(made: Made):
    serve(made.engine(), TEXT)
    engine = made.engine(hold=True)
    free = len(engine.pool.free)
    engine.add("r", TEXT)
    for _ in range(200):
        engine.step()
        if inside.behind_tier(engine.books).moves():
            break
        engine.stores[0].end("look")
    engine.abort("r")
    for _ in range(5):
        engine.step()
        for store in engine.stores:
            store.end()
    engine.settle()
    engine.check()
    assert len(engine.pool.free) == free
    assert inside.tier_pools(engine.books).live.sum() == 0


@pytest.mark.parametrize("seed", range(sized(2, 30)))
@pytest.mark.parametrize("faults", [None, UNKIND], ids=["sound", "unkind"])
def test_random_requests_on_engines_that_share_a_store_read_only_what_was_written(made: Made, seed, faults):
    rnd = random.Random(seed)
    bad = rnd.choice([{}, {"fail": 0.1, "miss": 0.1}, {"damage": 0.2, "tear": 0.1, "swap": 0.2}, {"refuse": 0.3}])
    workers = rnd.choice([1, 2])
    pair = [
        made.engine(blocks=40, workers=workers, seed=seed + k, faults=faults, store=bad, host_memory=12_000 * workers)
        for k in range(2)
    ]
    texts = stems(seed)
    for k in range(sized(60, 300)):
        engine = pair[rnd.randrange(2)]
        text = rnd.choice(texts)
        prompt = [*text[: rnd.randrange(1, len(text) + 1)], *(rnd.randrange(1000) for _ in range(rnd.randrange(4)))]
        engine.add(f"r{k}", prompt, rnd.randrange(1, 12))
        if rnd.random() < 0.05:
            engine.abort(rnd.choice(list(engine.requests)))
        if rnd.random() < 0.004:
            engine.reset()
        for _ in range(rnd.randrange(12)):
            engine.step()
            engine.check()
    for engine in pair:
        engine.settle(ends_lost=True)
        engine.check()
        assert engine.requests == {}
    fetched = sum(engine.books.stats().remote.fetched_objects for engine in pair)
    assert fetched or bad or faults is not None


def test_steps_tell_how_long_prompts_take(made: Made):
    now = [0.0]
    engine = made.engine()
    inside.vllm_clock(engine.connector, lambda: now[0])
    engine.step()
    engine.connector.get_kv_connector_stats()
    engine.add("r", TEXT)
    assert inside.compute_seconds(engine.books)(0, 100) is None
    while engine.requests:
        engine.step()
        now[0] += 16.0  # a step's 16 tokens
        engine.connector.get_kv_connector_stats()
        now[0] += 99.0  # nobody asks for anything
    assert inside.compute_seconds(engine.books)(0, 160) == pytest.approx(160, rel=0.2)


def test_a_fetch_that_takes_longer_than_computing_is_left_out(made: Made):
    other = made.engine()
    texts = [[1000 * k + i for i in range(60)] for k in range(2)]
    for text in texts:
        serve(made.engine(), text)
    assert serve(other, texts[0]) > 0
    other.books.estimate_compute(lambda start, end: 1e-9)
    assert serve(other, texts[1]) == 0
    assert other.books.stats().remote.not_worth == 1


# --- what engines must have in common ---------------------------------------------------------------


def test_whatever_cannot_work_is_refused_before_all_weights_are_read(made: Made, monkeypatch: pytest.MonkeyPatch):
    def read(*_: Any) -> str:
        raise AssertionError("the weights are read")

    monkeypatch.setattr("kvtier.integrations.vllm.behind.weights_of", read)
    with pytest.raises(ConfigError, match="xxhash"):
        made.engine(settings={"hashes": "xxhash"})
    with pytest.raises(AssertionError, match="are read"):
        made.engine()
    assert [store.is_closed for store in made.stores] == [True]
    with pytest.raises(ConfigError, match="did you mean 'host_memory'"):
        connector_module.KvtierConnector.requires_piecewise_for_cudagraph({"host_memroy": "1GiB"})
    options = {"host_memory": "1GiB", "remote_uri": "file:///kv", "key_secret_file": str(made.secret)}
    assert connector_module.KvtierConnector.requires_piecewise_for_cudagraph(options) is False


def test_the_secret_comes_from_a_file_or_the_environment(made: Made, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SECRET_VARIABLE, "of the environment")
    options = {"host_memory": "1GiB", "remote_uri": "file:///kv"}
    assert Settings.of(options).secret() == b"of the environment"
    assert Settings.of(options | {"key_secret_file": str(made.secret)}).secret() == b"s"
    raw = b"\xff\x80 \xc3"
    made.secret.write_bytes(raw + b"\n")
    monkeypatch.setitem(os.environb, SECRET_VARIABLE.encode(), raw + b"\n")
    assert Settings.of(options).secret() == Settings.of(options | {"key_secret_file": str(made.secret)}).secret() == raw
