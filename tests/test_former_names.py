"""Names from before there was one word a tier: each is refused with the name to use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier import ConfigError, Fragment, FullAttention, HostTier, KVCache, OutsideGroup
from kvtier.integrations.vllm.settings import Settings
from kvtier.testing import canary_spec
from runner import LLM, needle
from runner.cli import main

SPEC = {"full": (FullAttention(), 4)}


def host_tier() -> HostTier:
    group = OutsideGroup("g", FullAttention(), 4, 4, (Fragment(0, 64, 64),))
    return HostTier([group], np.zeros(256, np.uint8), "1KiB", store_uri="memory://")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: KVCache(canary_spec(SPEC), device_blocks={"full": 4}, store_uri="memory://"), "store_uri is called"),
        (host_tier, "store_uri is called remote_uri"),
        (lambda: LLM(needle.weights_path(), store_uri="memory://"), "remote_uri"),
        (lambda: Settings.of({"host_memory": "1GiB", "store_uri": "file:///kv"}), "store_uri is called remote_uri"),
    ],
)
def test_options(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        call()


def test_an_option_that_never_was_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        KVCache(canary_spec(SPEC), device_blocks={"full": 4}, colour=1)


@pytest.mark.parametrize("option", ["--kv-store", "--kv-store-secret-file"])
def test_options_of_the_server(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", option, "file:///kv"])
    assert ended.value.code == 2
    assert f"{option} is called {option.replace('store', 'remote')}" in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "ls", "file:///kv"]) == 2
    assert "`kvtier remote`" in capsys.readouterr().err


def test_they_are_not_in_the_help() -> None:
    told = subprocess.run([sys.executable, "-m", "runner.cli", "serve", "--help"], capture_output=True, text=True)
    assert "--kv-remote" in told.stdout and "--kv-store" not in told.stdout


def test_classes() -> None:
    import kvtier

    assert kvtier.RelayedBooks is kvtier.HostTierScheduler and kvtier.HostWorker is kvtier.HostTierWorker
    assert not {"RelayedBooks", "HostWorker"} & {*kvtier.__all__}
