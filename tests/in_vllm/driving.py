"""vLLM's real engine in this process, with kvtier's connector: what the scenarios ask it to do, and what they count.

Only this file knows the private parts of the connector, and of vLLM.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from link import Link
from models import VOCAB

BLOCK = 32
"""Tokens per block."""

Tokens = list[int]

CONNECTOR: dict[str, Any] = {
    "kv_connector": "KvtierConnector",
    "kv_connector_module_path": "kvtier.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "block_size": BLOCK,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_prefix_caching": True,
    "seed": 0,
}
"""At most four requests run at once."""


def prompt(seed: int, num_tokens: int) -> Tokens:
    """Random token ids."""
    rnd = random.Random(seed)
    return [rnd.randrange(3, VOCAB) for _ in range(num_tokens)]


@dataclass(frozen=True)
class Answer:
    """A request's text."""

    ids: Tokens
    logprobs: list[float]
    cached: int
    """Tokens of the prompt that were not computed, as vLLM counts them: on the device, and from the host."""
    loaded: int
    """Tokens that vLLM asked the connector to load, all tries together."""
    reached: int
    """The furthest token that a load has brought; 0 without one."""
    gaps: list[float] = field(default_factory=list)
    """By how much each token was likelier than the next best one, in logprobs."""
    others: list[Tokens] = field(default_factory=list)
    """The other texts of a request for several."""
    resumed: int = 0
    """Generated tokens that it had when it gave way last: vLLM has computed them again, as a prompt's."""

    @property
    def on_device(self) -> int:
        """Tokens that were on the device."""
        return self.cached - self.loaded

    def part(self, start: int, end: int | None = None) -> Answer:
        """The text's tokens from ``start`` to ``end``, without other texts."""
        span = slice(start, end)
        return replace(self, ids=self.ids[span], logprobs=self.logprobs[span], gaps=self.gaps[span], others=[])


