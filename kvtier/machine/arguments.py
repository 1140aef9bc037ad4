"""Arguments of calls: numbers of tokens, flags, block ids and keys.

Promises   what is wrong raises ``InvalidRequest``; what comes back is plain, and nobody else's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.machine.errors import InvalidRequest
from kvtier.machine.integers import integer, shown

KeyArray = npt.NDArray[np.uint64]

NO_KEYS: KeyArray = np.empty((0, 2), np.uint64)


def check_type(value: object, kind: type, name: str) -> None:
    """``value`` must be a ``kind``."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} must be {kind.__name__}, got {shown(value)}")


def check_function(value: object, name: str) -> None:
    """``value`` must be callable."""
    if not callable(value):
        raise InvalidRequest(f"{name} must be a function, got {shown(value)}")


def whole(value: object, name: str) -> int:
    """A whole number, not negative."""
    number = integer(value)
    if number is None or number < 0:
        raise InvalidRequest(f"{name} must be an integer, not negative, got {shown(value)}")
    return number


def flag(value: object, name: str) -> bool:
    """True or False: text such as "no" would count as True."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidRequest(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def block_ids(values: object) -> npt.NDArray[np.int32]:
    """int32 [n]."""
    try:
        array = np.asarray(values)
    except Exception as problem:  # torch refuses tensors of other devices
        raise InvalidRequest(f"block ids must be integers: {problem}") from None
    is_flat = array.ndim == 1 and (not array.size or array.dtype.kind in "iu")
    if not is_flat or (array.size and not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31):
        raise InvalidRequest("block ids must be a flat list of integers below 2**31")
    return np.ascontiguousarray(array, np.int32)


def key_array(value: Any, name: str, count: int | None = None) -> KeyArray:
    """uint64 [n, 2], of ``count`` keys if that is given: nothing is cast, and nothing repeated."""
    is_array = isinstance(value, np.ndarray)
    if is_array and value.dtype == np.uint64 and value.shape[1:] == (2,) and count in (None, len(value)):
        return np.asarray(value)
    found = f"{value.dtype} {list(value.shape)}" if is_array else shown(value)
    raise InvalidRequest(f"{name} must be uint64 [{'n' if count is None else count}, 2], got {found}")


def joined_keys(known: KeyArray, more: object, are_distinct: bool = False) -> KeyArray:
    """The ``known`` keys of a text and those that follow them, uint64 [n, 2]. No two may be equal, which is looked at
    unless ``are_distinct``."""
    keys = np.concatenate([known, key_array(more, "keys")])
    if are_distinct:
        return keys
    first, n = keys[:, 0], len(known)
    ordered = np.sort(first[n:])  # np.unique takes four times as long
    alike = (ordered[1:] == ordered[:-1]).any() or (n and np.isin(first[:n], first[n:]).any())
    if alike and len(np.unique(keys, axis=0)) < len(keys):
        raise InvalidRequest("two keys of one text are equal; each names all tokens up to its end, so no two are")
    return keys
