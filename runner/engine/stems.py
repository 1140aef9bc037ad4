"""Stems: what conversations with one system prompt and the same tools have in common, in tokens.

Owns       the stems of late, in 4 MB.
Promises   up to its stem's end a prompt has the tokens that other users' prompts have. Where a template does not let us
           know, nothing is told: no chat fails for it.
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
"""Tokens of a stem that is told: fewer are not worth a window's memory."""
MOST = 2**20
"""Tokens that are kept."""
USERS = "0", "1"
"""What two users say: words of any vocabulary, with no letter in common."""
ROLES = "system", "developer"


class Stems:
    """Finds where chats of one template begin alike. From any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, npt.NDArray[np.int32]] = OrderedDict()
        self._tokens = 0

    def ends(self, ids: Sequence[int], messages: Sequence[Any], options: Mapping[str, Any]) -> tuple[int, ...]:
        """Where the stem of ``ids`` ends. The template has made them of ``messages`` with ``options``. () if the stem
        is short, or there is neither a system prompt nor a tool."""
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
        today = date.today()  # templates write it
        asked = repr((today, self._tokenizer.chat_template, system, sorted(options.items())))
        key = blake2b(asked.encode(), digest_size=16).digest()
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
