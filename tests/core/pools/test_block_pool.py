"""The block pools against a model of dictionaries and lists; what becomes of the blocks that rows give up or name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.pools.blocks import GROUPS, INT32, USABLE, arr, key_of
from kvtier import SlidingWindow
from kvtier.geometry.layout import Layout
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.gpu_pool.row_state import Publish, RowCol
from kvtier.pools.block_pool import BlockPools, Col, Mark, Place
from kvtier.testing import canary_spec


class Model(RuleBasedStateMachine):
    """Every operation in its precondition; after each, all that can be read is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = BlockPools(Layout.fixed([64] * len(USABLE), USABLE))
        self.place = {(g, b): "EMPTY" for g in range(GROUPS) for b in range(1, USABLE[g] + 1)}
        self.refs = dict.fromkeys(self.place, 0)
        self.key: dict[tuple[int, int], int] = {}
        self.ready: dict[tuple[int, int], bool] = {}
        self.fences: dict[tuple[int, int], int] = {}
        self.empty = {g: list(range(1, USABLE[g] + 1)) for g in range(GROUPS)}  # next to go out first
        self.cached: dict[int, list[int]] = {g: [] for g in range(GROUPS)}  # coldest first
        self.cold: set[tuple[int, int]] = set()  # blocks that were released, or whose store ended, as superseded
        self.evicted = [0] * GROUPS
        self.peak = [0] * GROUPS
        self.ticket = 0

    # --- the model's own moves --------------------------------------------------------------------

    def _blocks(self, *places: str) -> list[tuple[int, int]]:
        return [x for x in self.place if self.place[x] in places]

    def _leave_lists(self, g: int, b: int) -> None:
        if b in self.empty[g]:
            self.empty[g].remove(b)
        if b in self.cached[g]:
            self.cached[g].remove(b)

    def _to_empty(self, g: int, b: int) -> None:
        self._leave_lists(g, b)
        self.place[g, b] = "EMPTY"
        self.empty[g].insert(0, b)
        if len(self.empty[g]) == USABLE[g]:
            self.empty[g].sort()  # a pool without content goes out from its beginning

    def _forget(self, g: int, b: int) -> None:
        if self.key.pop((g, b), None) is not None:
            self.ready.pop((g, b))
            if self.place[g, b] == "CACHED":
                self._to_empty(g, b)

    def _free(self, g: int, b: int, cold: bool = False) -> None:
        self.cold.discard((g, b))
        if cold:
            self.cold.add((g, b))
        if self.place[g, b] == "QUARANTINED":
            return
        if self.fences.get((g, b), 0) < 0:
            self._forget(g, b)
            self.place[g, b] = "QUARANTINED"
        elif (g, b) in self.fences:
            self.place[g, b] = "FENCED"
        elif (g, b) in self.key:
            self.place[g, b] = "CACHED"
            self.cached[g].insert(0 if cold else len(self.cached[g]), b)
        else:
            self._to_empty(g, b)

    def _restore(self, g: int, b: int) -> None:
        if self.place[g, b] == "QUARANTINED" and self.refs[g, b]:
            self.place[g, b] = "HELD"
        elif self.place[g, b] == "QUARANTINED":
            self._to_empty(g, b)

    def _note_peak(self) -> None:
        for g in range(GROUPS):
            held = sum(self.place[g, b] in ("HELD", "QUARANTINED") for b in range(1, USABLE[g] + 1))
            self.peak[g] = max(self.peak[g], held)

    # --- rules ------------------------------------------------------------------------------------

    @rule(g=st.integers(0, GROUPS - 1))
    def take(self, g: int) -> None:
        if not self.empty[g] and not self.cached[g]:
            with pytest.raises(AssertionError):
                self.pools.take(arr(g))
            return
        b = self.empty[g].pop(0) if self.empty[g] else self.cached[g].pop(0)
        if (g, b) in self.key:
            self.key.pop((g, b))
            self.ready.pop((g, b))
            self.evicted[g] += 1
        self.place[g, b], self.refs[g, b] = "HELD", 1
        self._note_peak()
        assert self.pools.take(arr(g)).tolist() == [b]

    @precondition(lambda self: self._blocks("HELD", "CACHED", "FENCED"))
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        g, b = data.draw(st.sampled_from(self._blocks("HELD", "CACHED", "FENCED")))
        self._leave_lists(g, b)
        self.place[g, b] = "HELD"
        self.refs[g, b] += 1
        self.pools.acquire(arr(g), arr(b))

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data(), times=st.integers(1, 2), cold=st.booleans())
    def release(self, data: st.DataObject, times: int, cold: bool) -> None:
        g, b = data.draw(st.sampled_from([x for x in self.refs if self.refs[x]]))
        times = min(times, self.refs[g, b])
        self.refs[g, b] -= times
        if not self.refs[g, b]:
            self._free(g, b, cold)
        self.pools.release(arr(*[g] * times), arr(*[b] * times), cold)

    @rule(g=st.integers(0, GROUPS - 1), b=st.integers(0, 5))
    def release_of_what_nobody_holds_is_an_error(self, g: int, b: int) -> None:
        if b <= USABLE[g] and self.refs.get((g, b), 0) == 0:
            with pytest.raises(AssertionError):
                self.pools.release(arr(g), arr(b))

    @precondition(lambda self: [x for x in self._blocks("HELD") if x not in self.key])
    @rule(data=st.data(), n=st.integers(0, 9), ready=st.booleans())
    def publish(self, data: st.DataObject, n: int, ready: bool) -> None:
        g, b = data.draw(st.sampled_from([x for x in self._blocks("HELD") if x not in self.key]))
        if any(k == n and x[0] == g for x, k in self.key.items()):
            return
        self.key[g, b], self.ready[g, b] = n, ready
        self.pools.publish(arr(g), arr(b), key_of(n), Mark.READY if ready else Mark.PENDING)

    @precondition(lambda self: self.key)
    @rule(data=st.data())
    def make_ready(self, data: st.DataObject) -> None:
        g, b = data.draw(st.sampled_from(list(self.key)))
        self.ready[g, b] = True
        self.pools.make_ready(arr(g), arr(b))

    @rule(g=st.integers(0, GROUPS - 1), b=st.integers(1, 5))
    def unpublish(self, g: int, b: int) -> None:
        if b <= USABLE[g]:
            self._forget(g, b)
            self.pools.unpublish(arr(g), arr(b))

    @precondition(lambda self: [x for x in self.key if x not in self.fences and self.place[x] != "QUARANTINED"])
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        free = [x for x in self.key if x not in self.fences and self.place[x] != "QUARANTINED"]
        g, b = data.draw(st.sampled_from(free))
        self.ticket += 1
        self.fences[g, b] = self.ticket
        if self.place[g, b] == "CACHED":
            self._leave_lists(g, b)
            self.place[g, b] = "FENCED"
        self.pools.fence(arr(g), arr(b), self.ticket)

    @precondition(lambda self: self.fences)
    @rule(data=st.data(), cold=st.booleans(), wrong=st.booleans())
    def unfence(self, data: st.DataObject, cold: bool, wrong: bool) -> None:
        g, b = data.draw(st.sampled_from(list(self.fences)))
        ticket = abs(self.fences[g, b])
        self.pools.unfence(arr(g), arr(b), ticket + 1000 if wrong else ticket, cold)
        if wrong:
            return
        del self.fences[g, b]
        if self.place[g, b] == "FENCED":
            self._free(g, b, cold or (g, b) in self.cold)
        else:
            self._restore(g, b)

    @precondition(lambda self: [x for x, t in self.fences.items() if t > 0])
    @rule(data=st.data())
    def expire_fence(self, data: st.DataObject) -> None:
        g, b = data.draw(st.sampled_from([x for x, t in self.fences.items() if t > 0]))
        ticket = self.fences[g, b]
        self.fences[g, b] = -ticket
        if self.place[g, b] == "FENCED":
            self._forget(g, b)
            self.place[g, b] = "QUARANTINED"
        self.pools.expire_fence(arr(g), arr(b), ticket)

    @precondition(lambda self: [x for x in self._blocks("HELD") if x not in self.fences])
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        g, b = data.draw(st.sampled_from([x for x in self._blocks("HELD") if x not in self.fences]))
        self._forget(g, b)
        self.place[g, b] = "QUARANTINED"
        self.pools.quarantine(arr(g), arr(b))

    @rule(g=st.integers(0, GROUPS - 1), b=st.integers(1, 5))
    def restore(self, g: int, b: int) -> None:
        if b > USABLE[g] or (g, b) in self.fences:
            return
        self._restore(g, b)
        self.pools.restore(arr(g), arr(b))

    @rule()
    def forget_all(self) -> None:
        for g, b in sorted(self.key):
            self._forget(g, b)
        self.pools.forget_all()

    # --- comparison -------------------------------------------------------------------------------

    @invariant()
    def all_that_can_be_read_agrees(self) -> None:
        a = self.pools.arrays
        for g, usable in enumerate(USABLE):
            base = int(a.meta[g, Col.BASE])
            assert a.place[base] == Place.NULL
            assert a.refs[base] == 0
            for b in range(1, usable + 1):
                i = base + b
                assert Place(a.place[i]).name == self.place[g, b]
                assert a.refs[i] == self.refs[g, b]
                assert a.fence[i] == self.fences.get((g, b), 0)
                mark = Mark.NONE if (g, b) not in self.key else Mark.READY if self.ready[g, b] else Mark.PENDING
                assert a.mark[i] == mark
            assert self.pools.empties(g) == self.empty[g]
            assert self.pools.coldest(g, 9).tolist() == self.cached[g]
            owner = {k: x[1] for x, k in self.key.items() if x[0] == g}
            for n in range(10):
                assert self.pools.find(arr(g), key_of(n)).tolist() == [owner.get(n, 0)]
            counts = [
                sum(self.place[g, b] == name for b in range(1, usable + 1))
                for name in ("EMPTY", "CACHED", "FENCED", "QUARANTINED")
            ]
            assert a.meta[g, [Col.EMPTY, Col.CACHED, Col.FENCED, Col.QUARANTINED]].tolist() == counts
            assert self.pools.usable[g] == usable == sum(counts) + self.pools.held[g]
            assert self.pools.clean[g] == counts[0] + counts[1]
            assert self.pools.free[g] == sum(counts[:3])
            assert a.meta[g, Col.EVICTED] == self.evicted[g]
            assert a.meta[g, Col.KEYED] == len(owner)


