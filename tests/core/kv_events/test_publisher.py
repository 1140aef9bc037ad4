"""The sockets: what listeners get, late or after a loss, and that none of them holds up the engine."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import inside
import msgspec
import pytest
import zmq
from patience import PATIENCE_S, wait_until
from remote.fake_backend import FakeBackend

from core.driving import prompt
from core.forking import in_child
from core.kv_events.router import Router
from kvtier import (
    CacheClosed,
    CacheManager,
    ChunkedLocal,
    ConfigError,
    FullAttention,
    KVCache,
    Request,
    SlidingWindow,
    Step,
)
from kvtier.cache.kv_events import worker
from kvtier.cache.kv_events.claims import Claims
from kvtier.cache.kv_events.config import KVEventsConfig
from kvtier.cache.kv_events.publisher import KVEventPublisher

BT = 4
GROUPS = {"full": (FullAttention(), BT), "win": (SlidingWindow(6), BT)}
END = (-1).to_bytes(8, "big", signed=True)
ON = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}


@contextmanager
def connected(kind: int, address: str, **options: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
        for name, value in options.items():
            socket.set(getattr(zmq, name), value)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(address)
        yield socket


class Engine:
    """A cache, its engine's loop, and what it publishes."""

    def __init__(self, make_serving: Any, of_cache: dict[str, Any] | None = None, **config: Any) -> None:
        self.serving = make_serving(GROUPS, 32, 64, **(of_cache or {}))
        self.publisher = KVEventPublisher(self.serving.cache, {**ON, **config}, interval_s=0.0)
        self.count = 0

    def serve(self, tokens: list[int], most: int = 1, **options: Any) -> list[int]:
        """One request; all of its text."""
        self.count += 1
        request = self.serving.add(f"{self.count}", tokens, most, **options)
        self.publisher.add(request)
        while self.serving.scheduler.has_work():
            step, ids = self.serving.begin()
            self.publisher.step(self.serving.end(step, ids))
            if not step.num_tokens:
                self.serving.scheduler.wait(0.05)
        self.publisher.poll()
        return [*tokens, *self.serving.finished[f"{self.count}"].token_ids]


@pytest.fixture
def engine(make_serving) -> Iterator[Any]:
    made: list[Engine] = []

    def make(of_cache: dict[str, Any] | None = None, **config: Any) -> Engine:
        made.append(Engine(make_serving, of_cache, **config))
        return made[-1]

    yield make
    for one in made:
        one.publisher.close()


def blocks(tokens: list[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tokens[i : i + BT]) for i in range(0, len(tokens) // BT * BT, BT))


def hear(socket: zmq.Socket[bytes], router: Router, until: Any) -> list[int]:
    """Batches until a condition holds; their numbers."""
    numbers = []
    while not until():
        topic, number, payload = socket.recv_multipart()
        assert topic == b""
        numbers.append(int.from_bytes(number, "big"))
        router.hear(payload)
    return numbers


def replay(address: str, start: int) -> list[tuple[int, bytes]]:
    with connected(zmq.DEALER, address) as asking:
        asking.send_multipart((b"", start.to_bytes(8, "big")))
        found = []
        while True:
            empty, _, number, payload = asking.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))


def test_a_listener_hears_prompts_and_what_was_generated_and_nothing_salted(engine):
    one = engine()
    router = Router(BT, joins=True)
    with connected(zmq.SUB, one.publisher.endpoint) as listening:
        numbers = hear(listening, router, lambda: True)
        secret = one.serve(prompt(7, 24), 4, cache_salt="tenant")
        beside = one.serve(prompt(8, 24), 4, extra_keys=(1,))
        adapted = one.serve(prompt(9, 24), 4, adapter="lora")
        text = one.serve(prompt(0, 18), 7)
        numbers = hear(listening, router, lambda: blocks(text) in router.believed)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "none was lost"
        told = {token for path in router.believed for block in path for token in block}
        assert told == {token for block in blocks(text) for token in block}
        assert not {blocks(other)[:1] for other in (secret, beside, adapted)} & router.believed


