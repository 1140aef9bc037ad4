"""A request whose answer is known."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class Asked(Protocol):
    """A request of a session begins after the answer to the one before it."""

    @property
    def session(self) -> Hashable:
        """Equal for requests of one session."""

    @property
    def prompt(self) -> Tokens:
        """int32 [n], made anew if it is asked for."""

    @property
    def answer(self) -> Tokens:
        """int32 [n], n at least 1; likewise."""
