"""Who reads the tokens of each row: what a step has for them goes out as a letter for each post.

Owns       the stream of each row's request, and the number of its post.
Promises   a row's reader is looked up when its request gets the row, and a batch's readers when the batch changes.
           Other steps cost a few calls for each post.
Does not   keep streams alive, or open letters.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runner.engine.streams import Letter, Post, TokenStream
from runner.sampling.logprobs import Logprobs


class _Nobody(Post):
    """The post of rows that nobody reads."""

    def send(self, letter: Letter) -> None:
        """Throws it away."""


class _Part(NamedTuple):
    """The sampled rows whose readers have one post."""

    post: Post
    places: npt.NDArray[np.int64]
    """Theirs among all sampled rows, int64 [m]."""
    streams: npt.NDArray[np.object_]
    """Weak references [m]."""


class Letters:
    """The letters of one step."""

    def __init__(self) -> None:
        self._now_s = time.perf_counter()
        self._of: dict[Post, Letter] = {}

    def to(self, post: Post) -> Letter:
        """The letter for ``post``."""
        letter = self._of.get(post)
        if letter is None:
            letter = self._of[post] = Letter(self._now_s)
        return letter

    def send(self) -> None:
        """Sends all of them."""
        for post, letter in self._of.items():
            post.send(letter)


class Readers:
    """Who reads each of the ``num_rows`` rows of an engine."""

    def __init__(self, num_rows: int) -> None:
        self._nobody = _Nobody()
        self._streams = np.full(num_rows, None, object)
        """[num_rows], weak references."""
        self._posts: list[Post] = [self._nobody] * num_rows
        self._numbers = np.full(num_rows, self._nobody.number, np.int64)
        """[num_rows], of the posts."""
        self._forget()

    def enter(self, row: int, stream: TokenStream | None) -> None:
        """A request has this row from now on, and ``stream`` gets its tokens."""
        post = self._nobody if stream is None else stream.mail.post
        self._streams[row] = None if stream is None else weakref.ref(stream)
        self._posts[row], self._numbers[row] = post, post.number
        self._forget()

    def _forget(self) -> None:
        """The rows that the last step has sampled, and their readers."""
        self._rows = np.empty(0, np.int32)
        self._batch: list[_Part] = []

    def letters(
        self, rows: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int64], logprobs: Logprobs | None
    ) -> Letters:
        """Letters with the next tokens of ``rows``, both [n], and the logprobs of those that asked for them."""
        if not np.array_equal(rows, self._rows):
            self._rows, self._batch = rows, list(self._parts(rows))
        letters = Letters()
        for part in self._batch:
            letter = letters.to(part.post)
            letter.streams, letter.token_ids = part.streams, token_ids[part.places]
            letter.logprobs = None if logprobs is None else logprobs.among(part.places)
        return letters

    def _parts(self, rows: npt.NDArray[np.int32]) -> Iterator[_Part]:
        """The rows of one post after another."""
        left, numbers = np.arange(len(rows)), self._numbers[rows]
        while len(left):
            are_its = numbers[left] == numbers[left[0]]
            places, left = left[are_its], left[~are_its]
            yield _Part(self._posts[rows[places[0]]], places, self._streams[rows[places]])
