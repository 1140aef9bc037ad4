"""Interrupts an LLM at random moments and looks whether it lives: ``python -m tests.served.interrupts --times 1000``.

A signal is raised by a tracer at a random bytecode of ``kvtier`` and ``runner`` in the thread that calls ``generate``,
sometimes a second one soon after. The next call must give the right text, with nothing of the call before it left.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from runner import LLM, SamplingParams
from runner.needle import weights_path

ROOT = str(Path(__file__).resolve().parents[2])
OURS = (f"{ROOT}/kvtier/", f"{ROOT}/runner/")
PROMPTS = [[3 + (7 * i + k) % 90 for i in range(50)] for k in (0, 0, 5)]
PARAMS = SamplingParams(max_tokens=6, temperature=0)


class Interrupted:
    """Traces opcodes of our code on this thread; raises SIGINT at those numbered ``at``."""

    def __init__(self, *at: int) -> None:
        self.count = 0
        self._at = set(at)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count in self._at:
                signal.raise_signal(signal.SIGINT)
        return self

    def run(self, llm: LLM, prompts: list[list[int]]) -> str:
        """What became of the call."""
        before = sys.gettrace()
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have the background ignore it
        try:
            sys.settrace(self)
            llm.generate(prompts, PARAMS, use_tqdm=False)
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            sys.settrace(before)
            signal.signal(signal.SIGINT, handler)
        return "too late"


def interrupt(llm: LLM, prompts: list[list[int]], times: int, seed: int) -> Counter[str]:
    """Counts what became of ``times`` calls; raises ``AssertionError`` when the LLM is not what it was."""
    rnd = random.Random(seed)
    expected = [output.token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    whole = Interrupted()
    whole.run(llm, prompts)
    found: Counter[str] = Counter()
    for _ in range(times):
        first = rnd.randrange(1, whole.count)
        moments = (first, first + rnd.randrange(1, 200)) if rnd.random() < 0.3 else (first,)
        llm.reset_prefix_cache()
        tracer = Interrupted(*moments)
        became = tracer.run(llm, prompts)
        found[became] += 1
        if became == "too late":  # how often the caller is woken, and so how much it runs, depends on the machine
            whole = tracer
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert [output.token_ids for output in outputs] == expected
        llm.settle()
        assert llm.audit() == []
        assert (llm.scheduler.request_ids, llm.scheduler.step, llm.engine.has_requests()) == ([], None, False)
        assert all(pool.held == 0 for pool in llm.cache.stats().device.values())
    return found


def main() -> None:
    from families.zoo import build

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1000, help="on each of the two models half of them")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        models = {"the bundled model": weights_path(), "Gemma 3": build("gemma3", Path(folder))}
        for name, path in models.items():
            with LLM(path, "cpu", "1MiB", "1MiB", max_batched_tokens=48, max_running=3) as llm:
                print(f"{name}:", dict(interrupt(llm, PROMPTS, args.times // 2, args.seed)), flush=True)


if __name__ == "__main__":
    main()
