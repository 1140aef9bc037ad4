"""The mutations as data: plausible mistakes that import, run, and are wrong. ``python -m tests.planted`` plants them.

``tests`` are the modules that are most likely to see the mistake, in the order in which they are run; what they do not
see is run against the rest of the core suite. A mistake that takes more than one edit has the others in ``also``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CONNECTOR = "kvtier/cpu_offload/connector.py"
STREAMS = "kvtier/cpu_offload/engines/streams.py"
THREADS = "kvtier/cpu_offload/engines/threads.py"
MEMORY = "kvtier/cpu_offload/tier_memory.py"
COORDINATOR = "kvtier/coordinator/coordinator.py"
SCHEDULER = "kvtier/coordinator/scheduler.py"
ADMISSION = "kvtier/coordinator/admission.py"
INBOX = "kvtier/coordinator/inbox.py"
ROSTER = "kvtier/coordinator/roster.py"
MATCH = "kvtier/coordinator/match.py"
PLAN = "kvtier/coordinator/plan.py"
STEP = "kvtier/coordinator/step.py"
TABLE = "kvtier/gpu_pool/block_table.py"
LOOPS = "kvtier/gpu_pool/pool_loops.py"
POOL = "kvtier/gpu_pool/block_pool.py"
KEYS = "kvtier/keys.py"
SPEC = "kvtier/spec.py"
SIZING = "kvtier/sizing.py"
CACHE = "kvtier/cache.py"


@dataclass(frozen=True)
class Mutation:
    """``old`` and the first part of each pair in ``also`` occur exactly once in ``file``."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    invariants: str
    tests: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = field(default=())
    hangs: bool = False
    """Whether the mistake may show as a test that never ends."""

    def apply(self, source: str) -> str:
        """``source`` with the mistake."""
        for old, new in ((self.old, self.new), *self.also):
            if source.count(old) != 1:
                raise ValueError(f"{self.name}: occurs {source.count(old)} times in {self.file}: {old!r}")
            source = source.replace(old, new)
        return source


