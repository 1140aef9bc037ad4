"""A real consumer: ``dynamo.indexer`` believes what the cache can use, token for token."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import inside
import pytest
from patience import PATIENCE_S
from remote.fake_backend import FakeBackend, Shared

from core.driving import prompt
from core.kv_events.indexer import Indexer, why_not
from kvtier import FullAttention, KVCache, Request, SlidingWindow
from kvtier.cache.kv_events.publisher import KVEventPublisher
from kvtier.coordinator.tracked import Tracked
from kvtier.geometry.keys import Text

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

BT = 16
GROUPS = {"full": (FullAttention(), BT), "win": (SlidingWindow(24), BT)}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvt") as folder:  # names of sockets are short
        yield Path(folder)


@pytest.fixture(scope="module")
def indexer(folder: Path) -> Iterator[Indexer]:
    with Indexer(folder / "log", BT) as indexer:
        yield indexer


def publisher(cache: KVCache, folder: Path, name: str, **config: object) -> KVEventPublisher:
    addresses = {"endpoint": f"ipc://{folder}/{name}", "replay_endpoint": f"ipc://{folder}/{name}-replay"}
    return KVEventPublisher(cache, {"enable_kv_cache_events": True, **addresses, **config}, interval_s=0.0)


def serve(serving, events: KVEventPublisher, name: str, tokens: list[int], most: int = 1, **options: str) -> list[int]:
    """One request; its text."""
    events.add(serving.add(name, tokens, most, **options))
    while serving.scheduler.has_work():
        step, ids = serving.begin()
        events.step(serving.end(step, ids))
        if not step.num_tokens:
            serving.scheduler.wait(0.05)
    events.poll()
    return [*tokens, *serving.finished[name].token_ids]


def usable(cache: KVCache, tokens: list[int]) -> tuple[int, int]:
    """What ``match`` says of a request that goes on with one more token: of any tier, and of the device alone."""
    coordinator = cache.core.coordinator
    asked = Request("asked", [*tokens, 1], 1)
    chain = coordinator.chain
    hit = coordinator.match(Tracked(asked, 0, Text(chain, chain.root(None, None, ()), asked.tokens)))
    device, _ = hit.of_group(0)
    on_device = next((i for i, block in enumerate(device.tolist()) if not block), len(device))
    return hit.num_tokens, on_device * BT


def agrees(indexer: Indexer, engine: int, tokens: list[int], told: tuple[int, int]) -> None:
    """Events travel on their own."""
    end = time.monotonic() + PATIENCE_S
    while (found := indexer.matched(tokens, engine)) != told and time.monotonic() < end:
        time.sleep(0.01)
    assert found == told


def test_dynamo_believes_what_match_accepts_in_both_tiers(make_serving, indexer, folder):
    rnd = random.Random(0)
    serving = make_serving(GROUPS, {"full": 24, "win": 12}, {"full": 40, "win": 40})
    events = publisher(serving.cache, folder, "walk")
    indexer.register(1, events.endpoint, events.replay_endpoint)
    texts = [prompt(k, rnd.randrange(20, 120)) for k in range(5)]
    tiers = set()
    for k in range(15):
        i = k % 5 if k < 5 else rnd.randrange(5)
        texts[i] = serve(serving, events, f"{k}", texts[i][:160], rnd.randrange(1, 24))
        for text in texts if k % 3 == 2 else texts[i : i + 1]:
            told = usable(serving.cache, text)
            agrees(indexer, 1, text, told)
            tiers.add((told[0] > 0, told[1] > 0, told[0] > told[1] > 0))
    assert tiers >= {(True, True, False), (True, False, False), (True, True, True), (False, False, False)}
    assert indexer.warnings() == []
    events.close()
    agrees(indexer, 1, texts[0], (0, 0))


def test_dynamo_knows_nothing_of_salted_prompts(make_serving, indexer, folder):
    serving = make_serving(GROUPS, 32, 64)
    events = publisher(serving.cache, folder, "salt")
    indexer.register(2, events.endpoint, events.replay_endpoint)
    secret = serve(serving, events, "A", prompt(0, 64), 1, cache_salt="tenant")
    text = serve(serving, events, "B", prompt(1, 64), 1)
    agrees(indexer, 2, text, (64, 64))
    assert indexer.matched(secret, 2) == (0, 0)
    events.close()


def test_dynamo_counts_the_store_as_a_disk_and_each_engine_for_itself(make_serving, indexer, folder, monkeypatch):
    monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", 300)
    shared, text = Shared(), prompt(40, 100)  # of its own: other tests have other keys
    one, other = (
        make_serving(GROUPS, 32, 64, hold=(), remote_uri=FakeBackend(shared), model_id="m", key_secret=b"s")
        for _ in range(2)
    )
    first, second = (publisher(serving.cache, folder, f"store{k}") for k, serving in enumerate((one, other)))
    for engine, events in ((5, first), (6, second)):
        indexer.register(engine, events.endpoint, events.replay_endpoint)
    serve(one, first, "a", text)
    serve(other, second, "b", prompt(41, 40))
    agrees(indexer, 5, text, (96, 96))
    for pools in (inside.pools(one.cache), inside.host(one.cache)):
        pools.forget_all()
    first.poll()
    agrees(indexer, 5, text, (96, 0))
    assert indexer.by_tier(text, 5) == {"gpu": 0, "cpu": 0, "disk": 96}
    assert indexer.by_tier(text, 6) == {"gpu": 0, "cpu": 0, "disk": 0}, "what one has stored is not another's"
    serve(other, second, "c", text)
    assert other.finished["c"].cached_tokens["remote"] == 96
    agrees(indexer, 6, text, (96, 96))
    one.cache.reset()
    first.poll()
    agrees(indexer, 5, text, (0, 0))
    assert indexer.by_tier(text, 6)["gpu"] == 96
    first.close()
    second.close()


@pytest.mark.parametrize("replays", [True, False], ids=["replay", "no_replay"])
def test_dynamo_that_comes_late_and_an_engine_that_comes_back(make_serving, indexer, folder, replays):
    name, engine = f"late{replays}", 3 + replays
    first = make_serving(GROUPS, 32, 64)
    events = publisher(first.cache, folder, name, buffer_steps=2)
    texts = [serve(first, events, f"{k}", prompt(k, 64), 1) for k in range(5)]
    indexer.register(engine, events.endpoint, events.replay_endpoint if replays else None)
    for text in texts[-2:]:
        agrees(indexer, engine, text, usable(first.cache, text))
    events.close()
    second = make_serving(GROUPS, 32, 64)
    events = publisher(second.cache, folder, name)
    text = serve(second, events, "new", prompt(9, 64), 1)
    for k in range(10):  # some batches, so that one is later than all that the first engine sent
        serve(second, events, f"{k}", prompt(10 + k, 32), 1)
    agrees(indexer, engine, texts[-1], (0, 0))
    agrees(indexer, engine, text, usable(second.cache, text))
    events.close()
