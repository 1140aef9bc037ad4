"""A bucket in bad times: it refuses, fails, hangs, cuts answers short, or is not there."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S

from kvtier import ConfigError
from kvtier.remote.backends.contract import Outcome
from remote.conftest import s3_uri
from remote.driving import FAILED, MISS, OK, REFUSED, Driver, Opens, name
from remote.fake_s3 import FakeS3


@pytest.fixture
def driver(opens: Opens, s3: FakeS3) -> Driver:
    return opens(s3_uri(s3.port, timeout_s=PATIENCE_S))


@pytest.mark.parametrize(
    ("status", "put"), [(401, REFUSED), (403, REFUSED), (404, FAILED), (429, FAILED), (500, FAILED), (507, REFUSED)]
)
def test_what_a_bucket_answers_is_an_outcome(driver: Driver, s3: FakeS3, status: int, put: Outcome) -> None:
    driver.put_sealed([1])
    s3.status = status
    answer = driver.put_sealed([2])
    assert (answer.outcomes, str(status) in answer.reasons[0]) == ((put,), True)
    read = MISS if status == 404 else FAILED
    assert driver.get_checked([1]).outcomes == (read,)
    assert driver.outcomes("look", [name(1), name(2)]) == [read, read]
    removal = driver.call("delete", [name(1)])
    assert removal.outcomes == (MISS if status == 404 else put,), removal
    s3.status = 0
    assert driver.get_checked([1]).outcomes == (OK,)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("Server returned non-2xx status code: 507 Insufficient Storage", REFUSED),
        ("Server returned non-2xx status code: 409 Conflict: <Code>XMinioAdminBucketQuotaExceeded</Code>", REFUSED),
        ("Error performing PUT http://host/507 /403 quota in 403 ms: status code: 500 ", FAILED),
    ],
)
def test_what_is_no_room_and_what_is_a_fault(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, text: str, outcome: Outcome
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(text)

    monkeypatch.setattr(driver.store, "_obstore", SimpleNamespace(put=broken))
    answer = driver.put_sealed([1])
    assert (answer.outcomes, text[-20:-1] in answer.reasons[0]) == ((outcome,), True)


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_bucket_that_is_not_there_or_refuses_is_refused_at_the_start(opens: Opens, s3: FakeS3, status: int) -> None:
    s3.status = status
    with pytest.raises(ConfigError) as caught:
        opens(s3_uri(s3.port))
    said = str(caught.value)
    assert "s3://bucket/some/prefix cannot be used: " in said and f"{status} " in said and "NoSuchThing" in said
    assert len(said) < 200 and "xml" not in said, said


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_bucket_that_may_answer_later_is_told_and_used(
    opens: Opens, s3: FakeS3, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    s3.status = status
    driver = opens(s3_uri(s3.port))
    (told,) = [record.getMessage() for record in caplog.records if record.name == "kvtier.remote"]
    assert told.startswith("s3://bucket/some/prefix does not answer: ") and str(status) in told
    s3.status = 0
    assert driver.put_sealed([1]).outcomes == (OK,)


def test_reasons_are_short(driver: Driver, s3: FakeS3) -> None:
    s3.status = 404
    (reason,) = driver.put_sealed([1]).reasons.values()
    assert reason == "FileNotFoundError: Server returned non-2xx status code: 404 Not Found: NoSuchThing"
    s3.close()
    (reason,) = driver.put_sealed([1]).reasons.values()
    assert reason == "GenericError: HTTP error: error sending request"


def test_a_bucket_that_hangs_fails_in_time(driver: Driver, opens: Opens, s3: FakeS3) -> None:
    """It hangs on all the while."""
    driver.put_sealed([1])
    s3.hangs.set()
    hurried = opens(s3_uri(s3.port, timeout_s=0.2))
    assert hurried.get_checked([1]).outcomes == (FAILED,)
    assert hurried.outcomes("look", [name(1)]) == [FAILED]
    s3.goes_on.set()
    s3.hangs.clear()
    assert driver.get_checked([1]).outcomes == (OK,)


def test_an_answer_that_is_cut_short_fails(driver: Driver, s3: FakeS3) -> None:
    driver.put_sealed([1])
    s3.cut = 100
    assert driver.get_checked([1]).outcomes == (FAILED,)


def test_a_bucket_that_is_not_there_fails_at_once(opens: Opens, keys_of_aws: None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = opens(s3_uri(port, timeout_s=PATIENCE_S))
    assert driver.outcomes("look", [name(1)]) == [FAILED]
    assert driver.put_sealed([1]).outcomes == (FAILED,)


def test_the_environment_may_say_where_the_bucket_is(opens: Opens, s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert opens("s3://bucket/there").put_sealed([1]).outcomes == (OK,)
    assert list(s3.objects) == [f"there/{name(1)}"]


def test_a_prefix_is_kept_and_a_failed_call_is_tried_once_more(driver: Driver, s3: FakeS3) -> None:
    driver.put_sealed([1])
    assert list(s3.objects) == [f"some/prefix/{name(1)}"]
    s3.requests, s3.status = 0, 503
    driver.get_checked([1])
    assert s3.requests == 2
