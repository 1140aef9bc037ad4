"""Everything that the runner raises beyond kvtier's own errors.

KVTierError
`-- RunnerError
    |-- ModelLoadError (OSError)     a folder or hub id that is no complete, readable checkpoint
    |-- NonFiniteLogits              a request's logits are NaN or infinite; it alone has ended
    |-- NonFiniteState               a request's recurrent state is NaN or infinite; it alone has ended
    |-- NoTokenAllowed               a request's own options leave no token to choose; it alone has ended
    |-- GrammarFailed                a request's grammar cannot go on, or takes too long; it alone has ended
    |-- ForwardFailed                a forward raised; the requests of its step have ended
    |-- UnknownRequest (KeyError)    no such request is known, or it is forgotten
    |-- Overloaded                   too much is queued already; come back later
    |-- EngineDead                   the engine's thread has ended and serves nothing any more
    `-- MissingPackage (ImportError) an optional package that an option needs; the message says how to install it
"""

from __future__ import annotations

from kvtier.machine.errors import KVTierError

OF_ENGINE = ("transformers", "safetensors", "tokenizers", "jinja2", "rich", "tqdm")
"""Packages of the extra "engine". The library does without them."""


class RunnerError(KVTierError):
    """Base of the errors that the reference engine raises on purpose."""


class ModelLoadError(RunnerError, OSError):
    """The checkpoint cannot be read, or is not whole. The message says which part and what to do."""


class NonFiniteLogits(RunnerError):
    """No token can be chosen: a request's logits are NaN or infinite. Its K and V are not found again.

    Models trained in bfloat16 overflow in float16; a GPU that computes nonsense looks the same.
    """

    def __init__(self, dtype: object) -> None:
        name = str(dtype).removeprefix("torch.")
        fix = "; load the model in bfloat16 or float32" if name == "float16" else ""
        super().__init__(f"the model's logits are not finite in {name}{fix}")


class NonFiniteState(RunnerError):
    """What a recurrent layer keeps of a request is NaN or infinite. It is not sealed, so nobody finds it."""

    def __init__(self, dtype: object) -> None:
        name = str(dtype).removeprefix("torch.")
        super().__init__(f"the model's recurrent states are not finite in {name}")


class NoTokenAllowed(RunnerError):
    """Masks, biases and penalties of a request leave no token that could come next, though its logits are finite."""


class GrammarFailed(RunnerError):
    """A request's text cannot be kept to its grammar any further. The message says why."""


class ForwardFailed(RunnerError):
    """A forward raised, and the request at fault is unknown: all requests of its step end. The cause says why."""


class UnknownRequest(RunnerError, KeyError):
    """There is nothing to say of a request: it was never queued, or is forgotten."""

    __str__ = Exception.__str__  # a KeyError would quote its message


class Overloaded(RunnerError):
    """More is queued than allowed. Nothing changed; try again after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(RunnerError):
    """The engine's thread has ended on an error and serves nothing any more. The cause says why; make a new one."""


class MissingPackage(RunnerError, ImportError):
    """An optional package is not installed. The message names it and the command that installs it."""


def of_missing(problem: Exception, what: str) -> MissingPackage | None:
    """What to say if ``what`` failed because a package of the extra "engine" is not installed; else None."""
    package = (problem.name or "").partition(".")[0] if isinstance(problem, ModuleNotFoundError) else ""
    package = "transformers" if package == "huggingface_hub" else package  # which comes with it
    if package not in OF_ENGINE:
        return None
    return MissingPackage(f"{what} needs {package}; pip install 'kvtier[engine]'", name=package)
