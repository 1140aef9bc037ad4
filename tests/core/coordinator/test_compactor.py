"""Blocks that move so that another group can have their slab: whoever holds one is told, and its bytes come along."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import inside
import numpy as np
import pytest

from core.driving import HeldEngine, Serving, prompt
from core.slabs import (
    BLOCKED,
    A,
    B,
    cache,
    check_books,
    counts,
    found,
    free,
    keys_of,
    of,
    owners,
    pools_of,
    shared_serving,
    slab_of,
    take,
    whole_slab,
)
from kvtier import CacheSpec, FullAttention, SlidingWindow
from kvtier.coordinator.compactor import MOST_LOOKS, Compactor
from kvtier.coordinator.match import Match
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.failures import CopyNews
from kvtier.cpu_offload.store_policy import StorePolicy
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.gpu_pool.row_state import RowCol
from kvtier.machine.journal import Journal
from kvtier.pools import exchange
from kvtier.pools.block_pool import Col, Mark
from kvtier.testing import CanaryEngine, SimulatedDevice, canary_spec

WIDE = canary_spec({"full": (FullAttention(), 4), "win": (SlidingWindow(8), 4)}, num_layers={"full": 1, "win": 6})
"""Six blocks of "full" in a slab, or one of "win"."""
TURNED = canary_spec({"win": (SlidingWindow(8), 4), "full": (FullAttention(), 4)}, num_layers={"full": 1, "win": 6})
"""The same in the other order."""


class Moves:
    """Rows over pools with two slabs of group A, and a compactor whose copies are noted.

    ``sparse`` and ``dense`` are the slabs' blocks, all held once. The groups may be those of another ``spec``, and the
    slabs those of another group, ``g``, of it. ``lazy``: with a host tier, in whose lazy mode nothing is lost.
    """

    def __init__(self, num_slabs: int = 2, spec: CacheSpec = WIDE, g: int = A, lazy: bool = False) -> None:
        sizes = [group.block_bytes for group in spec.groups]
        self.pools = pools_of(num_slabs, sizes)
        self.tables = BlockTables(spec, self.pools, 4)
        self._g = g
        self.copied: list[tuple[int, int, int]] = []
        self.host, self.engine = (pools_of(4, sizes), HeldEngine(None, has_bytes=False)) if lazy else (None, None)
        pools = self.pools, self.pools, self.host
        self.connector = Connector(*pools, self.engine, counts(*sizes), 1.0, CopyNews(Journal(0), ()))
        stores = StorePolicy(self.connector, self.pools, self.host)
        self.compactor = Compactor(self.tables, self.connector, stores, self._copy, lazy)
        self.sparse, self.dense = whole_slab(self.pools, g), whole_slab(self.pools, g)

    def _copy(self, g: int, sources: np.ndarray, targets: np.ndarray) -> None:
        self.copied += [(g, b, c) for b, c in zip(sources.tolist(), targets.tolist(), strict=True)]

    def set_row(self, r: int, blocks: Sequence[int]) -> None:
        """Row r holds these blocks of the group, and nothing of the other."""
        held = counts(*(len(blocks) * (g == self._g) for g in (A, B)))
        self.tables.set_row(r, counts(0, 0), held, np.array(blocks, np.int32))

    def row(self, r: int) -> list[int]:
        return self.tables.table(A)[r, : self.tables.arrays.hi[A][r]].tolist()

    def refs(self, blocks: Sequence[int]) -> list[int]:
        return self.pools.arrays.refs[self.pools.entries(*of(A, blocks))].tolist()

    @staticmethod
    def match(*device: Sequence[int]) -> Match:
        """A match of these blocks of group A, and of B."""
        blocks, num = np.array([b for of_group in device for b in of_group], np.int32), [len(part) for part in device]
        return Match(4, 4, counts(0, 0), counts(*num), blocks, np.zeros_like(blocks), False)


def test_a_moved_block_is_named_anew_by_every_row_and_by_the_match():
    moves = Moves()
    pools, (x, y, z, *rest), dense = moves.pools, moves.sparse, moves.dense
    free(pools, A, rest)
    cache(pools, A, [z])
    free(pools, A, dense[4:])
    cache(pools, A, dense[3:4])
    pools.publish(*of(A, [x]), keys_of(A, [x]), Mark.READY)
    pools.acquire(*of(A, [x, x]))
    moves.set_row(0, [x, dense[0]])
    moves.set_row(1, [x, dense[1]])
    moves.set_row(2, [dense[2], y])
    match = moves.match([0, x], [])
    versions = moves.tables.arrays.state[:, RowCol.VERSION].copy()
    peak = pools.column(Col.PEAK_HELD).tolist()
    assert not pools.provide(counts(0, 1))
    assert moves.compactor.empty_slab(counts(0, 1), match)

    to = {b: c for _, b, c in moves.copied}
    assert sorted(to) == sorted([x, y])
    assert {g for g, _, _ in moves.copied} == {A}
    assert sorted(to.values()) == sorted(dense[4:])
    assert moves.row(0) == [to[x], dense[0]]
    assert moves.row(1) == [to[x], dense[1]]
    assert moves.row(2) == [dense[2], to[y]]
    assert match.device.tolist() == [0, to[x]]
    assert (moves.tables.arrays.state[:, RowCol.VERSION] - versions).tolist() == [1, 1, 1, 0]
    assert moves.refs([to[x], to[y], *dense[:3]]) == [3, 1, 1, 1, 1]
    assert moves.refs([x, y]) == [0, 0]
    assert pools.find(of(A, [x])[0], keys_of(A, [x])).tolist() == [to[x]]
    assert found(pools, A, [z]) == [False]
    assert found(pools, A, dense[3:4]) == [True], "content was given up though there were empty blocks"
    assert pools.held.tolist() == [5, 0]
    assert pools.column(Col.PEAK_HELD).tolist() == peak
    assert moves.compactor.num_moved == 2
    assert sorted(owners(pools)) == [A, B]
    check_books(pools)
    assert take(pools, B, 1)


def test_the_match_has_blocks_of_other_groups_before_those_that_move():
    moves = Moves(3, TURNED, B)
    (x, *rest), (other,) = moves.sparse, whole_slab(moves.pools, A)
    free(moves.pools, B, rest)
    free(moves.pools, B, moves.dense[5:])
    moves.set_row(0, moves.dense[:5])
    match = moves.match([other], [x])
    assert moves.compactor.empty_slab(counts(1, 0), match)
    assert moves.copied == [(B, x, moves.dense[5])]
    assert match.device.tolist() == [other, moves.dense[5]]
    assert moves.refs([moves.dense[5]]) == [1]


@pytest.mark.parametrize("is_known", [True, False])
def test_older_content_goes_for_a_state_although_each_of_its_slabs_has_a_block_in_use(is_known: bool):
    """``is_known``: whether the blocks in use can be moved, since rows hold them."""
    moves = Moves(3)
    pools, (x, *sparse), (y, *dense) = moves.pools, moves.sparse, moves.dense
    state = whole_slab(pools, B)
    cache(pools, A, sparse + dense)
    cache(pools, B, state)
    if is_known:
        moves.set_row(0, [x, y])
    states, make_idle = np.array([0, 1], np.uint8), partial(moves.compactor.make_idle, None)
    assert pools.provide(counts(0, 1), False, states, moves.compactor.move, make_idle)
    take(pools, B, 1)
    assert found(pools, B, state) == [is_known]
    gone = pools.find(np.zeros(10, np.int32), keys_of(A, sparse + dense)) == 0
    assert int(gone.sum()) == (6 if is_known else 0), "a slab's worth"
    if is_known:
        now = {source: target for _, source, target in moves.copied}
        assert moves.row(0) == [now[x], y]
        assert moves.refs([now[x], y]) == [1, 1]
    check_books(pools)


def test_a_slab_that_is_made_idle_keeps_its_cached_content():
    moves = Moves()
    pools, (x, *sparse), dense = moves.pools, moves.sparse, moves.dense
    free(pools, A, dense[2:])
    cache(pools, A, sparse[:3])
    free(pools, A, sparse[3:])
    moves.set_row(0, [x, *dense[:2]])
    assert moves.compactor.make_idle(None, A)
    ((_, source, target),) = moves.copied
    assert source == x
    assert target in dense[2:]
    assert moves.row(0) == [target, *dense[:2]]
    assert found(pools, A, sparse[:3]) == [True] * 3
    assert len(set(take(pools, A, 6))) == 6, "its empty blocks can be taken again"
    check_books(pools)


def test_few_slabs_are_looked_at_for_one_that_can_be_made_idle(monkeypatch):
    """However many the pool has: each look reads all rows, and copies may hold a block of each slab."""
    moves, looked, movable = Moves(40), list[int](), Compactor._movable
    slabs = [moves.sparse, moves.dense, *(whole_slab(moves.pools, A) for _ in range(38))]
    for _, *rest in slabs:
        free(moves.pools, A, rest)
    monkeypatch.setattr(Compactor, "_movable", lambda self, s, pinned: looked.append(s) or movable(self, s, pinned))
    assert not moves.compactor.make_idle(None, A)
    assert 0 < len(looked) <= MOST_LOOKS
    moves.set_row(0, [moves.dense[0]])
    assert moves.compactor.make_idle(None, A)
    check_books(moves.pools)


def test_a_block_that_moves_is_not_held_twice():
    """The highest number of held blocks is what requests have held at once."""
    pools = pools_of(2)
    first = take(pools, A, 3)
    free(pools, A, first[1:])
    assert pools.provide(counts(5, 0))
    held = [first[0], *take(pools, A, 2)]
    assert {slab_of(pools, A, b) for b in held[1:]} == {1}
    assert pools.held.tolist() == pools.column(Col.PEAK_HELD).tolist() == [3, 0]
    targets = np.empty(1, np.int32)
    exchange.move_blocks(*pools.arrays, 0, np.array(held[:1], np.int32), targets, False)
    assert slab_of(pools, A, int(targets[0])) == 1
    assert pools.held.tolist() == pools.column(Col.PEAK_HELD).tolist() == [3, 0]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_of_slabs_with_as_many_blocks_to_move_the_coldest_is_emptied(order: tuple[int, ...]):
    pools = pools_of(3)
    slabs = [whole_slab(pools, A) for _ in range(3)]
    for s in order:
        cache(pools, A, slabs[s][1:])
    tried, a = np.zeros(3, np.uint8), pools.arrays
    for s in (*order, -1):
        assert exchange.movable_slab(a.meta, a.slabs, counts(0, 1), tried) == s
        tried[s] = 1


def test_a_block_of_which_not_every_holder_is_known_stays():
    """Somebody holds a reference that neither a row nor the match accounts for: the block cannot be renamed for it."""
    moves = Moves()
    free(moves.pools, A, moves.sparse[1:])
    free(moves.pools, A, moves.dense[5:])
    moves.set_row(0, moves.dense[:4])
    assert not moves.compactor.empty_slab(counts(0, 1), None)
    assert moves.copied == []
    assert owners(moves.pools) == [A, A]
    moves.set_row(1, moves.sparse[:1])
    assert moves.compactor.empty_slab(counts(0, 1), None)
    assert [b for _, b, _ in moves.copied] == moves.sparse[:1]


@pytest.mark.parametrize("what", ["fenced", "quarantined", "pending"])
def test_a_slab_with_a_block_that_a_copy_uses_is_not_emptied(what: str):
    moves = Moves()
    block = moves.sparse[1]
    free(moves.pools, A, moves.sparse[2:])
    free(moves.pools, A, moves.dense[3:])
    moves.set_row(0, moves.dense[:3])
    moves.set_row(1, moves.sparse[:1] + ([block] if what == "pending" else []))
    BLOCKED[what][0](moves.pools, block)
    assert moves.compactor.empty_slab(counts(0, 1), None), "the other slab can be emptied"
    assert [b for _, b, _ in moves.copied] == moves.dense[:3]
    assert slab_of(moves.pools, A, moves.sparse[0]) == owners(moves.pools).index(A)
    check_books(moves.pools)


@pytest.mark.parametrize("overdue", [False, True])
def test_a_held_block_that_a_store_reads_is_not_moved(overdue: bool):
    moves = Moves()
    free(moves.pools, A, moves.sparse[1:])
    free(moves.pools, A, moves.dense[3:])
    moves.set_row(0, moves.dense[:3])
    moves.set_row(1, moves.sparse[:1])
    moves.pools.publish(*of(A, moves.sparse[:1]), keys_of(A, moves.sparse[:1]), Mark.READY)
    moves.pools.fence(*of(A, moves.sparse[:1]), 1)
    if overdue:
        moves.pools.expire_fence(*of(A, moves.sparse[:1]), 1)
    assert moves.compactor.empty_slab(counts(0, 1), None)
    assert [b for _, b, _ in moves.copied] == moves.dense[:3]


def test_a_slab_is_not_emptied_into_blocks_that_its_own_group_needs():
    moves = Moves()
    free(moves.pools, A, moves.sparse[1:])
    free(moves.pools, A, moves.dense[4:])
    moves.set_row(0, moves.dense[:4])
    moves.set_row(1, moves.sparse[:1])
    assert not moves.compactor.empty_slab(counts(2, 1), None)
    assert moves.compactor.empty_slab(counts(1, 1), None)
    assert [b for _, b, _ in moves.copied] == moves.sparse[:1], "the slab with the fewest moves"


def test_in_lazy_mode_what_moved_blocks_push_out_elsewhere_is_stored_first():
    """The only place for the block that moves is one that caches something, in another slab."""
    moves = Moves(lazy=True)
    free(moves.pools, A, moves.sparse[1:])
    cache(moves.pools, A, moves.dense[5:])
    moves.set_row(0, moves.dense[:5])
    moves.set_row(1, moves.sparse[:1])
    assert not moves.compactor.empty_slab(counts(0, 1), None)
    (store,) = moves.connector.ledger.live()
    assert (store.groups.tolist(), store.device.tolist()) == ([A], moves.dense[5:])
    assert moves.connector.clear_until(lambda: moves.pools.is_enough(counts(0, 1)))
    assert moves.compactor.empty_slab(counts(0, 1), None)
    assert moves.copied == [(A, moves.sparse[0], moves.dense[5])]
    assert moves.host.find(store.groups, store.keys).tolist() == store.host.tolist()
    assert moves.connector.counts.dropped_blocks == 0


@pytest.mark.parametrize("mine", ["sparse", "dense"])
def test_a_request_takes_its_next_block_beside_its_last_one(mine: str):
    """Blocks of one request leave together: the slab is empty then, and nothing has to be moved out of it."""
    moves = Moves(6)
    blocks = getattr(moves, mine)
    moves.set_row(0, blocks[:2])
    free(moves.pools, A, [b for b in (*moves.sparse, *moves.dense) if b not in blocks[:2]])
    assert moves.pools.provide(counts(2, 4))
    moves.tables.extend(0, 16)
    assert {slab_of(moves.pools, A, b) for b in moves.row(0)} == {slab_of(moves.pools, A, blocks[0])}


# --- requests -----------------------------------------------------------------------------------------

SCATTERING = canary_spec(
    {"full": (FullAttention(), 8), "win": (SlidingWindow(24), 4)}, num_layers={"full": 1, "win": 6}
)
"""Three blocks of "full" in a slab, or one of "win"; a long prompt takes far more slabs for its window."""


@pytest.fixture
def shared(make_cache: Any) -> Any:
    """``shared_serving`` of caches that are audited and closed."""
    return partial(shared_serving, make_cache)


def scatter(serving: Serving) -> None:
    """Blocks of a few requests come to lie in three slabs, and a long prompt needs one of these slabs for its window.

    Requests 0, 3 and 6 go on; those between them end when all have a block.
    """
    for k in range(8):
        serving.add(str(k), prompt(k, 3), 6)
    serving.step()
    assert sorted(owners(serving.cache.core.coordinator.pools)) == [A] * 3 + [B] * 8
    for k in (1, 2, 4, 5, 7):
        serving.scheduler.finish(str(k))
    serving.add("long", prompt(9, 23), 1)


def test_blocks_of_running_requests_move_and_their_texts_stay_right(shared):
    serving = shared(SCATTERING, 11)
    scatter(serving)
    compactor = serving.cache.core.coordinator.compactor
    assert "long" in serving.step().request_ids
    assert compactor.num_moved > 0
    assert len(serving.run()) == 9


def test_a_move_without_its_bytes_would_be_seen(shared):
    """What the test before this one rests on."""
    serving = shared(SCATTERING, 11)
    inside.around_moves(inside.coordinator(serving.cache).compactor, lambda _: lambda g, sources, targets: None)
    scatter(serving)
    with pytest.raises(AssertionError):
        serving.run()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_bytes_are_moved_before_anything_else_is_written_there(shared, store: str, seed: int):
    """On a simulated device a forward, a move and a copy run when their streams get to it, unless something orders
    them: whatever is not ordered is a missing edge, even if the bytes came out right."""
    device = SimulatedDevice(seed)
    serving = shared(SCATTERING, 11, host=40, store=store, copy_engine=device.engine)
    serving.canary = CanaryEngine(serving.cache, device=device)
    scatter(serving)
    serving.run()
    assert serving.cache.core.coordinator.compactor.num_moved > 0
    assert len(serving.finished) == 9
    assert device.missing_edges == []


def test_a_hit_whose_blocks_are_moved_while_its_request_is_admitted(shared):
    """The prefix lies in the slab that is emptied to make room for the rest of the same request."""
    serving = shared(SCATTERING, 13)
    coordinator, head, hit, moved = serving.cache.core.coordinator, prompt(50, 8), [], []
    make_clean = coordinator.room.make_clean

    def watched(need: np.ndarray, match: Match | None = None) -> bool:
        hit[:] = [] if match is None else match.of_group(A)[0].tolist()
        return make_clean(need, match)

    coordinator.room.make_clean = watched
    inside.around_moves(
        coordinator.compactor,
        lambda move: lambda g, *ids: (moved.append((g, ids[0].tolist(), [*hit])), move(g, *ids)),
    )
    serving.add("head", [*head, 1], 6)
    for k in range(6):
        serving.add(str(k), prompt(k, 3), 6)
    serving.step()
    for name in ("head", "0", "3"):  # each of the three slabs has an idle block, and that of the prefix has no other
        serving.scheduler.finish(name)
    serving.step()
    serving.step()
    serving.add("long", head + prompt(9, 3))
    serving.step()
    assert [(g, blocks) for g, blocks, _ in moved] == [(A, hit_then) for _, _, hit_then in moved] != []
    serving.run()
    assert sum(serving.finished["long"].cached_tokens.values()) == 8
