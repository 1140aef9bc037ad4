"""Everything that the runner raises beyond kvtier's own errors.

KVTierError
`-- RunnerError
    |-- ModelLoadError (OSError)     a folder or hub id that is no complete, readable checkpoint
    `-- MissingPackage (ImportError) an optional package that an option needs; the message says how to install it
"""

from __future__ import annotations

from kvtier.errors import KVTierError


class RunnerError(KVTierError):
    """Base of what the reference engine raises on purpose."""


class ModelLoadError(RunnerError, OSError):
    """The checkpoint cannot be read, or is not whole. The message says which part and what to do."""


class MissingPackage(RunnerError, ImportError):
    """An optional package is not installed. The message names it and the command that installs it."""
