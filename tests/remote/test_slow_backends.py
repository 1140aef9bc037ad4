"""Stores that take their time to answer: what requests wait for, what they get, and what is stored again. Clocks are
given, so that no busy machine decides."""

from __future__ import annotations

from collections import Counter

import inside
import pytest
from breadth import sample
from core.driving import prompt

from kvtier import ChunkedLocal, FullAttention, SlidingWindow
from kvtier.remote.tier import ANSWER_S
from remote.fake_backend import FakeBackend, Shared

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(16), 4)}
STEP_S = 0.01
TOKEN_S = 0.05
"""That a token's prefill takes: 64 of them 3.2 s, as 30,000 tokens of a large model do."""


class SlowBackend(FakeBackend):
    """Each call ends ``look_s`` or ``move_s`` after it was made, on the clock of its engine."""

    def __init__(self, look_s: float, move_s: float = 0.0) -> None:
        super().__init__(hold=True)
        self.takes = {"look": look_s, "get": move_s, "put": move_s, "delete": move_s}
        self.now = lambda: 0.0
        self._due: dict[int, float] = {}

    def _call(self, what, ticket, names, run):
        super()._call(what, ticket, names, run)
        self._due[ticket] = self.now() + self.takes[what]

    def poll(self):
        for ticket in [ticket for ticket in self.calls if self._due[ticket] <= self.now()]:
            what, run = self.calls.pop(ticket)
            answer = run()
            self._ended.append(type(answer)(ticket, answer.outcomes, answer.reasons, max(1e-3, self.takes[what])))
        found, self._ended = self._ended, []
        return found

    def puts(self) -> Counter[str]:
        """How often each object was stored."""
        return Counter(name for what, names in self.made if what == "put" for name in names)


@pytest.fixture
def slow(make_serving, monkeypatch):
    """Makes servings over one shared remote, whose steps take ``STEP_S``."""
    monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", 300)
    shared = Shared()

    def make(look_s=0.0, token_s=TOKEN_S, groups=GROUPS, **options):
        store = SlowBackend(look_s)
        store.shared = shared
        options |= {"remote_uri": store, "model_id": "m", "key_secret": b"s"}
        made = make_serving(groups, 200, 400, hold=(), store="eager", **options)
        store.now = lambda: made.engine.clock_s
        made.store, made.remote = store, inside.coordinator(made.cache).door.remote
        made.cache.estimate_compute(lambda start, end: (end - start) * token_s)
        return made

    make.shared = shared
    return make


def run(serving, limit=4000):
    """Steps until all is done and spilled; each takes ``STEP_S``."""
    for _ in range(limit):
        if not serving.scheduler.has_work() and not serving.remote.num_progressing and not serving.store.calls:
            return
        serving.step()
        serving.engine.clock_s += STEP_S
    raise AssertionError("it never ended")


def conversations(serving, turns=4, speakers=3):
    """What each request got from the remote; answers are given, so that all engines see the same texts."""
    texts, got = [prompt(k, 40) for k in range(speakers)], []
    for turn in range(turns):
        for k in range(speakers):
            serving.add(f"{turn}.{k}", texts[k], 1)
            run(serving)
            got.append(serving.finished[f"{turn}.{k}"].cached_tokens["remote"])
            inside.pools(serving.cache).forget_all()
            inside.host(serving.cache).forget_all()
            texts[k] = [*texts[k], *prompt(100 * turn + k, 24)]
    return got


@pytest.mark.parametrize("look_s", sample([0.005, 0.04, 0.2], quick=[0.04, 0.2]))
def test_a_store_that_answers_slowly_hits_as_one_that_answers_at_once(slow, look_s):
    conversations(slow())
    first = dict(slow.shared.objects)
    at_once, later = slow(), slow(look_s)
    hits = [sum(conversations(serving)) for serving in (at_once, later)]
    assert hits[0] > 0 and hits[1] >= 0.9 * hits[0], hits
    assert later.cache.stats().remote.late_looks == 0
    assert slow.shared.objects.keys() == first.keys()
    assert later.store.puts().total() == at_once.store.puts().total() == 0, "all of it was there"


@pytest.mark.parametrize("look_s", sample([0.04, 0.2, 1.0], quick=[0.2]))
def test_what_a_late_answer_says_is_there_is_not_stored_again(slow, look_s, monkeypatch):
    """These prompts are computed long before the remote has answered. A question names some of their tiles."""
    monkeypatch.setattr("kvtier.coordinator.seek.MOST_SAMPLES", 2)
    one = slow()
    conversations(one)
    assert max(one.store.puts().values()) == 1
    hasty = slow(look_s, token_s=1e-5)
    assert sum(conversations(hasty)) == 0
    assert hasty.store.puts().total() == 0


