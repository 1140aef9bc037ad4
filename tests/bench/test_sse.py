"""Events are the same however their bytes were cut."""

from __future__ import annotations

import random

import pytest

from runner.bench import sse
from runner.bench.sse import EventReader
from runner.bench.told import Malformed

STREAM = (
    "\ufeffdata: first\n\n"
    ": a comment\r\nevent: x\r\ndata: {\"a\": 1}\r\n\r\n"
    'data:{"b": "é\u2028"}\n\n'
    "id: 7\ndata: one\ndata: two\n\n"
    "data: three\r\ndata: four\r\n\r\n"
    ": waiting\n\n"
    "data: last\r\rdata: [DONE]\n\n"
).encode()  # fmt: skip
EVENTS = [b"first", b'{"a": 1}', '{"b": "é\u2028"}'.encode(), b"one\ntwo", b"three\nfour", b"last", b"[DONE]"]


def read(pieces: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


def test_byte_by_byte_and_all_at_once() -> None:
    assert read([STREAM]) == EVENTS
    assert read([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


@pytest.mark.parametrize("seed", range(20))
def test_cut_anywhere(seed: int) -> None:
    draw = random.Random(seed)
    cuts = sorted(draw.randrange(len(STREAM)) for _ in range(draw.randrange(1, 12)))
    pieces = [STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)]
    assert read(pieces) == EVENTS


def test_an_event_that_is_not_whole_is_not_told() -> None:
    assert read([b'data: {"a"', b": 1}\n"]) == []


def test_a_line_without_end_is_kept_in_place_and_its_length_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LONGEST_EVENT", 1000)
    reader = EventReader()
    assert list(reader.feed(b"data: ")) == []
    kept = reader._rest
    for _ in range(9):
        assert list(reader.feed(b"x" * 100)) == [] and reader._rest is kept  # grows, and is not copied
    with pytest.raises(Malformed, match="longer than 1,000 bytes"):
        list(reader.feed(b"x" * 100))
    with pytest.raises(Malformed, match="longer than 1,000 bytes"):
        list(EventReader().feed(b"data: %b\n" % (b"x" * 400) * 3))  # an event of many lines
    assert read([b"data: %b\n\n" % (b"x" * 400)] * 9) == [b"x" * 400] * 9
