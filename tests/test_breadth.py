"""Nothing of the product is left to `make test-all` alone."""

from __future__ import annotations

from typing import Any

import pytest
from breadth import covering, sample
from conftest import WHOLLY

TOOLS = {
    "tests/core/test_gpu_benchmark.py",
    "tests/model/test_explore.py",
    "tests/served/test_gpu_sections.py",
    "tests/served/test_verify_command.py",
}
"""Of the tests of these, which test and measure kvtier themselves, some are left to `make test-all` alone."""
WHOLE_SERVERS = {"tests/server/test_exact_restart.py"}
"""What these show with processes, others show within one."""


def unmarked(parameters: list[Any]) -> list[tuple[Any, ...]]:
    return [tuple(parameter.values) for parameter in parameters if not parameter.marks]


def test_of_each_test_a_case_is_left(request: pytest.FixtureRequest) -> None:
    """Of each that was collected."""
    left = {test for test in request.config.stash[WHOLLY] if test.partition("::")[0] not in TOOLS | WHOLE_SERVERS}
    assert left == set()


def test_parameters_that_cover_have_every_value_and_are_all_combinations() -> None:
    found = covering(["a", "b"], [(1, 2), (3, 4), (5, 6)], [None], quick=[("a", (3, 4), None)])
    assert len(found) == 6
    assert unmarked(found) == [("a", 1, 2, None), ("a", 3, 4, None), ("a", 5, 6, None), ("b", 3, 4, None)]


def test_parameters_of_a_sample_are_those_asked_for() -> None:
    assert unmarked(sample(range(4), [1, 3])) == [(1,), (3,)]
    assert len(sample([(1, 2), (3, 4)], [(3, 4)])) == 2
    with pytest.raises(AssertionError, match="no such values"):
        sample(range(4), [4])