def test_who_does_not_wait_is_not_late_and_long_prompts_still_hit(slow):
    """Short prompts must not make a remote look dead that takes 40 ms."""
    one, other = slow(), slow(0.04)
    for k in range(8):
        one.add(f"{k}", prompt(k, 30), 1)
        run(one)
    other.cache.estimate_compute(lambda start, end: 1e-4)
    for k in range(7):
        other.add(f"{k}", prompt(k, 30), 1)
        run(other)
    stats = other.cache.stats().remote
    assert stats.late_looks == 1, "the first one has waited in vain, and the others have not waited"
    assert not stats.breaker_open
    other.cache.estimate_compute(lambda start, end: (end - start) * TOKEN_S)
    other.add("long", prompt(7, 30), 1)
    run(other)
    assert other.finished["long"].cached_tokens["remote"] == 28


def test_a_store_that_stops_to_answer_costs_one_wait_and_is_asked_again_later(slow):
    one, other = slow(), slow()
    other.store.takes = dict.fromkeys(other.store.takes, 1000.0)
    for k in range(9):
        one.add(f"{k}", prompt(k, 30), 1)
        run(one)
    began = other.engine.clock_s
    for k in range(4):
        other.add(f"{k}", prompt(k, 30), 1)
        while f"{k}" not in other.finished:
            other.step()
            other.engine.clock_s += STEP_S
    waited = other.engine.clock_s - began
    assert 0.5 * 28 * TOKEN_S <= waited <= 0.5 * 28 * TOKEN_S + 40 * STEP_S, waited
    other.engine.clock_s += ANSWER_S
    other.step()
    assert other.cache.stats().remote.breaker_open
    other.store.takes = dict.fromkeys(other.store.takes, 0.0)
    for k in range(4, 9):  # a try a second, until its answers are trusted again
        other.engine.clock_s += 1.1
        other.add(f"{k}", prompt(k, 30), 1)
        while f"{k}" not in other.finished:
            other.step()
            other.engine.clock_s += STEP_S
    assert other.finished["8"].cached_tokens["remote"] == 28
    other.store.calls.clear()


def test_a_text_is_not_spilled_before_its_answer(slow):
    """What the answer tells is not stored."""
    one = slow()
    one.add("a", prompt(0, 50), 1)
    run(one)
    other = slow(3.0, token_s=1e-5)
    other.add("a", prompt(0, 50), 1)
    while "a" not in other.finished:
        other.step()
        other.engine.clock_s += STEP_S
    for _ in range(20):
        other.step()
        other.engine.clock_s += STEP_S
    assert not other.store.puts() and not other.store.made[1:], "it waits for the first answer"
    run(other)
    assert not other.store.puts()


def test_who_waits_sleeps_until_the_answer_of_a_text(slow):
    """A text that waits for its answer is nothing to do: an idle engine sleeps until the question's time is over."""
    serving = slow(1000.0, token_s=1e-5)
    serving.add("a", prompt(0, 50), 1)
    while "a" not in serving.finished:
        serving.step()
        serving.engine.clock_s += STEP_S
    asked_s = serving.engine.clock_s
    for _ in range(10):
        serving.step()
    due_s = inside.coordinator(serving.cache).door.due_s([])
    assert serving.remote.num_progressing and ANSWER_S - 20 * STEP_S < due_s <= ANSWER_S
    serving.engine.clock_s = asked_s + due_s
    serving.step()
    serving.step()
    assert serving.store.puts(), "nobody has answered, so it is stored"
    serving.store.calls.clear()


def test_what_is_not_worth_a_fetch_is_not_stored_again(slow):
    one, other = slow(), slow()
    for k in range(2):
        one.add(f"{k}", prompt(k, 50), 1)
        run(one)
    other.add("0", prompt(0, 50), 1)
    run(other)
    assert other.finished["0"].cached_tokens["remote"] == 48, "it has seen how long a fetch takes"
    other.cache.estimate_compute(lambda start, end: 1e-9)
    other.add("1", prompt(1, 50), 1)
    run(other)
    assert other.finished["1"].cached_tokens["remote"] == 0
    assert other.cache.stats().remote.not_worth == 1
    assert not other.store.puts()


def test_an_option_of_the_uri_says_how_patient_requests_are(tmp_path):
    from kvtier import ConfigError
    from kvtier.remote.backends.uri import PATIENCE, parse_uri

    assert parse_uri("file:///x").patience == PATIENCE
    assert parse_uri("file:///x?patience=0").patience == 0
    assert parse_uri("s3://b?patience=2.5").patience == 2.5
    for wrong in ("-1", "11", "x", "nan", "inf", ""):
        with pytest.raises(ConfigError, match="patience"):
            parse_uri(f"file:///x?patience={wrong}")
