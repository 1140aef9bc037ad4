"""Everything that the runner raises beyond kvtier's own errors.

KVTierError
`-- RunnerError
    `-- ModelLoadError (OSError)     a folder or hub id that is no complete, readable checkpoint
"""

from __future__ import annotations

from kvtier.errors import KVTierError


class RunnerError(KVTierError):
    """Base of what the reference engine raises on purpose."""


class ModelLoadError(RunnerError, OSError):
    """The checkpoint cannot be read, or is not whole. The message says which part and what to do."""
