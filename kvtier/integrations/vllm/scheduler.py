"""The scheduler's side: what the host tier has of a request, and what each step copies.

Owns       the books of the host tier, and a ``TrackedRequest`` for each request that vLLM has asked about.
Promises   no store holds a device block: a step that writes to its source is ordered after it. The blocks that a load
           writes to are held until the load has really ended, even if it was given up. The keys of a load that failed
           or is late are misses before the step's output has been dealt with.
Does not   touch bytes: ``WorkerSide`` does. It decides nothing about vLLM's own blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.integrations.vllm.behind import gauges_of
from kvtier.integrations.vllm.events import BlockEvents
from kvtier.integrations.vllm.follow import Int64s, TrackedRequest
from kvtier.integrations.vllm.messages import StepOrders, WorkerReport
from kvtier.machine.errors import StepError

if TYPE_CHECKING:
    from kvtier.host_tier.plan import HostPlan
    from kvtier.host_tier.text import BlocksOf
    from kvtier.integrations.vllm.behind import RemoteSide
    from kvtier.integrations.vllm.geometry import Geometry
    from kvtier.integrations.vllm.settings import Settings


LOOK_S = 1.0
"""Time between two steps of an idle engine that has given up a load."""

PENDING_WAIT_S = 1.0
"""A request waits so long for stores that are still writing its hit; then it does without."""

TEXT_BLOCKS = 16
"""Generated blocks are stored so many at a time, and the last ones with the text's end: a plan costs as much for one
block as for many."""

NEVER = 2**40
"""No text has so many tokens."""

Ids = npt.NDArray[np.int32]


class SchedulerSide:
    """``workers``: vLLM's ranks, which share these books.

    ``zeroes_first``: they zero and copy blocks before the connector hears of a step, as vLLM's model runner V2 does.
    ``counts_nans``: vLLM counts the NaNs in logits.
    """

    def __init__(
        self,
        plan: HostPlan,
        geometry: Geometry,
        settings: Settings,
        workers: int,
        zeroes_first: bool = False,
        with_events: bool = False,
        counts_nans: bool = False,
    ) -> None:
        from kvtier.host_tier.scheduler import HostTierScheduler

        self.books = HostTierScheduler(plan, settings.deadline_s, workers)
        self._geometry = geometry
        self._stores = settings.store == "eager"
        self._pool: Any = None
        self._zeroes_first = zeroes_first
        self._states = geometry.states
        self._unit = self.books.hit_tokens if self._states else min(group.block_tokens for group in geometry.groups)
        self._followed: dict[str, TrackedRequest] = {}
        self._counts_nans = counts_nans
        self._left: list[TrackedRequest] = []  # have ended in the last step: vLLM counts its NaNs only after that
        self._loads: dict[int, str] = {}  # by ticket, its request: not sent to the workers yet
        self._held: dict[int, list[Any]] = {}  # by ticket, vLLM's blocks that a load writes to
        self._written: list[tuple[int, Sequence[int]]] = []  # (group, blocks) that the next step writes
        self._void: set[int] = set()  # loads that a reset has outdated: not told to the workers yet
        self._targets: list[tuple[Ids, Ids]] = []  # (groups, blocks) that its loads write
        self._placed: set[str] = set()  # requests that were given their blocks since the last step
        self._events: BlockEvents | None = None
        if with_events:
            tokens = [group.block_tokens for group in geometry.groups]
            self._events = BlockEvents(self.books, tokens, geometry.hashes_per_key)
        self._waits = {"waits_for_stores": 0, "waits_given_up": 0}
        self._behind: RemoteSide | None = None
        self._clock = time.monotonic
        self._look_s = 0.0
        self._told = dict[str, int]()  # counters, as they were given out last

    def bind(self, pool: Any) -> None:
        """vLLM's ``BlockPool``."""
        self._pool = pool

    def use_remote(self, behind: RemoteSide) -> None:
        """Puts a remote tier."""
        self._behind = behind
        self._waits["waits_for_remote"] = 0

    # --- a request arrives ------------------------------------------------------------------------

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond ``computed`` that a load would bring, and whether there are any.

        The number is None while stores still write some of them, or while the remote tier may bring more.
        """
        if self._left:
            self._disown_wrong()
        follow = self._follow(request)
        follow.local, follow.asked = computed, request.num_tokens
        if getattr(request, "skip_reading_prefix_cache", False):  # vLLM would throw the answer away
            return 0, False
        behind = self._behind
        text = follow.text()
        hit = text.match(computed, request.num_tokens, ask_remote=behind is not None)
        if hit.is_sought or (behind is not None and behind.is_opening()):
            self._waits["waits_for_remote"] += 1
            return None, False
        if not hit.is_pending:
            follow.asked_s, follow.from_remote = None, hit.from_remote
            if self._states and text.next_parting > max(hit.end, getattr(request, "shared_prefix_boundary", NEVER)):
                request.shared_prefix_boundary = text.next_parting  # vLLM ends a step there, and keeps the state
            return hit.num_tokens, hit.num_tokens > 0
        now = self._clock()
        follow.asked_s = now if follow.asked_s is None else follow.asked_s
        waits = now - follow.asked_s < PENDING_WAIT_S
        self._waits["waits_for_stores" if waits else "waits_given_up"] += 1
        return (None if waits else 0), False

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], num_tokens: int) -> None:
        """vLLM has given it its ``blocks``, by group; the host tier brings ``num_tokens`` tokens of them."""
        follow = self._follow(request)
        if request.num_computed_tokens == 0:
            there = follow.local + num_tokens
            first = [there // group.block_tokens for group in self._geometry.groups]
            follow.end = follow.told = follow.due = 0
        else:  # a load has ended, and more blocks have come
            first = [len(table) for table in follow.tables]
        self._placed.add(request.request_id)
        self._written += [(g, ids[n:]) for g, (ids, n) in enumerate(zip(blocks, first, strict=True)) if len(ids) > n]
        follow.place(blocks)
        if num_tokens:
            self._load(follow, num_tokens)
        else:
            follow.drop_hit()

    def follow(self, request_id: str) -> TrackedRequest:
        """What is known of a request that has asked."""
        return self._followed[request_id]

    def _follow(self, request: Any) -> TrackedRequest:
        if request.request_id not in self._followed:
            self._followed[request.request_id] = TrackedRequest(self.books, request, self._geometry.hashes_per_key)
            if self._events is not None and self._behind is not None:
                self._events.name(request.block_hashes)  # of what the remote may say that it has
        return self._followed[request.request_id]

    def _load(self, follow: TrackedRequest, num_tokens: int) -> None:
        text = follow.text()
        hit = text.held
        if hit is None or hit.num_tokens != num_tokens:
            raise StepError(f"vLLM loads {num_tokens} tokens, other than it was offered: {hit and hit.num_tokens}")
        targets = follow.blocks(hit.groups, hit.at)
        held = list(map(self._pool.blocks.__getitem__, targets.tolist()))
        ticket = text.load(targets)
        self._targets.append((hit.groups, targets))
        self._pool.touch(held)
        self._loads[ticket], self._held[ticket] = follow.request.request_id, held

    # --- a step -----------------------------------------------------------------------------------

    def plan(self, output: Any) -> StepOrders:
        """The copies of the step that vLLM has scheduled (``SchedulerOutput``)."""
        self._look_s = self._clock() + LOOK_S
        if self._counts_nans:
            self._disown_wrong()
        if self._behind is not None:
            self._behind.step_begins(output)
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None and request_id not in cached.resumed_req_ids:
                self._grow(self._followed[request_id], blocks)
        self._order_writers(output)
        is_idle = output.total_num_scheduled_tokens == 0
        step = StepOrders(self.books.take_orders(), self._loads, frozenset(self._void), is_idle)
        self._loads, self._void = {}, set()
        self._placed.clear()
        if self._stores:
            if self._states:
                self._keep_states(output)
            for new in output.scheduled_new_reqs:
                before = new.num_computed_tokens
                self._advance(self._followed[new.req_id], before, before + output.num_scheduled_tokens[new.req_id])
            followed, scheduled = self._followed, output.num_scheduled_tokens
            for request_id, before in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                follow = followed[request_id]
                follow.end = end = before + scheduled[request_id]
                if end >= follow.due:
                    self._advance(follow, before, end)
        return step

    def _preempted(self, request_id: str) -> None:
        """Its blocks may be others' in this very step; until then they hold what it has computed."""
        follow = self._followed.get(request_id)
        if follow is None or request_id in self._placed:  # after a reset it is back at once
            return
        if not self._states:
            self._tell(follow, self._there(follow, follow.end), follow.end, is_end=True)
        follow.leave_device()

    def _there(self, follow: TrackedRequest, computed: int) -> BlocksOf:
        """Its blocks. vLLM has taken out what token ``computed`` does not see: other requests may have it."""
        gone = [group.attention.first_visible(computed) // group.block_tokens for group in self._geometry.groups]

        def blocks_of(g: int, at: Int64s) -> Ids:
            blocks = follow.blocks_of(g, at)
            blocks[at < gone[g]] = -1
            return blocks

        return blocks_of

    def _grow(self, follow: TrackedRequest, blocks: Sequence[Sequence[int]]) -> None:
        for g, (table, ids) in enumerate(zip(follow.tables, blocks, strict=True)):
            if ids:
                table.append(ids)
                self._written.append((g, ids))

    # --- states -----------------------------------------------------------------------------------

    def _keep_states(self, output: Any) -> None:
        """Stores the states that the step leaves, and with each what a hit there needs besides.

        Only vLLM knows these blocks, and only in this step: a table's entries behind or ahead of a state hold other
        states, or none. Those of requests that have ended or give way in this step may be others' already. What comes
        after a text's last state is stored for nothing: no hit can end there.
        """
        told = getattr(output, "kv_connector_block_state", None)
        for request_id, offers in (told.boundary_state_offloads if told is not None else {}).items():
            follow, is_gone = self._followed.get(request_id), request_id in (output.preempted_req_ids or ())
            if follow is None or is_gone or request_id in output.finished_req_ids:
                continue
            states: dict[int, dict[int, int]] = {}
            for g, block, boundary in offers:
                if block > 0 and boundary % self._unit == 0:
                    states.setdefault(boundary, {})[g] = block
            for boundary in sorted(states):
                self._keep_state(follow, boundary, states[boundary])

    def _keep_state(self, follow: TrackedRequest, boundary: int, blocks: Mapping[int, int]) -> None:
        """Stores the state at a boundary, in these blocks by group, if hits are to be expected there: where prompts
        part, at a prompt's end, and beyond."""
        is_end = boundary >= self._last_boundary(follow)
        if is_end and boundary <= follow.last_state:
            return
        if is_end:
            follow.last_state = boundary
        elif boundary == getattr(follow.request, "shared_prefix_boundary", 0):
            follow.text().part(boundary)
        there = self._there(follow, boundary - 1)

        def blocks_of(g: int, at: Int64s) -> Ids:
            if g not in self._states:
                return there(g, at)
            return np.where(at == boundary // self._unit - 1, blocks.get(g, -1), -1).astype(np.int32)

        self._tell(follow, blocks_of, boundary + is_end, is_end)

    def _pass_state(self, follow: TrackedRequest, end: int) -> None:
        """The step computes tokens up to ``end``. If it passes the prompt's last boundary, where no state was left, the
        device had one: what the host tier has of the prompt was used."""
        last = self._last_boundary(follow)
        follow.due = last + 1 if end <= last else NEVER
        if follow.last_state < last < end:
            self._keep_state(follow, last, {})

    def _last_boundary(self, follow: TrackedRequest) -> int:
        """Where the same prompt would hit, which leaves a token to compute."""
        return int((follow.request.num_prompt_tokens - 1) // self._unit * self._unit)

    # --- order ------------------------------------------------------------------------------------

    def _order_writers(self, output: Any) -> None:
        """What the step writes to comes after the stores that read there.

        With ``zeroes_first`` vLLM has zeroed blocks, made copies and begun new states before anybody is asked.
        """
        copies = [copy[-1] for copy in getattr(output, "kv_cache_block_copies", None) or ()]
        if self._zeroes_first:
            begun = chain.from_iterable(ids for g, ids in self._written if g in self._states)
            self.written_again([*(output.new_block_ids_to_zero or ()), *copies, *(b for b in begun if b > 0)])
        elif copies:
            self._written += [(g, copies) for g in range(len(self._geometry.groups))]
        if self._written or self._targets:
            counts = [len(ids) for _, ids in self._written]
            groups = np.repeat(np.array([g for g, _ in self._written], np.int32), counts)
            blocks = np.fromiter(chain.from_iterable(ids for _, ids in self._written), np.int32, sum(counts))
            parts = [(groups[blocks > 0], blocks[blocks > 0]), *self._targets]
            self._written.clear()
            self._targets.clear()
            self.books.overwrite(*map(np.concatenate, zip(*parts, strict=True)))

    def _advance(self, follow: TrackedRequest, before: int, end: int) -> None:
        """The step computes its tokens from ``before`` to ``end``."""
        if self._states:
            self._pass_state(follow, end)
            return
        follow.end, prompt = end, follow.request.num_prompt_tokens
        is_prompt_end = follow.told < prompt <= end
        text_tokens = TEXT_BLOCKS * self._unit
        unit = self._unit if end <= follow.asked else text_tokens
        if end // unit > follow.told // unit or is_prompt_end:
            self._tell(follow, self._there(follow, before), end, is_prompt_end)
        follow.due = (follow.told // text_tokens + 1) * text_tokens if end >= max(prompt, follow.asked) else 0

    def _tell(self, follow: TrackedRequest, blocks_of: BlocksOf, end: int, is_end: bool) -> None:
        if self._stores and end > 0 and not follow.is_wrong:
            if self._events is not None:
                self._events.name(*follow.hashes_since(follow.told))
            follow.told = end
            follow.text().computed_by(blocks_of, end, is_end)

    # --- ends -------------------------------------------------------------------------------------

    def take_note(self, report: WorkerReport | None) -> None:
        """What workers have seen end; copies that are late by now are given up."""
        if report is not None:
            self.books.report(report.report)
            if self._behind is not None:
                self._behind.take_facts(report.facts)
        elif not self.books.has_work:
            return
        ended = self.books.poll()
        for ticket in ended.released:
            self._pool.free_blocks(self._held.pop(ticket))

    def written_again(self, blocks: Iterable[int]) -> None:
        """vLLM computes these device blocks anew: what stores read there is never found."""
        ids = np.array(list(blocks), np.int32)
        for g in range(len(self._geometry.groups)) if len(ids) else ():
            self.books.spoil(np.full(len(ids), g, np.int32), ids)

    def finished(self, request: Any, blocks: Sequence[Sequence[int]]) -> None:
        """The request has ended; its ``blocks``, by group, are still its own."""
        follow = self._followed.pop(request.request_id, None)
        if follow is None:
            return
        if follow.end and not self._states:
            follow.place(blocks)
            end = min(follow.end, request.num_computed_tokens, request.num_tokens)  # vLLM may have taken tokens back
            self._tell(follow, follow.blocks_of, end, is_end=True)
        follow.close()
        if self._counts_nans:
            self._left.append(follow)

    def _disown_wrong(self) -> None:
        """Makes content of requests whose logits were no numbers unfindable: K and V that gave these may be none."""
        left, self._left = self._left, []
        for follow in (*self._followed.values(), *left):
            if not follow.is_wrong and follow.request.num_nans_in_logits:
                self._void |= follow.disown() & self._held.keys()
        for follow in left:
            follow.close()

    def news(self) -> dict[str, int]:
        """Counters since the last call, and gauges (``stats``); empty if nothing has happened.

        vLLM asks once a step, at its end.
        """
        if self._behind is not None:
            self._behind.step_ends()
        counts = self.books.counts
        now = self._waits | {
            "stored_blocks": counts.stored_blocks,
            "stored_bytes": counts.stored_bytes,
            "loaded_blocks": counts.loaded_blocks,
            "loaded_bytes": counts.loaded_bytes,
            "verified_blocks": counts.loaded_blocks if self.books.verifies else 0,
            "damaged_blocks": counts.corrupt_blocks,
            "failed_loads": counts.failed_loads,
            "failed_stores": counts.failed_stores,
            "late_copies": counts.expired,
            "dropped_blocks": counts.dropped_blocks,
        }
        now |= {} if self._behind is None else self._behind.counters()
        new = {name: value - self._told.get(name, 0) for name, value in now.items()}
        if not any(new.values()):
            return {}
        self._told = now
        stats = self.books.stats()
        return new | {
            "quarantined_blocks": sum(pool.quarantined for pool in stats.host.values()),
            "cached_blocks": sum(pool.cached for pool in stats.host.values()),
            "stores_hang": int(stats.stores_hang),
            **gauges_of(stats.remote),
        }

    def events(self) -> Iterable[Any]:
        """vLLM's KV events of the host tier, if it asks for events."""
        return () if self._events is None else self._events.take()

    def reset(self) -> None:
        """All content is forgotten; loads under way count as failed."""
        self._void |= set(self._held)
        self.books.reset()
        if self._behind is not None:
            self._behind.reset()

    @property
    def has_work(self) -> bool:
        """Whether steps are needed, even empty ones, for copies to go on or to be reported, or for wrong content to go.

        A load that was given up needs one now and then: its device blocks are free once its copy has ended.
        """
        if self._left or (self._behind is not None and self._behind.is_opening()):
            return True
        return self.books.has_work or (bool(self._held) and self._clock() >= self._look_s)

    def close(self) -> None:
        """The engine has ended."""
        self.books.close()
        if self._behind is not None:
            self._behind.close()
