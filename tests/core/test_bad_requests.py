"""Bad requests: a typed error that says what to do, raised before any state changes."""

from __future__ import annotations

import copy
import pickle
import sys

import inside
import numpy as np
import pytest

from core.driving import assert_same, prompt, snapshot
from kvtier import (
    CacheSpec,
    ConfigError,
    FullAttention,
    GroupSpec,
    InvalidRequest,
    KVCache,
    KVTierError,
    Request,
    StepError,
)
from kvtier.coordinator.advance import advance
from kvtier.coordinator.plan import valid_ids

SPEC = CacheSpec([GroupSpec("full", FullAttention(), 1, 1, 8)])


class Elsewhere:
    """Like a tensor on another device: only torch knows how to get at it."""

    def __repr__(self) -> str:
        return "Elsewhere"

    def __array__(self, *_, **__):
        raise TypeError("can't convert a device tensor to numpy")


class Text(str):
    """Text of a library's own."""

    def __str__(self) -> str:
        return "something else"


def nested(depth: int, times: int = 1) -> tuple:
    found = ("k",)
    for _ in range(depth):
        found = (found,) * times
    return found


ITSELF: list = ["k"]
ITSELF += [ITSELF, ITSELF]


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        np.empty(0, np.int64),
        [-1],
        [2**31],
        [2**63],
        [2**70],
        [1.0],
        ["1"],
        [True],
        [1, True],
        [np.True_, 1],
        [None],
        [[1, 2]],
        [[1], [1, 2]],
        None,
        5,
        "12",
        b"12",
        {1: 2},
        {1, 2},
        object(),
        (i for i in (1, 2)),
        np.ones((2, 2), np.int64),
        np.ones(3),
        Elsewhere(),
    ],
    ids=lambda tokens: str(tokens).split(" at 0x")[0],
)
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(tokens):
    with pytest.raises(InvalidRequest, match=r"request 'r'"):
        Request("r", tokens, 4)


@pytest.mark.parametrize("tokens", [[0], [2**31 - 1], (1, 2), range(3), np.ones(3, np.int64), np.ones(3, np.uint8)])
def test_a_prompt_may_be_any_sequence_of_ints(tokens):
    request = Request("r", tokens, 4)
    assert list(request.prompt_token_ids) == [int(t) for t in tokens]
    assert request.tokens.dtype == np.int32


def test_a_prompt_stays_what_was_given():
    """It was an int32 array of the list, and ``+ [5]`` added 5 to every id."""
    ids = Request("r", [1, 2, 3], 4).prompt_token_ids
    ids += [5]
    assert ids == [1, 2, 3, 5]
    array = Request("r", np.arange(3), 4).prompt_token_ids
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 7


def test_a_request_does_not_change_with_the_array_it_was_made_of():
    tokens = np.arange(5, dtype=np.int32)
    request = Request("r", tokens, 4)
    tokens[:] = 9
    assert request.prompt_token_ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("field", "value"),
    {
        "request_id": "s",
        "prompt_token_ids": [],
        "tokens": np.empty(0, np.int32),
        "max_new_tokens": None,
        "eos_token_ids": 5,
        "cache_salt": "s",
        "priority": None,
        "adapter": "a",
        "extra_keys": ("k",),
    }.items(),
)
def test_a_request_never_changes(field, value):
    """One that was changed after its construction killed the engine for everybody, or ran as nonsense."""
    request = Request("r", [1, 2, 3], 2)
    before = getattr(request, field)
    with pytest.raises(AttributeError, match=field):
        setattr(request, field, value)
    with pytest.raises(AttributeError):
        delattr(request, field)
    assert np.array_equal(getattr(request, field), before)


def test_a_request_can_be_copied_and_carries_what_its_owner_adds():
    request = Request("r", [1, 2, 3], 2, eos_token_ids=[7], cache_salt="s")
    request.note = "mine"
    for twin in (copy.deepcopy(request), pickle.loads(pickle.dumps(request))):
        assert (twin.prompt_token_ids, twin.eos_token_ids, twin.cache_salt, twin.note) == ([1, 2, 3], (7,), "s", "mine")


@pytest.mark.parametrize("bad", [0, -1, 1.5, None, "4", True, [1]])
def test_max_new_tokens_must_be_a_positive_int(bad):
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        Request("r", [1], bad)


