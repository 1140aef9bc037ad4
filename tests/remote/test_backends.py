"""Every backend against the same tests: a directory, memory, S3 as a stand-in and as moto has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from breadth import breadth

from remote.conformance import Conformance
from remote.conftest import s3_uri
from remote.driving import Driver, Opens


class TestBackends(Conformance):
    @pytest.fixture(params=["memory", "file", "s3", pytest.param("moto", marks=breadth)])
    def driver(self, request: pytest.FixtureRequest, opens: Opens, folder: Path) -> Driver:
        if request.param == "memory":
            return opens("memory://")
        if request.param == "file":
            return opens(f"file://{folder}")
        found = request.getfixturevalue(request.param)
        return opens(s3_uri(found if request.param == "moto" else found.port))


def test_a_directory_takes_more_pieces_than_one_call_of_the_system(opens: Opens, folder: Path) -> None:
    driver = opens(f"file://{folder}")
    data, back = driver.filled(1, *[16] * 2500), driver.room(*[16] * 2500)
    driver.call("put", ["kvt1/a"], [data])
    driver.call("get", ["kvt1/a"], [back])
    assert back == data


def test_memory_is_shared_by_name_and_else_not(opens: Opens) -> None:
    one, same, other = opens("memory://shared-by-a-test"), opens("memory://shared-by-a-test"), opens("memory://")
    one.put_sealed([1])
    assert [driver.get_checked([1]).outcomes[0].value for driver in (same, other)] == ["ok", "miss"]
