"""Values that others have written, servers in their answers and files of traces, and how they are written again.

Promises   what is not of the expected form raises ``ValueError``, whatever it is. Numbers have bounds, so that sums,
           arrays and JSON can hold them.
"""

from __future__ import annotations

import json
import math
from typing import Any

MOST_TOKENS = 2**53
"""Largest count that is believed. Floats hold each whole number up to it."""
LONGEST_PROMPT = 2**24
"""Tokens of a prompt that can still be made in memory."""
_LEAST_ID, _MOST_ID = -(2**63), 2**64 - 1


class Malformed(ValueError):
    """An answer that is not of OpenAI's form."""


def parsed(raw: bytes | str) -> Any:
    """The JSON of ``raw``; raises ``ValueError`` if it is none, or is nested too deeply to be read."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def count(value: Any) -> int | None:
    """A number of tokens; None if ``value`` is something else."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def ids(value: Any) -> list[int] | None:
    """Token ids; None if ``value`` is something else."""
    return value if isinstance(value, list) and all(count(one) is not None for one in value) else None


def text(value: Any) -> str | None:
    """Text that is not empty; None if ``value`` is something else."""
    return value if isinstance(value, str) and value else None


def whole(name: str, value: Any, least: int, most: int) -> int:
    """A whole number within these bounds; raises ``ValueError`` for another."""
    try:
        found = int(value)
        if isinstance(value, float) and value != found:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} {_short(value)} is no whole number") from None
    if not least <= found <= most:
        raise ValueError(f"{name} {_short(value)} is not within {least} and {most}")
    return found


def seconds(name: str, value: Any) -> float:
    """A finite number from 0 up; raises ``ValueError`` for another."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError) as problem:
        raise ValueError(f"{name} {_short(value)} is no number that a clock has: {problem}") from None
    if not (found >= 0 and math.isfinite(found)):
        raise ValueError(f"{name} {_short(value)} is not a finite number from 0 up")
    return found


def blocks(value: Any) -> list[int]:
    """Ids of a prompt's blocks, of up to 64 bits, with a sign or without; raises ``ValueError`` for others."""
    if not isinstance(value, list) or len(value) > LONGEST_PROMPT:
        raise ValueError(f"hash_ids {_short(value)} is no list of a prompt's blocks")
    if not value or ({*map(type, value)} == {int} and min(value) >= _LEAST_ID and max(value) <= _MOST_ID):
        return value
    return [whole("an id of hash_ids,", one, _LEAST_ID, _MOST_ID) for one in value]


def who(value: Any) -> str | int | None:
    """Who asks; raises ``ValueError`` for what is no name."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int))):
        raise ValueError(f"session {_short(value)} is neither text nor a whole number")
    return value


def finite_or_inf(value: float) -> float | str:
    """The number; infinity, which JSON lacks, as "inf"."""
    return "inf" if math.isinf(value) else value


def printable(line: str, encoding: str) -> str:
    """``line`` with a ? for each character that a terminal with this encoding cannot show, or would obey."""
    kept = "".join(one if one.isprintable() else "?" for one in line)
    return kept.encode(encoding, errors="replace").decode(encoding)


def _short(value: Any) -> str:
    """The beginning of a value as Python writes it."""
    try:
        found = repr(value)
    except (ValueError, RecursionError):  # a number of more digits than Python writes, or deep lists
        return f"of type {type(value).__name__}"
    return found if len(found) <= 40 else f"{found[:40]}..."
