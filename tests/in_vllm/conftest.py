"""vLLM's real engine in this process, one at a time: `make test-vllm` installs vLLM, and nothing else does."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from models import POOL, make_model

if TYPE_CHECKING:
    from driving import Engine

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "HF_HUB_OFFLINE": "1",
}
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KVTIER_AUDIT", "2")  # the host tier's books are checked in full

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make test-vllm` does that", allow_module_level=True)


def bind_kernels_now() -> None:
    """vLLM does it when it makes a worker, and cannot do it once numba is there: kvtier's parts bring that.

    `test_fresh_process.py` does without. vLLM 0.30 binds none.
    """
    if importlib.util.find_spec("vllm.triton_utils.dispatcher") is None:
        return
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    current_platform.register_triton_kernel_overrides()
    dispatcher._rebind_kernels = lambda overrides: None


bind_kernels_now()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model by name."""
    folder = tmp_path_factory.mktemp("models")
    return lambda name: make_model(name, folder)


@pytest.fixture(scope="module")
def engine_of(model: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    """The engine of a model with options; the last one is kept, and another one takes its place."""
    from driving import Engine

    kept: dict[Any, Engine] = {}

    def engine_of(name: str, num_blocks: int = 0, **options: Any) -> Engine:
        wanted = (name, num_blocks or POOL[name], *sorted(options.items()))
        if wanted not in kept:
            for other in [*kept]:
                kept.pop(other).close()
            kept[wanted] = Engine(model(name), num_blocks or POOL[name], **options)
        return kept[wanted]

    yield engine_of
    for engine in kept.values():
        engine.close()
