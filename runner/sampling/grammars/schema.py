"""The parts of a JSON schema that its grammar would not keep to.

xgrammar leaves out parts that a grammar cannot express, without notice. A schema that it would loosen is refused
instead, with the place. Two forms are taken as they are: ``oneOf`` as ``anyOf``, and ``enum`` or ``const`` alone beside
``type``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

UNKNOWN = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("contains", "minContains", "maxContains", "uniqueItems", "$dynamicRef", "$recursiveRef"),
)
COMBINING = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
"""Beside one of these nothing else is looked at."""

BY_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}
"""Limits of values of a type; they count only if ``type`` is given."""

LIMITS = tuple(name for names in BY_TYPE.values() for name in names)


def not_enforced(schema: Any, at: str = "#") -> list[str]:
    """The parts that would be left out, each as "keyword at place"; empty if the grammar keeps to all of it.

    Raises ``RecursionError`` for a schema that is nested too deeply.
    """
    if not isinstance(schema, Mapping):
        return []
    found = [f"{name} at {at}" for name in UNKNOWN if schema.get(name) not in (None, False)]
    found += [f"{what} at {at}" for what in _loosened(schema)]
    for place, inner in _inner(schema):
        found += not_enforced(inner, f"{at}/{place}")
    return found


def _unescaped(pattern: object) -> bool:
    """Whether a pattern may write characters that JSON must escape: quotes, backslashes and control characters."""
    if not isinstance(pattern, str):
        return False
    written = re.sub(r"\[\^(\\.|[^\]\\])*\]", "", pattern)  # classes that leave characters out write none of them
    return re.search(r'["\x00-\x1f]|\\[\\0cfnrtuvx]', written) is not None


def _loosened(schema: Mapping[str, Any]) -> Iterator[str]:
    combining = [name for name in COMBINING if name in schema]
    limits = [name for name in LIMITS if name in schema]
    if combining:
        values = combining[0] in ("const", "enum")  # they say all that there is to say
        beside = [*combining[1:], *([] if values else [*limits, *(["type"] if "type" in schema else [])])]
        if beside:
            yield f"{beside[0]} beside {combining[0]}"
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
            yield "allOf of several schemas"
        return
    if "type" not in schema:
        yield from (f"{name} without type" for name in limits if name not in ("properties", "items", "prefixItems"))
    kinds = schema.get("type")
    if schema.get("multipleOf") is not None and kinds != "integer":
        yield "multipleOf for other than integers"
    patterns = [schema.get("pattern"), *(schema.get("patternProperties") or ())]
    if any(_unescaped(pattern) for pattern in patterns):
        yield "pattern with quotes, backslashes or control characters"
    if "propertyNames" in schema and schema.get("properties"):
        yield "propertyNames beside properties"
    if len([name for name in ("pattern", "format") if name in schema]) == 2:
        yield "format beside pattern"
    if ("pattern" in schema or "format" in schema) and ("minLength" in schema or "maxLength" in schema):
        yield "minLength or maxLength beside pattern or format"
    required, known = schema.get("required"), schema.get("properties")
    if isinstance(required, list):
        known = known if isinstance(known, Mapping) else {}
        missing = [name for name in required if name not in known]
        if missing:
            yield f"required {missing[0]!r}, which properties does not have,"


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema, with their places."""
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(name), Mapping):
            yield from ((f"{name}/{key}", inner) for key, inner in schema[name].items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(name), list):
            yield from ((f"{name}/{i}", inner) for i, inner in enumerate(schema[name]))
    for name in ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"):
        yield name, schema.get(name)
    if isinstance(names := schema.get("propertyNames"), Mapping):
        yield "propertyNames", {"type": "string", **names}
