"""Fragments are found by structure and nothing else, and give way to others without a word of the rest changed."""

from __future__ import annotations

import pytest

from .structure import Code, NotFound

SOURCE = '''"""A module."""

LIMIT = 4


class Pool:
    """Blocks."""

    size: int = 0

    @property
    @cache(
        1 + 1
    )
    def free(self):
        # a comment that stays
        total = sum(
            self.counts,  # of all groups
            start = 0 )
        return total   # ü: columns are bytes

    def release(self, block):
        def count(n):
            return n - 1

        if not block:
            self.lost += 1
            return
        elif block < 0:
            raise ValueError(f"{block + 1} is no block")
        self.refs[block] = count(self.refs[block])


def release(pool, blocks):
    for block in blocks:
        pool.release(block)
        pool.touch(block)
    pool.touch(blocks)
'''


@pytest.fixture
def code():
    return Code({"kvtier/pools/pool.py": SOURCE})


def changed(code, place, old, new):
    """What the change does to the text: the lines that went and those that came."""
    ((file, text),) = code.changed([(code.find(place, old), new)]).items()
    assert file == "kvtier/pools/pool.py"
    was, now = SOURCE.splitlines(), text.splitlines()
    return [line for line in was if line not in now], [line for line in now if line not in was]


def test_a_method_is_named_with_its_class_or_without(code):
    for place in ("free", "Pool.free", "pool.Pool.free", "kvtier.pools.pool.Pool.free"):
        assert changed(code, place, "return total", "return total + 1") == (
            ["        return total   # ü: columns are bytes"],
            ["        return total + 1   # ü: columns are bytes"],
        )


def test_a_fragment_of_several_lines_is_found_however_it_is_formatted(code):
    gone, come = changed(code, "free", "total = sum(self.counts, start=0)", "total = 0")
    assert gone == ["        total = sum(", "            self.counts,  # of all groups", "            start = 0 )"]
    assert come == ["        total = 0"]


def test_statements_come_with_the_indentation_of_those_that_go(code):
    gone, come = changed(
        code,
        "pool.release",
        """
        pool.release(block)
        pool.touch(block)
        """,
        """
        if block:
            pool.release(block)
        """,
    )
    assert gone == ["        pool.release(block)", "        pool.touch(block)"]
    assert come == ["        if block:", "            pool.release(block)"]


def test_an_expression_that_is_a_statement_may_give_way_to_statements(code):
    assert changed(code, "release", "pool.touch(blocks)", "pass") == (["    pool.touch(blocks)"], ["    pass"])


def test_an_expression_within_others_keeps_together(code):
    assert changed(code, "Pool.release", "self.refs[block]", "a + b")[1] == [
        "        self.refs[block] = count((a + b))"
    ]


def test_a_nested_function_has_a_place_of_its_own(code):
    assert changed(code, "release.count", "n - 1", "n") == (["            return n - 1"], ["            return (n)"])
    assert changed(code, "count", "return n - 1", "return n")[1] == ["            return n"]


def test_a_decorated_function_goes_with_its_decorators(code):
    free = """
    @property
    @cache(2 - 0)
    def free(self):
        total = sum(self.counts, start=0)
        return total
    """
    assert changed(code, "Pool", free.replace("2 - 0", "1 + 1"), "free = 0")[1] == [
        "    free = 0   # ü: columns are bytes"
    ]
    with pytest.raises(NotFound, match="0 times"):
        code.find("Pool", free)


def test_classes_and_modules_are_places_where_no_function_has_the_name(code):
    assert changed(code, "Pool", "size: int = 0", "size: int = 1")[1] == ["    size: int = 1"]
    assert changed(code, "pools.pool", "LIMIT = 4", "LIMIT = 5")[1] == ["LIMIT = 5"]


def test_several_changes_of_one_file_do_not_move_each_other(code):
    edits = [("Pool", "size: int = 0", "size: int = 1"), ("count", "n - 1", "n"), ("free", "return total", "return 0")]
    (text,) = code.changed([(code.find(place, old), new) for place, old, new in edits]).values()
    assert [line.strip() for line in text.splitlines() if line not in SOURCE.splitlines()] == [
        "size: int = 1",
        "return 0   # ü: columns are bytes",
        "return (n)",
    ]


def test_a_fragment_may_be_in_one_of_several_functions_of_a_name(code):
    assert code.find("release", "self.lost += 1").begin == code.find("Pool.release", "self.lost += 1").begin


@pytest.mark.parametrize(
    ("place", "fragment", "why"),
    [
        ("free", "self.size", "0 times"),
        ("nobody", "total", "0 of that name"),
        ("ol.free", "return total", "0 of that name"),
        ("release", "block", "7 times"),
        ("Pool.release", 'if block < 0:\n    raise ValueError(f"{block + 1} is no block")', "cannot be replaced"),
    ],
)
def test_what_is_not_there_once_is_an_error(code, place, fragment, why):
    with pytest.raises(NotFound, match=why):
        code.find(place, fragment)


def test_what_is_no_python_any_more_is_an_error(code):
    with pytest.raises(SyntaxError):
        code.changed([(code.find("count", "n - 1"), "pass")])
