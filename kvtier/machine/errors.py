"""Everything kvtier raises.

    KVTierError
    |-- ConfigError (ValueError)          a spec, pool size or option that cannot work; raised at construction
    |   |-- UnsupportedModel              a transformers config whose layers or positions kvtier cannot cache
    |   |-- DeviceUnavailable             no such device, no driver for it, or no software that fits the driver
    |   |-- AttentionUnavailable          the requested attention backend cannot run this model here
    |   `-- NotExact                      exact=True cannot be kept for this model, dtype or device
    |-- MemoryUnavailable (MemoryError)   a tier asks for more memory than there is, or for less than one block
    |-- InvalidRequest (ValueError)       a request that no engine could run: empty prompt, bad ids, bad lengths
    |   `-- DuplicateRequest              its id is already waiting or running
    |-- RequestTooLarge                   well formed, but its prompt can never fit these pools
    |-- StepError (RuntimeError)          schedule, commit and cancel called out of order
    |-- CacheClosed (RuntimeError)        used after close(), or in a forked child of the process that made it
    |-- TransferError (RuntimeError)      a copy engine broke its protocol
    `-- InvariantBroken (RuntimeError)    an audit found damage (only with KVTIER_AUDIT=1 or 2)

Shortage ("not now") is a value, ``kvtier.Shortage``, never an exception.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any


class KVTierError(Exception):
    """Base of every error that kvtier raises on purpose."""


class ConfigError(KVTierError, ValueError):
    """A spec, pool size or option that cannot work. The message names the group or option and the fix."""


class UnsupportedModel(ConfigError):
    """The model has layers or positions that a KV cache by attention kind cannot serve."""


class DeviceUnavailable(ConfigError):
    """The device is not there, or its driver or a package that it needs is missing, too old, or of another CUDA."""


class AttentionUnavailable(ConfigError):
    """The requested attention backend cannot run here, or not this model. The message names the fix."""


class NotExact(ConfigError):
    """``exact=True`` cannot be kept: answers would depend on hits, chunks or neighbours. The message says why."""


class MemoryUnavailable(KVTierError, MemoryError):
    """A tier wants more memory than the machine has, or was given too little for one block of a group."""


class InvalidRequest(KVTierError, ValueError):
    """The request is malformed. Nothing changed; correct it and add it again."""


class DuplicateRequest(InvalidRequest):
    """A request of this id is waiting or running."""


class RequestTooLarge(KVTierError):
    """The prompt can never run in these pools, not even alone and one token a step.

    It is counted as if every group needed its maximum at the same moment. ``needs`` and ``have`` give blocks per group,
    for every group that is too small. In an arena that groups share, each group has the blocks that the needs of the
    others leave. ``longest``: tokens of the longest prompt that fits; None if not known.
    """

    def __init__(
        self, needs: Mapping[str, int], have: Mapping[str, int], *, what: str = "the prompt", longest: int | None = None
    ) -> None:
        self.what = what
        self.needs = dict(needs)
        self.have = dict(have)
        self.longest = longest
        rows = ", ".join(f"{name}: needs {n} blocks, have {self.have[name]}" for name, n in self.needs.items())
        known = "" if longest is None else f"; the longest prompt that fits has {longest:,} tokens"
        super().__init__(
            f"{what} can never fit ({rows}{known}); give the cache more device memory or shorten the prompt"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), what=self.what, longest=self.longest), (self.needs, self.have)


class StepError(KVTierError, RuntimeError):
    """schedule, commit or cancel was called out of order, or with arrays of the wrong shape."""


class CacheClosed(KVTierError, RuntimeError):
    """The cache was closed, or this is a forked child of the process that made it: copies need that one's threads."""


class TransferError(KVTierError, RuntimeError):
    """A copy engine made a report that its protocol forbids (an unknown ticket, an end twice)."""


class InvariantBroken(KVTierError, RuntimeError):
    """An audit between two calls found damage: ``violations`` has all of it, ``moment`` names the call before.

    Raised only if ``KVTIER_AUDIT`` asks for audits. It is a bug of kvtier, of the copy engine, or of an engine that
    wrote outside its blocks. Close the cache.
    """

    def __init__(self, moment: str, violations: Sequence[object]) -> None:
        self.moment = moment
        self.violations = tuple(violations)
        lines = [f"{len(self.violations)} invariants are broken after {moment}:", *map(str, self.violations[:20])]
        more = len(self.violations) - 20
        super().__init__("\n  ".join([*lines, f"... and {more} more"] if more > 0 else lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.moment, self.violations)
