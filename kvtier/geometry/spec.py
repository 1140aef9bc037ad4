"""The parts of a model's KV cache: its groups, and which layer lives where.

Owns       the geometry: how many bytes a block takes, and how many blocks a run needs.
Promises   ``GroupSpec.peak_blocks`` says whether a request can ever run. Refusal and advertised capacity ask it;
           admission asks its compiled form in ``coordinator/needs.py``. Keeps I6, I23.
Does not   know pools, tiers or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, assert_never

from kvtier.geometry.dtypes import DTYPE_BYTES, dtype_name
from kvtier.geometry.kinds import (
    ALIGN_BYTES,
    BOUND,
    STATE_TOKENS,
    Attention,
    ChunkedLocal,
    FullAttention,
    Kind,
    RecurrentState,
    SlidingWindow,
    positive,
)
from kvtier.geometry.kv_scales import KVScales, layer_row
from kvtier.geometry.roles import ROLES, Place, Places, read_layers
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import integer, shown

MOST_LAYERS = 10_000
"""A description with more layers is taken for damaged: no model has them, and naming them all would take minutes."""
MOST_HEADS = 2**16
"""Likewise with more KV heads, each of which may have a scale."""


class _Default(int):
    """A number that was not given."""


_BLOCK_TOKENS = _Default(16)
_MOST_HELD = 3
"""Blocks of states that a step holds of a request: what it goes on from, the last boundary, what it ends with."""


@dataclass(frozen=True)
class GroupSpec:
    """Layers with one attention kind and one KV shape, or with states of one shape.

    A block holds K and V of ``block_tokens`` consecutive tokens in all ``num_layers`` layers, contiguous.
    ``head_dim_v`` is V's head size if it differs from K's ``head_dim``; 0: the group keeps K alone. ``dtype``: the
    stored type of K and V, by torch's name; "fp8" is "float8_e4m3fn". ``kv_scales``: of float8 groups, per layer and KV
    head; None: all 1. ``entry_tokens``: tokens that share one *entry* of K and V; it is written with the last of them.
    A group of states (``RecurrentState``) has none of these; its ``block_tokens`` are 64 unless given.
    """

    name: str
    attention: Attention
    num_layers: int
    num_kv_heads: int = 0
    head_dim: int = 0
    dtype: str = "bfloat16"
    block_tokens: int = _BLOCK_TOKENS
    head_dim_v: int | None = None
    kv_scales: KVScales | None = None
    entry_tokens: int = 1

    def __post_init__(self) -> None:
        where = f"group {shown(self.name)}"
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError("a group needs a non-empty name")
        if not isinstance(self.attention, (FullAttention, SlidingWindow, ChunkedLocal, RecurrentState)):
            raise ConfigError(
                f"{where}: attention must be FullAttention, SlidingWindow, ChunkedLocal or RecurrentState, got "
                f"{shown(self.attention)}"
            )
        sizes = ["num_layers", "block_tokens", "entry_tokens"]
        if isinstance(self.attention, RecurrentState):
            self._check_state(where, self.attention)
        else:
            sizes += ["num_kv_heads", "head_dim"]
            if self.head_dim_v is not None and integer(self.head_dim_v) != 0:
                sizes.append("head_dim_v")
        for what in sizes:
            object.__setattr__(self, what, positive(f"{where}: {what}", getattr(self, what)))
        if self.num_layers > MOST_LAYERS:
            raise ConfigError(f"{where}: num_layers is {self.num_layers:,}; no model has more than {MOST_LAYERS:,}")
        if self.num_kv_heads > MOST_HEADS:
            raise ConfigError(f"{where}: num_kv_heads is {self.num_kv_heads:,}; no model has more than {MOST_HEADS:,}")
        if integer(self.head_dim_v) == 0:
            object.__setattr__(self, "head_dim_v", 0)
        object.__setattr__(self, "dtype", dtype_name(self.dtype, where))
        if self.entry_tokens > 1:
            self._check_entries(where)
        if isinstance(self.attention, RecurrentState) and self.block_bytes >= BOUND:
            raise ConfigError(
                f"{where}: the state of {self.num_layers:,} layers takes {self.block_bytes:,} bytes; a block must be "
                "below 2 GiB"
            )
        if self.kv_scales is not None:
            self._check_scales(where)
        if isinstance(self.attention, ChunkedLocal) and self.attention.chunk_tokens % self.block_tokens:
            raise ConfigError(
                f"{where}: chunk_tokens {self.attention.chunk_tokens} is not a multiple of block_tokens "
                f"{self.block_tokens}; a block must not straddle two chunks"
            )

    def _check_state(self, where: str, state: RecurrentState) -> None:
        nothing = {"num_kv_heads": 0, "head_dim": 0, "head_dim_v": None, "kv_scales": None, "entry_tokens": 1}
        for what, value in nothing.items():
            given = getattr(self, what)
            if given is not None if value is None else integer(given) != value:
                raise ConfigError(f"{where}: {what} is of keys and values, and a RecurrentState has its own parts")
        for part in state.parts:
            if DTYPE_BYTES[part.dtype] == 1 or (part.dtype == "float16" and not part.name.startswith("conv")):
                raise ConfigError(
                    f"{where}, part {shown(part.name)}: {part.dtype} overflows or drifts over a long text; "
                    "keep it in float32 or bfloat16 (parts called conv... are windows of inputs, and may be in float16)"
                )
        object.__setattr__(self, "dtype", state.parts[0].dtype)
        if isinstance(self.block_tokens, _Default):
            object.__setattr__(self, "block_tokens", STATE_TOKENS)

    def _check_entries(self, where: str) -> None:
        if self.attention.kind is not Kind.FULL:
            raise ConfigError(
                f"{where}: entries of {self.entry_tokens:,} tokens are kept of full attention alone, not of "
                f"{type(self.attention).__name__}: a window could begin within one"
            )
        if self.block_tokens % self.entry_tokens:
            raise ConfigError(
                f"{where}: block_tokens {self.block_tokens:,} is not a multiple of entry_tokens {self.entry_tokens:,}; "
                "an entry must not straddle two blocks"
            )

    def _check_scales(self, where: str) -> None:
        if self.head_dim_v == 0:
            raise ConfigError(f"{where}: kv_scales are of K and V, and this group keeps K alone")
        if not isinstance(self.kv_scales, KVScales):
            raise ConfigError(f"{where}: kv_scales must be KVScales, got {type(self.kv_scales).__name__}")
        if DTYPE_BYTES[self.dtype] != 1:
            raise ConfigError(f'{where}: kv_scales are for 8-bit floats, not {self.dtype}; use dtype="fp8"')
        self.kv_scales.check_shape(self.num_layers, self.num_kv_heads, where)
        if self.kv_scales.is_one:
            object.__setattr__(self, "kv_scales", None)  # equal geometry has equal keys

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head size of K and of V."""
        return self.head_dim, self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def block_entries(self) -> int:
        """Entries of K and V in a block: its tokens, unless several share one."""
        return self.block_tokens // self.entry_tokens

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of K and V in all layers of the group; 0 for states."""
        return self.num_layers * self.num_kv_heads * sum(self.head_dims) * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers of the group, rounded up if tokens share an entry; 0 for states,
        which do not grow with the tokens."""
        return -(-self.entry_bytes // self.entry_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in either tier, padded to a multiple of ``ALIGN_BYTES``."""
        if isinstance(self.attention, RecurrentState):
            return self.num_layers * self.attention.layer_bytes
        return -(-self.entry_bytes * self.block_entries // ALIGN_BYTES) * ALIGN_BYTES

    def blocks_needed(self, start: int, end: int) -> int:
        """Blocks that a step holds to compute tokens [start, end): from the first visible token to the end.

        Of the states that a step passes it holds few, beside those where prompts part.
        """
        needed = -(-end // self.block_tokens) - self.attention.first_visible(start) // self.block_tokens
        return min(needed, _MOST_HELD) if self.attention.kind is Kind.STATE else needed

    def peak_blocks(self, num_tokens: int) -> int:
        """The most blocks that a run of ``num_tokens`` holds at once when it computes one token a step.

        For a window of W tokens this is the tight bound ceil((W + block_tokens - 1) / block_tokens). It is reached if
        the window straddles blocks (vLLM issue 48959 was this bound off by one).
        """
        whole = -(-num_tokens // self.block_tokens)
        span = self.attention.span_tokens
        if self.attention.kind in (Kind.WINDOW, Kind.STATE):
            return min(whole, -(-(span + self.block_tokens - 1) // self.block_tokens))
        if self.attention.kind is Kind.CHUNK:
            return min(whole, span // self.block_tokens)
        if self.attention.kind is Kind.FULL:
            return whole
        assert_never(self.attention.kind)


@dataclass(frozen=True)
class CacheSpec:
    """All groups of a model. ``layers[i]`` maps the roles of model layer i to its places.

    A place is (group name, index within the group): ``{"kv": ("full", 3)}``; ``{}`` for a layer without a cache.
    ``layers`` may be given as places alone. Without it the model's layers are numbered through the groups in order.
    """

    groups: tuple[GroupSpec, ...]
    layers: tuple[Places, ...] = field(default=(), kw_only=True)

    def __init__(
        self, groups: Iterable[GroupSpec], *, layers: Sequence[Place | Mapping[str, Place]] | None = None
    ) -> None:
        if not isinstance(groups, Iterable):
            raise ConfigError(f"a CacheSpec takes a list of GroupSpec, got {shown(groups)}")
        try:
            groups = tuple(groups)
        except TypeError as problem:  # an array of no dimension
            raise ConfigError(f"a CacheSpec takes a list of GroupSpec: {problem}") from None
        if not groups:
            raise ConfigError("a CacheSpec needs at least one group")
        for group in groups:
            if not isinstance(group, GroupSpec):
                raise ConfigError(f"CacheSpec groups must be GroupSpec, not {type(group).__name__}")
        names = [group.name for group in groups]
        if len(set(names)) != len(names):
            raise ConfigError(f"group names must be unique, got {names}")
        _check_hit_tokens(groups)
        if layers is None:
            layers = [(group.name, i) for group in groups for i in range(group.num_layers)]
        sizes = {group.name: group.num_layers for group in groups}
        own = {group.name: _own_role(group) for group in groups}
        read = read_layers(layers, sizes, own)
        _check_roles(read, own)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "layers", read)

    @classmethod
    def from_config(
        cls,
        hf_config: Any,
        dtype: Any = None,
        block_tokens: int = 16,
        kv_scales: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> CacheSpec:
        """The groups of a transformers causal LM, read from its config by layer type.

        ``dtype`` defaults to the config's own; ``kv_scales`` are for "fp8", as ``with_kv_scales`` takes them. Raises
        ``UnsupportedModel`` naming the layer type or the reason, ``ConfigError`` for scales that do not fit.
        """
        from kvtier.integrations.transformers import spec_from_config

        spec = spec_from_config(hf_config, dtype=dtype, block_tokens=block_tokens)
        return spec if kv_scales is None else spec.with_kv_scales(kv_scales)

    def with_kv_scales(self, scales: Mapping[int, Mapping[str, Any]]) -> CacheSpec:
        """These groups with static scales: ``scales[i]`` of model layer i has "k" and "v".

        Each is one number for all KV heads of the layer or one number per KV head. A layer that reads another layer's
        KV needs none; if it has scales, they must not differ. Raises ``ConfigError`` for missing or unknown layers or
        heads, and for scales that are not positive numbers. It also does so for groups that are not in 8-bit floats.
        """
        if not isinstance(scales, Mapping):
            raise ConfigError(f"kv_scales maps model layers to scales of k and v, got {type(scales).__name__}")
        rows: dict[Place, dict[str, tuple[float, ...]]] = {}
        places = self.places("kv")
        for given, pair in scales.items():
            where, i = f"kv_scales of layer {shown(given)}", integer(given)
            if i is None or not 0 <= i < len(self.layers):
                raise ConfigError(f"{where}: the model has layers 0..{len(self.layers) - 1}")
            if not isinstance(pair, Mapping) or set(pair) != {"k", "v"}:
                raise ConfigError(f'{where} must be {{"k": ..., "v": ...}}, got {shown(pair)}')
            place = places[i]
            if place is None:
                raise ConfigError(f"{where}: this layer keeps no keys and values")
            heads = self.group(place[0]).num_kv_heads
            made = {which: layer_row(pair[which], heads, f"{where}: {which}_scale") for which in ("k", "v")}
            if rows.setdefault(place, made) != made:
                raise ConfigError(f"{where} differ from those of the layer whose KV it reads")
        missing = [i for i, at in enumerate(places) if at is not None and at not in rows]
        if missing:
            raise ConfigError(f"kv_scales name no scales for model layers {missing}")
        for name in {name for name, _ in rows}:
            if other := [i for i in range(self.group(name).num_layers) if (name, i) not in rows]:
                raise ConfigError(f"kv_scales: layers {other} of group {name!r} are of no model layer's K and V")
        groups, scaled = [], {name for name, _ in rows}
        for g in self.groups:
            if g.name not in scaled:  # of other roles
                groups.append(g)
                continue
            k, v = (tuple(rows[g.name, i][which] for i in range(g.num_layers)) for which in ("k", "v"))
            groups.append(replace(g, kv_scales=KVScales(k, v)))
        return CacheSpec(groups, layers=self.layers)

    def layer(self, i: int) -> Place:
        """(group name, layer index within it) of model layer ``i``; sharing layers map to the layer they read.

        Raises ``ConfigError`` for a layer without a place or with several: ``layers[i]`` has them by role.
        """
        at = integer(i)
        if at is None or not 0 <= at < len(self.layers):
            raise ConfigError(f"the model has layers 0..{len(self.layers) - 1}, not {shown(i)}")
        places = list(self.layers[at].values())
        if len(places) != 1:
            found = f"has several places, {self.layers[at]}" if places else "has no place in the cache"
            raise ConfigError(f"model layer {at} {found}; ask layers[{at}] for them by role")
        return places[0]

    def places(self, role: str) -> tuple[Place | None, ...]:
        """By model layer, its place for ``role``; None for layers without one. Raises ``ConfigError``."""
        try:
            return self._places[role]
        except (KeyError, TypeError):
            raise ConfigError(f"no role {shown(role)}; there are {', '.join(ROLES)}") from None

    @cached_property
    def _places(self) -> dict[str, tuple[Place | None, ...]]:
        return {role: tuple(layer.get(role) for layer in self.layers) for role in ROLES}

    def group(self, name: str) -> GroupSpec:
        """The group called ``name``; raises ``ConfigError`` with the existing names."""
        return self.groups[self.index(name)]

    def index(self, name: str) -> int:
        """Position of the group called ``name``; raises ``ConfigError`` with the existing names."""
        if not isinstance(name, str) or name not in self.names:
            raise ConfigError(f"no group {shown(name)}; there are {', '.join(self.names)}")
        return self.names.index(name)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Group names, in order."""
        return tuple(group.name for group in self.groups)

    @cached_property
    def hash_tokens(self) -> int:
        """Tokens per link of the key chain: gcd of the groups' block_tokens."""
        return math.gcd(*(group.block_tokens for group in self.groups))

    @cached_property
    def hit_tokens(self) -> int:
        """A prefix hit is a multiple of this: lcm of the groups' block_tokens."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all groups."""
        return sum(group.token_bytes for group in self.groups)


def _own_role(group: GroupSpec) -> str:
    """The role of a group's places where none is named."""
    if group.attention.kind is Kind.STATE:
        return "state"
    return "kv" if group.entry_tokens == 1 else "entries"


def _check_roles(layers: Sequence[Places], own: Mapping[str, str]) -> None:
    """Refuses states where keys and values are expected, and the like: only indices and rows may be of any form."""
    for i, places in enumerate(layers):
        for role, (name, _) in places.items():
            if role in ("kv", "entries", "state") and role != own[name]:
                raise ConfigError(f"model layer {i}: group {shown(name)} is of role {own[name]!r}, not {role!r}")


def _check_hit_tokens(groups: Sequence[GroupSpec]) -> None:
    """Refuses block sizes of little in common: they end together so seldom that no prefix would ever be found again.

    States are kept at hits alone, so each of their blocks is one.
    """
    unit = math.lcm(*(group.block_tokens for group in groups))
    for group in groups:
        if group.attention.kind is Kind.STATE and group.block_tokens != unit and unit < BOUND:
            raise ConfigError(
                f"group {shown(group.name)}: states are kept where hits end, at multiples of {unit:,} tokens (the "
                f"least common multiple of all groups' block_tokens); its block_tokens is {group.block_tokens:,}"
            )
    if unit >= BOUND:
        sizes = ", ".join(f"{group.name}: {group.block_tokens:,}" for group in groups)
        raise ConfigError(
            f"prefix hits would be multiples of {shown(unit)} tokens, the least common multiple of the groups' "
            f"block_tokens ({sizes}); take sizes that divide each other, so that it is below 2**31"
        )
