"""The engine in a process that has seen nothing of kvtier. There the connector must not bring numba too early."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from driving import CONNECTOR, ENGINE
from models import POOL

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(**json.loads(sys.argv[1]))
(answer,) = llm.generate([{"prompt_token_ids": [5] * 100}], SamplingParams(max_tokens=3, detokenize=False))
assert "numba" in sys.modules
print("tokens:", len(answer.outputs[0].token_ids))
"""


def test_the_connector_comes_before_numba(model: Callable[[str], Path]) -> None:
    transfer = CONNECTOR | {"kv_connector_extra_config": {"host_memory": "64MiB"}}
    arguments = ENGINE | {"model": str(model("llama")), "num_gpu_blocks_override": POOL["llama"]}
    command = [sys.executable, "-c", SCRIPT, json.dumps(arguments | {"kv_transfer_config": transfer})]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tokens: 3" in done.stdout
