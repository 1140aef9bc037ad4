"""What ``KvtierConnector`` refuses by name: configs, layouts, adapters, versions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from integrations.fake_vllm import FakeEngine
from integrations.fake_worker import ROLES, SPECS, UNIT, connector_module, kv_cache_config, spec_class, vllm_config
from integrations.served_once import TEXT, push_out, pushed_out
from integrations.standin import check_call
from kvtier import ConfigError, MemoryUnavailable, UnsupportedModel
from kvtier.integrations.vllm import settings
from kvtier.integrations.vllm.settings import check_version

REFUSED = {
    "policy": ({"policy": "fail"}, {}, {}, ConfigError, 'set "kv_load_failure_policy": "recompute"'),
    "prefix caching": ({"prefix_caching": False}, {}, {}, ConfigError, "--no-enable-prefix-caching.*vLLM's log"),
    "latents on a CPU": (
        {"prefix_caching": False, "device": "cpu", "model_fields": {"use_mla": True}},
        {},
        {},
        UnsupportedModel,
        "vLLM has turned prefix caching off.*MLA",
    ),
    "latents on machines": (
        {"parallel": {"world_size": 2, "nnodes_within_dp": 2}, "model_fields": {"use_mla": True}},
        {},
        {},
        ConfigError,
        "all 2 ranks share one host memory, and need one machine",
    ),
    "latents beside states": (
        {"parallel": {"world_size": 2}, "model_fields": {"use_mla": True, "is_hybrid": True}},
        {},
        {},
        UnsupportedModel,
        "same on each rank, beside layers whose blocks are not.*--tensor-parallel-size 1",
    ),
    "states": (
        {"model_fields": {"is_hybrid": True}, "mamba_cache_mode": "all"},
        {},
        {},
        UnsupportedModel,
        "mamba_cache_mode is 'all'.*needs align",
    ),
    "states alone": (
        {"model_fields": {"is_attention_free": True}, "mamba_cache_mode": "none"},
        {},
        {},
        UnsupportedModel,
        "mamba_cache_mode is 'none'.*needs align",
    ),
    "finer hashes": (
        {"model_fields": {"is_hybrid": True}, "prefix_match_unit": 2},
        {},
        {},
        UnsupportedModel,
        "every 2 tokens.*leave --prefix-match-unit out",
    ),
    "DeepSeek-V4": (
        {"model_fields": {"hf_text_config": SimpleNamespace(model_type="deepseek_v4")}},
        {},
        {},
        UnsupportedModel,
        "deepseek_v4 keeps a layer's window, entries, index keys and rows in pages.*vLLM's own connectors",
    ),
    "DeepSeek-V4.1": (
        {"model_fields": {"hf_text_config": SimpleNamespace(model_type="deepseek_v41")}},
        {},
        {},
        UnsupportedModel,
        "deepseek_v41 keeps windows out of vLLM's prefix cache.*by replay",
    ),
    "encoder": ({"model_fields": {"is_encoder_decoder": True}}, {}, {}, UnsupportedModel, "attends to an encoder"),
    "speculative": ({"speculative": object()}, {}, {}, UnsupportedModel, "speculative decoding"),
    "pipeline": ({"parallel": {"pipeline_parallel_size": 2}}, {}, {}, ConfigError, "pipeline_parallel_size=2"),
    "launcher": (
        {"parallel": {"distributed_executor_backend": "external_launcher", "world_size": 2}},
        {},
        {},
        ConfigError,
        "a scheduler in each rank",
    ),
    "dcp": ({"parallel": {"decode_context_parallel_size": 2}}, {}, {}, ConfigError, "decode_context_parallel_size=2"),
    "no memory": ({}, {"host_memory": None}, {}, ConfigError, 'needs "host_memory"'),
    "little memory": ({}, {"host_memory": 100}, {}, MemoryUnavailable, "raise host_memory"),
    "unknown option": ({}, {"host_bytes": 5}, {}, ConfigError, "no option 'host_bytes'; there are host_memory"),
    "misspelt option": ({}, {"hostmemory": 5}, {}, ConfigError, "did you mean 'host_memory'"),
    "store": ({}, {"store": "lazy"}, {}, ConfigError, "store must be 'eager' or 'off'"),
    "copy engine": ({}, {"copy_engine": "teleport"}, {}, ConfigError, "copy_engine must be 'threads', 'cuda'"),
    "deadline": ({}, {"deadline_s": 0}, {}, ConfigError, "deadline_s must be a positive number"),
    "verify": ({}, {"verify": "yes"}, {}, ConfigError, "verify must be one of"),
    "mode of a layer": ({}, {}, {"kind": "state", "mamba_cache_mode": "all"}, UnsupportedModel, "mode 'all'"),
    "finer states": (
        {},
        {},
        {"kind": "state", "hash_block_size": 2},
        UnsupportedModel,
        "leave --prefix-match-unit out",
    ),
    "drafts of states": ({}, {}, {"kind": "state", "num_speculative_blocks": 1}, UnsupportedModel, "may take back"),
    "another kind": ({}, {}, {"class": "NewSpec"}, UnsupportedModel, "a kind that kvtier does not know"),
    "not cached": ({}, {}, {"prefix_cacheable": False}, UnsupportedModel, "not part of vLLM's prefix cache"),
    "retained": ({}, {}, {"extra_retained_tokens": 4}, UnsupportedModel, "keeps tokens beyond its window"),
    "hash block": ({}, {}, {"hash_block_size": 3}, UnsupportedModel, "names every 3 tokens"),
    "host": ({}, {}, {"host_resident": True}, UnsupportedModel, "host memory already"),
    "allocations": ({}, {}, {"size": 5}, UnsupportedModel, "lies in 2 allocations"),
    "heads": ({}, {}, {"block_stride": 8}, UnsupportedModel, "heads lie outside.*VLLM_KV_CACHE_LAYOUT=LBHNC"),
    "heads and layers": ({}, {}, {"layer_stride": 8}, UnsupportedModel, "heads lie outside"),
}


def test_layers_of_a_group_need_pages_of_one_size():
    """vLLM tells its scheduler the size of the first layer's only: books and workers would not agree."""
    layers = [SPECS["full"](), SPECS["full"]()]
    both = spec_class("UniformTypeKVCacheSpecs")(block_size=UNIT, kv_cache_specs={"0.0": layers[0], "0.1": layers[1]})
    cache, config = kv_cache_config([both], 8), vllm_config({"host_memory": "1MiB"})
    connector_module.KvtierConnector(config, ROLES.WORKER, cache)
    layers[1].page_size_bytes *= 2
    with pytest.raises(UnsupportedModel, match=r"pages of \[32, 64\] bytes"):
        connector_module.KvtierConnector(config, ROLES.WORKER, cache)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(name):
    changes, extra, shape, error, match = REFUSED[name]
    spec, whole = SPECS[shape.get("kind", "window")](), SPECS["full"]()
    if "class" in shape:
        spec = spec_class(shape["class"])(**vars(spec))
    for field in ("prefix_cacheable", "extra_retained_tokens", "mamba_cache_mode", "num_speculative_blocks"):
        if field in shape:
            setattr(spec, field, shape[field])
    cache = kv_cache_config([spec, whole], 8, **{k: v for k, v in shape.items() if k == "hash_block_size"})
    for field in ("host_resident", "size", "block_stride", "layer_stride"):
        if field in shape:
            setattr(cache.kv_cache_tensors[0], field, shape[field])
    options = {k: v for k, v in ({"host_memory": "1MiB"} | extra).items() if v is not None}
    with pytest.raises(error, match=match):
        connector_module.KvtierConnector(vllm_config(options, **changes), ROLES.SCHEDULER, cache)


