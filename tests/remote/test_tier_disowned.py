"""Content that proved wrong, and resets: what is taken back is not found again, nor fetched, nor spilled."""

from __future__ import annotations

from core.driving import prompt

from kvtier import FullAttention, SlidingWindow
from kvtier.remote.backends.contract import Answer, Outcome
from remote.conftest import store_of
from remote.fake_backend import FakeBackend

FULL = {"full": (FullAttention(), 4)}
NOTHING = {"device": 0, "host": 0, "remote": 0}


def test_after_a_reset_the_store_is_left_alone(shared_serving):
    """The weights may have changed, and the names have not."""
    one, other = shared_serving(), shared_serving()
    one.serve("a", prompt(0, 50), 1)
    other.store.hold = True
    other.add("a", prompt(0, 50), 1)
    other.step()
    other.store.end("look")
    other.step()
    other.cache.reset_prefix_cache()
    other.store.end("get")
    other.store.hold = False
    assert other.run()["a"].cached_tokens == NOTHING
    assert not store_of(other).is_on
    calls = len(other.store.made)
    other.serve("b", prompt(0, 50), 1)
    assert len(other.store.made) == calls


def test_content_of_a_failed_request_is_deleted_from_the_store(shared_serving):
    one = shared_serving()
    one.add("bad", prompt(0, 50), 20)
    one.steps_until(lambda: shared_serving.shared.objects and one.is_running("bad"))
    one.scheduler.fail("bad")
    one.run()
    assert not shared_serving.shared.objects
    other = shared_serving()
    assert other.serve("a", prompt(0, 50), 1).cached_tokens == NOTHING


def test_a_request_that_fails_before_it_has_a_whole_block_leaves_nothing_to_delete(shared_serving):
    """It has a key, and no boundary of a hit: else the engine has work for ever."""
    one = shared_serving({"full": (FullAttention(), 8), "win": (SlidingWindow(6), 4)})
    one.add("bad", prompt(0, 5), 4)
    one.scheduler.fail("bad")
    one.run()
    assert one.remote.num_disowned == 0
    assert not any(what == "delete" for what, _ in one.store.made)


def test_a_spill_under_way_does_not_bring_back_what_was_disowned(shared_serving):
    one = shared_serving()
    one.store.hold = True
    one.add("bad", prompt(0, 50), 20)
    one.step()
    one.steps_until(lambda: one.store.end("look") or any(what == "put" for what, _ in one.store.calls.values()))
    one.scheduler.fail("bad")
    one.step()
    one.store.end("delete")
    one.step()
    one.store.end("put")
    one.store.hold = False
    one.run()
    assert not shared_serving.shared.objects


def test_what_is_disowned_is_not_fetched_before_it_is_deleted(shared_serving):
    shared_serving().serve("a", prompt(0, 50), 1)
    other = shared_serving()
    other.add("bad", prompt(0, 50), 20)
    other.steps_until(lambda: other.known("bad") > 52)
    other.store.hold = True
    other.scheduler.fail("bad")
    other.step()
    other.add("next", prompt(0, 50), 1)
    other.step()
    other.store.end("look")
    other.step()
    other.store.end("get")
    other.step()
    other.store.hold = False
    assert other.run()["next"].cached_tokens == NOTHING
    assert other.serve("again", prompt(0, 50), 1).cached_tokens["device"] > 0


def test_an_answer_of_before_a_delete_does_not_make_known_what_it_takes_away(shared_serving):
    """Else the text is not stored again for an hour, and routers are told that it is there."""
    shared_serving().serve("a", prompt(0, 50), 1)
    other = shared_serving()
    news = other.remote.listen()
    other.add("bad", prompt(0, 50), 20)
    other.store.hold = True
    other.cache.estimate_compute(lambda start, end: 0.0)
    other.step()
    other.engine.clock_s += 0.1
    other.steps_until(lambda: other.known("bad") > 52)
    other.scheduler.fail("bad")
    other.step()
    assert {what for what, _ in other.store.calls.values()} == {"look", "delete"}
    other.store.end("look")
    other.step()
    other.store.hold = False
    other.run()
    assert not shared_serving.shared.objects and news.take() == {}
    other.serve("again", prompt(0, 50), 1)
    assert shared_serving.shared.objects, "it is sound now"


def test_a_delete_that_fails_is_tried_again_and_keeps_the_names_until_then(shared_serving):
    one = shared_serving()
    one.add("bad", prompt(0, 50), 20)
    one.steps_until(lambda: shared_serving.shared.objects and one.known("bad") > 52)
    deletes = []
    delete = one.store.delete
    one.store.delete = lambda ticket, names, within_s: deletes.append((ticket, names))
    one.scheduler.fail("bad")
    one.step()
    assert len(deletes) == 1
    one.store._ended.append(Answer(deletes[0][0], (Outcome.FAILED,) * len(deletes[0][1])))
    one.step()
    assert one.remote.num_disowned == 1
    one.store.delete = delete
    one.engine.clock_s += 1.1
    one.run()
    assert one.remote.num_disowned == 0
    assert not shared_serving.shared.objects


def test_big_windows_of_a_prompts_end_are_deleted_with_their_text(shared_serving):
    one = shared_serving({"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4)}, least=1)
    one.add("bad", prompt(0, 50), 40)
    one.steps_until(lambda: one.known("bad") > 75)
    assert shared_serving.shared.objects
    one.scheduler.fail("bad")
    one.run()
    assert not shared_serving.shared.objects


def test_a_reset_is_final_for_requests_that_are_asking(shared_serving):
    shared_serving().serve("a", prompt(0, 50), 1)
    other = shared_serving()
    other.store.hold = True
    other.add("a", prompt(0, 50), 1)
    other.step()
    other.cache.reset_prefix_cache()
    other.store.end("look")
    other.store.hold = False
    assert other.run()["a"].cached_tokens == NOTHING


def test_what_replaces_a_damaged_object_comes_after_its_delete(shared_serving):
    one = shared_serving(FULL)
    one.serve("a", prompt(0, 50), 1)
    name = next(iter(shared_serving.shared.objects))
    shared_serving.shared.objects[name] = b"damaged"
    other = shared_serving(FULL, store=FakeBackend(hold=True))
    other.add("a", prompt(0, 50), 1)
    other.steps_until(lambda: other.store.calls)
    for kind in ("look", "get"):
        other.store.end(kind)
        other.step()
    other.steps_until(lambda: "a" in other.finished)
    for _ in range(3):
        other.store.end("put")
        other.step()
    assert all(name not in names for what, names in other.store.made if what == "put"), "it is not deleted yet"
    other.store.end("delete")
    for _ in range(3):
        other.step()
    assert [names for what, names in other.store.made if what == "put"][-1] == (name,)
    other.store.end("put")
    other.step()
    assert len(shared_serving.shared.objects[name]) > 300


def test_objects_that_failed_puts_have_written_are_deleted_with_a_failed_request(shared_serving):
    """A bucket's answer is late, and the bytes are there."""
    one = shared_serving(store=FakeBackend(), least=10**6)
    answer = one.store._answer
    one.store._answer = lambda ticket, ends: answer(ticket, [(Outcome.FAILED, "late")] * len(ends))
    one.add("bad", prompt(0, 22), 40)
    one.steps_until(lambda: shared_serving.shared.objects and one.known("bad") > 52)
    one.scheduler.fail("bad")
    one.run()
    assert not shared_serving.shared.objects