def test_a_forked_child_tells_listeners_nothing_and_its_parent_goes_on(engine):
    one, router = engine(), Router(BT, joins=True)

    def leave() -> str:
        texts = one.publisher.poll(), one.publisher.close()
        one.publisher = None
        gc.collect()
        return str(texts)

    with connected(zmq.SUB, one.publisher.endpoint) as listening:
        first = one.serve(prompt(0, 18), 7)
        hear(listening, router, lambda: blocks(first) in router.believed)
        assert in_child(leave) == "(None, None)"
        second = one.serve(prompt(1, 18), 7)
        hear(listening, router, lambda: blocks(second) in router.believed)
        assert blocks(first) in router.believed


STORE = {"model_id": "m", "key_secret": b"s", "hold": ()}


def test_what_is_known_of_the_store_is_not_lost_in_a_full_queue(engine, monkeypatch):
    go_on, take = threading.Event(), worker.Worker._take

    def held(self: worker.Worker, news: Any) -> None:
        assert go_on.wait(PATIENCE_S)
        take(self, news)

    monkeypatch.setattr(worker.Worker, "_take", held)
    go_on.set()
    one, router = engine({**STORE, "remote_uri": FakeBackend()}, max_queue_size=1), Router(BT, joins=True)
    with connected(zmq.SUB, one.publisher.endpoint) as listening:
        router.hear(listening.recv_multipart()[2])  # it is greeted: from now on it hears all
        thread, tokens = one.publisher._worker, prompt(0, 18)
        for name, text in (("a", tokens), ("b", prompt(1, 18))):
            while not thread.takes_more:
                pass  # until the thread has what came before
            if name == "b":
                go_on.clear()
            one.publisher.add(Request(name, text, 1))
        while not thread.takes_more:
            pass  # until it has this as well, and is held
        one.serving.serve("a", tokens, 1)
        one.publisher.poll()  # changes of both tiers here, which fill the queue, and of the remote
        assert not thread.takes_more
        go_on.set()
        for pools in (inside.pools(one.serving.cache), inside.host(one.serving.cache)):
            pools.forget_all()
        hear(listening, router, lambda: one.publisher.poll() or blocks(tokens) in router.found["STORAGE"])


def test_a_listener_hears_what_only_the_store_has_left_and_when_it_is_left_alone(engine, monkeypatch):
    monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", 300)
    one, router = engine({**STORE, "remote_uri": FakeBackend()}), Router(BT, joins=True)
    with connected(zmq.SUB, one.publisher.endpoint) as listening:
        text = one.serve(prompt(0, 18), 7)
        for pools in (inside.pools(one.serving.cache), inside.host(one.serving.cache)):
            pools.forget_all()
        one.publisher.poll()
        hear(listening, router, lambda: one.publisher.poll() or blocks(text) in router.found["STORAGE"])
        one.serving.cache.reset()
        hear(listening, router, lambda: one.publisher.poll() or not router.believed)


def test_nothing_is_recorded_for_a_publisher_whose_thread_has_ended(engine, monkeypatch):
    one = engine({**STORE, "remote_uri": FakeBackend()})
    remote = one.serving.cache.core.coordinator.door.remote
    assert len(remote._known._listeners) == 1
    one.publisher.close()
    one.publisher.poll()
    assert len(remote._known._listeners) == 0
    one.serve(prompt(0, 16), 2)


def test_an_engine_with_a_scheduler_of_its_own_publishes_as_well(make_cache):
    cache = make_cache(GROUPS, 32)
    manager, router = CacheManager(cache), Router(BT, joins=True)
    publisher = KVEventPublisher(cache, ON, interval_s=0.0)
    request = Request("A", prompt(0, 15), 2)
    sequence = manager.open(request)
    publisher.add(request)
    assert manager.start(sequence) is None
    with connected(zmq.SUB, publisher.endpoint) as listening:
        for count, token in ((15, 5), (1, 6)):
            step = manager.plan([(sequence, count)])
            assert isinstance(step, Step)
            publisher.step(manager.commit(step, [token]))
        hear(listening, router, lambda: blocks([*request.tokens.tolist(), 5]) in router.believed)
    publisher.close()


