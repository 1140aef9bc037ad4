"""The mutations fit the code as it is; that each is caught is for ``python -m tests.planted`` to show."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from . import sampled
from .mutations import MUTATIONS
from .structure import Code, parsed

ROOT = Path(__file__).resolve().parents[2]
NOT_MADE = {"I26"}
"""Invariants of what kvtier does not have yet (tensor parallelism)."""


@pytest.fixture(scope="module")
def code():
    return Code.below(ROOT)


def says(fragment):
    """Without its layout and comments."""
    return [ast.dump(node) for node in parsed(fragment)]


def test_each_has_a_name_of_its_own():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)


def test_each_invariant_and_each_edge_has_one():
    table = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    invariants = set(re.findall(r"^\| (I\d+) \|", table, re.MULTILINE)) - NOT_MADE
    assert len(invariants) >= 29
    assert not invariants - {name for mutation in MUTATIONS for name in mutation.invariants.split()}
    for edge in range(1, 8):
        assert any(mutation.name.startswith(f"edge_{edge}_") for mutation in MUTATIONS), edge


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_is_found_once_changes_what_the_code_does_and_names_tests_that_exist(mutation, code):
    for file in mutation.apply(code):
        assert mutation.invariants or file.startswith("runner/")
    assert all(says(old) != says(new) for _, old, new in mutation.changes)
    assert mutation.breaks and mutation.tests
    for module in mutation.tests:
        assert (ROOT / module).is_file()


def test_a_sample_is_the_same_for_the_same_seed_and_each_change_of_it_is_one(code):
    drawn = sampled.draw(code, ROOT, 200, 3)
    assert [one.name for one in drawn] == [one.name for one in sampled.draw(code, ROOT, 200, 3)]
    assert len({one.operator for one in drawn}) == 5
    for one in drawn[:40]:
        ((file, text),) = one.apply(code).items()
        assert ast.dump(ast.parse(text)) != ast.dump(code.trees[file])
        assert all((ROOT / module).is_file() for module in one.tests)


def test_operators_change_what_runs_and_nothing_else():
    source = '''
LIMIT = 3

@jit(cache=1)
def f(a: Literal[1], b=2) -> Literal[4]:
    """Text."""
    if a < b and a:
        raise ValueError(f"{a + 5}")
    a.append(LIMIT)
    prefetch(a, b + 8)
    a.x = 6
    return a
'''
    found = {(operator, new) for _, operator, new in sampled.changes(ast.parse(source))}
    assert found == {
        ("comparison", "a <= b"),
        ("and_or", "a < b or a"),
        ("negated", "not (a < b and a)"),
        ("left_out", "pass"),
        ("off_by_one", "7"),
    }
