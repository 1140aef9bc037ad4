"""A process with one engine: ``python -m runner.verify.vllm.child ORDER REPORT``.

ORDER is a JSON file (``Order``). REPORT gets a JSON object a line as things happen: {"plan": ..}, {"facts": ..},
{"begins": NAME}, {"happened": ..}. If the engine cannot run, it gets {"refused": MESSAGE}.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.verify.vllm import plan as planning
from runner.verify.vllm.plan import Plan
from runner.verify.vllm.scenarios import RAISED, REFERENCE, SCENARIOS, Scenario, Serving, reference
from runner.verify.vllm.served import Engine

Say = Callable[..., None]
_MORE_PROMPTS = 8
"""Room, in prompts, for more than there are: floods, answers, and what lies beside them."""
_LEAST_BYTES = 64 << 20
_MORE_BLOCKS = 4
"""Over one and a half prompts, for what does not divide."""


@dataclass(frozen=True)
class Order:
    """What a child is to do.

    ``plan`` and ``kv_bytes``, which hold all its texts: None for the reference, which makes them.
    ``kv_transfer_config``: None for the reference. ``engine_args``: of vLLM, for both engines.
    """

    model: str
    prompts: int
    new_tokens: int
    tokens: int | None = None
    chunk_tokens: int | None = None
    plan: Mapping[str, Any] | None = None
    kv_bytes: int | None = None
    blocks: int | None = None
    kv_transfer_config: Mapping[str, Any] | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, plan: Plan, kv_bytes: int) -> dict[str, Any]:
        """Arguments for vLLM's ``EngineArgs``. The user's own go before."""
        return {
            "model": self.model,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "max_model_len": plan.max_model_len,
            "max_num_batched_tokens": plan.chunk_tokens,
            "max_num_seqs": len(plan.crowd),
            "kv_cache_memory_bytes": kv_bytes,
            "num_gpu_blocks_override": self.blocks,
            "kv_transfer_config": self.kv_transfer_config,
            "enable_logging_iteration_details": True,
            "seed": 0,
            **self.engine_args,
        }


def run_reference(engine: Engine, plan: Plan, say: Say) -> None:
    """The cold answers, what rounding does, and the pool that holds a prompt and a half."""
    say(begins="reference")
    cold, peak = reference(engine, plan)
    say(happened=cold.to_dict(), blocks=math.ceil(1.5 * peak * engine.facts.blocks) + _MORE_BLOCKS)
    run_scenarios(engine, plan, say, REFERENCE, has_connector=False)


def run_scenarios(
    engine: Engine, plan: Plan, say: Say, scenarios: tuple[Scenario, ...] = SCENARIOS, has_connector: bool = True
) -> None:
    """One after the other, in one engine; an engine that raises serves no more."""
    serving = Serving(engine, plan)
    for scenario in scenarios:
        say(begins=scenario.name)
        happened = scenario.run(serving)
        happened.has_connector = has_connector
        say(happened=happened.to_dict())
        if any(RAISED in violation for violation in happened.violations):
            break


def _run(order: Order, say: Say) -> None:
    from runner.verify.vllm.engine import VLLMEngine, model_facts

    if order.plan is None:
        facts = model_facts(order.model, order.engine_args)
        plan = planning.make(
            facts["vocab_size"],
            facts["max_model_len"],
            order.tokens,
            order.prompts,
            order.new_tokens,
            order.chunk_tokens,
        )
        texts = len(plan.prompts) + _MORE_PROMPTS
        kv_bytes = max(_LEAST_BYTES, texts * plan.max_model_len * facts["token_bytes"])
        say(plan=plan.to_dict(), kv_bytes=kv_bytes)
    else:
        plan, kv_bytes = Plan(**order.plan), order.kv_bytes or _LEAST_BYTES
    engine = VLLMEngine(order.arguments(plan, kv_bytes))
    block_tokens, has_states = engine.facts.block_tokens, engine.facts.has_states
    least = plan.least_tokens(block_tokens, has_states)
    if plan.longest < least:
        states = " with recurrent states" if has_states else ""
        raise ValueError(
            f"prompts of {plan.longest:,} tokens are too short for blocks of {block_tokens}{states}: use --tokens "
            f"{least} or more, or smaller blocks (--block-size)"
        )
    say(facts=asdict(engine.facts))
    if order.plan is None:
        run_reference(engine, plan, say)
    else:
        run_scenarios(engine, plan, say)


def main(order_file: str, report_file: str) -> int:
    """Exit status: 0, or 2 if the engine cannot run."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with Path(report_file).open("a", encoding="utf-8") as report:

        def say(**event: Any) -> None:
            report.write(json.dumps(event) + "\n")
            report.flush()

        try:
            _run(Order(**json.loads(Path(order_file).read_text(encoding="utf-8"))), say)
        except Exception as problem:  # of any kind: vLLM and connectors raise what they like
            import traceback

            traceback.print_exc()
            say(refused=f"{type(problem).__name__}: {problem}")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
