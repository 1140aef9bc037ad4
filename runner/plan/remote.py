"""What a remote tier costs and holds, by arithmetic.

Owns       the sizes of the objects that texts are cut into, as ``kvtier plan`` and its tests need them.
Promises   the same objects and bytes as ``kvtier.remote.objects`` makes, at any length, without making them.
Does not   know how fast a remote tier is: the user says it.

A *hit* of n tokens reads tiles, blocks that are objects by themselves ("big"), and one end. A *text* is a prompt that
is computed once: its two last hits are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.coordinator.seek import CALL_S
from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import CacheSpec, GroupSpec
from kvtier.remote.envelope import TRAILER_BYTES
from kvtier.remote.objects import ObjectPlan
from runner.plan.report import LengthPlan, RemoteLength, RemotePlan


@dataclass(frozen=True)
class Amount:
    """Objects and the bytes of their blocks."""

    objects: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes with a trailer behind each object."""
        return self.block_bytes + self.objects * TRAILER_BYTES

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.objects + other.objects, self.block_bytes + other.block_bytes)


class RemoteSizes:
    """Sizes of the objects of a cache with these groups."""

    def __init__(self, spec: CacheSpec) -> None:
        plan = ObjectPlan(spec)
        self.unit, self.tile_tokens = plan.unit, plan.tile_tokens
        self.big_groups = [spec.groups[int(kind[1:])] for kind in plan.kinds if kind.startswith("b")]
        small = [group for group in spec.groups if group not in self.big_groups]
        self._tiled = [group for group in small if group.attention.kind is Kind.FULL]
        self._local = [group for group in small if group.attention.kind is not Kind.FULL]
        self.tile_bytes = sum(_bytes(group, self.tile_tokens) for group in self._tiled)
        """Bytes of a tile's blocks; 0 if there are no tiles."""

    def hit(self, n: int, *, fullest: bool = False) -> Amount:
        """What a hit of ``n`` tokens reads if nothing of it is here. ``fullest``: chunks as full as they get."""
        n = n // self.unit * self.unit
        tiles = n // self.tile_tokens if self.tile_tokens else 0
        found = Amount(tiles, tiles * self.tile_bytes) + self._end(n, fullest)
        for group in self.big_groups:
            first, end = _span(group, n, fullest)
            found += Amount(end - first, (end - first) * group.block_bytes)
        return found

    def text(self, n: int) -> Amount:
        """What is stored of a prompt of ``n`` tokens: two hits on it, on all of it and on all but its last token."""
        whole, less = n // self.unit * self.unit, (n - 1) // self.unit * self.unit
        found = self.hit(whole)
        if whole == less:
            return found
        found += self._end(less, False)
        for group in self.big_groups:
            (first, end), (wanted, _) = _span(group, less, False), _span(group, whole, False)
            more = min(end, wanted) - first  # blocks that the longer hit has forgotten
            found += Amount(more, more * group.block_bytes)
        return found

    def further_end(self, n: int) -> Amount:
        """What one more end near ``n`` tokens stores again if nothing but its tiles and full attention is there."""
        n = n // self.unit * self.unit
        found = self._end(n, True)
        for group in self.big_groups:
            if group.attention.kind is not Kind.FULL:
                first, end = _span(group, n, True)
                found += Amount(end - first, (end - first) * group.block_bytes)
        return found

    def most_end_bytes(self, longest: int) -> int:
        """Bytes of the largest end of texts up to ``longest`` tokens."""
        longest = longest // self.unit * self.unit
        rest = min(longest, self.tile_tokens - self.unit) if self.tile_tokens else 0
        spans = [(group, _span(group, longest, True)) for group in self._local]
        return sum(_bytes(group, rest) for group in self._tiled) + sum(
            (end - first) * group.block_bytes for group, (first, end) in spans
        )

    def _end(self, n: int, fullest: bool) -> Amount:
        rest = n % self.tile_tokens if self.tile_tokens else 0
        size = sum(_bytes(group, rest) for group in self._tiled)
        for group in self._local:
            first, end = _span(group, n, fullest)
            size += (end - first) * group.block_bytes
        return Amount(1 if size else 0, size)


