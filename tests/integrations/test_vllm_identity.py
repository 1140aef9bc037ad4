"""What engines must have in common to share a remote tier: any difference is another name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integrations.fake_vllm import stems
from integrations.fake_worker import SPECS, kv_cache_config, vllm_config
from kvtier import ConfigError
from kvtier.integrations.vllm.geometry import geometry_of
from kvtier.integrations.vllm.identity import check_engine, facts_of, model_id, weights_of
from kvtier.integrations.vllm.settings import SECRET_VARIABLE, Settings


def name_of(specs=("full",), facts=None, weights="w", hashes="h", blocks=8, **changes: Any) -> str:
    cache = kv_cache_config([SPECS[kind]() for kind in specs], blocks)
    told = {0: "cpu"} if facts is None else facts
    return model_id(vllm_config({}, **changes), cache, geometry_of(cache), weights, hashes, told)


def test_any_difference_is_another_name():
    names = [
        name_of(),
        name_of(specs=("window", "full")),
        name_of(facts={0: "gpu"}),
        name_of(facts={0: "cpu", 1: "cpu"}),
        name_of(weights="v"),
        name_of(hashes="g"),
        name_of(dtype="bfloat16"),
        name_of(cache_dtype="fp8"),
        name_of(hf={"rope": {"type": "yarn"}}),
        name_of(hf={"rope": {"type": "longrope"}}),
        name_of(hf={"rope": {"type": "longrope"}}, max_model_len=200),
    ]
    assert len(set(names)) == len(names)
    assert name_of(blocks=9) == name_of(max_model_len=200) == name_of(hf={"_name_or_path": "x"}) == names[0]


@dataclass
class Model:
    """Fields as of vLLM's ``ModelConfig``."""

    hf_config: Any
    model: str = "no/folder"
    dtype: str = "float32"
    max_model_len: int = 100
    served_model_name: str = "m"
    model_weights: str = ""
    model_impl: str = "auto"
    quantization_config: Any = None
    model_class_overrides: Any = field(default_factory=dict)
    hf_overrides: Any = field(default_factory=dict)
    multimodal_config: Any = None
    of_a_later_vllm: int = 0


@dataclass
class Quantized:
    linear: str
    ignore: tuple[str, ...] = ()


def test_every_field_of_vllms_configs_is_in_the_name_but_those_known_to_say_nothing():
    def name(load=None, attention=None, **model: Any) -> str:
        cache, config = kv_cache_config([SPECS["full"]()], 8), vllm_config({})
        config.model_config = Model(config.model_config.hf_config, **model)
        config.attention_config = SimpleNamespace(**{"use_non_causal": False} | (attention or {}))
        vars(config.load_config).update(load or {})
        return model_id(config, cache, geometry_of(cache), "w", "h", {0: "cpu"})

    names = [
        name(),
        name(quantization_config=Quantized("fp8")),
        name(quantization_config=Quantized("fp8", ("k_proj",))),
        name(model_class_overrides={"Llama": "granite:Granite"}),
        name(hf_overrides={"architectures": ["Mistral"]}),
        name(hf_overrides=stems),
        name(model_impl="transformers"),
        name(model_weights="s3://bucket/w"),
        name(load={"ignore_patterns": ["*-00002*"]}),
        name(attention={"use_non_causal": True}),
        name(multimodal_config=SimpleNamespace(video_pruning_rate=0.3, mm_processor_cache_gb=4)),
        name(multimodal_config=SimpleNamespace(video_pruning_rate=0.7, mm_processor_cache_gb=4)),
        name(multimodal_config=SimpleNamespace(video_pruning_rate=0.3, mm_encoder_attn_dtype="fp8")),
        name(of_a_later_vllm=1),
    ]
    assert len(set(names)) == len(names)
    assert name(served_model_name="other", load={"download_dir": "/d"}) == name(max_model_len=200) == names[0]
    assert name(multimodal_config=SimpleNamespace(video_pruning_rate=0.3, mm_processor_cache_gb=8)) == names[10]
    assert name_of(hf={"architectures": ["Mistral"]}) != name_of()