def test_who_comes_late_gets_everything_at_once(engine):
    one = engine()
    texts = [one.serve(prompt(k, 16), 1) for k in range(3)]
    for _ in range(2):
        router = Router(BT, joins=True)
        with connected(zmq.SUB, one.publisher.endpoint) as listening:
            hear(listening, router, lambda router=router: all(blocks(text) in router.believed for text in texts))


def test_a_replay_has_every_batch_from_the_one_asked_for(engine):
    one = engine()
    with connected(zmq.SUB, one.publisher.endpoint) as listening:
        live = Router(BT, joins=True)
        text = one.serve(prompt(0, 18), 7)
        last = hear(listening, live, lambda: blocks(text) in live.believed)[-1]
    found = replay(one.publisher.replay_endpoint, 0)
    numbers = [number for number, _ in found]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)) and last in numbers
    late = Router(BT, joins=True)
    for _, payload in found:
        late.hear(payload)
    assert late.found == live.found
    assert [number for number, _ in replay(one.publisher.replay_endpoint, last)][0] == last  # noqa: RUF015
    assert replay(one.publisher.replay_endpoint, numbers[-1] + 100) == []


@pytest.mark.parametrize("part_blocks", [1, 6, 10**6])
def test_who_asks_for_what_is_no_longer_kept_gets_all_that_holds(engine, monkeypatch, part_blocks):
    monkeypatch.setattr(worker, "PART_BLOCKS", part_blocks)
    one = engine(buffer_steps=4)
    texts = [one.serve(prompt(k, 16), 1) for k in range(5)]
    late, begun = Router(BT, joins=True), False
    for _, payload in replay(one.publisher.replay_endpoint, 0):
        begun = begun or msgspec.msgpack.decode(payload)[1][0] == {"type": "AllBlocksCleared"}
        if begun:
            late.hear(payload)
    assert all(blocks(text) in late.believed for text in texts)


def test_an_error_in_a_question_is_no_end_of_answers(engine):
    one = engine()
    with connected(zmq.DEALER, one.publisher.replay_endpoint) as asking:
        for wrong in ((b"",), (b"", b"12"), (b"", bytes(8), b"more"), (b"no", b"delimiter", b"", b"")):
            asking.send_multipart(wrong)
    assert replay(one.publisher.replay_endpoint, 0)


def test_a_listener_who_reads_nothing_holds_up_nobody(engine):
    one = engine(hwm=1)
    with (
        connected(zmq.SUB, one.publisher.endpoint, RCVHWM=1, RCVBUF=4096),
        connected(zmq.SUB, one.publisher.endpoint, RCVHWM=0) as listening,
    ):
        for k in range(20):
            text = one.serve(prompt(k % 5, 30), 1)
            if k % 5 == 4:
                one.serving.cache.reset()
        text = one.serve(prompt(0, 30), 1)
        told = Router(BT, joins=True)
        found = replay(one.publisher.replay_endpoint, 0)
        for _, payload in found:
            told.hear(payload)
        assert blocks(text) in told.believed
        assert listening.poll(1000 * PATIENCE_S)


def test_what_finds_the_thread_behind_is_told_later(engine):
    one = engine(max_queue_size=1)
    with connected(zmq.SUB, one.publisher.endpoint) as listening:
        router = Router(BT, joins=True)
        texts = [one.serve(prompt(k, 24), 1) for k in range(4)]
        missed = list(texts)
        while missed:  # a text that was refused is known once its request comes again
            missed = [text for text in missed if one.serve(text, 1) and not _heard(listening, router, text)]


def _heard(listening: zmq.Socket[bytes], router: Router, text: list[int]) -> bool:
    while listening.poll(200):
        router.hear(listening.recv_multipart()[2])
    return blocks(text)[:6] in router.believed


def test_an_error_of_the_thread_ends_the_events_and_not_the_engine(engine, monkeypatch, caplog):
    one = engine()

    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Claims, "add_text", fails)
    assert one.serve(prompt(0, 16), 2)[:16] == prompt(0, 16)
    wait_until(lambda: "no more KV events" in caplog.text, "the thread has ended")
    assert "no more KV events; the engine goes on" in caplog.text
    assert one.serve(prompt(1, 16), 2)[:16] == prompt(1, 16)