OF_V4 = {
    "rows": r"layer '0\.0' \(SlidingWindowMLASpec\) is a window of.*entries, index keys and rows in pages of several",
    "replayed": r"layer '0\.0' \(SlidingWindowMLASpec\) is of a model that.*rebuilds them by replay",
    "entries": r"layer '0\.0' \(MLAAttentionSpec\) has one entry for several tokens.*in pages of several",
}


@pytest.mark.parametrize("kind", OF_V4)
def test_no_engine_begins_to_serve_a_part_of_what_a_layer_of_deepseek_v4_keeps(kind):
    with pytest.raises(UnsupportedModel, match=OF_V4[kind]):
        FakeEngine((kind, "full"))


def test_latents_of_each_token_come_back_from_the_host_tier():
    engine = FakeEngine(("latents",), 50, host_memory=40_000)
    engine.serve(TEXT)
    engine.settle()
    push_out(engine)
    engine.serve(TEXT)
    assert (engine.loads, engine.wrong) == (1, 0)


AT_ONCE = [name for name, (_, _, shape, error, _) in REFUSED.items() if not shape and error is not MemoryUnavailable]


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_the_config_tells_is_refused_before_vllm_measures_memory_and_compiles(name):
    """vLLM asks for a layout then: of all that it asks a connector, it is the first with its config."""
    changes, extra, _, error, match = REFUSED[name]
    options = {k: v for k, v in ({"host_memory": "1MiB"} | extra).items() if v is not None}
    check_call("get_required_kvcache_layout", None)
    with pytest.raises(error, match=match):
        connector_module.KvtierConnector.get_required_kvcache_layout(vllm_config(options, **changes))


