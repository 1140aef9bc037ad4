"""What the protocol of ``kvtier.remote.backends.contract`` promises, with a store that is well."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from driving import ARENA_PIECES, FAILED, MISS, OK, Client, content, names_of
from remote.mooncake_cluster import Cluster

from kvtier.remote.backends.contract import DAMAGED
from kvtier.remote.backends.mooncake_memory import STAGE_BYTES

Clients = Callable[..., Client]


@pytest.fixture(scope="module")
def client(calm: Cluster, make_calm_client: Clients) -> Client:
    """Closing one takes a second: most tests share it."""
    return make_calm_client()


@pytest.fixture(scope="module")
def other(calm: Cluster, make_calm_client: Clients) -> Client:
    """Objects of one piece more, and some threads."""
    return make_calm_client(pieces=4, threads="3")


def test_what_was_stored_comes_back_and_what_was_not_is_a_miss(client: Client) -> None:
    there, absent = names_of("there", 12), names_of("absent", 12)
    assert client.put(there).outcomes == (OK,) * 12
    mixed = [name for pair in zip(there, absent, strict=True) for name in pair]
    assert client.look(mixed).outcomes == (OK, MISS) * 12
    answer = client.get(mixed)
    assert answer.outcomes == (OK, MISS) * 12
    assert answer.reasons == {}


def test_another_client_reads_what_one_has_stored(client: Client, make_client: Clients) -> None:
    names = names_of("shared", 8)
    assert client.put(names).outcomes == (OK,) * 8
    assert make_client().get(names).outcomes == (OK,) * 8


@pytest.mark.parametrize("pieces", [1, 80])
def test_an_object_of_one_piece_or_of_more_than_a_batch_has(make_client: Clients, calm: Cluster, pieces: int) -> None:
    client = make_client(pieces=pieces)
    names = names_of(f"of {pieces}", 5)
    assert client.put(names).outcomes == (OK,) * 5
    assert client.get(names).outcomes == (OK,) * 5


def test_an_object_that_is_there_stays_or_is_replaced(client: Client) -> None:
    names = names_of("twice", 5)
    for _ in range(2):
        assert client.put(names).outcomes == (OK,) * 5
        assert client.get(names).outcomes == (OK,) * 5


def test_one_name_twice_in_a_call(client: Client) -> None:
    name = names_of("same", 1) * 3
    assert client.put(name).outcomes == (OK,) * 3
    assert client.get(name).outcomes == (OK,) * 3
    assert client.look(name).outcomes == (OK,) * 3


def test_an_object_of_another_length_fails(client: Client, other: Client) -> None:
    short, long = names_of("short", 2), names_of("long", 2)
    assert client.put(short).outcomes == other.put(long).outcomes == (OK, OK)
    for reader, names, stored in ((other, short, client), (client, long, other)):
        answer = reader.get(names)
        assert answer.outcomes == (FAILED, FAILED)
        words = f"it has {stored.nbytes:,} bytes, not {reader.nbytes:,}"
        assert all(reason.startswith(DAMAGED) and words in reason for reason in answer.reasons.values())


def test_as_many_objects_as_the_arena_has(client: Client) -> None:
    names = names_of("many", ARENA_PIECES // client.pieces)
    assert set(client.put(names).outcomes) == {OK}
    assert set(client.look(names + names_of("no", 5000)).outcomes[: len(names)]) == {OK}
    assert set(client.get(names).outcomes) == {OK}


def test_what_was_deleted_is_gone_even_if_somebody_has_just_read_it(client: Client) -> None:
    names = names_of("gone", 3)
    client.put(names)
    client.get(names)
    assert client.delete([*names, "never"]).outcomes == (OK, OK, OK, MISS)
    assert client.get(names).outcomes == (MISS,) * 3


def test_a_trailer_that_cannot_be_written_or_is_wrong_fails_that_object_only(client: Client) -> None:
    names = names_of("trailer", 3)
    objects = client.buffers(3)

    def before(k: int) -> None:
        if k == 1:
            raise RuntimeError("no trailer")

    client.store.put(100, names, objects, 5.0, before)
    answer = client.answer(100)
    assert (answer.outcomes, answer.reasons) == ((OK, FAILED, OK), {1: "RuntimeError: no trailer"})

    def after(k: int, total: int | None) -> str:
        if k == 0:
            raise RuntimeError("not read")
        return "not mine"

    client.store.get(101, names, objects, 5.0, after)
    answer = client.answer(101)
    assert answer.outcomes == (FAILED, MISS, FAILED)
    assert answer.reasons == {0: "RuntimeError: not read", 2: "not mine"}


def test_buffers_outside_of_the_arena_and_too_large_for_the_stage(client: Client) -> None:
    sizes = (STAGE_BYTES + 9, STAGE_BYTES // 2, STAGE_BYTES // 2, 0, 7)
    stored = [memoryview(content(f"outside {k}", size)) for k, size in enumerate(sizes)]
    client.store.put(1, ["outside"], [stored], 5.0)
    assert client.answer(1).outcomes == (OK,)
    read = [memoryview(bytearray(size)) for size in sizes]
    client.store.get(2, ["outside"], [read], 5.0)
    assert client.answer(2).outcomes == (OK,)
    assert read == stored


def test_calls_of_nothing_late_calls_and_bad_names(client: Client) -> None:
    for call in (client.put, client.get, client.look, client.delete):
        assert call([]).outcomes == ()
        answer = call(["late"], deadline_s=-1.0)
        assert (answer.outcomes, answer.reasons) == ((FAILED,), {0: "the call's time was over before it began"})
    assert client.put([""]).outcomes == (FAILED,)
    client.store.put(7, ["empty"], [[memoryview(b"")]], 5.0)
    assert client.answer(7).outcomes == (FAILED,)


def test_a_closed_store_answers_too(calm: Cluster, make_client: Clients) -> None:
    client = make_client()
    client.close()
    for call in (client.put, client.get, client.look, client.delete):
        assert call(["x"]).reasons == {0: "the store is closed"}


def test_two_clients_store_the_same_names_at_once(client: Client, make_client: Clients) -> None:
    names = names_of("race", 64)
    answers = []
    each = (client, make_client())
    threads = [threading.Thread(target=lambda c=c: answers.append(c.put(names))) for c in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {outcome for answer in answers for outcome in answer.outcomes} == {OK}
    assert set(client.until("ok", "get", names).outcomes) == {OK}
