"""URIs of stores: a bad one says what is accepted, before anything is opened."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier import ConfigError
from kvtier.remote.backends.uri import SpillWhen, check_packages, open_backend, parse_uri


@pytest.mark.parametrize(
    ("uri", "scheme", "host", "path"),
    [
        ("file:///var/a%20b", "file", "", "/var/a b"),
        ("memory://", "memory", "", ""),
        ("memory://name/", "memory", "name", "/"),
        ("s3://bucket", "s3", "bucket", ""),
        ("gs://bucket/a/b", "gs", "bucket", "/a/b"),
        ("az://container/a", "az", "container", "/a"),
        ("mooncake://127.0.0.1:50051", "mooncake", "127.0.0.1", ""),
    ],
)
def test_what_is_accepted(uri: str, scheme: str, host: str, path: str) -> None:
    found = parse_uri(uri)
    assert (found.scheme, found.host, found.path) == (scheme, host, path)


def test_options() -> None:
    found = parse_uri("s3://bucket?threads=8&timeout_s=2.5&digest=blake2b&region=x&spill=eviction")
    assert (found.threads, found.timeout_s, found.digest) == (8, 2.5, "blake2b")
    assert found.spill is SpillWhen.EVICTION
    assert found.options == {"region": "x"}
    plain = parse_uri("file:///a")
    assert (plain.threads, plain.timeout_s, plain.digest, plain.options) == (4, 10.0, "none", {})
    assert parse_uri("mooncake://h:1?protocol=rdma").options == {"protocol": "rdma"}


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("", "use file:///directory, memory://"),
        ("/var/kv", "use file:///directory, memory://"),
        ("redis://host:1", "mooncake://host:port"),
        ("s3://bucket:99999", "is no URI of a remote tier"),
        (7, "is no URI of a remote tier"),
        (b"file:///a", "is no URI of a remote tier"),
        ("file://var/kv", "three slashes"),
        ("file:var", "three slashes"),
        ("memory://a/b", "no path"),
        ("s3://", "names no bucket"),
        ("s3://bucket:80/a", "only mooncake:// takes one"),
        ("az:///a", "names no bucket or container"),
        ("mooncake://host", "mooncake://host:port"),
        ("mooncake://host:1/x", "mooncake://host:port"),
        ("s3://key:secret@bucket", "credentials"),
        ("file:///a#b", "'#'"),
        ("file:///a%00b", "NUL"),
        ("file:///a?threads", "?threads=8"),
        ("file:///a?threads=1&threads=2", "twice"),
        ("file:///a?thread=2", "unknown option 'thread'; file:// takes threads, timeout_s, digest"),
        ("file:///a?region=x", "unknown option 'region'"),
        ("file:///a?threads=0", "threads=0 is not a number from 1 to 256"),
        ("file:///a?threads=1.5", "threads=1.5 is not"),
        ("file:///a?timeout_s=-1", "timeout_s=-1 is not a number from 0.01 to 3600"),
        ("file:///a?timeout_s=inf", "timeout_s=inf"),
        ("file:///a?digest=md5", "digest=md5 is none of none, blake2b"),
        ("s3://b?endpoint=127.0.0.1:9", "endpoint=127.0.0.1:9 is no address; it is written http://host:port"),
        ("s3://b?endpoint=ftp://host", "is no address"),
        ("s3://b?endpoint=http://", "is no address"),
        ("s3://b?endpoint=http://host:port", "is no address"),
        ("mooncake://h:1?foo=1", "mooncake: no option 'foo'"),
        ("mooncake://h:1?replica_num=0", "replica_num is '0'"),
        ("file:///a?spill=now", "spill=now is none of landing, eviction"),
    ],
)
def test_what_is_refused(uri: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_uri(uri)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "https://s3.example.org", "http://[::1]:9000/store"])
def test_endpoints(address: str) -> None:
    assert parse_uri(f"s3://b?endpoint={address}").options == {"endpoint": address}


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_backend(f"file://{tmp_path}/file")


@pytest.mark.parametrize("uri", ["memory://", "s3://bucket"])
def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvtier\[remote\]'"):
        open_backend(uri)


def test_a_directory_needs_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    uri = parse_uri(f"file://{tmp_path}/store?mode=0640")
    check_packages(uri)
    store = open_backend(uri)
    assert store.close(60.0) and (tmp_path / "store").is_dir()


@pytest.mark.parametrize(
    ("uri", "says"), [("s3://bucket/a//b", "empty path segment"), ("az://container", "Account must")]
)
def test_a_bucket_that_obstore_cannot_open_is_refused(monkeypatch: pytest.MonkeyPatch, uri: str, says: str) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match=f"cannot be opened: .*{says}"):
        open_backend(uri)


def test_mooncake_is_opened_by_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    module = SimpleNamespace(MooncakeBackend=lambda *arguments: given.append(arguments) or "store")
    monkeypatch.setitem(sys.modules, "kvtier.remote.backends.mooncake", module)
    assert open_backend("mooncake://host:50051?threads=3&protocol=tcp&digest=blake2b") == "store"
    assert given == [("host", 50051, {"threads": "3", "protocol": "tcp"})]
