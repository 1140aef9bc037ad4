"""Roles: for what a model's layer uses its places in the groups.

Owns       the names of roles, and the reading of ``CacheSpec(layers=...)``.
Promises   a layer has at most one place for each role, no place has two roles in one layer, and every place exists.
           Bad input is a ``ConfigError`` that names the model layer.
Does not   know what groups hold: it is told their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import integer, shown

Place = tuple[str, int]
"""A group's name, and the index of a layer in it."""
ROLES = ("kv", "entries", "state", "index", "rows")
"""Keys and values of each token; those that several tokens share; a recurrent state; what an indexer looks through;
rows of tokens that later entries are made of."""


class Places(Mapping[str, Place]):
    """The places of one model layer by role, in the order of ``ROLES``; none for a layer without a cache.

    It equals a dict of the same content, and can be hashed.
    """

    __slots__ = ("_pairs",)

    def __init__(self, pairs: Mapping[str, Place]) -> None:
        self._pairs = tuple((role, pairs[role]) for role in ROLES if role in pairs)

    def __getitem__(self, role: str) -> Place:
        for name, place in self._pairs:
            if name == role:
                return place
        raise KeyError(role)

    def __iter__(self) -> Iterator[str]:
        return (role for role, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return repr(dict(self._pairs))


def read_layers(layers: object, sizes: Mapping[str, int], roles: Mapping[str, str]) -> tuple[Places, ...]:
    """The places of each model layer. ``sizes``: layers of each group; ``roles``: the role of a group's own.

    Each layer is {role: (group name, index in it)}, or (group name, index in it) alone, which has the group's role.
    """
    if not isinstance(layers, Sequence) or isinstance(layers, (str, bytes)):
        raise ConfigError(
            f"layers must be a list of (group name, index in it), got {shown(layers)}; a layer of several places is a "
            "dict of them by role"
        )
    return tuple(Places(dict(_read(i, layer, sizes, roles))) for i, layer in enumerate(layers))


def _read(i: int, layer: object, sizes: Mapping[str, int], roles: Mapping[str, str]) -> Iterable[tuple[str, Place]]:
    if not isinstance(layer, Mapping):
        place = _place(i, layer, sizes)
        return [(roles[place[0]], place)]
    found: dict[str, Place] = {}
    for role, given in layer.items():
        if not isinstance(role, str) or role not in ROLES:
            raise ConfigError(f"model layer {i}: no role {shown(role)}; there are {', '.join(ROLES)}")
        place = _place(i, given, sizes)
        if place in found.values():
            raise ConfigError(f"model layer {i}: {shown(place)} cannot have two roles in one layer")
        found[role] = place
    return found.items()


def _place(i: int, place: object, sizes: Mapping[str, int]) -> Place:
    if not isinstance(place, (tuple, list)) or len(place) != 2:
        raise ConfigError(f"model layer {i} must be (group name, index in it), got {shown(place)}")
    name, index = place[0], integer(place[1])
    if not isinstance(name, str) or name not in sizes or index is None or not 0 <= index < sizes[name]:
        raise ConfigError(f"model layer {i} maps to layer {shown(place[1])} of group {shown(name)}, which is not there")
    return str(name), index