def _core(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/core/test_{name}.py" for name in names)


def _regressions(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/regressions/test_{name}.py" for name in names)


def _field(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/field/test_{name}.py" for name in names)


_STREAM_TESTS = ("tests/model/test_streams.py",)

_ORDER = (
    Mutation(
        "edge_1_store_does_not_wait_for_the_forward",
        STREAMS,
        "runtime.wait(stream, runtime.record(runtime.compute_stream()))  # edges 1 and 2",
        "if transfer.direction is Direction.LOAD:\n"
        "            runtime.wait(stream, runtime.record(runtime.compute_stream()))",
        "a store reads its block before the forward has written it",
        "I17",
        _STREAM_TESTS,
    ),
    Mutation(
        "edge_2_load_does_not_wait_for_the_forward",
        STREAMS,
        "runtime.wait(stream, runtime.record(runtime.compute_stream()))  # edges 1 and 2",
        "if transfer.direction is Direction.STORE:\n"
        "            runtime.wait(stream, runtime.record(runtime.compute_stream()))",
        "a load writes a block that a forward still reads",
        "I17",
        _STREAM_TESTS,
    ),
    Mutation(
        "edge_3_request_runs_before_its_load_was_seen_to_end",
        SCHEDULER,
        "elif not self._connector.is_live(seq.ticket):",
        "else:",
        "a forward reads what a load still writes",
        "I17 I13",
        (*_core("connector"), *_STREAM_TESTS),
    ),
    Mutation(
        "edge_4_the_wrong_stream_waits_for_the_store",
        STREAMS,
        "self._runtime.wait(compute, copy.done)  # edge 4",
        "self._runtime.wait(self._streams[copy.transfer.direction], copy.done)",
        "the next writer of a block is not ordered after the store that reads it",
        "I17",
        _STREAM_TESTS,
    ),
    Mutation(
        "edge_4_old_copies_are_not_waited_for",
        STREAMS,
        "elif not self._see(copy.done, end_s):",
        "elif self._see(copy.done, self._runtime.now()) is None:",
        "a block whose store has taken long is handed out without any order",
        "I17",
        (*_STREAM_TESTS, "tests/model/test_what_checks_must_see.py"),
    ),
    Mutation(
        "edge_4_the_compute_stream_trusts_copies_that_hang",
        STREAMS,
        "self._runtime.now() - copy.begun_s < YOUNG_S",
        "self._runtime.now() - copy.begun_s < 1e9",
        "a copy that never ends stops the compute stream for ever",
        "I8",
        ("tests/model/test_what_checks_must_see.py",),
    ),
    Mutation(
        "edge_4_fence_cleared_without_an_order",
        CONNECTOR,
        "return self._engine.order_after([transfer.ticket], min(left_s, LONGEST_WAIT_S))",
        "return left_s > 0.0",
        "a fenced block is handed out while its store reads it",
        "I17",
        (*_field("c_stream_order"), *_STREAM_TESTS),
    ),
    Mutation(
        "edge_4_threads_order_after_looks_at_queues_only",
        THREADS,
        "lambda: self._unfinished.isdisjoint(tickets), timeout_s)",
        "lambda: not any(self._queues.values()), timeout_s)",
        "a writer does not wait for the copy that a thread is making",
        "I17",
        _core("engines"),
    ),
    Mutation(
        "edge_4_threads_order_after_does_not_wait",
        THREADS,
        "return self._changed.wait_for(lambda: self._unfinished.isdisjoint(tickets), timeout_s)",
        "return True",
        "a writer does not wait for a store on the CPU",
        "I17",
        _core("engines"),
    ),
    Mutation(
        "edge_5_host_key_ready_before_its_store_has_ended",
        CONNECTOR,
        "self._host.publish(groups, hosts, keys, Mark.PENDING)",
        "self._host.publish(groups, hosts, keys, Mark.READY)",
        "a load reads a host block that a store still writes",
        "I17 I13",
        (*_core("connector"), *_STREAM_TESTS),
    ),
    Mutation(
        "edge_6_load_does_not_pin_its_host_blocks",
        CONNECTOR,
        "self._host.acquire(groups, hosts)\n        self._device.acquire(groups, blocks)",
        "self._device.acquire(groups, blocks)",
        "a store writes a host block that a load still reads",
        "I17 I2",
        (*_regressions("g_matched_host_blocks_stay"), *_core("connector")),
        also=(
            (
                "self._device.release(t.groups, t.device)\n        self._host.release(t.groups, t.host)\n",
                "self._device.release(t.groups, t.device)\n",
            ),
            (
                "self._host.release(t.groups, t.host)\n        self._host.restore(t.groups[good], t.host[good])\n",
                "if t.direction is Direction.STORE:\n"
                "            self._host.release(t.groups, t.host)\n"
                "        self._host.restore(t.groups[good], t.host[good])\n",
            ),
        ),
    ),
    Mutation(
        "edge_7_store_lets_go_of_its_host_blocks_when_planned",
        CONNECTOR,
        "transfer = self._new(Direction.STORE, groups, blocks, hosts, keys, cold)",
        "self._host.release(groups, hosts)\n"
        "        transfer = self._new(Direction.STORE, groups, blocks, hosts, keys, cold)",
        "two stores write one host block",
        "I17 I2",
        _core("connector", "stores"),
        also=(
            ("self._host.release(t.groups, t.host)\n        self._device.unfence", "self._device.unfence"),
            (
                "self._host.release(t.groups, t.host)\n        self._host.restore(t.groups[good], t.host[good])\n",
                "if t.direction is Direction.LOAD:\n"
                "            self._host.release(t.groups, t.host)\n"
                "        self._host.restore(t.groups[good], t.host[good])\n",
            ),
            (
                "self._host.release(transfer.groups, transfer.host)\n            self._settle(transfer)",
                "self._settle(transfer)",
            ),
        ),
    ),
)

_TRANSFERS = (
    Mutation(
        "abort_drops_the_pin_of_a_load_too_early",
        CONNECTOR,
        "self._host.acquire(groups, hosts)\n        self._device.acquire(groups, blocks)",
        "self._host.acquire(groups, hosts)",
        "blocks that a load still writes are free once its request is aborted",
        "I2 I17 I18",
        (*_field("e_endings_and_failures"), *_core("connector")),
        also=(
            (
                "self._device.release(t.groups, t.device)\n        self._host.release(t.groups, t.host)\n",
                "self._host.release(t.groups, t.host)\n",
            ),
            ("self._device.release(t.groups, t.device)\n            self._device.restore", "self._device.restore"),
        ),
    ),
    Mutation(
        "missed_unpin_of_matched_host_blocks",
        COORDINATOR,
        "self.connector.unpin_host(loads.groups, loads.hosts)",
        "if ready:\n            self.connector.unpin_host(loads.groups, loads.hosts)",
        "an admission that finds no clean blocks keeps the host blocks it matched for ever",
        "I2 I12 I27",
        (*_core("connector"), *_field("a_accounting")),
    ),
    Mutation(
        "missed_unpin_of_a_hit_that_is_not_admitted",
        COORDINATOR,
        "        else:\n            self.pools.release(*hit)\n",
        "",
        "an admission that finds no clean blocks keeps the device blocks it hit for ever",
        "I2 I4 I27",
        (*_core("connector"), *_field("a_accounting")),
    ),
    Mutation(
        "hit_not_pinned_while_room_is_made",
        COORDINATOR,
        "self.connector.pin_host(loads.groups, loads.hosts)",
        "self.connector.pin_host(loads.groups[:0], loads.hosts[:0])",
        "host blocks of a match are evicted by the stores that its own admission starts",
        "I12",
        (*_regressions("g_matched_host_blocks_stay"), *_field("c_stream_order")),
        also=(
            (
                "self.connector.unpin_host(loads.groups, loads.hosts)",
                "self.connector.unpin_host(loads.groups[:0], loads.hosts[:0])",
            ),
        ),
    ),
    Mutation(
        "match_from_before_a_row_was_freed",
        ADMISSION,
        "                self._preempt(self._givers(seq, entries)[0])\n                continue",
        "                self._preempt(self._givers(seq, entries)[0])\n                return match",
        "host blocks of a match are evicted by the stores of the request that gives up its row",
        "I12",
        _regressions("g_matched_host_blocks_stay"),
    ),
    Mutation(
        "failed_store_published",
        CONNECTOR,
        "self._host.unpublish(t.groups[~good], t.host[~good])\n        self._host.release(t.groups, t.host)\n"
        "        self._device.unfence",
        "self._host.make_ready(t.groups[~good], t.host[~good])\n        self._host.release(t.groups, t.host)\n"
        "        self._device.unfence",
        "a host block is found whose bytes never arrived",
        "I13 I20",
        _core("connector"),
    ),
    Mutation(
        "failed_load_published",
        CONNECTOR,
        "self._device.unpublish(t.groups[~good], t.device[~good])",
        "self._device.make_ready(t.groups[~good], t.device[~good])",
        "a device block is found whose bytes never arrived",
        "I13 I20",
        _core("connector"),
    ),
    Mutation(
        "failed_load_is_tried_again",
        SCHEDULER,
        "seq.use_host = False",
        "seq.use_host = True",
        "a request reads a source that has failed it again and again",
        "I20",
        (*_field("e_endings_and_failures"), *_core("connector")),
    ),
    Mutation(
        "deadline_never_passes",
        CONNECTOR,
        "transfer.deadline_s = self._engine.now() + self._deadline_s",
        "transfer.deadline_s = max(transfer.deadline_s, self._engine.now() + self._deadline_s)",
        "a copy that never ends is waited for for ever",
        "I18 I19",
        _core("connector"),
        hangs=True,
    ),
    Mutation(
        "overdue_load_is_not_quarantined",
        CONNECTOR,
        "self._device.quarantine(t.groups, t.device)",
        "self._device.unpublish(t.groups, t.device)",
        "blocks that a late load may still write are not marked as such",
        "I1 I17",
        _core("connector"),
    ),
    Mutation(
        "overdue_store_keeps_its_share_of_the_bound",
        CONNECTOR,
        "self._device.expire_fence(t.groups, t.device, t.ticket)\n            self._store_bytes -= t.num_bytes",
        "self._device.expire_fence(t.groups, t.device, t.ticket)",
        "stores that hang use up the bytes in flight, and no store is ever submitted again",
        "I8 I19",
        _core("connector"),
    ),
    Mutation(
        "reset_without_epoch",
        CONNECTOR,
        "self.epoch += 1",
        "self.epoch += 0",
        "what was under way at a reset is published when it ends",
        "I13",
        _core("connector"),
    ),
    Mutation(
        "reset_lets_running_rows_publish",
        COORDINATOR,
        "self.tables.arrays.publish[:] = 0",
        "self.tables.arrays.publish[:] = 1",
        "what runs across a reset is found afterwards",
        "I13",
        _core("lifecycle", "connector"),
    ),
    Mutation(
        "last_host_block_is_never_used",
        CONNECTOR,
        "(np.cumsum(of_group) <= room[g])",
        "(np.cumsum(of_group) < room[g])",
        "a store is dropped though the host has a block for it",
        "I22",
        _core("stores", "connector"),
    ),
    Mutation(
        "device_hit_does_not_refresh_the_host_copy",
        CONNECTOR,
        "        self._host.acquire(groups[there], hosts[there])\n"
        "        self._host.release(groups[there], hosts[there])\n",
        "",
        "the host evicts what is hit on the device most often",
        "I21",
        (*_field("f_hits"), *_core("stores")),
    ),
    Mutation(
        "lazy_store_skipped_at_eviction",
        COORDINATOR,
        "planned[g] = self.connector.launder(g, int(evicted))",
        "planned[g] = 0",
        "blocks are evicted without a copy in the host tier",
        "I21",
        _core("stores"),
    ),
    Mutation(
        "stores_submitted_without_bound",
        CONNECTOR,
        "while self._planned and self._store_bytes < STORE_BYTES_IN_FLIGHT:",
        "while self._planned:",
        "a burst of stores fills the link",
        "I17",
        _core("connector"),
    ),
)

_BYTES = (
    Mutation(
        "checksum_taken_from_the_copy",
        MEMORY,
        "            checksum_blocks(self._device.bytes.view(np.uint64), src, sizes, sums)\n"
        "            self._sums[self._first_sum[t.groups] + t.host] = sums\n"
        "        copy_blocks(self._host.bytes, dst, self._device.bytes, src, sizes)\n",
        "            copy_blocks(self._host.bytes, dst, self._device.bytes, src, sizes)\n"
        "            checksum_blocks(self._host.bytes.view(np.uint64), dst, sizes, sums)\n"
        "            self._sums[self._first_sum[t.groups] + t.host] = sums\n"
        "            return _NONE\n"
        "        copy_blocks(self._host.bytes, dst, self._device.bytes, src, sizes)\n",
        "a store that damages its bytes blesses them",
        "I29",
        _core("engines", "verify"),
    ),
    Mutation(
        "checksum_not_checked",
        MEMORY,
        "return np.flatnonzero(found != self._sums[self._first_sum[t.groups] + t.host])",
        "return np.flatnonzero(found == 0)",
        "bytes that have changed in the host tier are used",
        "I29",
        _core("engines", "verify"),
    ),
    Mutation(
        "checksums_of_all_groups_in_one_place",
        MEMORY,
        "self._first_sum = np.concatenate([[0], np.cumsum(host.rows)])[:-1]",
        "self._first_sum = np.zeros(len(host.rows), np.int64)",
        "blocks of two groups with one id share a checksum",
        "I29",
        _core("engines", "verify"),
    ),
    Mutation(
        "corrupt_block_not_quarantined",
        CONNECTOR,
        "self._host.quarantine(t.groups[bad], t.host[bad])\n        self._corrupt.append",
        "self._corrupt.append",
        "memory that changes what it holds is used again",
        "I20 I29",
        _core("verify", "connector"),
    ),
    Mutation(
        "host_ids_out_of_range",
        MEMORY,
        "(blocks >= arena.rows[groups])",
        "(blocks > arena.rows[groups])",
        "a copy may name the block after a pool's last, which is the next group's null block",
        "I22",
        _core("engines"),
    ),
    Mutation(
        "copy_lands_a_block_early",
        MEMORY,
        "return arena.origins[groups] + blocks * sizes, sizes",
        "return arena.origins[groups] + (blocks - 1) * sizes, sizes",
        "bytes of the block before are copied",
        "I29",
        _core("engines"),
    ),
    Mutation(
        "null_block_not_paid_for",
        SIZING,
        "return sum((_blocks_for(group, tokens) + 1) * group.block_bytes for group in spec.groups)",
        "return sum(_blocks_for(group, tokens) * group.block_bytes for group in spec.groups)",
        "a tier takes more bytes than it was given",
        "I22",
        _core("sizing"),
    ),
)

_HITS = (
    Mutation(
        "min_instead_of_intersection",
        MATCH,
        "n, limiter, settled = (j * bt) // unit * unit, g, False",
        "n, limiter = (j * bt) // unit * unit, g",
        "a boundary that one group lowers is not checked again in the others",
        "I11",
        _core("match"),
    ),
    Mutation(
        "hit_covers_the_whole_prompt",
        MATCH,
        "bound = (num_tokens - 1) // unit * unit",
        "bound = num_tokens // unit * unit",
        "nothing is left to compute, so there are no logits",
        "I11",
        (*_core("match"), *_regressions("d_block_multiples")),
    ),
    Mutation(
        "pending_counts_as_ready",
        MATCH,
        "        return b, c, 1\n    if c != 0",
        "        return b, c, 0\n    if c != 0",
        "a block that a load still writes is hit",
        "I13 I17",
        (*_regressions("g_matched_host_blocks_stay"), *_core("connector")),
    ),
    Mutation(
        "window_off_by_one",
        TABLE,
        "first = max(np.int64(0), position - span + 1)",
        "first = max(np.int64(0), position - span + 2)",
        "the oldest token that a window sees is given up",
        "I11 I15",
        (*_core("step"), *_regressions("f_stale_block_ids")),
    ),
    Mutation(
        "window_keeps_a_block_too_many",
        TABLE,
        "first = max(np.int64(0), position - span + 1)",
        "first = max(np.int64(0), position - span)",
        "a window holds a block that nobody sees, beyond what admission counted",
        "I6 I15",
        (*_core("match"), *_field("f_hits")),
    ),
    Mutation(
        "chunk_border_belongs_to_the_chunk_before",
        TABLE,
        "first = position - position % span",
        "first = max(np.int64(0), position - 1) // span * span",
        "the first token of a chunk sees the chunk before",
        "I11 I15",
        (*_core("match"), *_field("f_hits")),
    ),
    Mutation(
        "anchor_at_the_very_end_only",
        COORDINATOR,
        "sorted({computed // unit * unit, max(0, computed - 1) // unit * unit})",
        "[computed // unit * unit]",
        "the same prompt again does not hit where its last token needs it",
        "I11",
        _core("anchors", "match"),
    ),
    Mutation(
        "anchor_off_by_one_at_a_branch",
        COORDINATOR,
        "if t.computed[row] < b <= end]",
        "if t.computed[row] < b < end]",
        "no anchor where two prompts part at the end of a chunk of prompt",
        "I11",
        (*_core("anchors"), *_regressions("e_identical_prompts")),
    ),
    Mutation(
        "anchor_released_before_it_is_sealed",
        PLAN,
        "release_before(p, t, r, (end - 1) // hit_tokens * hit_tokens)",
        "release_before(p, t, r, end)",
        "window blocks of the last boundary are gone when the request ends",
        "I11",
        _core("anchors", "match"),
    ),
    Mutation(
        "twins_run_together",
        COORDINATOR,
        "if not t.publish[other.row]:",
        "if t.publish[other.row]:",
        "identical prompts are computed side by side",
        "I11",
        _regressions("e_identical_prompts"),
    ),
    Mutation(
        "cached_tokens_of_the_wrong_tier",
        COORDINATOR,
        'seq.cached_tokens = {"device": seq.hit[0], "host": seq.hit[1]}',
        'seq.cached_tokens = {"device": seq.hit[1], "host": seq.hit[0]}',
        "hits are reported for the other tier",
        "I25",
        _core("stats"),
    ),
    Mutation(
        "cached_tokens_of_the_last_admission",
        COORDINATOR,
        "if seq.cached_tokens is None:",
        "if seq.state is State.RUNNING:",
        "a resumed request's own blocks are reported as a hit",
        "I25",
        _core("stats"),
    ),
)

_NAMES = (
    Mutation(
        "key_without_salt",
        KEYS,
        '("salt", salt), ',
        "",
        "tenants share content",
        "I14",
        _core("keys"),
    ),
    Mutation(
        "key_without_adapter",
        KEYS,
        '("adapter", adapter), ',
        "",
        "adapters share content",
        "I14",
        _core("keys"),
    ),
    Mutation(
        "key_without_group_geometry",
        KEYS,
        '("geometry", geometry), ',
        "",
        "caches of different geometry share keys",
        "I14",
        _core("keys"),
    ),
    Mutation(
        "key_fields_without_lengths",
        KEYS,
        'out += len(part).to_bytes(8, "little") + part',
        "out += part",
        "two contexts encode alike",
        "I14",
        (*_field("h_keys"), *_core("keys")),
    ),
    Mutation(
        "key_compared_in_part",
        LOOPS,
        "if p.key[2 * (base + b)] == lo and p.key[2 * (base + b) + 1] == hi:",
        "if p.key[2 * (base + b)] == lo:",
        "half of a key is enough for a hit",
        "I14 I21",
        (*_field("h_keys"), *_core("block_pool")),
    ),
    Mutation(
        "chunk_named_before_it_is_computed",
        COORDINATOR,
        "parts.append(self.tables.seal(row, g, first, end // group.block_tokens, seq.keys))",
        "stop = min(int(t.total[row]) // group.block_tokens, int(t.hi[g, row]))\n"
        "                    parts.append(self.tables.seal(row, g, first, stop, seq.keys))",
        "a block is published that the chunk has not filled",
        "I13",
        (*_regressions("d_block_multiples"), *_core("cache", "scheduler")),
    ),
    Mutation(
        "sampled_token_published_before_its_forward",
        PLAN,
        "            t.total[r] += 1\n            if _is_eos(t, r, tokens[k]):",
        "            t.total[r] += 1\n"
        "            t.computed[r] += t.total[r] >= t.limit[r]\n"
        "            if _is_eos(t, r, tokens[k]):",
        "the last sampled token counts as computed, so its block is published with a slot that nobody wrote",
        "I13",
        (*_regressions("d_block_multiples"), *_field("c_stream_order")),
    ),
    Mutation(
        "tail_of_the_key_chain_off_by_one",
        PLAN,
        "t.tail[r, (end - 1) % unit] = t.last[r]",
        "t.tail[r, end % unit] = t.last[r]",
        "blocks that decodes fill are named after other tokens",
        "I14",
        _core("match", "anchors"),
    ),
)

_POOLS = (
    Mutation(
        "double_free_goes_unnoticed",
        LOOPS,
        "if p.refs[i] <= 0 or b == 0:",
        "if p.refs[i] < 0 or b == 0:",
        "a block that nobody holds is released once more",
        "I3",
        (*_field("a_accounting"), *_core("block_pool")),
    ),
    Mutation(
        "free_list_push_without_counter",
        LOOPS,
        "p.place[base + b] = _EMPTY\n    p.meta[g, _N_EMPTY] += 1\n",
        "p.place[base + b] = _EMPTY\n",
        "blocks leave the count of free ones for ever",
        "I1",
        _core("block_pool"),
    ),
    Mutation(
        "lru_order_reversed",
        LOOPS,
        "_link_after(p, base, 0 if cold else p.prev[base], b)",
        "_link_after(p, base, p.prev[base] if cold else 0, b)",
        "the newest content is evicted first",
        "I21",
        _core("block_pool"),
    ),
    Mutation(
        "prefix_evicted_from_its_beginning",
        TABLE,
        "for j in range(t.hi[g, r] - 1, t.lo[g, r] - 1, -1):",
        "for j in range(t.lo[g, r], t.hi[g, r]):",
        "an evicted first block makes the rest of the prefix useless",
        "I21",
        _core("match"),
    ),
    Mutation(
        "unfence_without_ticket_check",
        LOOPS,
        "if p.fence[i] != ticket and p.fence[i] != -ticket:",
        "if p.fence[i] == 0:",
        "an old store's end clears a newer store's fence",
        "I17 I18",
        _core("block_pool", "connector"),
    ),
    Mutation(
        "index_deletion_leaves_a_gap",
        LOOPS,
        "if ((slot - home) & mask) >= ((slot - hole) & mask):",
        "if ((slot - home) & mask) > ((slot - hole) & mask):",
        "keys behind a deleted one are not found any more",
        "I21",
        _core("block_pool"),
    ),
    Mutation(
        "fenced_blocks_count_as_clean",
        POOL,
        "return self.arrays.meta[:, Col.EMPTY] + self.arrays.meta[:, Col.CACHED]",
        "return self.arrays.meta[:, [Col.EMPTY, Col.CACHED, Col.FENCED]].sum(axis=1)",
        "blocks that a store reads are counted on without an order",
        "I4 I17",
        _core("block_pool", "stores"),
    ),
    Mutation(
        "row_not_cleared",
        TABLE,
        "            t.table[at + j] = 0\n        t.lo[g, r] = 0",
        "        t.lo[g, r] = 0",
        "the tail of a reused row names blocks of its last occupant",
        "I15",
        _regressions("f_stale_block_ids"),
    ),
    Mutation(
        "window_block_not_nulled",
        TABLE,
        "            t.table[at + j] = 0\n            released += 1",
        "            released += 1",
        "a row names blocks that have left its window",
        "I15",
        _regressions("f_stale_block_ids"),
    ),
    Mutation(
        "late_twin_merged_without_a_reference",
        TABLE,
        "        acquire(p, g, twin)\n        release(p, g, own)",
        "        release(p, g, own)",
        "a row uses a block that it does not hold",
        "I2",
        (*_field("a_accounting"), *_regressions("e_identical_prompts")),
    ),
)

_SCHEDULING = (
    Mutation(
        "admission_checks_the_first_group_only",
        ADMISSION,
        "if np.all(need <= have):\n                seq.short_at = None",
        "if need[0] <= have[0]:\n                seq.short_at = None",
        "a request begins that another group has no blocks for",
        "I4 I6",
        _regressions("b_all_groups_or_none"),
    ),
    Mutation(
        "step_checks_the_last_group_only",
        PLAN,
        "short |= lack[g] > 0",
        "short = lack[g] > 0",
        "a step is planned that a group has no blocks for, again and again",
        "I4 I5 I8",
        _regressions("b_all_groups_or_none"),
        hangs=True,
    ),
    Mutation(
        "nothing_is_promised",
        COORDINATOR,
        "total[g] += max(0, group.peak_blocks(int(t.total[row])) - held)",
        "total[g] += 0 * held",
        "two requests are admitted that do not fit together",
        "I4 I9 I10",
        _regressions("deadlocks"),
        hangs=True,
    ),
    Mutation(
        "a_loading_request_is_promised_nothing",
        COORDINATOR,
        "(t.phase == Phase.PREFILL) | (t.phase == Phase.LOADING)",
        "t.phase == Phase.PREFILL",
        "others take the blocks that a load's request will need",
        "I9",
        (*_field("d_deadlocks"), *_regressions("deadlocks")),
        hangs=True,
    ),
    Mutation(
        "window_bound_off_by_one",
        SPEC,
        "return min(whole, -(-(span + self.block_tokens - 1) // self.block_tokens))",
        "return min(whole, -(-span // self.block_tokens))",
        "a window that straddles blocks takes more than admission said",
        "I6",
        _core("spec"),
    ),
    Mutation(
        "count_instead_of_set_of_victims",
        PLAN,
        "gained[g] += p.refs[i] == 0 and p.fence[i] >= 0",
        "gained[g] += p.fence[i] >= 0",
        "a block that two victims share is counted twice",
        "I10",
        (*_regressions("deadlocks"), *_field("c_preemption")),
        hangs=True,
    ),
    Mutation(
        "blocks_of_an_overdue_store_count_as_freed",
        PLAN,
        "gained[g] += p.refs[i] == 0 and p.fence[i] >= 0",
        "gained[g] += p.refs[i] == 0",
        "requests are preempted for blocks that will be quarantined",
        "I10",
        _field("c_preemption"),
        also=(("lost[g] += p.refs[i] == 0 and p.fence[i] >= 0", "lost[g] += p.refs[i] == 0"),),
    ),
    Mutation(
        "the_oldest_of_the_younger_is_preempted",
        ROSTER,
        "return [other for other in reversed(self.running) if other.order > seq.order]",
        "return [other for other in self.running if other.order > seq.order]",
        "the longest waits are made longer",
        "I10",
        _core("scheduler"),
    ),
    Mutation(
        "the_oldest_is_preempted",
        SCHEDULER,
        "younger = self._roster.younger(seq)\n",
        "younger = [other for other in running if other is not seq]\n",
        "the first in service order gives way to a later one",
        "I8 I10",
        _core("scheduler"),
        hangs=True,
    ),
    Mutation(
        "preempted_before_it_has_run",
        SCHEDULER,
        "[s for s in younger if s.ran], np.maximum",
        "younger, np.maximum",
        "requests push each other out without computing a token",
        "I10",
        _core("scheduler"),
        hangs=True,
    ),
    Mutation(
        "prefills_leave_decodes_nothing",
        PLAN,
        "end = min(total, start + max(np.int64(1), left - later_decodes))",
        "end = min(total, start + max(np.int64(1), left))",
        "a long prompt keeps decodes from their token",
        "I8",
        _core("scheduler"),
    ),
    Mutation(
        "capacity_finish_missing",
        SCHEDULER,
        '        else:\n            self._finish(seq, "capacity")\n',
        "        else:\n            self._entries.placed[seq.row] = 1\n",
        "a request that has outgrown the pool alone waits for ever",
        "I7 I8",
        _core("scheduler"),
        hangs=True,
    ),
    Mutation(
        "capacity_finish_of_a_waiting_request_missing",
        ADMISSION,
        "if not victims and not self._roster.running and not self._connector.num_progressing:",
        "if not victims and not self._roster.waiting:",
        "a preempted request that no longer fits waits for ever",
        "I7 I8",
        _regressions("deadlocks"),
        hangs=True,
    ),
    Mutation(
        "has_work_forgets_transfers",
        SCHEDULER,
        "return len(self._inbox) > 0 or self._connector.num_progressing > 0 or self._step is not None",
        "return len(self._inbox) > 0 or self._step is not None",
        "an engine stops while stores are under way",
        "I30",
        _core("scheduler"),
    ),
    Mutation(
        "wake_up_lost_when_a_transfer_ends",
        CONNECTOR,
        "        del self._transfers[transfer.ticket]\n        self.num_settled += 1\n",
        "        del self._transfers[transfer.ticket]\n",
        "a request that waits for a transfer never looks again",
        "I30",
        _core("waiting", "connector"),
        hangs=True,
    ),
    Mutation(
        "wake_up_lost_when_a_transfer_is_overdue",
        CONNECTOR,
        "        self.counts.expired += 1\n        self.num_settled += 1\n",
        "        self.counts.expired += 1\n",
        "a request that waits for a transfer that hangs never looks again",
        "I19 I30",
        (*_field("d_deadlocks"), *_core("waiting")),
        hangs=True,
    ),
    Mutation(
        "wait_sleeps_over_a_load_that_has_landed",
        SCHEDULER,
        "if not self._inbox.has_mail and not news:",
        "if not self._inbox.has_mail:",
        "an engine sleeps although its request could run",
        "I30",
        _core("waiting"),
        hangs=True,
    ),
    Mutation(
        "late_ending_hits_the_next_request_of_the_name",
        INBOX,
        "                self._endings.pop(request_id, None)\n",
        "",
        "an abort that came too late ends another request, or nobody",
        "I5 I18",
        _core("lifecycle"),
    ),
    Mutation(
        "eos_ignored",
        PLAN,
        "for i in range(t.eos.shape[1]):",
        "for i in range(1, t.eos.shape[1]):",
        "a request's first EOS does not end it",
        "I24",
        _core("lifecycle"),
    ),
    Mutation(
        "limit_off_by_one",
        PLAN,
        "elif t.total[r] >= t.limit[r]:",
        "elif t.total[r] > t.limit[r]:",
        "a token more than was asked for",
        "I24",
        _core("lifecycle", "cache"),
    ),
    Mutation(
        "ended_request_keeps_its_sampled_token",
        SCHEDULER,
        "        tokens[np.isin(rows, ended_rows)] = -1  #",
        "        #",
        "what is sampled after an abort is part of the text",
        "I24",
        _core("lifecycle"),
    ),
    Mutation(
        "cancelled_step_is_kept",
        SCHEDULER,
        "        for row in step.rows:\n            self._preempt(self._roster.of_row(row))\n",
        "        for row in step.rows[1:]:\n            self._preempt(self._roster.of_row(row))\n",
        "the first request of a failed forward goes on where it was",
        "I10 I24",
        _core("lifecycle"),
    ),
)

_STEPS = (
    Mutation(
        "last_page_len_off_by_one",
        STEP,
        "last[e] = (b - 1) % bt + 1",
        "last[e] = b % bt",
        "a full last page has length 0",
        "I15",
        _core("step"),
    ),
    Mutation(
        "slot_mapping_off_by_one",
        STEP,
        "* bt + position % bt",
        "* bt + (position + 1) % bt",
        "KV is written one slot further",
        "I15 I16",
        _core("step"),
    ),
    Mutation(
        "positions_off_by_one",
        PLAN,
        "positions[at] = start\n",
        "positions[at] = start + 1\n",
        "decodes are computed at the position of the next token",
        "I24",
        (*_core("step"), *_regressions("f_stale_block_ids")),
    ),
    Mutation(
        "positions_forget_the_hit",
        PLAN,
        "positions[at + i] = start + i",
        "positions[at + i] = i",
        "a prompt that hits is computed at positions from 0 on",
        "I24",
        (*_core("step"), *_regressions("c_resume_computes_only_the_rest")),
    ),
    Mutation(
        "chunk_of_a_prompt_is_sampled",
        PLAN,
        "if end == t.total[r]:\n            sample[sampled] = k",
        "if end >= t.total[r] - 1:\n            sample[sampled] = k",
        "a token is sampled one before the end of the prompt",
        "I24",
        (*_core("step"), *_regressions("d_block_multiples")),
    ),
    Mutation(
        "virtual_batch_reaches_into_the_next_chunk",
        STEP,
        "return min(end, (start // span + 1) * span)",
        "return min(end, ((start + 1) // span + 1) * span)",
        "queries of two chunks come as one entry",
        "I15",
        _core("step"),
    ),
)

_NUMBERS = (
    Mutation(
        "stored_blocks_count_failed_ones",
        CONNECTOR,
        "self.counts.stored_blocks += int(good.sum())",
        "self.counts.stored_blocks += len(good)",
        "blocks that never arrived are counted as stored",
        "I25",
        _core("connector", "stats"),
    ),
    Mutation(
        "computed_tokens_count_hits",
        SCHEDULER,
        'self.prompt_tokens["computed"] += prompt - sum(seq.cached_tokens.values())',
        'self.prompt_tokens["computed"] += prompt',
        "prompt tokens by source do not add up",
        "I25",
        _core("stats"),
    ),
    Mutation(
        "eviction_not_counted",
        LOOPS,
        "        p.meta[g, _N_EVICTED] += 1\n",
        "        p.meta[g, _N_EVICTED] += 0\n",
        "a counter stays at 0",
        "I25",
        _core("stats"),
    ),
    Mutation(
        "close_leaves_threads",
        CACHE,
        "if self._connector.close(CLOSE_TIMEOUT_S):",
        "if self._connector.num_live == 0:",
        "the copy engine's threads outlive the cache",
        "I28",
        _core("cache"),
    ),
    Mutation(
        "close_keeps_the_memory",
        CACHE,
        "            if self._host_arena is not None:\n                self._host_arena.free()\n",
        "",
        "a closed cache keeps its host tier's memory",
        "I28",
        _core("cache"),
    ),
)

_MEMORY = (
    Mutation(
        "memory_is_freed_under_a_copy_that_has_not_ended",
        CACHE,
        "_STILL_WRITTEN.append(memory)",
        "del memory",
        "a copy that goes on after its cache is gone writes memory that belongs to others",
        "I28",
        ("tests/model/test_what_checks_must_see.py",),
    ),
    Mutation(
        "held_blocks_are_not_counted_when_taken_back",
        LOOPS,
        "p.meta[g, _N_HELD] -= p.place[i] == _HELD\n        _to_free",
        "_to_free",
        "the count of held blocks only grows",
        "I1",
        _core("block_pool"),
    ),
)

MUTATIONS = (
    *_ORDER,
    *_MEMORY,
    *_TRANSFERS,
    *_BYTES,
    *_HITS,
    *_NAMES,
    *_POOLS,
    *_SCHEDULING,
    *_STEPS,
    *_NUMBERS,
)
