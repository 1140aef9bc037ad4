"""The kinds of damage that objects in a remote have, by the words in which it is told (docs/REMOTE.md)."""

from __future__ import annotations

from kvtier.remote.backends.contract import DAMAGED

_KINDS = (
    ("torn", "torn"),
    ("its payload", "checksum"),
    ("its bytes", "checksum"),
    ("its trailer", "trailer"),
    ("under a wrong name", "name"),
    ("of another namespace", "namespace"),
    ("of an older format", "format"),
    ("of a newer format", "format"),
    ("without a digest", "digest"),
    ("not from a holder", "digest"),
)
OTHER = "other"
KINDS = (*dict.fromkeys(kind for _, kind in _KINDS), OTHER)


def kind_of(reason: str) -> str:
    """The kind of damage in a reason that begins with ``DAMAGED``."""
    told = reason.removeprefix(DAMAGED).lstrip(": ")
    return next((kind for words, kind in _KINDS if told.startswith(words)), OTHER)
