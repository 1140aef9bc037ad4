"""What every ``Backend`` promises. A backend's tests derive from ``Conformance`` and bring ``driver``."""

from __future__ import annotations

import threading

from patience import FOREVER_S, PATIENCE_S

from kvtier.remote.backends.contract import DAMAGED
from remote.driving import FAILED, MISS, OK, Driver, name, pattern

SIZES = (4096, 64, 1 << 15)


class Conformance:
    """Needs a fixture ``driver``, a ``Driver`` over an empty store."""

    most_pieces = 200

    def test_what_was_put_is_got_in_pieces_cut_in_any_way(self, driver: Driver) -> None:
        data = driver.filled(1, *SIZES)
        assert driver.outcomes("put", [name(1)], [data]) == [OK]
        for cut in (SIZES, (sum(SIZES),), (16, 4080, 1 << 15, 64)):
            back = driver.room(*cut)
            assert driver.outcomes("get", [name(1)], [back]) == [OK]
            assert b"".join(back) == b"".join(data)

    def test_many_pieces(self, driver: Driver) -> None:
        data = driver.filled(1, *[16] * self.most_pieces)
        back = driver.room(*[16] * self.most_pieces)
        assert driver.outcomes("put", [name(1)], [data]) == [OK]
        assert driver.outcomes("get", [name(1)], [back]) == [OK]
        assert back == data

    def test_missing_names_are_misses_between_others(self, driver: Driver) -> None:
        assert driver.outcomes("put", [name(1), name(3)], [driver.filled(1, 64), driver.filled(3, 64)]) == [OK, OK]
        names = [name(i) for i in range(4)]
        back = [driver.room(64) for _ in names]
        answer = driver.call("get", names, back)
        assert (list(answer.outcomes), answer.reasons) == ([MISS, OK, MISS, OK], {})
        assert back[3][0] == pattern(3000, 64)
        assert driver.outcomes("look", names) == [MISS, OK, MISS, OK]

    def test_an_object_of_another_length_fails_and_says_so(self, driver: Driver) -> None:
        driver.call("put", [name(1)], [driver.filled(1, 4096)])
        for size in (16, 4080, 4112):
            answer = driver.call("get", [name(1)], [driver.room(size)])
            assert list(answer.outcomes) == [FAILED]
            assert answer.reasons[0].startswith(DAMAGED), answer

    def test_a_name_put_again_has_one_of_both_contents(self, driver: Driver) -> None:
        first, second = driver.filled(1, 4096), driver.filled(2, 4096)
        for data in (first, second):
            assert driver.outcomes("put", [name(1)], [data]) == [OK]
        back = driver.room(4096)
        assert driver.outcomes("get", [name(1)], [back]) == [OK]
        assert back in (first, second)

    def test_what_was_put_does_not_change_with_the_memory_it_came_from(self, driver: Driver) -> None:
        data = driver.filled(1, 4096)
        kept = bytes(data[0])
        driver.call("put", [name(1)], [data])
        data[0][:] = bytes(4096)
        back = driver.room(4096)
        driver.call("get", [name(1)], [back])
        assert back[0] == kept

    def test_deleted_objects_are_gone(self, driver: Driver) -> None:
        driver.call("put", [name(1), name(2)], [driver.filled(1, 64), driver.filled(2, 64)])
        assert driver.outcomes("delete", [name(1)]) == [OK]
        assert driver.outcomes("look", [name(1), name(2)]) == [MISS, OK]
        assert driver.outcomes("delete", [name(1)])[0] in (OK, MISS)  # some remotes cannot tell

    def test_empty_calls_end(self, driver: Driver) -> None:
        for what, more in (("look", ()), ("put", ((),)), ("get", ((),)), ("delete", ())):
            assert driver.call(what, (), *more).outcomes == ()

    def test_each_of_many_calls_at_once_ends_once(self, driver: Driver) -> None:
        numbers = range(40)
        tickets = [driver.send("put", [name(i)], [driver.filled(i, 512)]) for i in numbers]
        assert all(driver.answer(ticket).outcomes == (OK,) for ticket in tickets)
        back = [driver.room(512) for _ in numbers]
        tickets = [driver.send("get", [name(i)], [back[i]]) for i in reversed(numbers)]
        assert all(driver.answer(ticket).outcomes == (OK,) for ticket in tickets)
        assert [bytes(piece) for (piece,) in back] == [pattern(1000 * i, 512) for i in numbers]
        assert driver.store.poll() == []

    def test_trailers_are_written_before_and_checked_after(self, driver: Driver) -> None:
        assert driver.put_sealed([1, 2, 3]).outcomes == (OK,) * 3
        assert driver.get_checked([3, 1, 2]).outcomes == (OK,) * 3

    def test_what_is_wrong_with_an_object_is_the_reason(self, driver: Driver) -> None:
        driver.call("put", [name(1), name(2)], [driver.filled(1, 64), driver.filled(2, 64)])
        back = [driver.room(64), driver.room(64)]
        answer = driver.call("get", [name(1), name(2)], back, after=lambda k, total: "torn" if k else "")
        assert (answer.outcomes, answer.reasons) == ((OK, FAILED), {1: "torn"})

    def test_what_the_callbacks_raise_is_the_reason(self, driver: Driver) -> None:
        def raising(k: int, total: int | None = None) -> str:
            raise ValueError(f"object {k}")

        answer = driver.call("put", [name(1)], [driver.filled(1, 64)], before=raising)
        assert (answer.outcomes, "object 0" in answer.reasons[0]) == ((FAILED,), True)
        assert driver.outcomes("look", [name(1)]) == [MISS]
        driver.call("put", [name(1)], [driver.filled(1, 64)])
        answer = driver.call("get", [name(1)], [driver.room(64)], after=raising)
        assert (answer.outcomes, "object 0" in answer.reasons[0]) == ((FAILED,), True)

    def test_a_call_whose_time_is_over_is_not_made(self, driver: Driver) -> None:
        answer = driver.call("put", [name(1)], [driver.filled(1, 64)], within_s=-1.0)
        assert (answer.outcomes, "time" in answer.reasons[0]) == ((FAILED,), True)
        assert driver.outcomes("look", [name(1)]) == [MISS]
        assert driver.outcomes("look", [name(1)], within_s=-1.0) == [FAILED]

    def test_news_come_from_any_thread_and_a_wait_ends_with_them(self, driver: Driver) -> None:
        told = threading.Event()
        driver.store.on_news = told.set
        ticket = driver.send("look", [name(1)])
        assert told.wait(PATIENCE_S)
        assert driver.store.wait(0.0)
        assert [answer.ticket for answer in driver.store.poll()] == [ticket]
        assert not driver.store.wait(0.0)

    def test_a_wake_ends_one_wait(self, driver: Driver) -> None:
        driver.store.wake()
        assert not driver.store.wait(FOREVER_S)  # a wake before it counts too
        is_woken = threading.Event()

        def wake() -> None:
            is_woken.set()
            driver.store.wake()

        waker = threading.Timer(0.01, wake)
        waker.start()
        assert not driver.store.wait(FOREVER_S)
        assert is_woken.is_set(), "the first wake is over"
        waker.join()

    def test_after_close_calls_fail(self, driver: Driver) -> None:
        driver.call("put", [name(1)], [driver.filled(1, 64)])
        assert driver.store.close(PATIENCE_S)
        for what, more in (("look", ()), ("get", ([driver.room(64)],)), ("put", ([driver.filled(1, 64)],))):
            assert driver.outcomes(what, [name(1)], *more) == [FAILED]
        assert driver.store.close(PATIENCE_S)
