"""``PYTHON -m benchmarks.vllm.serving FOLDER``: vLLM's ``LLM`` for ``benchmarks.serving --vllm PYTHON``.

One thread, float32, greedy, its prefix cache on. A line in is JSON, ``[prompts, new tokens]``; a line out is
``[the new tokens of each prompt, CPU seconds of this process since it began]``.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main(folder: str) -> None:
    """Serves until there are no more lines."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    import torch

    torch.set_num_threads(1)
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=256,
        kv_cache_memory_bytes=2 << 30,
    )
    for line in sys.stdin:
        prompts, new_tokens = json.loads(line)
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        tokens = [list(done.outputs[0].token_ids) for done in llm.generate(given, params, use_tqdm=False)]
        print(json.dumps([tokens, time.process_time()]), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