@pytest.mark.parametrize("bad", [None, "", 5, b"r", ["r"]])
def test_a_request_id_must_be_a_non_empty_string(bad):
    with pytest.raises(InvalidRequest, match="request_id"):
        Request(bad, [1], 1)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("eos_token_ids", 5),
        ("eos_token_ids", None),
        ("eos_token_ids", [-1]),
        ("eos_token_ids", ["a"]),
        ("eos_token_ids", [1.5]),
        ("eos_token_ids", (2, True)),
        ("cache_salt", 5),
        ("cache_salt", b"salt"),
        ("adapter", 5),
        ("priority", 1.5),
        ("priority", None),
        ("priority", "high"),
        ("extra_keys", 5),
        ("extra_keys", None),
        ("extra_keys", [1.5]),
        ("extra_keys", [object()]),
        ("extra_keys", {"image": "cat"}),
        ("extra_keys", {"cat", "dog"}),
        ("eos_token_ids", {5: 6}),
        *((field, np.array(5)) for field in ("eos_token_ids", "extra_keys", "boundaries")),
        ("extra_keys", nested(33)),
        ("extra_keys", nested(10_000)),
        ("extra_keys", nested(30, times=2)),
        ("extra_keys", ITSELF),
    ],
)
def test_other_fields_are_refused_by_name(make_serving, field, bad):
    """Some at construction, some when added; never later, and never by another type of error."""
    serving = make_serving(blocks=8)
    with pytest.raises(InvalidRequest, match=field):
        serving.scheduler.add(Request("r", [1], 1, **{field: bad}))
    assert not serving.scheduler.has_work()
    assert serving.serve("next", prompt(1, 5), 2).finish_reason == "length"


@pytest.mark.parametrize("new", [2**31, 2**62, sys.maxsize])
def test_a_request_may_ask_for_more_tokens_than_will_ever_fit(make_serving, new):
    """People write sys.maxsize for "until it ends": it does, with capacity."""
    serving = make_serving(blocks=4)
    try:
        serving.add("r", prompt(0, 5), new)
    except KVTierError:
        assert new >= 2**62, "a number of tokens that fits in 32 bits is no nonsense"
    else:
        assert serving.run()["r"].finish_reason == "capacity"
    assert serving.serve("next", prompt(1, 5), 2).finish_reason == "length"


@pytest.mark.parametrize("priority", [-(2**70), 2**70, np.int64(3)])
def test_priorities_may_be_any_ints(make_serving, priority):
    serving = make_serving(blocks=8)
    assert serving.serve("r", prompt(0, 5), 2, priority=priority).finish_reason == "length"


def test_extra_keys_may_be_any_ints(make_serving):
    serving, keys = make_serving(blocks=8), [0, -1, 2**64 - 1, 2**64, -(2**64), 2**128]
    roots = {inside.coordinator(serving.cache).chain.root(None, None, (key,)).tobytes() for key in keys}
    assert len(roots) == len(keys)
    assert serving.serve("r", prompt(0, 5), 2, extra_keys=keys).finish_reason == "length"


def test_what_names_content_is_kept_in_pythons_own_types(make_serving):
    """The canary could not write down others, and a list in it could be changed later."""
    serving, mine = make_serving(blocks=8), [np.int64(5), bytearray(b"b"), Text("k"), None, True]
    given = {"adapter": Text("a"), "cache_salt": Text("s"), "extra_keys": [mine, nested(31)]}
    request = Request("r", prompt(0, 5), 2, **given)
    mine.append(1)
    assert (request.adapter, request.cache_salt) == ("a", "s")
    assert request.extra_keys == ((5, b"b", "k", None, True), nested(31))
    assert {type(value) for value in (request.adapter, *request.extra_keys[0])} == {str, int, bytes, type(None), bool}
    assert serving.serve("r", prompt(0, 5), 2, **given).finish_reason == "length"


@pytest.mark.parametrize("bad", [None, "request", 5, Request])
def test_only_requests_can_be_added(make_serving, bad):
    serving = make_serving(blocks=8)
    with pytest.raises(InvalidRequest, match="Request"):
        serving.scheduler.add(bad)


