"""A request: the caller's wish, its current state, and its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvtier.geometry.keys import plain_extra_keys, plain_text
from kvtier.machine.errors import InvalidRequest
from kvtier.machine.integers import integer, shown

FinishReason = Literal["stop", "length", "abort", "capacity", "load_error", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
MAX_TOKEN_ID = 2**31 - 1
_BOOLS = {bool, np.bool_}
_OF_REQUEST = frozenset(
    {"request_id", "tokens", "_as_list", "max_new_tokens", "eos_token_ids"}
    | {"cache_salt", "priority", "adapter", "extra_keys", "boundaries"}
)


class Request:
    """What to generate.

    ``request_id``        a name; no other request that waits or runs has it.
    ``prompt_token_ids``  1-D, ints in [0, 2**31), at least one.
    ``max_new_tokens``    at least 1.
    ``eos_token_ids``     tokens that end the text.
    ``cache_salt``, ``adapter``, ``extra_keys``  partition the prefix cache: two requests share KV only if all three are
                          equal. Extra keys are str, bytes, int and tuples of them: 32 deep and 65,536
                          values at most.
    ``priority``          smaller is served first; equal priorities in order of arrival.
    ``boundaries``        numbers of prompt tokens after which other prompts are likely to go on otherwise: where a
                          system prompt or a document ends. A hint: it changes what is kept, and nothing else. Each
                          costs the memory of one window, as long as such places pay; the last 32 count.

    A request never changes: to assign to one of these raises ``AttributeError``. The constructor raises
    ``InvalidRequest``.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        max_new_tokens: int,
        eos_token_ids: Iterable[int] = (),
        cache_salt: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
        extra_keys: Sequence[Any] = (),
        boundaries: Sequence[int] = (),
    ) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequest(f"request_id must be a non-empty string, got {shown(request_id)}")
        where = f"request {shown(request_id)}"
        most, rank = integer(max_new_tokens), integer(priority)
        if most is None or most < 1:
            raise InvalidRequest(f"{where}: max_new_tokens must be at least 1, got {shown(max_new_tokens)}")
        if rank is None:
            raise InvalidRequest(f"{where}: priority must be an integer, got {shown(priority)}")
        self.request_id = request_id
        #: The prompt, int32 [n], read-only.
        self.tokens = _token_array(prompt_token_ids, where, "prompt_token_ids")
        self._as_list = isinstance(prompt_token_ids, list)
        if len(self.tokens) == 0:
            raise InvalidRequest(
                f"{where}: the prompt is empty; give it at least one token (BOS, if the model has one)"
            )
        self.max_new_tokens = most
        eos = _tuple(eos_token_ids, where, "eos_token_ids")
        self.eos_token_ids = tuple(int(t) for t in _token_array(eos, where, "eos_token_ids"))
        self.cache_salt = _optional_str(cache_salt, where, "cache_salt")
        self.priority = rank
        self.adapter = _optional_str(adapter, where, "adapter")
        if isinstance(extra_keys, Set):
            raise InvalidRequest(f"{where}: extra_keys must be a sequence; a set has no order")
        self.extra_keys = plain_extra_keys(_tuple(extra_keys, where, "extra_keys"))
        #: Ascending, each once.
        self.boundaries = _boundaries(boundaries, len(self.tokens), where)

    @property
    def prompt_token_ids(self) -> list[int] | npt.NDArray[np.int32]:
        """The prompt: a new list if a list was given, else ``tokens``."""
        return self.tokens.tolist() if self._as_list else self.tokens

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OF_REQUEST and name in self.__dict__:
            raise AttributeError(f"{name} of a request never changes; make another Request")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in _OF_REQUEST:
            raise AttributeError(f"{name} of a request never changes; make another Request")
        super().__delattr__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        extra = self.eos_token_ids, self.cache_salt, self.priority, self.adapter, self.extra_keys, self.boundaries
        others = {name: value for name, value in self.__dict__.items() if name not in _OF_REQUEST}
        return type(self), (self.request_id, self.prompt_token_ids, self.max_new_tokens, *extra), others

    def __repr__(self) -> str:
        most = shown(self.max_new_tokens)
        return f"Request({shown(self.request_id)}, {len(self.tokens)} tokens, max_new_tokens={most})"


