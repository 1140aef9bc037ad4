"""Controls of ``kvtier verify --engine vllm``: ``python tests/served/vllm_controls.py MODEL``, in vLLM's own Python.

Exit status 0 if the kit sees that a connector brings noise, and that another one stores nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from runner.verify.vllm import kit

SIZES = {"tokens": 768, "prompts": 2, "new_tokens": 8, "engine_args": {"dtype": "float32", "block_size": 32}}


def statuses(model: str, connector: str, module: str, **options: Any) -> dict[str, str]:
    """By scenario, with a small host tier that ``options`` are given to."""
    config = kit.kvtier_config(256 << 20) | {"kv_connector": connector, "kv_connector_module_path": module}
    config["kv_connector_extra_config"] |= options
    report = kit.run(model, config, **SIZES)
    for result in report.results:
        print(connector, options, result.name, result.status, result.largest_difference, result.missing, flush=True)
    return {result.name: result.status.value for result in report.results}


def main(model: str) -> int:
    """Exit status."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    noisy = statuses(model, "NoisyConnector", "noisy_connector", verify="off")
    idle = statuses(model, "KvtierConnector", "kvtier.integrations.vllm", store="off")
    sees_noise = all(noisy[name] == "differs" for name in ("host hit", "mixed hit", "preempted"))
    is_fair = all(noisy[name] == "equal" for name in ("bare device hit", "bare batch", "cold"))
    sees_idle = all(idle[name] == "not exercised" for name in ("host hit", "mixed hit", "preempted"))
    texts = all(idle[name] == "equal" for name in ("cold", "device hit", "batch", "reset"))
    return 0 if sees_noise and is_fair and sees_idle and texts else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
