"""A played vLLM: the few names that ``kvtier verify --engine vllm`` uses, and an engine without a model.

It has a device pool (blocks by content, the least recently used go first), a host tier behind the connector, and vLLM's
counts. A text is a hash of its prompt, unless the connector has brought noise. ``kv_connector_extra_config`` has a
"fault", see ``FAULTS``, and a "marker": the file that an engine makes when it falls silent.
As a program: ``runner.verify.vllm.child`` with this vLLM.
"""

from __future__ import annotations

import os
import random
import sys
import time
import zlib
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

BLOCK = 16
ROOMY = 2_000
HYBRID = "played-hybrid"
"""A model with recurrent states."""
VOCAB, MAX_MODEL_LEN = 500, 8_192
FAULTS = (
    "noise",  # other bytes than were stored
    "wrong logprobs",  # the same tokens
    "nothing stored",
    "loads fail",  # tokens counted as found are computed
    "no reset",
    "remembers",  # after a reset
    "raises",  # at the first load
    "falls silent",  # at the first load
    "dies",  # at the first load, the process
    "ends early",  # requests, at the first load
    "never preempts",
    "near tie",
    "refuses",
)


@dataclass
class EngineArgs:
    """vLLM's; what is not here cannot be given."""

    model: str
    dtype: str = "float32"
    skip_tokenizer_init: bool = False
    enable_prefix_caching: bool = False
    max_model_len: int = MAX_MODEL_LEN
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int = 0
    kv_transfer_config: Any = None
    enable_logging_iteration_details: bool = False
    seed: int = 0

    def create_model_config(self) -> Any:
        return SimpleNamespace(
            dtype=SimpleNamespace(itemsize=4),
            max_model_len=self.max_model_len,
            hf_text_config=SimpleNamespace(num_hidden_layers=2),
            get_vocab_size=lambda: VOCAB,
            get_total_num_kv_heads=lambda: 1,
            get_head_size=lambda: 32,
        )


@dataclass
class KVTransferConfig:
    """vLLM's; what is not here cannot be given."""

    kv_connector: str
    kv_role: str
    kv_connector_module_path: str | None = None
    kv_load_failure_policy: str = "fail"
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class SamplingParams:
    """vLLM's; greedy ones."""

    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool
    logprobs: int


class StatLoggerBase:
    """vLLM's interface."""