@dataclass(frozen=True)
class FinishedRequest:
    """The outcome of a request. ``token_ids`` are the generated tokens, including the EOS that ended it.

    ``cached_tokens`` counts the prompt tokens that the first admission found, on the device and in the host tier. A
    token counts as host if any group had to load a block for it. With a remote tier there is a third
    entry, "remote": tokens of which any block was fetched for this request.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason
    cached_tokens: dict[str, int]
    preemptions: int
    queue_s: float | None = field(default=None, compare=False)
    """Seconds from ``add`` until it first ran, its load landed; None if it never did."""


@dataclass(frozen=True)
class Shortage:
    """The answer "not now": per group, blocks (needed, available). Expected, hence a value and not an exception."""

    groups: Mapping[str, tuple[int, int]]

    def __str__(self) -> str:
        return ", ".join(f"{name}: needs {need}, has {have}" for name, (need, have) in self.groups.items())


def _token_array(ids: Any, where: str, what: str) -> npt.NDArray[np.int32]:
    if isinstance(ids, np.ma.MaskedArray):
        raise InvalidRequest(f"{where}: {what} is a masked array; give the ids that count, as compressed() does")
    try:
        array = np.asarray(ids)
    except Exception as problem:  # whatever an object's __array__ raises; torch refuses tensors of other devices
        raise InvalidRequest(f"{where}: {what} is not a list of token ids: {problem}") from None
    if array.size == 0:
        return np.empty(0, np.int32)
    is_list = isinstance(ids, Sequence) and not isinstance(ids, (str, bytes))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        wrong = (shown(x) for x in ids if not _is_token_id(x)) if is_list else iter(())
        found = next(wrong, f"{array.dtype} of shape {array.shape}")
        raise InvalidRequest(f"{where}: {what} must be a 1-D list of ints in 0..{MAX_TOKEN_ID}, got {found}")
    if is_list and not _BOOLS.isdisjoint(map(type, ids)):  # among ints NumPy takes them for ints
        raise InvalidRequest(f"{where}: {what} must be ints, and holds bools")
    if int(array.min()) < 0 or int(array.max()) > MAX_TOKEN_ID:
        raise InvalidRequest(f"{where}: {what} holds {int(array.min())}..{int(array.max())}; ids are 0..{MAX_TOKEN_ID}")
    return np.frombuffer(array.astype(np.int32).tobytes(), np.int32)  # no caller can make it writable


def _is_token_id(value: object) -> bool:
    whole = integer(value)
    return whole is not None and 0 <= whole <= MAX_TOKEN_ID


def _tuple(values: Any, where: str, what: str) -> tuple[Any, ...]:
    """A tuple of the values; a mapping is refused, since its values would be lost."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{where}: {what} must be a sequence, got {shown(values)}")
    try:
        return tuple(values)
    except TypeError as problem:  # an array of no dimension
        raise InvalidRequest(f"{where}: {what} must be a sequence: {problem}") from None


def _boundaries(values: Any, most: int, where: str) -> tuple[int, ...]:
    if isinstance(values, tuple) and not values:
        return ()
    given = _tuple(values, where, "boundaries")
    found = [n for n in map(integer, given) if n is not None and 0 < n <= most]
    if len(found) < len(given) or not _BOOLS.isdisjoint(map(type, given)):
        raise InvalidRequest(f"{where}: boundaries must be ints in 1..{most}, the prompt's length, got {shown(values)}")
    return tuple(sorted({*found}))


def _optional_str(value: Any, where: str, what: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{where}: {what} must be a string or None, got {shown(value)}")
    return None if value is None else plain_text(value)
