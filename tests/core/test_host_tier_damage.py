"""``HostTier``: damaged fragments, refused blocks, and loads that were given up or are overdue."""

from __future__ import annotations

import inside
import numpy as np
import pytest

from core.outside import BLOCKS, GROUPS, ROW, Outside, chain
from kvtier import (
    Fragment,
    FullAttention,
    HostTier,
    OutsideGroup,
)
from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.pools.block_pool import Place
from kvtier.testing import Faults


def test_without_verification_a_flipped_bit_is_not_seen_which_shows_that_the_check_can_fail():
    wrong = 0
    for verify in ("off", "full"):
        engine = Outside(3, Faults(corrupt=1.0), verify=verify)
        engine.serve(list(range(40)))
        engine.serve(list(range(40)))
        wrong += engine.wrong
        assert (engine.wrong > 0) == (verify == "off")
    assert wrong


@pytest.mark.parametrize("fragment", [0, 1])
def test_a_damaged_fragment_takes_its_block_out_and_no_other(fragment):
    engine = Outside()
    engine.serve(list(range(40)))
    keys = np.ascontiguousarray(chain(list(range(40)))[1::2])  # of the full group's blocks
    of = np.zeros(len(keys), np.int32)
    hosts = inside.tier_pools(engine.tier).find(of, keys)
    assert (hosts > 0).all()
    layout = inside.tier_arena(engine.tier).layout
    inside.tier_arena(engine.tier).bytes[layout.origins[0] + hosts[4] * layout.strides[0] + fragment * ROW + 5] ^= 1
    assert engine.serve(list(range(40))) == 0, "the load has failed, and all was computed"
    assert engine.wrong == 0
    assert engine.tier.stats().transfers.corrupt_blocks == 1
    found = inside.tier_pools(engine.tier).find(of, keys)
    assert (found == hosts).tolist() == [k != 4 for k in range(len(keys))]
    assert found[4] > 0, "it was stored again, in another block"


def test_all_fragments_of_a_refused_block_are_wiped_and_no_other_block():
    engine, text = Outside(), list(range(40))
    engine.serve(text)
    hosts = inside.tier_pools(engine.tier).find(np.zeros(5, np.int32), np.ascontiguousarray(chain(text)[1:11:2]))
    layout = inside.tier_arena(engine.tier).layout
    at = int(layout.origins[0] + hosts[4] * layout.strides[0])  # its first fragment of two
    inside.blow_up(inside.tier_arena(engine.tier).bytes[at : at + ROW])
    engine.memory[:] = 0x55
    seq = engine.begin(text)
    blocks = dict(seq.tables)
    while seq.ticket is not None:
        engine.poll([seq])
    wiped = [(layer, b) for layer in range(6) for b in range(BLOCKS) if not engine.row(layer, b).any()]
    assert wiped == [(0, blocks[0][4]), (5, blocks[0][4])]
    engine.leave(seq)
    engine.check()


def test_what_a_load_has_left_that_was_given_up_is_wiped_before_its_blocks_are_free():
    engine, text = Outside(deadline_s=8.0), list(range(40))
    engine.serve(text)
    engine.memory[:] = 0x55
    inside.use_faults(engine.engines[0], Faults(lose=1.0))
    seq = engine.begin(text)
    while seq.ticket is not None:
        engine.poll([seq])
    [held] = engine.lent.values()
    mine = {(layer, b) for g, blocks in held for b in blocks for layer in GROUPS[engine.groups[g].name][2]}
    assert all(engine.row(*place).any() for place in mine)
    engine.engines[0].end_lost()
    engine.poll([])
    assert engine.lent == {}
    assert sum(not engine.row(*place).any() for place in mine) > 20, "every fragment of the hit"
    engine.leave(seq)
    engine.check()


class ByHand(CopyEngine):
    """Copies end when the test says so, on the test's clock."""

    def __init__(self, memory):
        super().__init__(memory)
        self.ended, self.time_s = [], 0.0

    def submit(self, transfer):
        self.memory.copy(transfer)

    def poll(self):
        ended, self.ended = self.ended, []
        return ended

    def order_after(self, tickets, timeout_s):
        return True

    def wait(self, timeout_s):
        return bool(self.ended)

    def wake(self): ...

    def now(self):
        return self.time_s

    def close(self, timeout_s):
        return True


@pytest.mark.parametrize("resets", [False, True])
def test_a_block_that_two_overdue_loads_read_is_in_use_again_when_both_have_ended(resets):
    groups, engines = [OutsideGroup("full", FullAttention(), 4, 16, (Fragment(0, 64, 64),))], []
    make = lambda memory: engines.append(ByHand(memory)) or engines[0]  # noqa: E731
    tier = HostTier(groups, np.zeros(1024, np.uint8), "4KiB", deadline_s=5.0, copy_engine=make)
    keys = chain(list(range(16)), 4)
    writer = tier.text(keys)
    writer.computed([np.arange(4, dtype=np.int32)], 16, is_end=True)
    tier.poll()
    engines[0].ended = [Outcome(1)]
    tier.poll()
    texts = [tier.text(keys) for _ in range(2)]
    for k, text in enumerate(texts):
        hosts = text.match(0, 17).hosts
        text.load(np.arange(4 + 4 * k, 8 + 4 * k, dtype=np.int32))
    engines[0].time_s = 6.0
    assert set(tier.poll().failed) == {2, 3}
    pools = inside.tier_pools(tier)
    out = []
    for outcome in (Outcome(2, "a checksum is wrong", np.array([0]), corrupt=True), Outcome(3, "too late")):
        if resets:
            tier.reset()
        engines[0].ended = [outcome]
        tier.poll()
        assert tier.audit() == []
        places = pools.arrays.place[pools.entries(np.zeros(4, np.int32), hosts)]
        out.append((places == Place.QUARANTINED).tolist())
    assert out[0] == [True] * 4, "the other load may still read them"
    assert out[1] == [not resets, False, False, False], "the first one's bytes have changed, until a reset"
    tier.reset()
    assert tier.audit() == []
    assert tier.stats().host["full"].quarantined == 0