class LLMEngine:
    """As the module says."""

    def __init__(self, args: EngineArgs, loggers: list[Any]) -> None:
        assert args.enable_prefix_caching and args.skip_tokenizer_init, "hits and token ids are what is asked for"
        config = args.kv_transfer_config
        self._fault = None if config is None else config.kv_connector_extra_config.get("fault")
        self._marker = "" if config is None else config.kv_connector_extra_config.get("marker", "")
        assert self._fault is None or self._fault in FAULTS
        if self._fault == "refuses":
            raise ValueError("this connector needs another GPU")
        self._has_connector = config is not None
        self._blocks = args.num_gpu_blocks_override or ROOMY
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                dtype=f"torch.{args.dtype}", is_hybrid=args.model == HYBRID, is_attention_free=False
            ),
            cache_config=SimpleNamespace(block_size=BLOCK, num_gpu_blocks=self._blocks),
        )
        self._loggers = [make(self.vllm_config, 0) for make in loggers]
        self._details = args.enable_logging_iteration_details
        self._waiting: list[tuple[str, list[int], SamplingParams]] = []
        self._device: OrderedDict[int, None] = OrderedDict()
        self._host: set[int] = set()
        self._totals = dict.fromkeys(("device", "host", "offered", "preemptions"), 0)

    @classmethod
    def from_engine_args(cls, args: EngineArgs, stat_loggers: list[Any]) -> LLMEngine:
        return cls(args, stat_loggers)

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        assert params.temperature == 0 and params.ignore_eos
        self._waiting.append((request_id, prompt["prompt_token_ids"], params))

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Any]:
        """All that wait, from beginning to end."""
        requests, self._waiting = self._waiting, []
        step = SimpleNamespace(computed=0, resumed_device=0, resumed_host=0)
        needed = sum(-(-(len(prompt) + params.max_tokens) // BLOCK) for _, prompt, params in requests)
        is_short = needed > self._blocks and len(requests) > 1 and self._fault != "never preempts"
        outputs = [self._serve(*request, step, is_short and request is requests[-1]) for request in requests]
        stats = SimpleNamespace(
            num_running_reqs=len(requests),
            kv_cache_usage=min(1.0, needed / self._blocks),
            iteration_details=SimpleNamespace(num_ctx_tokens=step.computed, num_generation_tokens=0),
            prefix_cache_stats=SimpleNamespace(preempted_hits=step.resumed_device),
            connector_prefix_cache_stats=SimpleNamespace(preempted_hits=step.resumed_host),
        )
        if not self._details:
            stats.iteration_details = None
        for logger in self._loggers:
            logger.record(stats, None, mm_cache_stats=None)
        return outputs

    def get_metrics(self) -> list[Any]:
        t = self._totals
        by_source = {"local_cache_hit": t["device"], "external_kv_transfer": t["host"], "local_compute": 1}
        found = [("vllm:prompt_tokens_by_source", {"source": s, "engine": "0"}, n) for s, n in by_source.items()]
        found += [("vllm:external_prefix_cache_hits", {}, t["offered"]), ("vllm:num_preemptions", {}, t["preemptions"])]
        counters = [SimpleNamespace(name=name, labels=labels, value=value) for name, labels, value in found]
        return [*counters, SimpleNamespace(name="vllm:iteration_tokens_total", labels={}, buckets={})]

    def reset_prefix_cache(self, reset_connector: bool) -> bool:
        assert reset_connector
        if self._fault == "no reset":
            return False
        self._device.clear()
        if self._fault != "remembers":
            self._host.clear()
        return True

    def _serve(self, request_id: str, prompt: list[int], params: SamplingParams, step: Any, is_preempted: bool) -> Any:
        blocks = [zlib.crc32(repr(prompt[:end]).encode()) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        useful = blocks[: (len(prompt) - 1) // BLOCK]
        local = next((i for i, block in enumerate(useful) if block not in self._device), len(useful))
        brought = next((i for i, b in enumerate(useful[local:]) if b not in self._host), len(useful) - local)
        self._totals["device"] += local * BLOCK
        self._totals["host"] += brought * BLOCK
        self._totals["offered"] += brought * BLOCK
        failed = self._fault == "loads fail"
        step.computed += len(prompt) + params.max_tokens - 1 - (local + (0 if failed else brought)) * BLOCK
        stores = self._has_connector and self._fault != "nothing stored"
        if stores:
            self._host |= set(blocks)
        if is_preempted:
            self._totals["preemptions"] += 1
            step.resumed_host += stores * len(blocks) * BLOCK
            step.computed += (not stores) * len(blocks) * BLOCK
        for block in reversed(blocks):  # the end goes first
            self._device[block] = None
            self._device.move_to_end(block)
        while len(self._device) > self._blocks:
            self._device.popitem(last=False)
        return self._output(request_id, prompt, params, brought > 0 or (is_preempted and stores))

    def _output(self, request_id: str, prompt: list[int], params: SamplingParams, has_loaded: bool) -> Any:
        fault, reason = self._fault if has_loaded else None, "length"
        if fault == "raises":
            raise RuntimeError("EngineCore encountered an issue")
        if fault == "dies":
            os._exit(7)
        if fault == "falls silent":
            Path(self._marker).touch()
            time.sleep(1_000)
        if fault == "ends early":
            reason, params = "error", SamplingParams(0, 0, True, False, params.logprobs)
        ids, rows = [], []
        draw = random.Random(repr((prompt, "noise" if fault == "noise" else "")))
        for i in range(params.max_tokens):
            top = draw.sample(range(VOCAB), params.logprobs)
            shift = 0.5 if fault == "wrong logprobs" else 0.0
            rows.append({token: SimpleNamespace(logprob=-0.5 - 0.05 * j - shift) for j, token in enumerate(top)})
            ids.append(top[1] if fault == "near tie" and i == 1 else top[0])
        completion = SimpleNamespace(token_ids=ids, logprobs=rows, finish_reason=reason)
        return SimpleNamespace(request_id=request_id, finished=True, prompt_token_ids=prompt, outputs=[completion])


def modules() -> dict[str, ModuleType]:
    """For ``sys.modules``."""
    names = ("vllm", "vllm.config", "vllm.v1", "vllm.v1.metrics", "vllm.v1.metrics.loggers")
    made = {name: ModuleType(name) for name in names}
    vllm = made["vllm"]
    vllm.__version__ = "0.31.0"
    vllm.EngineArgs, vllm.LLMEngine, vllm.SamplingParams = EngineArgs, LLMEngine, SamplingParams
    made["vllm.config"].KVTransferConfig = KVTransferConfig
    made["vllm.v1.metrics.loggers"].StatLoggerBase = StatLoggerBase
    return made


def main(arguments: list[str]) -> int:
    """A child process with this vLLM."""
    sys.modules |= modules()
    from runner.verify.vllm import child, scenarios

    scenarios._SETTLE_S = 0.0
    scenarios._RESET_S = 0.0
    return child.main(*arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[-2:]))