Model.TestCase.settings = settings(max_examples=80, stateful_step_count=50)
TestAgainstTheModel = Model.TestCase


def test_a_batch_that_names_a_block_twice_releases_it_twice():
    pools = BlockPools(Layout.fixed([64], [4]))
    b = int(pools.take(arr(0))[0])
    pools.acquire(arr(0), arr(b))
    pools.release(arr(0, 0), arr(b, b))
    assert pools.arrays.refs[b] == 0
    assert pools.held.tolist() == [0]
    assert sorted(pools.take(arr(0, 0, 0, 0)).tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(3))
def test_the_ring_keeps_its_order_however_many_hits_leave_holes(seed):
    """Against a list, through many sweeps: hits, releases to either end, evictions."""
    rng, n = np.random.default_rng(seed), 40
    pools, zero = BlockPools(Layout.fixed([64], [n])), arr(0)
    blocks = pools.take(np.zeros(n, INT32))
    pools.publish(np.zeros(n, INT32), blocks, np.concatenate([key_of(i) for i in range(n)]), Mark.READY)
    pools.release(np.zeros(n, INT32), blocks)
    order, names, sweeps = blocks[::-1].tolist(), n, 0
    for i in range(6000):
        busy = pools.arrays.meta[0, Col.SWEEP] >= 0
        if rng.random() < (0.2 if i // 500 % 2 else 0.01):  # evict the coldest, one or many, and name their blocks anew
            count = int(rng.integers(1, n + 1)) if busy and rng.random() < 0.3 else 1
            moved, order = order[:count], order[count:]
            taken = pools.take(np.zeros(count, INT32)).tolist()
            assert taken == (moved[::-1] if order else sorted(moved))  # an empty pool goes out from its beginning
            for b in moved:
                pools.publish(zero, arr(b), key_of(names := names + 1), Mark.READY)
        else:
            moved = [order.pop(int(rng.integers(len(order))))]
            pools.acquire(zero, arr(moved[0]))
        cold = bool(rng.random() < 0.3)
        for b in moved:
            if cold:
                pools.fence(zero, arr(b), i + 1)
            pools.release(zero, arr(b))
            if cold:
                pools.unfence(zero, arr(b), i + 1, cold=True)
            order.insert(0 if cold else len(order), b)
        assert pools.coldest(0, n).tolist() == order
        sweeps += busy and pools.arrays.meta[0, Col.SWEEP] < 0
    assert sweeps > 20


@pytest.mark.parametrize("seed", range(3))
def test_the_index_stays_sound_over_many_keys(seed):
    """Insertions and deletions at the index's highest load; every key leads to its block, and only to it.

    Looked at time and again: a key that a deletion has lost may be found again once the gap is filled.
    """
    rng, n = np.random.default_rng(seed), 255
    pools, live = BlockPools(Layout.fixed([64], [n])), {}
    blocks = pools.take(np.zeros(n, INT32))
    for i in range(3000):
        b = int(rng.choice(blocks))
        if b in live:
            pools.unpublish(arr(0), arr(b))
            del live[b]
        else:
            key = np.array([[rng.integers(0, 40), rng.integers(0, 2**63)]], np.uint64)
            pools.publish(arr(0), arr(b), key, Mark.READY)
            live[b] = key
        if i % 20 == 19:
            keys = np.concatenate(list(live.values()))
            assert pools.find(np.zeros(len(keys), INT32), keys).tolist() == list(live)
    gone = keys + np.uint64(1 << 20)
    assert not pools.find(np.zeros(len(keys), INT32), gone).any()


def test_the_highest_number_of_held_blocks_is_remembered():
    pools = BlockPools(Layout.fixed([64], [4]))
    blocks = pools.take(arr(0, 0))
    pools.publish(arr(0, 0), blocks, np.concatenate([key_of(1), key_of(2)]), Mark.READY)
    pools.release(arr(0, 0), blocks)
    assert pools.column(Col.PEAK_HELD).tolist() == [2]
    pools.take(arr(0, 0))
    pools.acquire(arr(0, 0), blocks)
    assert pools.held.tolist() == [4]
    assert pools.column(Col.PEAK_HELD).tolist() == [4], "blocks that a hit has brought back are held too"


@pytest.mark.parametrize("ticket", [1, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32, 3 * (2**31 - 1), 2**40 + 7])
def test_a_fence_stands_whatever_the_number_of_its_store(ticket):
    pools = BlockPools(Layout.fixed([64], [2]))
    blocks = pools.take(arr(0, 0))
    pools.publish(arr(0, 0), blocks, np.concatenate([key_of(1), key_of(2)]), Mark.READY)
    pools.fence(arr(0, 0), blocks, ticket)
    pools.release(arr(0, 0), blocks)
    assert [Place(p) for p in pools.arrays.place[1:]] == [Place.FENCED] * 2
    for other in (ticket - 1, ticket + 1):
        pools.unfence(arr(0, 0), blocks, other)
        pools.expire_fence(arr(0, 0), blocks, other)
    assert [Place(p) for p in pools.arrays.place[1:]] == [Place.FENCED] * 2
    pools.unfence(arr(0), blocks[:1], ticket)
    pools.expire_fence(arr(0), blocks[1:], ticket)
    assert [Place(pools.arrays.place[b]) for b in blocks] == [Place.CACHED, Place.QUARANTINED]
    pools.unfence(arr(0), blocks[1:], ticket)  # the late store has ended after all
    assert Place(pools.arrays.place[blocks[1]]) == Place.EMPTY


def test_a_key_that_another_block_carries_is_not_published_again():
    pools = BlockPools(Layout.fixed([64], [3]))
    blocks = pools.take(arr(0, 0))
    pools.publish(arr(0), blocks[:1], key_of(1), Mark.READY)
    with pytest.raises(AssertionError, match="another block"):
        pools.publish(arr(0), blocks[1:], key_of(1), Mark.PENDING)
    assert pools.find(arr(0), key_of(1)).tolist() == blocks[:1].tolist()
    assert pools.arrays.mark[blocks[1]] == Mark.NONE


# --- rows -----------------------------------------------------------------------------------------


def rows_of(num_rows: int, blocks: int) -> BlockTables:
    """Rows of one window group; a block is four tokens, and no token sees another block than its own."""
    spec = canary_spec({"win": (SlidingWindow(1), 4)})
    tables = BlockTables(spec, BlockPools(Layout.fixed([spec.groups[0].block_bytes], [blocks])), num_rows)
    tables.arrays.publish[:] = Publish.TOLD
    return tables


def hold(tables: BlockTables, r: int, n: int) -> np.ndarray:
    """Row r holds n blocks that nobody else has."""
    blocks = tables.pools.take(np.zeros(n, INT32))
    tables.set_row(r, np.zeros(1, np.int64), np.array([n]), blocks)
    return blocks


def test_each_block_of_a_run_that_a_row_gives_up_goes_where_it_belongs():
    """Nearly all have neither key nor fence nor another holder and become empty together; the others do not."""
    tables = rows_of(1, 8)
    pools, blocks = tables.pools, hold(tables, 0, 8)
    pools.publish(np.zeros(3, INT32), blocks[2:5], np.concatenate([key_of(n) for n in range(3)]), Mark.READY)
    for k, ticket in ((3, 1), (4, 2)):
        pools.fence(arr(0), blocks[k : k + 1], ticket)
    pools.unpublish(arr(0, 0), blocks[3:5])  # a reset
    pools.expire_fence(arr(0), blocks[4:5], 2)
    pools.acquire(arr(0), blocks[6:7])
    assert tables.release_before(0, 32) == 8
    places = ["EMPTY", "EMPTY", "CACHED", "FENCED", "QUARANTINED", "EMPTY", "HELD", "EMPTY"]
    assert [Place(p).name for p in pools.arrays.place[blocks]] == places
    assert tables.table(0)[0, :8].tolist() == [0] * 8
    pools.unfence(arr(0), blocks[3:4], 1)
    pools.unfence(arr(0), blocks[4:5], 2)
    pools.release(arr(0), blocks[6:7])
    assert [Place(p).name for p in pools.arrays.place[blocks]] == ["EMPTY"] * 2 + ["CACHED"] + ["EMPTY"] * 5
    assert sorted(pools.empties(0)) == sorted({*range(1, 9)} - {int(blocks[2])})


def test_a_row_that_names_what_another_has_named_takes_its_blocks_and_is_seen_to_have_changed():
    tables = rows_of(2, 8)
    first, second = hold(tables, 0, 3), hold(tables, 1, 3)
    keys = np.concatenate([key_of(n) for n in range(3)])
    before = tables.arrays.state[:, RowCol.VERSION].copy()
    tables.seal(0, 0, 0, 2, keys)
    tables.seal(1, 0, 0, 3, keys)
    assert tables.table(0)[:, :3].tolist() == [first.tolist(), [*first[:2], second[2]]]
    assert (tables.arrays.state[:, RowCol.VERSION] - before).tolist() == [0, 2]
    assert tables.sealed.take()[1].tolist() == [*first[:2], second[2]]
    assert tables.pools.arrays.refs[first].tolist() == [2, 2, 1]
    assert [Place(p).name for p in tables.pools.arrays.place[second]] == ["EMPTY", "EMPTY", "HELD"]


def test_a_block_that_is_held_again_after_its_quarantine_counts_in_the_peak():
    pools = BlockPools(Layout.fixed([64], [8]))
    first = pools.take(np.zeros(2, np.int32))
    pools.quarantine(np.zeros(2, np.int32), first)
    pools.take(np.zeros(2, np.int32))
    pools.restore(np.zeros(2, np.int32), first)
    assert pools.arrays.meta[0, Col.HELD] == pools.arrays.meta[0, Col.PEAK_HELD] == 4
