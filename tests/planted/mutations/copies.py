"""Transfers: what is pinned, published, counted, verified; what an end means; what is stored."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "stores_are_cut_as_if_each_were_the_first",
        "R9",
        "all but the first of many stores are of one block each",
        "core/cpu_offload/stores_in_flight",
        ("StoreQueue.parts", "before + self.most_a_transfer", "self.most_a_transfer"),
    ),
    mutation(
        "margin_without_slabs_that_nobody_has",
        "I21",
        "lazy stores copy from the first block on, although most of the device is unused",
        "core/cpu_offload/store_policy",
        (
            "launder",
            "margin - self._pools.column(Col.EMPTY) - self._pools.unused",
            "margin - self._pools.column(Col.EMPTY)",
        ),
    ),
    mutation(
        "wait_sleeps_beside_stores_that_it_saw_refused",
        "I30",
        "an engine sleeps though stores have just ended badly",
        "core/coordinator/waiting",
        ("Connector.wait", "self.ledger.num_settled == settled", "True"),
    ),
    mutation(
        "abort_drops_the_pin_of_a_load_too_early",
        "I2 I17 I18",
        "blocks that a load still writes are free once its request is aborted",
        "field/e_endings_and_failures core/cpu_offload/connector",
        ("Connector.load", "self._pools.acquire(groups, blocks)", "pass"),
        ("Ends.load", "self._pools.release(t.groups, t.device)", "pass"),
        ("Ends.late", "self._pools.release(t.groups, t.device)", "pass"),
    ),
    mutation(
        "missed_unpin_of_matched_host_blocks",
        "I2 I12 I27",
        "an admission that finds no clean blocks keeps the host blocks it matched for ever",
        "core/cpu_offload/connector field/a_tiers",
        ("let_go", "self.connector.unpin_host(loads.groups, loads.hosts)", "pass"),
    ),
    mutation(
        "missed_unpin_of_a_hit_that_is_not_admitted",
        "I2 I4 I27",
        "an admission that finds no clean blocks keeps the device blocks it hit for ever",
        "core/cpu_offload/connector field/a_tiers field/a_groups",
        ("let_go", "self.pools.release(*hit)", "pass"),
    ),
    mutation(
        "hit_not_pinned_while_room_is_made",
        "I12",
        "host blocks of a match are evicted by the stores that its own admission starts",
        "regressions/g_matched_host_blocks_stay field/c_stream_order",
        ("pin_host", "self._host.acquire(groups, hosts)", "self._host.acquire(groups[:0], hosts[:0])"),
        ("unpin_host", "self._host.release(groups, hosts)", "self._host.release(groups[:0], hosts[:0])"),
    ),
    mutation(
        "failed_store_published",
        "I13 I20",
        "a host block is found whose bytes never arrived",
        "core/cpu_offload/connector",
        ("Ends.store", "self._host.unpublish", "self._host.make_ready"),
    ),
    mutation(
        "failed_load_is_tried_again",
        "I20",
        "a request reads a source that has failed it again and again",
        "field/e_endings_and_failures core/cpu_offload/connector",
        ("_settle_loads", "seq.use_host = False", "seq.use_host = True"),
    ),
    mutation(
        "deadline_never_passes",
        "I18 I19",
        "a copy that never ends is waited for for ever",
        "core/cpu_offload/connector",
        (
            "Ledger.submit",
            "now + self.deadline_s",
            "max(t.deadline_s, now + self.deadline_s)",
        ),
        hangs=True,
    ),
    mutation(
        "overdue_load_is_not_quarantined",
        "I1 I17",
        "blocks that a late load may still write are not marked as such",
        "core/cpu_offload/connector",
        ("Ends.give_up", "self._pools.quarantine", "self._pools.unpublish"),
    ),
    mutation(
        "stores_go_on_while_stores_hang",
        "I8 I19",
        "each store behind one that hangs takes a deadline, and its blocks out of circulation",
        "core/cpu_offload/stores_in_flight",
        ("stores_hang", "self._last_overdue > self._last_ended", "False"),
    ),
    mutation(
        "refused_stores_are_planned_again",
        "I19",
        "schedule never returns while the copy engine refuses stores",
        "core/cpu_offload/store_policy",
        ("_submit", "self._refuses |= transfer.direction is Direction.STORE", "pass"),
        hangs=True,
    ),
    mutation(
        "refused_store_becomes_overdue",
        "I18",
        "schedule raises what no transfer may do",
        "core/cpu_offload/stores_in_flight",
        ("_order_after", "transfer.state is not TransferState.IN_FLIGHT", "transfer.state is TransferState.PLANNED"),
    ),
    mutation(
        "reset_without_epoch",
        "I13",
        "what was under way at a reset is published when it ends",
        "core/cpu_offload/connector",
        ("Connector.reset", "self.ledger.epoch += 1", "self.ledger.epoch += 0"),
    ),
    mutation(
        "device_hit_does_not_refresh_the_host_copy",
        "I21",
        "the host evicts what is hit on the device most often",
        "field/f_hits core/cpu_offload/store_policy",
        (
            "touch",
            """
            self._host.acquire(groups[found], hosts[found])
            self._host.release(groups[found], hosts[found], cold)
            """,
            "pass",
        ),
    ),
    mutation(
        "lazy_store_skipped_at_eviction",
        "I21",
        "blocks are evicted without a copy in the host tier",
        "core/cpu_offload/store_policy",
        ("make_clean", "self._stores.launder(self.pools, *evicted)", "0"),
    ),
    mutation(
        "checksum_taken_from_the_copy",
        "I29",
        "a store that damages its bytes blesses them",
        "core/cpu_offload/engines/engines core/cpu_offload/verify",
        (
            "_store",
            """
            checksum_blocks(self._device.bytes.view(np.uint64), src, sizes, sums)
            self.note_sums(t, sums)
            """,
            """
            copy_blocks(self._host.bytes, dst, self._device.bytes, src, sizes)
            checksum_blocks(self._host.bytes.view(np.uint64), dst, sizes, sums)
            self.note_sums(t, sums)
            return _NONE
            """,
        ),
    ),
    mutation(
        "corrupt_block_not_quarantined",
        "I20 I29",
        "memory that changes what it holds is used again",
        "core/cpu_offload/verify core/cpu_offload/connector",
        ("_take_out", "self._host.quarantine(t.groups[bad], t.host[bad])", "pass"),
    ),
    mutation(
        "refused_loads_leave_their_bytes",
        "I20",
        "whoever gets the blocks next reads NaN in slots that it masks",
        "core/cpu_offload/refused_loads core/testing/faulty",
        ("_has_ended", "self._engine.wipe(t.groups[bad], t.device[bad])", "pass"),
    ),
    mutation(
        "refused_loads_are_wiped_after_their_end_is_told",
        "I20",
        "blocks are handed out before they are zeros",
        "core/cpu_offload/refused_loads",
        (
            "Wiper.poll",
            """
            outcomes = (*left, *ended)
            return [outcome for outcome in outcomes if self._has_ended(find(outcome.ticket), outcome)]
            """,
            """
            for outcome, t in left:
                self._has_ended(t, outcome)
            ended = self._engine.poll()
            self._left = [(outcome, find(outcome.ticket)) for outcome in ended]
            return ended
            """,
        ),
    ),
    mutation(
        "blocks_that_cannot_be_wiped_are_handed_out",
        "I20",
        "a device that fails to take zeros keeps what was refused",
        "core/cpu_offload/refused_loads",
        ("_has_ended", "return False", "return True"),
    ),
    mutation(
        "a_load_that_broke_while_it_began_is_not_wiped",
        "I20",
        "an engine that copies at once has written some of it",
        "core/cpu_offload/refused_loads",
        ("Wiper.submit", "outcome if self._has_ended(t, outcome) else None", "outcome"),
    ),
    mutation(
        "wiped_fragments_are_those_of_the_block_before",
        "I20",
        "another block of the engine's own memory is zeros, and the refused one is not",
        "core/host_tier_damage",
        ("FragmentEngine.wipe", "blocks + 1", "blocks"),
    ),
    mutation(
        "host_ids_out_of_range",
        "I22",
        "a copy may name the block after a pool's last, which is the next group's null block",
        "core/cpu_offload/engines/engines",
        ("_spans", "blocks >= arena.rows[groups]", "blocks > arena.rows[groups]"),
    ),
    mutation(
        "copy_lands_a_block_early",
        "I29",
        "bytes of the block before are copied",
        "core/cpu_offload/engines/engines",
        ("_spans", "blocks * arena.strides[groups]", "(blocks - 1) * arena.strides[groups]"),
    ),
)
