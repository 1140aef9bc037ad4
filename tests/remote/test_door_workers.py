"""Workers of an engine with its own memory: real backends, options, and the ends of several workers' calls."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from core.outside import chain
from patience import FOREVER_S, be_patient_with_backends

from kvtier import ConfigError, Fragment, FullAttention, HostTier, OutsideGroup
from kvtier.host_tier.orders import Orders
from kvtier.host_tier.plan import HostPlan
from kvtier.host_tier.scheduler import HostTierScheduler
from kvtier.host_tier.worker import HostTierWorker
from kvtier.remote.backends.contract import Answer, Outcome
from kvtier.remote.envelope import TRAILER_BYTES, read_trailer
from kvtier.remote.names import object_name
from kvtier.remote.parcels import Grade, Parcel, Receipt
from kvtier.remote.relay import RelayedBackend, RelayedWire
from remote.fake_backend import FakeBackend

ID = {"model_id": "m", "key_secret": b"s"}


@pytest.fixture(autouse=True)
def small_objects(monkeypatch):
    """Objects of some blocks each."""
    monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", 60)


# --- real remotes ----------------------------------------------------------------------------------


def test_two_tiers_share_a_directory(tmp_path, monkeypatch):
    pytest.importorskip("obstore", reason="obstore is not installed; `make test` installs it")
    be_patient_with_backends(monkeypatch)
    memory = [np.zeros(64 * 64, np.uint8) for _ in range(2)]
    group = OutsideGroup("full", FullAttention(), 4, 64, (Fragment(0, 64, 64),))
    keys, blocks = chain(list(range(41)), 4), np.arange(10, dtype=np.int32)
    memory[0][: 10 * 64] = np.arange(640) % 251
    for k, own in enumerate(memory):
        with HostTier([group], own, "64KiB", remote_uri=f"file://{tmp_path}?digest=blake2b", **ID) as tier:
            text = tier.text(keys)
            while (hit := text.match(0, 41, ask_remote=True)).is_sought or tier.has_work:
                tier.wait(1.0)
                tier.poll()
            assert hit.num_tokens == (40 if k else 0)
            if k:
                ticket = text.load(hit.at.astype(np.int32))
                while ticket not in tier.poll().loaded:
                    tier.wait(1.0)
            else:
                text.computed([blocks], 40, is_end=True)
                while tier.poll() and tier.has_work:
                    tier.wait(1.0)
            text.close()
            assert tier.audit() == []
    assert np.array_equal(memory[0], memory[1]) and memory[1].any()
    trailers = [read_trailer(path.read_bytes()[-TRAILER_BYTES:]) for path in tmp_path.rglob("*") if path.is_file()]
    assert trailers and all(trailer.has_digest for trailer in trailers)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"remote_uri": "file:///tmp"}, "remote_uri needs model_id and key_secret"),
        ({"remote_uri": "file:///tmp", "model_id": "m"}, "remote_uri needs model_id and key_secret"),
        ({"remote_uri": "/tmp", **ID}, "remote_uri must be such as file:///var/kv"),
        ({"remote_uri": "gopher://x", **ID}, "is no URI of a remote tier; use file:///"),
        ({"model_id": 7}, "model_id must be a string"),
        ({"key_secret": "s"}, "key_secret must be bytes"),
    ],
)
def test_options_that_cannot_work(options, says):
    group = OutsideGroup("full", FullAttention(), 4, 8, (Fragment(0, 64, 64),))
    with pytest.raises(ConfigError, match=says):
        HostTier([group], np.zeros(512, np.uint8), "64KiB", **options)


def a_worker(store):
    """With a block of host memory, and a spill of it under way."""
    group = OutsideGroup("full", FullAttention(), 4, 8, (Fragment(0, 64, 64),))
    memory = np.zeros(512, np.uint8)
    worker = HostTierWorker(HostPlan([group], 512, "4KiB", "off"), memory, copy_engine="threads")
    worker.use_remote(store, b"s")
    of, block = np.zeros(1, np.int32), np.ones(1, np.int32)
    worker.begin(Orders(parcels=(Parcel(7, True, (("t", b"k" * 16),), of, block, of, 30.0, (b"n" * 16,)),)))
    return worker


def test_a_worker_waits_for_its_store_as_for_copies():
    store = FakeBackend(hold=True)
    worker = a_worker(store)
    assert worker.num_under_way == 1
    ends = threading.Timer(0.02, store.end)
    ends.start()
    worker.wait(FOREVER_S)
    receipts = worker.poll().report.receipts
    assert receipts[7] == (1, Receipt((Grade.OK,), {}, 0.001))
    assert worker.num_under_way == 0 and len(store.shared.objects) == 1
    assert worker.close() and store.is_closed


def test_what_was_handed_to_a_workers_store_gets_there_when_the_worker_ends():
    store = FakeBackend(hold=True)
    worker = a_worker(store)
    store.wait = lambda timeout_s: store.end() or True
    assert worker.close()
    assert len(store.shared.objects) == 1


def test_a_store_that_hangs_holds_up_the_end_of_a_worker_for_a_moment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvtier.remote.relay.DRAIN_S", 0.0)
    store, asked = FakeBackend(hold=True), list[float]()
    worker = a_worker(store)
    store.close = lambda timeout_s: asked.append(timeout_s) is None
    assert worker.close()
    assert 0 < max(asked) <= 2


def test_a_parcel_that_cannot_even_begin_has_failed():
    store = FakeBackend()
    store.put = lambda: None
    worker = a_worker(store)
    ((count, receipt),) = worker.poll().report.receipts.values()
    assert (count, receipt.grades) == (1, (Grade.FAILED,)) and "TypeError" in receipt.reasons[0]
    assert worker.close()


def test_books_end_their_own_store():
    store = FakeBackend()
    group = OutsideGroup("full", FullAttention(), 4, 8, (Fragment(0, 64, 64),))
    books = HostTierScheduler(HostPlan([group], 512, "4KiB"))
    books.use_remote(store, **ID)
    books.close()
    assert store.is_closed
    with HostTier([group], np.zeros(512, np.uint8), "4KiB", remote_uri=(own := FakeBackend()), **ID):
        assert not own.is_closed
    assert own.is_closed


def test_a_delete_takes_the_objects_of_all_workers_and_the_worst_end_counts():
    fake = FakeBackend()
    store, wire = RelayedBackend(fake, lambda: 0.0), RelayedWire(np.array([8]), [b"a" * 16, b"b" * 16])
    names = [("t", bytes([k]) * 16) for k in range(2)]
    wire.delete(store, 7, names, 1.0)
    ((what, texts),) = fake.made
    assert (what, list(texts)) == ("delete", [object_name(of * 16, *name) for name in names for of in (b"a", b"b")])
    (answer,) = store.poll()
    assert (answer.ticket, answer.outcomes) == (7, (Outcome.OK, Outcome.OK))
    wire.delete(store, 8, names, 1.0)
    ends = (Outcome.OK, Outcome.MISS, Outcome.FAILED, Outcome.OK)
    fake.calls[8] = "delete", lambda: Answer(8, ends, {2: "no answer"}, 0.5)
    assert store.poll() == [Answer(8, (Outcome.MISS, Outcome.FAILED), {1: "no answer"}, 0.5)]
    wire.look(store, 9, names, 1.0)
    assert list(fake.made[-1][1]) == [object_name(b"a" * 16, *name) for name in names], "of the first one"


def test_of_a_calls_time_a_worker_gets_what_is_left():
    now = [10.0]
    store = RelayedBackend(FakeBackend(), lambda: now[0])
    nothing = np.empty(0, np.int32)
    for _ in range(2):
        store.hand_on(Parcel(1, True, (), nothing, nothing, nothing, 5.0))
    now[0] = 12.0
    assert [parcel.within_s for parcel in store.take()] == [3.0, 3.0]
    assert store.take() == ()
    store.hand_on(Parcel(2, True, (), nothing, nothing, nothing, 5.0))
    now[0] = 20.0
    assert store.take()[0].within_s == 0.0


def test_of_two_ends_the_worse_one_counts():
    one = Receipt((Grade.OK, Grade.FAILED, Grade.MISS, Grade.OK), {1: "damaged: x"}, 0.5)
    two = Receipt((Grade.MISS, Grade.REFUSED, Grade.MISS, Grade.OK), {1: "full"}, 2.0)
    for both in (one.both(two), two.both(one)):
        assert both == Receipt((Grade.MISS, Grade.FAILED, Grade.MISS, Grade.OK), {1: "damaged: x"}, 2.0)
