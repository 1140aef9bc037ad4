"""One server for the tests of a module, around one bundled model for all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import httpx
import openai
import pytest
from patience import PATIENCE_S, be_patient_with_backends, wait_until

from runner import LLM, AsyncLLM, SamplingParams, needle
from server.running import Running, serving


@pytest.fixture(scope="session")
def llm() -> Iterator[AsyncLLM]:
    """The bundled model, in small pools."""
    with AsyncLLM(needle.weights_path(), device="cpu", device_memory="24MiB", host_memory="16MiB",
                  max_waiting_requests=64, max_waiting_tokens=200_000) as llm:  # fmt: skip
        yield llm


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AsyncLLM, Iterator[str]]]:
    """The same model with a store, and prompts of 300 tokens that lie there alone."""
    store = f"file://{tmp_path_factory.mktemp('kv')}"
    options = {"device": "cpu", "device_memory": "24MiB", "host_memory": "16MiB", "remote_uri": store}
    prompts = [needle.make_prompt(300, seed=seed).text for seed in range(60, 64)]
    with LLM(needle.weights_path(), **options, key_secret=b"tests") as other:
        other.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        other.settle()
    with AsyncLLM(needle.weights_path(), **options, key_secret=b"tests") as llm:
        yield llm, (prompts[k] for k in count())


@pytest.fixture
def mortal(llm: AsyncLLM) -> Iterator[AsyncLLM]:
    """An engine that a test may kill, around the same model."""
    with AsyncLLM(llm.model, device_memory="4MiB", host_memory=0) as mortal:
        yield mortal


@pytest.fixture(scope="session")
def running(llm: AsyncLLM) -> Iterator[Running]:
    """A server with default settings."""
    with serving(llm, max_body_bytes=2**20, read_timeout_s=PATIENCE_S) as running:
        yield running


@pytest.fixture(scope="session")
def client(running: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, which does not retry here."""
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def web(running: Running) -> Iterator[httpx.Client]:
    """Plain HTTP."""
    with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as web:
        yield web


@pytest.fixture(autouse=True)
def stores_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here is about stores that are slow."""
    be_patient_with_backends(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a request behind, in the server or in the engine."""
    yield
    if "running" in request.fixturenames:
        running: Running = request.getfixturevalue("running")
        wait_until(lambda: not running.admission.tickets and not any(running.llm.load().values()), "nothing is left")
