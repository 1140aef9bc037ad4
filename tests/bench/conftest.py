"""The real server around the bundled model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server.running import Running, serving

from runner import AsyncLLM, needle

KEY = "the key"


@pytest.fixture(scope="package")
def llm() -> Iterator[AsyncLLM]:
    """The bundled model, in small pools."""
    with AsyncLLM(needle.weights_path(), device="cpu", device_memory="8MiB", host_memory="8MiB") as llm:
        yield llm


@pytest.fixture(scope="package")
def running(llm: AsyncLLM) -> Iterator[Running]:
    """A server that asks for ``KEY``."""
    with serving(llm, api_keys=(KEY,), max_model_len=4096) as running:
        yield running