class Engine:
    """One engine; ``num_blocks`` on the device, prompts in chunks of ``chunk`` tokens.

    ``engine``: more arguments of vLLM's, and ``policy``. Other arguments are the connector's options; one that is None
    is left out.
    """

    def __init__(
        self,
        model: Path,
        num_blocks: int,
        chunk: int = 256,
        engine: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.link = Link()
        given = {"host_memory": "64MiB", "copy_engine": self.link} | options
        own = dict(engine or {})
        transfer = CONNECTOR | {
            "kv_connector_extra_config": {name: value for name, value in given.items() if value is not None},
            "kv_load_failure_policy": own.pop("policy", "recompute"),
        }
        sizes = {"num_gpu_blocks_override": num_blocks, "max_num_batched_tokens": chunk}
        arguments = ENGINE | sizes | {"kv_transfer_config": transfer} | own
        try:
            self.llm = LLM(model=str(model), **arguments)
        except BaseException:
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()
            raise
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.side = self.scheduler.connector._scheduler_side
        self.books = self.side.books
        self.steps = self.empty_steps = self.preemptions = 0
        self._resumed = dict[str, int]()
        self._loaded: dict[str, int] = {}
        self._reached: dict[str, int] = {}
        self._cold: dict[tuple[tuple[int, ...], int], Answer] = {}
        self._names = 0
        self._watch()
        self.free = self.num_free()

    def _watch(self) -> None:
        connector = self.scheduler.connector
        allocated, plan = connector.update_state_after_alloc, connector.build_connector_meta
        match, local = connector.get_num_new_matched_tokens, dict[str, int]()

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
            local[request.request_id] = num_computed_tokens
            return match(request, num_computed_tokens)

        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
            name = _given(request.request_id)
            self._loaded[name] = self._loaded.get(name, 0) + num_external_tokens
            if num_external_tokens:
                end = local[request.request_id] + num_external_tokens
                self._reached[name] = max(self._reached.get(name, 0), end)
            allocated(request, blocks, num_external_tokens)

        def build_connector_meta(output: Any) -> Any:
            self.steps += 1
            self.empty_steps += output.total_num_scheduled_tokens == 0
            for request_id in output.preempted_req_ids or ():
                self.preemptions += 1
                if (request := self.scheduler.requests.get(request_id)) is not None:
                    self._resumed[_given(request_id)] = request.num_output_tokens
            return plan(output)

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        connector.update_state_after_alloc = update_state_after_alloc
        connector.build_connector_meta = build_connector_meta

    # --- requests ---------------------------------------------------------------------------------

    def add(self, tokens: Tokens, num_tokens: int, n: int = 1, priority: int = 0) -> str:
        """A request for ``n`` texts of ``num_tokens`` tokens; its name."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._names += 1
        name = f"r{self._names}"
        greedy = {"temperature": 0.0} if n == 1 else {"temperature": 1.0, "top_k": 1}  # of 0.0 vLLM takes n = 1 only
        params = SamplingParams(
            n=n,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=2,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **greedy,
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, params, priority=priority)
        return name

    def step(self) -> dict[str, Answer]:
        """One step of the engine; the requests that it ended."""
        return {_given(out.request_id): self._answer(out) for out in self.llm.llm_engine.step() if out.finished}

    def _answer(self, output: Any) -> Answer:
        text = output.outputs[0]
        logprobs = [next(iter(of.values())).logprob for of in text.logprobs or ()]
        best = [sorted(one.logprob for one in of.values())[-2:] for of in text.logprobs or ()]
        name, cached = _given(output.request_id), output.num_cached_tokens or 0
        return Answer(
            list(text.token_ids),
            logprobs,
            cached,
            self._loaded.get(name, 0),
            self._reached.get(name, 0),
            [second - first for first, second in best],
            [list(other.token_ids) for other in output.outputs[1:]],
            self._resumed.get(name, 0),
        )

    def run(self, timeout_s: float = 300.0) -> dict[str, Answer]:
        """Steps until no request is left."""
        ended, end_s = dict[str, Answer](), time.monotonic() + timeout_s
        while self.llm.llm_engine.has_unfinished_requests():
            ended |= self.step()
            assert time.monotonic() < end_s, "requests do not end"
        return ended

    def ask(self, prompts: Sequence[Tokens], num_tokens: int = 24) -> list[Answer]:
        """All at once; their texts."""
        names = [self.add(tokens, num_tokens) for tokens in prompts]
        ended = self.run()
        return [ended[name] for name in names]

    def abort(self, name: str) -> None:
        """The client has gone."""
        self.llm.llm_engine.abort_request([name])

    def cold(self, tokens: Tokens, num_tokens: int = 24) -> Answer:
        """The text of this engine with neither tier, computed once."""
        name = tuple(tokens), num_tokens
        if name not in self._cold:
            self.reset()
            stores, self.side._stores = self.side._stores, False
            (self._cold[name],) = self.ask([tokens], num_tokens)
            self.side._stores = stores
            self.reset()
            assert (self._cold[name].cached, self._cold[name].loaded) == (0, 0)
        return self._cold[name]

    # --- the tiers --------------------------------------------------------------------------------

    @property
    def transfers(self) -> Any:
        """The host tier's counters."""
        return self.books.stats().transfers

    @property
    def store(self) -> Any:
        """The counters of the remote tier."""
        return self.books.stats().remote

    def num_free(self) -> int:
        """Free blocks of the device."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def settle(self, timeout_s: float = 60.0) -> None:
        """Steps until no copy is under way."""
        end_s = time.monotonic() + timeout_s
        while self.transfers.live or self.side._held or self.books.has_work:
            assert time.monotonic() < end_s, "copies do not end"
            if self.books.has_work:
                self.step()
            else:  # a copy that was given up is looked at in the next step, whatever it is for
                self.ask([prompt(0, 8)], 1)

    def forget_device(self) -> None:
        """vLLM's own prefix cache is empty."""
        self.settle()
        self.forget_device_now()

    def forget_device_now(self) -> None:
        """The same, with copies under way."""
        assert self.llm.reset_prefix_cache()

    def reset(self) -> None:
        """Both tiers are empty."""
        self.settle()
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def check_nothing_is_held(self) -> None:
        """All blocks of both tiers are free again, and the books are sound."""
        self.settle()
        assert self.num_free() == self.free
        assert self.books.audit() == []
        assert sum(pool.held for pool in self.books.stats().host.values()) == 0
        assert self.side._followed == {}

    def close(self) -> None:
        """Ends it; another engine may be made then."""
        self.settle()
        self.llm.llm_engine.engine_core.shutdown()


def _given(request_id: str) -> str:
    """The name that a request was given: vLLM appends a random part."""
    return request_id.split("-")[0]