def _bytes(group: GroupSpec, num_tokens: int) -> int:
    return num_tokens // group.block_tokens * group.block_bytes


def _span(group: GroupSpec, n: int, fullest: bool) -> tuple[int, int]:
    """The blocks that a hit of n tokens needs: first, and the one behind the last."""
    first = group.attention.first_visible(n)
    if fullest and group.attention.kind is not Kind.FULL:
        first = max(0, n - group.attention.span_tokens)
    return first // group.block_tokens, n // group.block_tokens


def plan_remote(
    spec: CacheSpec,
    num_bytes: int,
    gb_per_s: float,
    link_gb_per_s: float,
    lengths: tuple[LengthPlan, ...],
    fits: Callable[[int], bool],
    compute_s: Callable[[int], float] | None,
) -> RemotePlan:
    """The plan of a remote tier of ``num_bytes`` bytes. ``compute_s``: seconds to compute a prompt, if they are known.

    ``fits``: whether a hit of so many tokens can be held; if not, no longer one can.
    """
    sizes = RemoteSizes(spec)

    def fetch_s(amount: Amount) -> float:
        return CALL_S + amount.num_bytes / (gb_per_s * 1e9) + amount.block_bytes / (link_gb_per_s * 1e9)

    def length(of: LengthPlan) -> RemoteLength:
        hit, text = sizes.hit(of.tokens), sizes.text(of.tokens)
        texts = num_bytes // text.num_bytes if text.objects else 0
        return RemoteLength(
            tokens=of.tokens,
            fetch_bytes=hit.num_bytes,
            fetch_objects=hit.objects,
            read_amplification=hit.num_bytes / hit.block_bytes if hit.block_bytes else None,
            fetch_s=None if (why := _why_not(of)) else fetch_s(hit),
            why_not=why,
            text_bytes=text.num_bytes,
            text_objects=text.objects,
            further_end_bytes=sizes.further_end(of.tokens).num_bytes,
            texts=texts,
            tokens_held=texts * of.tokens,
        )

    most, even = lengths[-1].tokens, None
    beyond = first_unit(lambda n: not fits(n), sizes.unit, most)
    longest = most if beyond is None else beyond - sizes.unit
    if compute_s is not None:
        # Fetching grows ever more slowly with the length, and computing ever faster: they meet once at most.
        even = first_unit(lambda n: fetch_s(sizes.hit(n, fullest=True)) < compute_s(n), sizes.unit, longest)
    return RemotePlan(
        num_bytes=num_bytes,
        gb_per_s=gb_per_s,
        call_s=CALL_S,
        trailer_bytes=TRAILER_BYTES,
        tile_tokens=sizes.tile_tokens,
        tile_bytes=sizes.tile_bytes,
        most_end_bytes=sizes.most_end_bytes(most),
        big_blocks={group.name: group.block_bytes for group in sizes.big_groups},
        longest_tokens=longest,
        break_even_tokens=even,
        lengths=tuple(map(length, lengths)),
    )


def _why_not(of: LengthPlan) -> str:
    """Why a hit of this length cannot be fetched; "" if it can."""
    if of.beyond_model:
        return "longer than the model's positions"
    if of.load_bytes and of.host is not None and not of.host.requests:
        return "does not fit the host"
    return "" if of.device.requests else "does not fit the device"


def first_unit(is_sooner: Callable[[int], bool], unit: int, longest: int) -> int | None:
    """The first multiple of ``unit`` from which on ``is_sooner`` is true; None if it is not even at the last one."""
    low, high = 0, longest // unit
    if not high or not is_sooner(high * unit):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_sooner(middle * unit) else (middle, high)
    return high * unit
