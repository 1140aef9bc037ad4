"""Names: whatever changes the bytes of a block changes the namespace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier import CacheSpec, ConfigError, FullAttention, GroupSpec, SlidingWindow
from kvtier.geometry.keys import KeyChain
from kvtier.geometry.kv_scales import KVScales
from kvtier.remote import names
from kvtier.remote.names import Name, namespace, object_name, parse
from remote.driving import NAMESPACE, key, name

GROUPS = (
    GroupSpec("full", FullAttention(), 2, 2, 16, "float8_e4m3fn", 16),
    GroupSpec("win", SlidingWindow(64), 2, 2, 16, "bfloat16", 16),
)
SCALES = KVScales(((0.5, 1.0), (1.0, 1.0)), ((1.0, 1.0), (1.0, 1.0)))


def of(groups=GROUPS, model="weights-1", secret=b"secret", plan=(), **more) -> bytes:
    spec = CacheSpec(groups, **more)
    return namespace(KeyChain(spec, model, secret), spec, secret, plan)


def changed(**fields: object) -> tuple[GroupSpec, ...]:
    return replace(GROUPS[0], **fields), GROUPS[1]


OTHERS = {
    "weights": {"model": "weights-2"},
    "secret": {"secret": b"another"},
    "plan": {"plan": ("tile", 256)},
    "layers": {"layers": [("win", 0), ("win", 1), ("full", 0), ("full", 1)]},
    "a role": {"layers": [{"index": ("full", 0)}, ("full", 1), ("win", 0), ("win", 1)]},
    "another role": {"layers": [{"rows": ("full", 0)}, ("full", 1), ("win", 0), ("win", 1)]},
    "two roles": {"layers": [{"kv": ("full", 0), "index": ("win", 0)}, ("full", 1), {}, ("win", 1)]},
    "a layer without a cache": {"layers": [("full", 0), ("full", 1), ("win", 0), {}, ("win", 1)]},
    "order of groups": {"groups": GROUPS[::-1]},
    "dtype": {"groups": changed(dtype="bfloat16")},
    "8-bit dtype": {"groups": changed(dtype="float8_e5m2")},
    "scales": {"groups": changed(kv_scales=SCALES)},
    "block size": {"groups": changed(block_tokens=32)},
    "hash unit": {"groups": tuple(replace(group, block_tokens=32) for group in GROUPS)},
    "number of layers": {"groups": changed(num_layers=3)},
    "KV heads": {"groups": changed(num_kv_heads=4)},
    "head size": {"groups": changed(head_dim=32)},
    "V's head size": {"groups": changed(head_dim_v=32)},
    "window": {"groups": (GROUPS[0], replace(GROUPS[1], attention=SlidingWindow(128)))},
    "name of a group": {"groups": changed(name="global")},
}


def test_the_same_is_the_same_and_every_difference_is_another_namespace() -> None:
    found = {what: of(**other) for what, other in OTHERS.items()} | {"none": of()}
    assert of() == of()
    assert len(set(found.values())) == len(found)
    assert {len(value) for value in found.values()} == {16}


def test_what_was_stored_before_there_were_roles_is_still_found() -> None:
    """These are the digests of kvtier as it was then."""
    assert of(plan=("tile", 256)).hex() == "4636d3ef9cd87a38cdf3c530fa1f0353"
    shared = [("win", 0), ("full", 0), ("win", 1), ("full", 1), ("full", 1)]
    for layers in (shared, [{"kv": place} for place in shared]):
        assert of(plan=("tile", 256), layers=layers).hex() == "61a46859f1300ef718690bb4f949ff9b"
    root = KeyChain(CacheSpec(GROUPS), "weights-1", b"secret").root(None, "salt", ())
    assert root.tobytes().hex() == "e497ffa71c86493fb868200ae1f61ec1"


@pytest.mark.parametrize(("where", "value"), [("FORMAT", 2), ("BYTE_LAYOUT", 2), ("sys.byteorder", "big")])
def test_formats_and_byte_order_are_part_of_it(monkeypatch: pytest.MonkeyPatch, where: str, value: object) -> None:
    before = of()
    owner, _, attribute = where.rpartition(".")
    monkeypatch.setattr(getattr(names, owner) if owner else names, attribute, value)
    assert of() != before


def test_names_that_nobody_would_find_again_are_refused() -> None:
    with pytest.raises(ConfigError, match="model_id"):
        of(model="")
    with pytest.raises(ConfigError, match="key_secret"):
        spec = CacheSpec(GROUPS)
        namespace(KeyChain(spec, "weights-1", None), spec, b"")


def test_a_name_has_its_parts_again() -> None:
    assert parse(object_name(NAMESPACE, "b0", key(7))) == Name(NAMESPACE, "b0", key(7))
    for wrong in (
        "",
        "README",
        name(1)[:-1],
        name(1) + "#1",
        "x" + name(1),
        name(1).upper(),
        name(1).replace("/01/", "/02/"),
    ):
        assert parse(wrong) is None, wrong
