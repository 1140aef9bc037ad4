"""The seven edges: what is ordered after what (docs/ARCHITECTURE.md)."""

from __future__ import annotations

from ..mutation import mutation

MUTATIONS = (
    mutation(
        "edge_1_store_does_not_wait_for_the_forward",
        "I17",
        "a store reads its block before the forward has written it",
        "model/streams",
        (
            "_give",
            "runtime.wait(stream, mark)",
            """
            if copy.transfer.direction is Direction.LOAD:
                runtime.wait(stream, mark)
            """,
        ),
    ),
    mutation(
        "edge_2_load_does_not_wait_for_the_forward",
        "I17",
        "a load writes a block that a forward still reads",
        "model/streams",
        (
            "_give",
            "runtime.wait(stream, mark)",
            """
            if copy.transfer.direction is Direction.STORE:
                runtime.wait(stream, mark)
            """,
        ),
    ),
    mutation(
        "edges_1_and_2_the_compute_stream_is_marked_too_late",
        "I17 I8",
        "a store waits for forwards that were launched after it, and may wait for it",
        "model/streams",
        ("_give", "runtime.wait(stream, mark)", "runtime.wait(stream, runtime.record(runtime.compute_stream()))"),
    ),
    mutation(
        "edge_3_request_runs_before_its_load_was_seen_to_end",
        "I17 I13",
        "a forward reads what a load still writes",
        "core/cpu_offload/connector model/streams",
        ("_settle_loads", "not self._connector.ledger.is_live(seq.ticket)", "True"),
    ),
    mutation(
        "edge_4_a_store_that_its_stream_has_not_been_given_yet_is_not_waited_for",
        "I17",
        "the compute stream writes a block whose store is still in the submission queue",
        "model/streams",
        (
            "order_after",
            """
            if not self._is_given(copy, end_s - self._runtime.now()):
                return False
            """,
            """
            if not copy.is_given():
                continue
            """,
        ),
    ),
    mutation(
        "edge_4_the_wrong_stream_waits_for_the_store",
        "I17",
        "the next writer of a block is not ordered after the store that reads it",
        "model/streams",
        (
            "order_after",
            "self._runtime.wait(compute, copy.done)",
            "self._runtime.wait(self._streams[copy.transfer.direction], copy.done)",
        ),
    ),
    mutation(
        "edge_4_old_copies_are_not_waited_for",
        "I17",
        "a block whose store has taken long is handed out without any order",
        "model/streams model/what_checks_must_see",
        ("order_after", "not self._see(copy, end_s)", "self._see(copy, self._runtime.now()) is None"),
    ),
    mutation(
        "edge_4_fence_cleared_without_an_order",
        "I17",
        "a fenced block is handed out while its store reads it",
        "field/c_stream_order model/streams",
        ("_order_after", "self._engine.order_after([transfer.ticket], min(left_s, LONGEST_WAIT_S))", "left_s > 0.0"),
    ),
    mutation(
        "edge_4_threads_order_after_looks_at_queues_only",
        "I17",
        "a writer does not wait for the copy that a thread is making",
        "core/cpu_offload/engines/engines",
        (
            "order_after",
            "return self._unfinished.isdisjoint(tickets)",
            "return all(queue.empty() for queue in self._copies._queues.values())",
        ),
    ),
    mutation(
        "edge_4_threads_order_after_does_not_wait",
        "I17",
        "a writer does not wait for a store on the CPU",
        "core/cpu_offload/engines/engines",
        ("order_after", "return self._unfinished.isdisjoint(tickets)", "return True"),
    ),
    mutation(
        "edge_5_host_key_ready_before_its_store_has_ended",
        "I17 I13",
        "a load reads a host block that a store still writes",
        "core/cpu_offload/connector model/streams",
        (
            "take_for_stores",
            "publish(p, of[i], host[i], named[i, 0], named[i, 1], _PENDING)",
            "publish(p, of[i], host[i], named[i, 0], named[i, 1], _READY)",
        ),
    ),
    mutation(
        "edge_6_load_does_not_pin_its_host_blocks",
        "I17 I2",
        "a store writes a host block that a load still reads",
        "regressions/g_matched_host_blocks_stay core/cpu_offload/connector",
        ("Connector.load", "self._host.acquire(groups, hosts)", "pass"),
        (
            "Ends.load",
            """
            self._host.release(t.groups[~superseded], t.host[~superseded])
            self._host.release(t.groups[superseded], t.host[superseded], cold=True)
            """,
            "pass",
        ),
        (
            "Ends.late",
            "self._host.release(t.groups, t.host)",
            """
            if t.direction is Direction.STORE:
                self._host.release(t.groups, t.host)
            """,
        ),
    ),
    mutation(
        "edge_7_store_lets_go_of_its_host_blocks_when_planned",
        "I17 I2",
        "two stores write one host block",
        "core/cpu_offload/connector core/cpu_offload/stores_in_flight core/cpu_offload/store_policy",
        (
            "Connector.store",
            "self._device.fence(on, device, transfer.ticket)",
            """
            self._device.fence(on, device, transfer.ticket)
            self._host.release(transfer.groups, transfer.host)
            """,
        ),
        ("Ends.store", "self._host.release(t.groups, t.host, cold=t.superseded is not None)", "pass"),
        ("Ends.cancel", "self._host.release(t.groups, t.host)", "pass"),
        (
            "Ends.late",
            "self._host.release(t.groups, t.host)",
            """
            if t.direction is Direction.LOAD:
                self._host.release(t.groups, t.host)
            """,
        ),
    ),
)
