"""An engine that keeps to vLLM's contract with its connectors: block pool, hybrid prefix cache, asynchronous loads.

It follows vLLM's scheduler step for step where a connector can tell the difference: one pool of block ids for all
groups, which share memory; blocks behind a window are taken out of the table (id 0); a preempted request's blocks are
others' in the same step; a request that waits for a load keeps its blocks until the worker has spoken; it is looked at
before those that hold nothing, and loads only if all that hold blocks can still end; everything between scheduler and
workers is pickled. Content follows from the block hashes, so each read can be judged.

Recurrent states are kept as in vLLM's mode "align": a table has the block of the last boundary and the one that is
written to; steps of a prompt end where blocks do; states are kept, and offered to the connector, at a prompt's last
boundary and where it is known to part from others. Offers are not taken back if their request gives way in the same
step, as vLLM's documentation warns.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import inside
import numpy as np

from integrations.fake_worker import (
    ROLES,
    SPECS,
    TICK_S,
    UNIT,
    BlockPool,
    Request,
    Worker,
    connector_module,
    first_visible,
    kv_cache_config,
    vllm_config,
)
from integrations.standin import check_call
from kvtier.testing import Faults, SimulatedEngine

REST_STEPS = 100_000
"""Ten times what the longest waits take, on clocks that steps alone move."""


class FakeEngine:
    """``kinds``: of the groups. ``faults``: of every worker's copies. A step is a second of the copies' clock, and
    ``TICK_S`` of the connector's own.

    ``settings``: changes of ``vllm_config``. ``extra``: the connector's own options.
    """

    def __init__(
        self,
        kinds: tuple[str, ...] = ("window", "chunk", "full"),
        num_blocks: int = 60,
        workers: int = 1,
        seed: int = 0,
        faults: Faults | None = None,
        chunk: int = 16,
        max_running: int = 3,
        settings: Mapping[str, Any] = MappingProxyType({}),
        **extra: Any,
    ) -> None:
        self.kinds, self.num_blocks, self.chunk, self.max_running = kinds, num_blocks, chunk, max_running
        self.engines: list[SimulatedEngine] = []

        def make(memory: Any) -> SimulatedEngine:
            self.engines.append(SimulatedEngine(memory, seed + len(self.engines), faults or Faults(max_delay_s=1.0)))
            return self.engines[-1]

        extra = {"host_memory": 8_000 * workers, "deadline_s": 8.0, "copy_engine": make} | extra
        self.config = vllm_config(extra, workers, **settings)
        specs = [SPECS[kind]() for kind in kinds]
        self.sizes = [spec.block_size for spec in specs]
        self.kv_cache_config = kv_cache_config(specs, num_blocks)
        self.connector = connector_module.KvtierConnector(self.config, ROLES.SCHEDULER, self.kv_cache_config)
        self.workers = [Worker(self, rank) for rank in range(workers)]
        self.books = inside.vllm_books(self.connector)
        inside.relay_clock(self.books, self.engines[0].now)
        inside.vllm_clock(self.connector, lambda: self.engines[0].now() * TICK_S)
        self.pool = BlockPool(num_blocks)
        check_call("bind_gpu_block_pool", self.pool)
        self.connector.bind_gpu_block_pool(self.pool)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.finished_ids: set[str] = set()
        self.preempted_ids: set[str] = set()
        self.recv_left: dict[str, int] = {}
        self.recv_failed: set[str] = set()
        self.zeroed: list[int] = []
        self.done: dict[str, Request] = {}
        self.hits = Counter[str]()  # tokens by the tier that has brought them, as vLLM counts them
        self.nans: dict[int, int] = {}  # by length of text, NaNs in the logits of the next token of whoever has it
        self.has_states = "state" in kinds
        self.offers: dict[str, list[tuple[int, int, int]]] = {}
        self.wrong = self.loads = self.failures = self.preemptions = self.steps = 0

    # --- as a client sees it ------------------------------------------------------------------------

    def add(self, request_id: str, prompt: list[int], new_tokens: int = 4) -> Request:
        request = self.requests[request_id] = Request(request_id, prompt, new_tokens)
        self.waiting.append(request)
        return request

    def abort(self, request_id: str) -> None:
        if request_id in self.requests and self.requests[request_id].status != "finished":
            self.finish(self.requests[request_id])

    def reset(self) -> None:
        """As ``reset_prefix_cache(reset_running_requests=True, reset_connector=True)``."""
        for request in self.running[::-1]:
            self.preempt(request)
        for block in self.pool.blocks:
            self.pool.forget(block)
        check_call("reset_cache")
        assert self.connector.reset_cache()

    def serve(self, prompt: list[int], new_tokens: int = 4) -> Request:
        request = self.add(f"s{self.steps}", prompt, new_tokens)
        while request.status != "finished" or request.request_id in self.requests:
            self.step()
        return request

    def settle(self, ends_lost: bool = False) -> None:
        """Until the connector has nothing left to do. ``ends_lost``: lost copies end after all, with an error."""
        for _ in range(REST_STEPS):
            if not (self.requests or self.connector.has_pending_push_work()):
                return
            for one in self.engines if ends_lost else ():
                one.end_lost()
            self.step()
        left = [(r.request_id, r.status, r.num_computed_tokens, r.num_tokens) for r in self.requests.values()]
        raise AssertionError(f"no rest after {REST_STEPS} steps: {left}, {len(self.pool.free)} blocks are free")

    # --- a step -------------------------------------------------------------------------------------

    def step(self) -> None:
        self.steps += 1
        preempted = self.preempted_ids
        self.preempted_ids = set()
        scheduled, new, resumed, grown = {}, [], set(), {}
        budget, was_preempted, is_short = self.chunk, False, False
        for request in list(self.running):
            if request not in self.running:
                continue
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            count = self.cut(request, request.num_computed_tokens, count)
            if count <= 0:
                continue
            added = self.grow(request, request.num_computed_tokens + count)
            while added is None:
                victim = self.running[-1]
                self.preempt(victim)
                preempted |= self.preempted_ids
                self.preempted_ids = set()
                was_preempted = True
                budget += scheduled.pop(victim.request_id, 0)
                grown.pop(victim.request_id, None)
                if victim is request:
                    break
                added = self.grow(request, request.num_computed_tokens + count)
            if added is None:
                break
            grown[request.request_id] = added
            scheduled[request.request_id], budget = count, budget - count
            self.offer(request, request.num_computed_tokens + count)
        for request in [] if was_preempted else sorted(self.waiting, key=lambda request: not request.tables):
            if budget <= 0 or len(self.running) >= self.max_running:
                break
            if request.status == "remote" and not self.promote(request):
                continue
            if is_short and not request.tables:
                break
            count = self.admit(request, budget)
            if count is None:
                is_short = True  # another one that holds blocks may need less
                continue
            if count:
                self.waiting.remove(request)
                self.running.append(request)
                (resumed.add if request.status == "preempted" else new.append)(request.request_id)
                request.status = "running"
                scheduled[request.request_id], budget = count, budget - count
                self.offer(request, request.num_computed_tokens + count)
        output = self.output(scheduled, new, resumed, grown, preempted)
        check_call("build_connector_meta", output)
        message = pickle.dumps(self.connector.build_connector_meta(output))
        forward = []
        for name, count in scheduled.items():
            request = self.requests[name]
            forward.append((request, request.num_computed_tokens, request.num_computed_tokens + count))
            request.num_computed_tokens += count
        finished, self.finished_ids = self.finished_ids, set()
        answers = [worker.run(message, forward, finished) for worker in self.workers]
        self.update(forward, answers)

    def cut(self, request: Request, start: int, count: int) -> int:
        """As ``_mamba_block_aligned_split``: how many of ``count`` tokens the step computes."""
        end, known = start + count, max(request.num_prompt_tokens, request.num_tokens - 1)
        if not self.has_states or count <= 0 or start >= known:
            return count
        if end < known and end // UNIT * UNIT > start:
            end = end // UNIT * UNIT
        whole = (start // UNIT + 1) * UNIT if start % UNIT else 0
        stops = whole, (request.num_tokens - 1) // UNIT * UNIT, request.shared_prefix_boundary
        return min([end, *(stop for stop in stops if start < stop < end)]) - start

    def offer(self, request: Request, end: int) -> None:
        """The step leaves a state after ``end`` tokens; if it is kept, the connector may have it."""
        if end not in (last_boundary(request), request.shared_prefix_boundary) or not end or end % UNIT:
            return
        for g, kind in enumerate(self.kinds):
            if kind == "state":
                request.kept.add(end)
                block = request.tables[g][end // UNIT - 1]
                self.offers.setdefault(request.request_id, []).append((g, block.block_id, end))

    def output(self, scheduled: Any, new: Any, resumed: Any, grown: Any, preempted: set[str]) -> Any:
        """vLLM's ``SchedulerOutput``, as far as connectors read it."""
        offers, self.offers = self.offers, {}
        cached = [name for name in scheduled if name not in new]
        ids = lambda name: tuple([b.block_id if b else 0 for b in table] for table in self.requests[name].tables)  # noqa: E731
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=name, block_ids=ids(name), num_computed_tokens=self.requests[name].num_computed_tokens
                )
                for name in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached,
                resumed_req_ids=resumed,
                new_block_ids=[ids(name) if name in resumed else grown.get(name) for name in cached],
                num_computed_tokens=[self.requests[name].num_computed_tokens for name in cached],
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=preempted,
            finished_req_ids=set(self.finished_ids),
            new_block_ids_to_zero=self.zeroed,
            kv_cache_block_copies=None,
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads=offers),
        )

    def drop_skipped(self, request: Request, computed: int) -> None:
        """Blocks that the next token does not see leave the table."""
        for g, kind in enumerate(self.kinds):
            table = request.tables[g]
            gone = [j for j in range(min(first_visible(kind, computed) // self.sizes[g], len(table))) if table[j]]
            self.pool.free_blocks([table[j] for j in gone])
            for j in gone:
                table[j] = None

    def grow(self, request: Request, end: int) -> tuple[list[int], ...] | None:
        """Blocks up to token ``end`` in every group; None, and nothing taken, if there are too few."""
        self.drop_skipped(request, request.num_computed_tokens)
        lacking = [max(0, -(-end // size) - len(t)) for size, t in zip(self.sizes, request.tables, strict=True)]
        gaps = [count - 1 if kind == "state" and count else 0 for kind, count in zip(self.kinds, lacking, strict=True)]
        if sum(lacking) - sum(gaps) > len(self.pool.free):
            return None
        added: tuple[list[int], ...] = tuple([] for _ in lacking)
        for table, count, skipped, ids in zip(request.tables, lacking, gaps, added, strict=True):
            blocks = [None] * skipped + [self.pool.take() for _ in range(count - skipped)]
            table += blocks
            ids += [block.block_id if block else 0 for block in blocks]
        return added

    def local_hit(self, request: Request) -> int:
        """Tokens in the prefix cache of all groups; at least one is left.

        If those with keys and values alone have more, the prompt parts from another one there.
        """
        hit = self.hit_of(request, self.kinds)
        full = self.hit_of(request, tuple(kind for kind in self.kinds if kind != "state")) if self.has_states else hit
        request.shared_prefix_boundary = full if full > hit else 0
        return hit

    def hit_of(self, request: Request, kinds: tuple[str, ...]) -> int:
        unit = int(np.lcm.reduce(self.sizes))
        hit = (request.num_tokens - 1) // unit * unit
        while hit:
            wanted = [
                (g, request.block_hashes[(j + 1) * size // UNIT - 1])
                for g, (kind, size) in enumerate(zip(self.kinds, self.sizes, strict=True))
                if kind in kinds
                for j in range(first_visible(kind, hit) // size, hit // size)
            ]
            if all(key in self.pool.cached for key in wanted):
                return hit
            hit -= unit
        return 0

    def admit(self, request: Request, budget: int) -> int | None:
        """Tokens to compute in this step; 0 if it waits for a load or is to be asked for again; None without room."""
        local = ext = 0
        if request.num_computed_tokens == 0:
            local = self.local_hit(request)
            check_call("get_num_new_matched_tokens", request, local)
            told, is_async = self.connector.get_num_new_matched_tokens(request, local)
            if told is None:
                return 0
            ext = told
            assert is_async is (ext > 0)
            assert local + ext < request.num_tokens
        computed = request.num_computed_tokens or local + ext
        count = 0 if ext else self.cut(request, computed, min(request.num_tokens - computed, budget))
        tables = request.tables or [
            [
                None
                if j < first_visible(kind, local) // size
                else self.pool.cached[g, request.block_hashes[(j + 1) * size // UNIT - 1]]
                for j in range(local // size)
            ]
            for g, (kind, size) in enumerate(zip(self.kinds, self.sizes, strict=True))
        ]
        hit = [] if request.tables else [block for table in tables for block in table if block]
        skipped = [first_visible(kind, computed) // size for kind, size in zip(self.kinds, self.sizes, strict=True)]
        lacking = [
            [j for j in range(len(table), -(-(computed + count) // size)) if j >= first]
            for table, size, first in zip(tables, self.sizes, skipped, strict=True)
        ]
        lacking = [js[-1:] if kind == "state" else js for kind, js in zip(self.kinds, lacking, strict=True)]
        unused = sum(block.ref_cnt == 0 for block in hit)
        taken = sum(map(len, lacking)) + unused
        if taken > len(self.pool.free) or (ext and not self.can_all_end(request, taken)):
            return None
        self.pool.touch(hit)
        for table, size, ids in zip(tables, self.sizes, lacking, strict=True):
            while len(table) < -(-(computed + count) // size):
                table.append(self.pool.take() if len(table) in ids else None)
        request.tables = tables
        if request.num_computed_tokens == 0:
            request.cached_tokens = local + ext
        blocks = SimpleNamespace(
            get_block_ids=lambda: tuple([b.block_id if b else 0 for b in table] for table in request.tables)
        )
        check_call("update_state_after_alloc", request, blocks, ext)
        self.connector.update_state_after_alloc(request, blocks, ext)
        if ext and request.status != "preempted":
            check_call("get_external_cache_hit_sources", request, ext)
            sources = self.connector.get_external_cache_hit_sources(request, ext)
            assert sum(sources.values()) == ext and min(sources.values()) > 0
            self.hits.update({source.value: count for source, count in sources.items()})
        request.num_computed_tokens = computed
        if ext:
            request.was_preempted = request.status == "preempted"
            request.status = "remote"
            self.loads += 1
        return count

    def can_all_end(self, request: Request, taken: int) -> bool:
        """Whether the requests that wait with blocks can end one after the other, if this one takes so many blocks.

        Those that run end anyway, or give way. If nobody holds blocks, this one may try.
        """
        waiting = [one for one in self.waiting if one.tables]
        if not waiting and not self.running:
            return True
        free = len(self.pool.free) - taken + sum(len(one.held(1)) for one in self.running)
        ends = [(self.most_blocks(one) - len(one.held()), len(one.held(1))) for one in waiting]
        for lacking, freed in sorted([*ends, (self.most_blocks(request) - taken, taken)]):
            if lacking > free:
                return False
            free += freed
        return True

    def most_blocks(self, request: Request) -> int:
        """Blocks that it holds at most for the tokens that it has."""
        total, see = request.num_tokens, {"window": 10, "chunk": 8, "state": 1}
        seen = [(size, see.get(kind, total) + self.chunk) for kind, size in zip(self.kinds, self.sizes, strict=True)]
        return sum(-(-min(total, tokens + size) // size) for size, tokens in seen)

    def promote(self, request: Request) -> bool:
        """Whether the load of a waiting request has ended; if it has failed, all is computed."""
        if request.request_id not in self.received:
            return False
        self.received.discard(request.request_id)
        request.status = "preempted" if request.was_preempted else "waiting"
        if request.request_id in self.failed:
            self.failed.discard(request.request_id)
            self.failures += 1
            request.num_computed_tokens = 0
            self.give_back(request)
        else:
            request.kept.add(request.num_computed_tokens)
            self.cache_blocks(request, request.num_computed_tokens)
        return True

    def cache_blocks(self, request: Request, computed: int) -> None:
        for g, size in enumerate(self.sizes):
            for j in range(min(computed, len(request.block_hashes) * UNIT) // size):
                if self.kinds[g] == "state" and (j + 1) * size not in request.kept:
                    continue
                block, key = request.tables[g][j], (g, request.block_hashes[(j + 1) * size // UNIT - 1])
                if block is not None and block.key is None and key not in self.pool.cached:
                    block.key, self.pool.cached[key] = key, block

    def give_back(self, request: Request) -> None:
        self.pool.free_blocks([block for table in request.tables for block in reversed(table) if block])
        request.tables = []

    def preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.running.remove(request)
        for end in request.kept:  # an offer of this step, which is not taken back
            for g, (kind, table) in enumerate(zip(self.kinds, request.tables, strict=True)):
                block = table[end // UNIT - 1] if kind == "state" and end // UNIT <= len(table) else None
                if block:
                    self.offers.setdefault(request.request_id, []).append((g, block.block_id, end))
        self.give_back(request)
        request.num_computed_tokens, request.status = 0, "preempted"
        self.waiting.insert(0, request)
        self.preempted_ids.add(request.request_id)

    def finish(self, request: Request) -> None:
        """As ``finish_requests`` and ``_free_request``: blocks that a load may write to stay until it has spoken."""
        keeps = request.status == "remote" and request.request_id not in self.received
        self.received.discard(request.request_id)
        self.failed.discard(request.request_id)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = "finished"
        if request.tables:
            self.drop_skipped(request, request.num_computed_tokens)
        ids = tuple(
            [b.block_id if b else 0 for b in table[: -(-request.num_computed_tokens // size)]]
            for table, size in zip(request.tables, self.sizes, strict=False)
        ) or tuple([] for _ in self.kinds)
        check_call("request_finished_all_groups", request, ids)
        assert self.connector.request_finished_all_groups(request, ids) == (False, None)
        self.finished_ids.add(request.request_id)
        if not keeps:
            self.drop(request)

    def drop(self, request: Request) -> None:
        self.give_back(request)
        self.done[request.request_id] = self.requests.pop(request.request_id)

    def update(self, forward: list[tuple[Request, int, int]], answers: list[tuple[Any, ...]]) -> None:
        report, ended, failed = None, set(), set()
        for results, one in answers:
            report = one if report is None else report if one is None else report.aggregate(one)
            for name in results.finished_recving:
                left = self.recv_left.get(name, len(self.workers)) - 1
                self.recv_left[name] = left
                if left == 0:
                    del self.recv_left[name]
                    ended.add(name)
            self.recv_failed |= results.failed_recving
            assert results.failed_recving <= results.finished_recving
        failed = self.recv_failed & ended
        self.recv_failed -= failed
        for name in failed:
            if self.requests[name].status == "remote":
                self.requests[name].num_computed_tokens = 0
                self.failed.add(name)
        for request, _, end in forward:
            if request.status != "running" or request.num_computed_tokens != end:
                continue  # aborted or preempted meanwhile
            if end == request.num_tokens:
                request.tokens.append(7 + sum(request.tokens[-3:]) % 50)
                request.extend_hashes()
            self.cache_blocks(request, end)
            length = request.num_tokens
            if length >= request.most:
                self.finish(request)
            if self.nans:
                request.num_nans_in_logits = self.nans.get(length, 0)  # after its end has been told
        check_call("update_connector_output", SimpleNamespace())
        self.connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))
        for name in ended:
            request = self.requests[name]
            if request.status == "remote":
                self.received.add(name)
            else:
                assert request.status == "finished"
                self.drop(request)

    def check(self) -> None:
        """The books are sound, and every block is somebody's."""
        assert self.books.audit() == []
        assert self.wrong == 0


def last_boundary(request: Request) -> int:
    """Where the same prompt would hit."""
    return (request.num_prompt_tokens - 1) // UNIT * UNIT


def stems(seed: int, count: int = 3, most: int = 60) -> list[list[int]]:
    rnd = random.Random(seed)
    return [[rnd.randrange(1000) for _ in range(rnd.randrange(20, most))] for _ in range(count)]
