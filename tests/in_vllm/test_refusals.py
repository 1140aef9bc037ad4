"""What cannot work is refused when the engine starts, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driving import Engine

from kvtier.errors import ConfigError, MemoryUnavailable, UnsupportedModel


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host_memroy": "1GiB"}, "no option 'host_memroy'; did you mean 'host_memory'"),
        ({"colour": 1}, "no option 'colour'; there are host_memory, verify, store"),
        ({"host_memory": None}, 'needs "host_memory", such as "64GiB"'),
        ({"host_memory": "1KiB"}, "host_memory is 1,024 bytes.*raise host_memory"),
        ({"host_memory": "9999TiB"}, "host_memory asks for.*lower host_memory"),
        ({"verify": "sometimes"}, "verify.*'sometimes'"),
        ({"store": "lazy"}, "store must be 'eager' or 'off', got 'lazy'"),
        ({"deadline_s": -1}, "deadline_s.*-1"),
        ({"copy_engine": "teleport"}, "copy_engine must be 'threads', 'cuda'.*'teleport'"),
    ],
)
def test_options(model: Callable[[str], Path], options: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, MemoryUnavailable), match=f"(?s){says}"):
        Engine(model("llama"), 72, **options).close()


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"policy": "fail"}, "kv_load_failure_policy is 'fail'.*\"recompute\""),
        ({"enable_prefix_caching": False}, "prefix caching is off.*--enable-prefix-caching"),
    ],
)
def test_settings_of_vllm(model: Callable[[str], Path], engine: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        Engine(model("llama"), 72, engine=engine).close()


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.0.0"])
def test_versions_with_another_interface(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(ConfigError, match=rf"works with vLLM 0.30 to 0.33; this is {re.escape(version)}"):
        Engine(model("llama"), 72).close()


def test_speculative_decoding(model: Callable[[str], Path]) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    with pytest.raises(UnsupportedModel, match="speculative decoding"):
        Engine(model("llama"), 72, engine={"speculative_config": drafts}).close()


def test_none_of_these_refusals_is_in_the_way_of_the_next_start(model: Callable[[str], Path]) -> None:
    engine = Engine(model("llama"), 72)
    assert len(engine.ask([[5] * 40], 3)[0].ids) == 3
    engine.check_nothing_is_held()
    engine.close()