def test_a_config_that_works_asks_for_no_layout():
    config = vllm_config({"host_memory": "1MiB"})
    assert connector_module.KvtierConnector.get_required_kvcache_layout(config) is None


@pytest.mark.parametrize(("version", "works"), [("0.30.2", False), ("0.31.0", True)])
def test_adapters_need_a_vllm_whose_block_hashes_know_which_adapter_a_name_means(version, works):
    """Before, another adapter under the same name found the K and V of the old one."""
    config = vllm_config({"host_memory": "1MiB"}, lora=object())
    if works:
        settings.check_engine(config, version)
        return
    with pytest.raises(ConfigError, match=r"LoRA.*by its name alone.*vLLM 0\.31"):
        settings.check_engine(config, version)
    settings.check_engine(vllm_config({"host_memory": "1MiB"}), version)


def test_a_request_that_reads_no_cache_is_not_asked_for():
    """One that wants logprobs of its prompt: vLLM would throw the answer away."""
    engine = pushed_out()
    request = engine.add("r", TEXT)
    request.skip_reading_prefix_cache = True
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert sum(pool.held for pool in engine.books.stats().host.values()) == 0, "it holds a hit"


VERSIONS = {"0.29.1": False, "0.30.0": True, "0.33.2rc1": True, "0.34.0": False, "1.0": False, "dev": True}


@pytest.mark.parametrize(("version", "works"), VERSIONS.items())
def test_versions_of_another_interface_are_refused_with_the_range_that_works(version, works):
    if works:
        check_version(version)
        return
    with pytest.raises(ConfigError, match=f"works with vLLM 0.30 to 0.33; this is {version}"):
        check_version(version)


def test_memory_that_lies_otherwise_than_vllm_says_is_refused():
    engine = FakeEngine(("full",), 8)
    caches = {"0.0": engine.workers[0].storage[16:], "0.1": engine.workers[0].storage}
    with pytest.raises(UnsupportedModel, match="does not lie where"):
        engine.workers[0].connector.register_kv_caches(caches)


def test_the_package_imports_neither_numba_nor_kvtiers_core():
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; from integrations.standin import install; install(); "
        "from kvtier.integrations.vllm import KvtierConnector; "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('numba', 'llvmlite')]; assert not bad, bad"
    )
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    subprocess.run([sys.executable, "-c", code, *folders], check=True, timeout=300)
