"""The required form of a text: a value that is checked as far as possible without a tokenizer.

Promises   hashable and small; equal values mean the same texts.
Does not   compile anything (``structured.py``).
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvtier.machine.errors import InvalidRequest
from kvtier.machine.integers import shown
from runner.sampling.grammars.schema import not_enforced

MAX_CHARACTERS = 2**17
"""Most letters of a schema, regular expression or grammar, or of all choices together."""


@dataclass(frozen=True)
class StructuredOutputs:
    """The required form of a text; exactly one of these.

    ``json``         a JSON schema, as a dict or as text. The field keeps it as text.
    ``regex``        the whole text matches it. No look-around, no back-references.
    ``choice``       the text is one of these strings.
    ``grammar``      EBNF as llama.cpp writes it (GBNF); its first rule is ``root``.
    ``json_object``  True: any JSON object.

    Raises ``InvalidRequest`` for none or several of them, for text that is no JSON, and for keywords of JSON Schema
    that cannot be enforced.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            has = " and ".join(given) if given else "none"
            raise InvalidRequest(f"structured_outputs takes exactly one of {', '.join(names)}, got {has}")
        (kind,) = given
        value = getattr(self, kind)
        if kind == "json":
            value = _schema(value)
            object.__setattr__(self, "json", value)
        elif kind == "choice":
            value = _choices(value)
            object.__setattr__(self, "choice", value)
        elif kind == "json_object":
            if value is not True:
                raise InvalidRequest(f"structured_outputs.json_object must be True, got {shown(value)}")
            value = ""
        elif not isinstance(value, str) or not value:
            raise InvalidRequest(f"structured_outputs.{kind} must be text, got {shown(value)}")
        text = "".join(value)
        if len(text) > MAX_CHARACTERS:
            raise InvalidRequest(
                f"structured_outputs.{kind} has {len(text):,} characters; at most {MAX_CHARACTERS:,} are taken"
            )
        if any("\ud800" <= letter <= "\udfff" or letter == "\0" for letter in text):
            raise InvalidRequest(f"structured_outputs.{kind} is no Unicode text, or has a null character")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(f.name for f in fields(self) if getattr(self, f.name) not in (None, False))


def _schema(value: Any) -> str:
    """A JSON schema as text."""
    try:
        if isinstance(value, Mapping):
            text = json_text.dumps(dict(value), ensure_ascii=False)
        elif isinstance(value, str):
            text = value
        else:
            raise InvalidRequest(f"structured_outputs.json must be a JSON schema, got {shown(value)}")
        schema = json_text.loads(text)
        problems = not_enforced(schema)
    except (TypeError, ValueError) as problem:
        raise InvalidRequest(f"structured_outputs.json is no JSON: {shown(str(problem))}") from None
    except RecursionError:
        raise InvalidRequest("structured_outputs.json is nested too deeply") from None
    if problems:
        raise InvalidRequest(f"a text cannot be held to this JSON schema: {'; '.join(problems[:5])}")
    return text


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidRequest(f"structured_outputs.choice must be a list of strings, got {shown(value)}")
    if not all(isinstance(one, str) and one for one in value):
        raise InvalidRequest(f"structured_outputs.choice must be non-empty strings, got {shown(value)}")
    return tuple(dict.fromkeys(value))
