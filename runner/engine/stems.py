"""Stems: what conversations with one system prompt and the same tools have in common, in tokens.

Owns       the stems of late, in 4 MB.
Promises   a stem's end is a place in the prompt up to which other users' conversations have the same tokens. Where there
           is no such place nothing is told: no chat fails since a template refuses what is asked here.
Does not   know templates: it renders two conversations that differ in the user's words alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import date
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST = 64
"""Tokens of a stem that is told: to compute fewer costs less than a window's memory."""
MOST = 2**20
"""Tokens that are kept."""
USERS = "0", "1"
"""What two users say: words of any vocabulary, with no letter in common."""
ROLES = "system", "developer"


class Stems:
    """Of one tokenizer's chat template. From any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, npt.NDArray[np.int32]] = OrderedDict()
        self._tokens = 0

    def ends(self, ids: Sequence[int], messages: Sequence[Any], options: Mapping[str, Any]) -> tuple[int, ...]:
        """The end of the stem of ``ids``, which the template has made of ``messages`` with ``options``; () if it has
        neither system prompt nor tools, or is short."""
        system = [*takewhile(_is_system, messages)]
        if len(ids) < LEAST or not (system or options.get("tools")):
            return ()
        try:
            stem = self._stem(system, options)
            end = _shared(stem, ids)
        except Exception:  # a checkpoint's template raises what it likes
            return ()
        return (end,) if end >= LEAST else ()

    def _stem(self, system: list[Any], options: Mapping[str, Any]) -> npt.NDArray[np.int32]:
        options = {**options, "add_generation_prompt": True, "continue_final_message": False}
        all_of_it = date.today(), self._tokenizer.chat_template, system, sorted(options.items())  # templates write dates
        key = blake2b(repr(all_of_it).encode(), digest_size=16).digest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        one, other = (
            self._tokenizer.apply_chat_template([*system, {"role": "user", "content": said}], **options)
            for said in USERS
        )
        stem = np.array(one[: _shared(one, other)], np.int32)
        with self._lock:
            if key not in self._kept:  # another thread may have been here
                self._kept[key] = stem
                self._tokens += len(stem) + LEAST
            while self._tokens > MOST:
                _, oldest = self._kept.popitem(last=False)
                self._tokens -= len(oldest) + LEAST
        return stem


def _is_system(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") in ROLES


def _shared(one: Sequence[int] | npt.NDArray[np.int32], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    most = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:most]) != np.asarray(other[:most]))
    return int(differ[0]) if len(differ) else most
