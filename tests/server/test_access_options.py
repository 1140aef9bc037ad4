"""The options of ``kvtier serve`` that say who may call."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from kvtier import ConfigError
from runner.commands import access_arguments
from runner.server.settings import Settings


def read(*options: str, **more: Any) -> Settings:
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    access_arguments.add_to(parser)
    args = parser.parse_args(options, argparse.Namespace(host="0.0.0.0", **more))
    return Settings(names=("m",), **access_arguments.read(args))


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (access_arguments.KEY_VARIABLE, access_arguments.ADMIN_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_keys_come_from_options_and_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read() == Settings(names=("m",), host="0.0.0.0")
    monkeypatch.setenv(access_arguments.KEY_VARIABLE, "b, c")
    monkeypatch.setenv(access_arguments.ADMIN_VARIABLE, "boss")
    told = read("--api-key", "a", "b", "--salt-by-api-key", "--allowed-hosts", "llm.example", "[::1]")
    assert (told.api_keys, told.admin_api_keys, told.salt_by_api_key) == (("a", "b", "c"), ("boss",), True)
    assert told.allowed_hosts == ("llm.example", "[::1]")
    assert read("--allowed-origins", '["http://a", "http://b"]').allowed_origins == ("http://a", "http://b")


@pytest.mark.parametrize(
    ("options", "more", "says"),
    [
        (["--api-key", " "], {}, "--api-key is empty"),
        (["--admin-api-key", ""], {}, "--admin-api-key is empty"),
        (["--api-key", "a", "b", "--admin-api-key", "b"], {}, "both --api-key and --admin-api-key"),
        (["--salt-by-api-key"], {}, "needs keys"),
        (["--api-key", "a", "--salt-by-api-key"], {"kv_events_config": '{"enable_kv_cache_events": true}'},
         "nothing to tell routers"),
        (["--allowed-origins", '["http://a" "http://b"]'], {}, "no JSON list"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(options: list[str], more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(*options, **more)