def test_close_is_bounded_says_that_nothing_is_there_and_frees_the_addresses(make_serving):
    others = set(threading.enumerate())
    one = Engine(make_serving)
    with connected(zmq.SUB, one.publisher.endpoint) as listening:
        router = Router(BT, joins=True)
        text = one.serve(prompt(0, 16), 1)
        hear(listening, router, lambda: blocks(text) in router.believed)
        one.publisher.close()
        one.publisher.close()
        hear(listening, router, lambda: not router.believed)
    assert not [x for x in set(threading.enumerate()) - others if x.name == "kvtier-kv-events"]
    one.serve(prompt(1, 16), 1)  # the engine goes on
    address = {"endpoint": one.publisher.endpoint, "replay_endpoint": one.publisher.replay_endpoint}
    again = KVEventPublisher(one.serving.cache, {**ON, **address})
    with pytest.raises(ConfigError, match=r"cannot listen at tcp://127\.0\.0\.1:\d+ \(Address already in use\)"):
        KVEventPublisher(one.serving.cache, {**ON, **address})
    again.close()


def test_a_closed_cache_has_no_news(make_cache):
    cache = make_cache(GROUPS)
    publisher = KVEventPublisher(cache, ON)
    cache.close()
    publisher.poll()
    publisher.step([])
    publisher.close()
    with pytest.raises(CacheClosed):
        KVEventPublisher(cache, ON)


def test_a_publisher_that_nobody_holds_ends(make_cache):
    others = set(threading.enumerate())
    publisher = KVEventPublisher(make_cache(GROUPS), ON)
    address = publisher.endpoint
    del publisher
    assert not [x for x in set(threading.enumerate()) - others if x.name == "kvtier-kv-events"]
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.bind(address)


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_a_missing_package_is_named(make_cache, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf"KV events need {missing}; pip install 'kvtier\[events\]'"):
        KVEventPublisher(make_cache(GROUPS), ON)


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ({"win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}, "none of the groups win, chunk has it"),
        (
            {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 8)},
            "these groups have several: full has 4, win has 8",
        ),
    ],
)
def test_groups_that_routers_cannot_be_told_of_are_refused(make_cache, groups, why):
    with pytest.raises(ConfigError, match=why):
        KVEventPublisher(make_cache(groups), ON)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (None, "must be a mapping of enable_kv_cache_events, publisher"),
        ("{", "is no JSON"),
        ("[]", "must be a mapping"),
        ({"enable": True}, "has no 'enable'; it has enable_kv_cache_events"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events must be true or false"),
        ({"enable_kv_cache_events": True, "publisher": "kafka"}, 'publisher must be "zmq" or "null"'),
        ({"publisher": "zmq"}, "publishes nothing unless enable_kv_cache_events is true"),
        ({"endpoint": "inproc://x"}, "endpoint must begin with tcp:// or ipc://"),
        ({"endpoint": None}, "endpoint must begin with"),
        ({"replay_endpoint": 5}, "replay_endpoint must begin with"),
        ({"buffer_steps": 0}, "buffer_steps must be an integer of at least 1"),
        ({"hwm": True}, "hwm must be"),
        ({"max_queue_size": 1.5}, "max_queue_size must be"),
        ({"topic": b""}, "topic must be text"),
    ],
)
def test_a_config_that_cannot_work_is_refused(given, why):
    with pytest.raises(ConfigError, match=why):
        KVEventsConfig.read(given)


def test_a_config_reads_as_in_vllm():
    read = KVEventsConfig.read
    assert not read({}).is_on
    assert not read({"enable_kv_cache_events": True, "publisher": "null"}).is_on
    assert read('{"enable_kv_cache_events": true}').is_on
    assert read({"enable_kv_cache_events": True, "publisher": "zmq"}).endpoint == "tcp://127.0.0.1:5557"
    assert read(read({"hwm": 7})).hwm == 7


def test_a_config_that_is_off_or_no_cache_is_refused(make_cache):
    with pytest.raises(ConfigError, match="enable_kv_cache_events is not true"):
        KVEventPublisher(make_cache(GROUPS), {})
    with pytest.raises(ConfigError, match=r"cache must be a kvtier\.KVCache"):
        KVEventPublisher(KVCache, ON)
