"""What cannot work is refused when the engine starts, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Engine

from kvtier.integrations.vllm.geometry import geometry_of
from kvtier.machine.errors import ConfigError, MemoryUnavailable, UnsupportedModel


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
        ({"enable_prefix_caching": False}, "prefix caching is off.*--no-enable-prefix-caching"),
    ],
)
def test_settings_of_vllm(model: Callable[[str], Path], engine: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        Engine(model("llama"), 72, engine=engine).close()


def test_latents_on_this_kind_of_cpu(model: Callable[[str], Path]) -> None:
    """vLLM turns prefix caching off, though it was asked for."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM leaves prefix caching on with AMX: run it on a CPU without AMX")
    with pytest.raises(UnsupportedModel, match=r"(?s)vLLM has turned prefix caching off.*MLA"):
        Engine(model("deepseek"), 72).close()


def test_the_config_is_looked_at_before_memory_is_measured_and_code_compiled(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.executor.abstract import Executor

    def measure(executor: Any) -> list[int]:
        raise AssertionError("too late")

    monkeypatch.setattr(Executor, "determine_available_memory", measure)
    with pytest.raises(ConfigError, match="kv_load_failure_policy is 'fail'"):
        Engine(model("llama"), 72, engine={"policy": "fail"}).close()


def test_layouts_are_read_rightly_or_refused() -> None:
    """Blocks of every layout that vLLM has, in tensors as vLLM makes them."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheLayout,
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16)
    blocks, layers = 6, ["0", "1", "2"]
    size, served = blocks * len(layers) * spec.page_size_bytes, set()
    for layout in KVCacheLayout:
        layer_stride, block_stride, *_ = compute_layout_strides(spec, blocks, len(layers), layout)
        tensor = KVCacheTensor(size, layers, layer_stride, block_stride)
        config = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(layers, spec)])
        try:
            (group,) = geometry_of(config).groups
        except UnsupportedModel as refusal:
            assert "heads lie outside" in str(refusal)
            continue
        served.add(layout.name)
        raw = torch.zeros(size, dtype=torch.int8)
        for n, view in enumerate(create_kv_cache_views(raw, spec, blocks, layout, tensor)):
            raw.zero_()
            view[4] = 1
            first, stride, num_bytes = group.fragments[n]
            block = raw[first + 4 * stride :][:num_bytes]
            assert block.count_nonzero() == raw.count_nonzero() > 0
    assert served == {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}


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