@pytest.mark.parametrize("bad", ["duplicate", "too large"])
def test_a_refused_request_leaves_no_trace(make_serving, bad):
    serving = make_serving(blocks=8, host=16, hold=[])
    serving.add("A", prompt(0, 9), 6)
    serving.step()
    before = snapshot(serving.cache)
    request = {
        "duplicate": Request("A", [1], 1),
        "too large": Request("B", prompt(1, 33), 1),
    }[bad]
    with pytest.raises(KVTierError):
        serving.scheduler.add(request)
    assert_same(before, snapshot(serving.cache))
    serving.run()
    assert list(serving.finished) == ["A"]


# --- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        Elsewhere(),
        None,
        "7",
        [[7]],
        [7, 7],
        [7.0],
        [-1],
        [2**31],
        [2**70],
        [True],
        np.array([2**63], np.uint64),
    ],
    ids=str,
)
def test_sampled_ids_that_are_none_are_refused_and_the_step_can_still_be_committed(make_serving, ids):
    serving = make_serving(blocks=8)
    serving.add("r", prompt(0, 5), 1)
    step, good = serving.begin()
    with pytest.raises(StepError):
        serving.scheduler.commit(step, ids)
    assert [done.request_id for done in serving.end(step, good)] == ["r"]


@pytest.mark.parametrize(
    "form",
    [
        lambda ids: np.stack([ids, ids], axis=1)[:, 0],
        lambda ids: np.frombuffer(ids.tobytes(), np.int64),
        lambda ids: ids.astype(np.uint16),
        lambda ids: ids.astype(">i8"),
        lambda ids: np.frombuffer(b"-" + ids.tobytes(), np.uint8)[1:].view(np.int64),
        lambda ids: ids.tolist(),
    ],
    ids=["column", "read-only", "narrow", "other byte order", "unaligned", "list"],
)
def test_sampled_ids_may_come_in_any_form_and_nothing_is_compiled_for_it(make_serving, form):
    """A column of a top-k took two seconds at its first commit."""
    serving = make_serving(blocks=8)
    serving.add("r", prompt(0, 5), 2)
    loops = [loop for loop in (advance, valid_ids) if hasattr(loop, "signatures")]  # none where they are not compiled
    compiled = [len(loop.signatures) for loop in loops]
    while serving.scheduler.has_work():
        step, ids = serving.begin()
        serving.end(step, form(ids))
    assert len(serving.finished["r"].token_ids) == 2
    assert [len(loop.signatures) for loop in loops] == compiled


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([2**70], "got 1180591620717411303424"),
        ([1, 2**63, -1], "got 9223372036854775808"),
        ([1, 2.5], "got 2.5"),
        ([1, None], "got None"),
        ([[1, 2]], r"got \[1, 2\]"),
        ("12", "got <U2 of shape"),
        (np.ones((2, 2), np.int64), r"got int64 of shape \(2, 2\)"),
        (np.ma.masked_equal([1, 2, 3], 2), "is a masked array"),
    ],
    ids=lambda value: "",
)
def test_a_prompt_that_is_refused_is_told_which_token_is_wrong(ids, found):
    with pytest.raises(InvalidRequest, match=f"prompt_token_ids .*{found}"):
        Request("r", ids, 4)


# --- integers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.array([1, 2]), np.array(["off"]), ["off"], {}, Elsewhere()], ids=repr)
@pytest.mark.parametrize("name", ["store", "verify", "on_load_error", "copy_engine", "device"])
def test_a_choice_that_is_no_text_is_refused(name, bad):
    with pytest.raises(ConfigError, match=f"{name} must be"):
        KVCache(SPEC, device_bytes="1MiB", **{name: bad})


@pytest.mark.parametrize("bad", [5, None, b"5", ["5"], {}, np.int64(5), np.array(["5"])], ids=repr)
def test_what_is_no_request_id_ends_nothing(make_serving, bad):
    """They were turned into text, so that 5 ended the request "5"."""
    serving = make_serving()
    serving.add(str(bad), [1, 2, 3], 2)
    assert serving.scheduler.abort(bad) is False
    assert serving.scheduler.finish(bad) is False
    assert serving.scheduler.progress(bad) is None
    assert [done.finish_reason for done in serving.run().values()] == ["length"]


def test_nobody_can_change_the_tokens_of_a_request_or_of_its_copies():
    request = Request("r", [1, 2, 3], 2)
    for one in (request, copy.copy(request), copy.deepcopy(request), pickle.loads(pickle.dumps(request))):
        assert one.prompt_token_ids == [1, 2, 3]
        with pytest.raises(ValueError):
            one.tokens.flags.writeable = True
