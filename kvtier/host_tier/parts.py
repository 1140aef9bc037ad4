"""What the texts of a host tier share: its books, its loads, and the hits that texts hold.

Owns       which loads are to be reported, and which hits are held.
Promises   device blocks that no group has are refused. In a forked child, which has no threads for copies, the tier
           counts as closed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.door import RemoteDoor
from kvtier.coordinator.keeping import Keeping
from kvtier.coordinator.match import Match, Matcher
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.device_side import OutsideDevice
from kvtier.cpu_offload.store_policy import StorePolicy
from kvtier.geometry.keys import KeyArray
from kvtier.geometry.kinds import Kind
from kvtier.geometry.outside import OutsideSpec
from kvtier.gpu_pool.row_state import Geo
from kvtier.machine.arguments import block_ids
from kvtier.machine.errors import CacheClosed, InvalidRequest
from kvtier.machine.forks import of_another_process, watch
from kvtier.pools.block_pool import BlockPools, Ids
from kvtier.remote.moves import Seek

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HostHit:
    """The tier's content of a text from token ``start`` to ``end``.

    Block ``hosts[k]`` of group ``groups[k]`` is the group's logical block ``at[k]``; int32 [n], int32 [n], int64 [n].
    The hit is held until it is loaded or dropped.
    """

    start: int
    end: int
    groups: Ids
    at: Int64s
    hosts: Ids
    is_pending: bool = False
    """A store is still writing some of it: ask again later, or do without."""
    is_sought: bool = False
    """The remote tier is asked for the text, or brings it: ask again later, or match without it."""
    from_remote: int = 0
    """The hit's last tokens, which the tier did not have when the text asked the remote."""

    @property
    def num_tokens(self) -> int:
        """Tokens that a load brings."""
        return self.end - self.start


class Rows(NamedTuple):
    """The groups as a search goes through them."""

    geometry: Int64s


@dataclass(eq=False)
class Question:
    """A text that asks the remote. ``found``: what the tier has of it."""

    keys: KeyArray
    tokens: range
    found: Match
    seek: Seek | None = None


@dataclass(eq=False)
class HostParts:
    """The parts of a ``HostTier``."""

    spec: OutsideSpec
    arrays: Rows
    device: OutsideDevice
    connector: Connector
    stores: StorePolicy
    matcher: Matcher
    door: RemoteDoor[Question]
    pools: BlockPools
    keeping: Keeping
    loads: dict[int, bool] = field(default_factory=dict)
    """Loads by ticket: whether the end was reported, and only the release is to come."""
    held: dict[int, HostHit] = field(default_factory=dict)
    asking: WeakSet[Question] = field(default_factory=WeakSet)
    """Texts that have waited for an answer of the remote."""
    is_closed: bool = False
    num_texts: int = 0
    why: str = "the host tier is closed"

    def __post_init__(self) -> None:
        watch(self)

    def on_fork(self) -> None:
        """No copy ends in a forked child."""
        self.is_closed, self.why = True, of_another_process("this host tier")

    def check_open(self) -> None:
        """Raises ``CacheClosed`` after ``close``, and in a forked child."""
        if self.is_closed:
            raise CacheClosed(self.why)

    def overwrite(self, groups: Ids, blocks: Ids) -> None:
        """Orders the next writers of these device blocks after the stores that read them."""
        self.connector.order_writers(self._fences(groups, blocks))

    def spoil(self, groups: Ids, blocks: Ids) -> None:
        """Sees to it that what stores read in these device blocks is never found."""
        self.connector.spoil(self._fences(groups, blocks))

    def _fences(self, groups: Ids, blocks: Ids) -> Ids:
        """The stores that read these device blocks."""
        self.check_open()
        groups, blocks = block_ids(groups), block_ids(blocks)
        self.check_blocks(groups, blocks)
        return self.device.fences(groups, blocks)

    @cached_property
    def _num_blocks(self) -> Int64s:
        return np.array([group.num_blocks for group in self.spec.groups])

    @cached_property
    def full(self) -> Ids:
        """The groups of full attention."""
        kinds = [group.attention.kind for group in self.spec.groups]
        return np.array([g for g, kind in enumerate(kinds) if kind is Kind.FULL], np.int32)

    @cached_property
    def first_of_full(self) -> Int64s:
        """Of each of these groups, the key of a text that names its first block."""
        units: Int64s = self.arrays.geometry[self.full, Geo.UNITS]
        return units - 1

    @cached_property
    def room_of_slabs(self) -> float:
        """Bytes for texts in pools that share slabs, whatever the texts; 0 for other pools."""
        anything = np.ones(len(self.spec.groups))
        return self.keeping.sizes.room(self.pools, anything) if self.pools.shared else 0.0

    def check_blocks(self, groups: Ids, blocks: Ids) -> None:
        """Raises ``InvalidRequest`` for blocks that no group has."""
        most = self._num_blocks
        if len(groups) != len(blocks) or (len(groups) and not 0 <= groups.min() <= groups.max() < len(most)):
            raise InvalidRequest(f"every block needs its group's number, 0 to {len(most) - 1}")
        if len(blocks) and (blocks.min() < 0 or np.any(blocks >= most[groups])):
            raise InvalidRequest("a device block is not one of its group's num_blocks")
