"""What the OpenAPI schema allows, and what it does not, as schemathesis makes it up: no 5xx."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import SkipTest

import pytest
import schemathesis
from breadth import sized
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from runner import AsyncLLM
from server.running import serving


@pytest.fixture(scope="module")
def api(llm: AsyncLLM) -> Iterator[Any]:
    """The schema of a server whose answers are short."""
    with serving(llm, max_model_len=48) as running:
        yield schemathesis.openapi.from_url(f"{running.url}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_makes_the_server_fail(api: Any, mode: GenerationMode) -> None:
    asked = 0
    for found in api.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=sized(3, 300), suppress_health_check=list(HealthCheck))
        def check(case: schemathesis.Case) -> None:
            nonlocal asked
            asked += 1
            case.call_and_validate(checks=[not_a_server_error])

        with contextlib.suppress(Unsatisfiable, SkipTest):  # some take no bad input
            check()
    assert asked > sized(10, 100)