def test_a_workers_facts_are_of_its_kernels_and_layout():
    import torch

    def facts(tensor: torch.Tensor, blocks: int = 6) -> str:
        return facts_of(vllm_config({}), blocks, {"layer": tensor})

    one = facts(torch.zeros(6, 2, 4))
    assert one == facts(torch.zeros(12, 2, 4), blocks=12), "the number of blocks is no part of it"
    others = [torch.zeros(6, 4, 2), torch.zeros(6, 2, 4).half(), torch.zeros(2, 6, 4), torch.zeros(6, 4, 2).mT]
    assert len({one, *map(facts, others)}) == 5


def test_weights_without_a_name(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"'no/folder' is neither a local folder nor .* \"model_id\""):
        weights_of(vllm_config({}), None)
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors.*\"model_id\""):
        weights_of(vllm_config({}, model=str(tmp_path)), None)
    with pytest.raises(ConfigError, match=r"load_format is 'dummy'.*\"model_id\""):
        weights_of(vllm_config({}, model=str(tmp_path), load_format="dummy"), None)
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = weights_of(vllm_config({}, model=str(tmp_path)), None)
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert len({first, weights_of(vllm_config({}, model=str(tmp_path)), None), weights_of(vllm_config({}), "m")}) == 3


class Hub:
    """A cache of the hub's files, as huggingface_hub lays it out."""

    def __init__(self, cache: Path) -> None:
        self.model = cache / "models--org--name"

    def download(self, commit: str, revision: str = "main", **files: str) -> None:
        """A snapshot, and what ``revision`` means from now on."""
        snapshot = self.model / "snapshots" / commit
        for folder in (snapshot, self.model / "refs"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (snapshot / name.replace("__", ".")).write_text(content)
        (self.model / "refs" / revision).write_text(commit)


ONE, TWO = "1" * 40, "2" * 40


def hub_config(cache: Path, revision: str | None = None, commit: str | None = None, code: str | None = None) -> Any:
    found = vllm_config({}, model="org/name", model_fields={"revision": revision, "code_revision": code})
    found.load_config.download_dir = str(cache)
    found.model_config.hf_config._commit_hash = commit
    return found


def test_a_model_of_the_hub_has_the_name_of_what_was_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "usual"))
    hub, folder = Hub(tmp_path / "hub"), tmp_path / "folder"
    hub.download(ONE, model__safetensors="one", tokenizer__json="says nothing")
    hub.download(TWO, "old", model__safetensors="two")
    folder.mkdir()
    (folder / "model.safetensors").write_text("one")
    name = weights_of(hub_config(tmp_path / "hub", commit=ONE), None)
    assert name == weights_of(vllm_config({}, model=str(folder)), None), "by content, wherever it lies"
    assert name == weights_of(hub_config(tmp_path / "hub", "main"), None)
    assert name == weights_of(hub_config(tmp_path / "hub", ONE), None)
    assert name != weights_of(hub_config(tmp_path / "hub", "old", TWO), None)
    Hub(tmp_path / "usual").download(ONE, modeling__py="code beside the config, not the weights")
    assert name != weights_of(hub_config(tmp_path / "hub", commit=ONE), None)


def test_a_model_of_the_hub_that_cannot_be_told_for_sure_needs_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "usual"))
    hub = Hub(tmp_path / "hub")
    hub.download(ONE, model__safetensors="one")
    moved_on = hub_config(tmp_path / "hub", commit=TWO)  # another one has downloaded since this engine began
    for config in (moved_on, hub_config(tmp_path / "hub", "other"), hub_config(tmp_path / "hub", code="main")):
        with pytest.raises(ConfigError, match=r"'org/name' is neither a local folder nor .* \"model_id\""):
            weights_of(config, None)
        assert weights_of(config, "m") == "given/m"


