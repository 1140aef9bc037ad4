"""Names of objects: ``kvt1/<namespace>/<kind>/<2 digits>/<key>``, and what a namespace stands for.

Promises   two caches share a namespace only if a block of one means the same in the other, byte by byte. They have the
           same model id, geometry with its dtypes, scales and block sizes, layers, layout of bytes, byte order and
           secret. The key's first two digits are a folder: 100,000 files in one are listed, asked for and deleted
           several times more slowly than in 256.
Does not   see more of the weights than ``model_id`` says. ``runner.model.identity`` makes one of a checkpoint.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.geometry.keys import KeyChain, encoded_fields
from kvtier.geometry.kinds import Attention, RecurrentState
from kvtier.geometry.outside import OutsideSpec
from kvtier.geometry.roles import Places
from kvtier.geometry.spec import CacheSpec
from kvtier.machine.errors import ConfigError
from kvtier.remote.envelope import FORMAT, MOST_KIND

ROOT = "kvt1"
"""The first part of every name. Whatever else lies in a bucket or directory is left alone."""
BYTE_LAYOUT = 1
"""Version of the layout of K and V in a block (``kvtier.pools.arena``). Another number, if that changes."""

_NAME = re.compile(rf"{ROOT}/([0-9a-f]{{32}})/([a-z0-9_.-]{{1,{MOST_KIND}}})/([0-9a-f]{{2}})/(\3[0-9a-f]{{30}})")


@dataclass(frozen=True)
class Name:
    """The parts of an object's name."""

    namespace: bytes
    kind: str
    key: bytes


def namespace(chain: KeyChain, spec: CacheSpec, secret: bytes, plan: Sequence[str | int] = ()) -> bytes:
    """16 bytes. ``plan``: what else shapes an object, such as which blocks it holds.

    Raises ``ConfigError`` without a model id or a secret: with random ones nobody would ever find an object again.
    """
    _check(chain.model_id, secret)
    return _digest(
        secret,
        ("format", FORMAT),
        ("chain", chain.fixed),
        ("layout", BYTE_LAYOUT),
        ("block_bytes", [group.block_bytes for group in spec.groups]),
        ("layers", [_named(places) for places in spec.layers]),
        ("order", sys.byteorder),
        ("plan", list(plan)),
    )


def _named(places: Places) -> list[object]:
    """A layer's places. One for K and V alone is named without its role, as before there were roles."""
    if places.keys() == {"kv"}:
        return [*places["kv"]]
    return [[role, *place] for role, place in places.items()]


def outside_namespace(model_id: str, spec: OutsideSpec, secret: bytes, plan: Sequence[str | int] = ()) -> bytes:
    """The namespace of an engine with memory and keys of its own: ``model_id`` names its weights, kernels and keys.

    Raises ``ConfigError`` as ``namespace`` does.
    """
    _check(model_id, secret)
    groups = [
        [
            group.name,
            group.attention.kind.name,
            group.attention.span_tokens,
            group.block_tokens,
            [fragment.num_bytes for fragment in group.fragments],
            *_parts(group.attention),
        ]
        for group in spec.groups
    ]
    return _digest(
        secret,
        ("format", FORMAT),
        ("outside", model_id),
        ("groups", groups),
        ("hash_tokens", spec.hash_tokens),
        ("order", sys.byteorder),
        ("plan", list(plan)),
    )


def _parts(attention: Attention) -> list[list[object]]:
    """The tensors that a block of states consists of; none for other groups."""
    parts = attention.parts if isinstance(attention, RecurrentState) else ()
    return [[part.name, list(part.shape), part.dtype] for part in parts]


def of_worker(namespace: bytes, rank: int, workers: int) -> bytes:
    """The namespace of one of several workers, each of which has its own share of each block."""
    return hashlib.blake2b(f"{rank}/{workers}".encode(), digest_size=16, key=namespace).digest()


def _check(model_id: str, secret: bytes) -> None:
    if not model_id:
        raise ConfigError("a remote needs model_id: the name of the weights, and of what computes K and V from them")
    if not secret:
        raise ConfigError("a remote needs key_secret: the same bytes in all processes that share it")


def _digest(secret: bytes, *pairs: tuple[str, object]) -> bytes:
    fields = encoded_fields(*pairs)
    key = hashlib.blake2b(secret, digest_size=32, person=b"kvtier-names").digest()
    return hashlib.blake2b(fields, digest_size=16, key=key).digest()


def object_name(namespace: bytes, kind: str, key: bytes) -> str:
    """The name of an object."""
    return f"{ROOT}/{namespace.hex()}/{kind}/{key.hex()[:2]}/{key.hex()}"


def parse(name: str) -> Name | None:
    """The parts of a name; None if it is no name of an object."""
    found = _NAME.fullmatch(name)
    return None if found is None else Name(bytes.fromhex(found[1]), found[2], bytes.fromhex(found[4]))
