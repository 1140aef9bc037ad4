"""The mutations fit the code as it is; that each is caught is for ``python -m tests.planted`` to show."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from .mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]


@cache
def read(file):
    """A file's text, and its syntax tree as text."""
    source = (ROOT / file).read_text(encoding="utf-8")
    return source, ast.dump(ast.parse(source))


def test_there_are_at_least_150_and_their_names_differ():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) >= 150
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place_of_the_code_and_names_tests_that_exist(mutation):
    source, before = read(mutation.file)
    assert mutation.file.startswith(("kvtier/", "runner/"))
    for old, _ in ((mutation.old, mutation.new), *mutation.also):
        assert source.count(old) == 1, f"occurs {source.count(old)} times: {old}"
    assert before != ast.dump(ast.parse(mutation.apply(source))), "a mutation changes more than a comment"
    assert mutation.breaks and (mutation.invariants or mutation.file.startswith("runner/"))
    assert mutation.tests
    for module in mutation.tests:
        assert (ROOT / module).is_file()