def test_a_snapshots_model_is_called_as_on_the_hub():
    """vLLM puts its folder in the model's place when it may not ask the hub."""
    online = name_of(model="org/name")
    assert online.startswith("name@")
    assert name_of(model=f"/cache/models--org--name/snapshots/{ONE}") == online


def test_the_weights_name_is_of_all_files_that_change_k_and_v(tmp_path: Path):
    folder, beside = tmp_path / "model", tmp_path / "quantization.json"
    folder.mkdir()
    config = vllm_config({}, model=str(folder))
    files = ["model.safetensors", "modeling.py", "preprocessor_config.json", "processor_config.json"]
    names = list[str]()
    for file in [*files, "video_preprocessor_config.json", "hf_quant_config.json", "model.safetensors.index.json"]:
        for content in ("one", "two"):
            (folder / file).write_text(content)
            names.append(weights_of(config, None))
    (folder / "tokenizer.json").write_text("says nothing")
    assert weights_of(config, None) == names[-1]
    config.model_config.hf_overrides = {"quantization_config_file": str(beside)}
    with pytest.raises(ConfigError, match=r"cannot be read.*quantization"):
        weights_of(config, "m")
    for content in ("one", "two"):
        beside.write_text(content)
        names += [weights_of(config, None), weights_of(config, "m")]
    assert len(set(names)) == len(names) == 18


def test_another_transformers_is_another_name(monkeypatch: pytest.MonkeyPatch):
    before = name_of()
    monkeypatch.setattr("kvtier.integrations.vllm.identity.version", lambda package: f"{package} of another day")
    assert name_of() != before


def test_hashes_that_can_be_forged_and_scales_of_one_engine():
    assert check_engine(vllm_config({})) != check_engine(vllm_config({}, hashes="sha256_cbor"))
    with pytest.raises(ConfigError, match=r"'xxhash'.*--prefix-caching-hash-algo sha256"):
        check_engine(vllm_config({}, hashes="xxhash"))
    config = vllm_config({})
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        check_engine(config)
    config = vllm_config({})
    config.weight_transfer_config = SimpleNamespace(backend="nccl")
    with pytest.raises(ConfigError, match="weight_transfer_config changes the weights"):
        check_engine(config)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key_secret_file": "x"}, 'key_secret_file is for a remote.*set "remote_uri"'),
        ({"model_id": "x"}, 'model_id is for a remote.*set "remote_uri"'),
        ({"remote_uri": "file:///kv"}, f'remote_uri needs a secret: "key_secret_file".*{SECRET_VARIABLE}'),
        ({"remote_uri": "file:///kv", "key_secret_file": "/not/there"}, "key_secret_file '/not/there': No such file"),
        ({"remote_uri": "file:///kv", "key_secret_file": 7}, "key_secret_file 7"),
        ({"remote_uri": "/kv", "secret": "s"}, "remote_uri must be such as file:///var/kv"),
        ({"remote_uri": 7, "secret": "s"}, "7"),
        ({"remote_uri": "gopher://x", "secret": "s"}, "is no URI of a remote tier; use file:///"),
        ({"remote_uri": "file:///kv", "secret": "s", "model_id": ""}, "model_id must be a text"),
        ({"remote_uri": "memory://", "secret": "s"}, "memory://, which .* do not share; use such as file:///"),
        ({"remote_uri": "memory://name", "secret": "s"}, "memory://"),
        ({"remote_uri": "s3://b?endpoint=https://KEY:SECRET@host", "secret": "s"}, "endpoint holds no credentials"),
        ({"remote_uri": "file:///kv", "key_secret_file": "a\0b"}, "key_secret_file 'a.*null"),
        ({"remote_uri": "file:///kv", "secret": " \n"}, "remote_uri needs a secret"),
        ({"remote_urk": "file:///kv"}, "did you mean 'remote_uri'"),
    ],
)
def test_options_that_cannot_work(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    if "secret" in options:
        monkeypatch.setenv(SECRET_VARIABLE, options.pop("secret"))
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        Settings.of({"host_memory": "1GiB", **options})
