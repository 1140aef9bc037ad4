"""``KvtierConnector`` with a remote behind its host tier, in the engine that keeps to vLLM's contract."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inside
import pytest
from breadth import sized
from remote.fake_backend import FakeBackend, Shared

from integrations.fake_vllm import SPECS, TICK_S, FakeEngine, connector_module, kv_cache_config, stems, vllm_config
from kvtier import ConfigError
from kvtier.integrations.vllm.geometry import geometry_of
from kvtier.integrations.vllm.identity import check_engine, facts_of, model_id, weights_of
from kvtier.integrations.vllm.settings import SECRET_VARIABLE, Settings
from kvtier.integrations.vllm.stats import COUNTERS, GAUGES
from kvtier.testing import Faults

UNKIND = Faults(fail=0.04, tear=0.03, corrupt=0.02, lose=0.02, max_delay_s=5.0)
KINDS = ("window", "chunk", "full")
TEXT = stems(1, 1, most=59)[0] + [3] * 40


class Made:
    """Engines that share a remote in memory."""

    def __init__(self, secret: Path) -> None:
        self.shared = Shared()
        self.secret = secret
        self.stores: list[FakeBackend] = []
        self.faults: dict[str, float] = {}
        self.hold = False

    def open(self, uri: str) -> FakeBackend:
        self.stores.append(FakeBackend(self.shared, self.hold, len(self.stores), **self.faults))
        return self.stores[-1]

    def engine(self, kinds=KINDS, blocks=60, hold=False, store=None, **options: Any) -> FakeEngine:
        self.stores, self.faults, self.hold = [], store or {}, hold
        given = {"remote_uri": "file:///nowhere", "key_secret_file": str(self.secret), "model_id": "m"}
        engine = FakeEngine(kinds, blocks, **(given | {"host_memory": 40_000} | options))
        inside.relay_clock(engine.books, lambda: engine.engines[0].now() * TICK_S)
        engine.stores = self.stores
        return engine


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    secret = tmp_path / "secret"
    secret.write_text("s")
    found = Made(secret)
    monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", 100)
    for name in ("kvtier.remote.opening.open_backend", "kvtier.remote.backends.uri.open_backend"):
        monkeypatch.setattr(name, found.open)
    return found


def serve(engine: FakeEngine, text: list[int]) -> int:
    """Cached tokens."""
    found = engine.serve(text)
    engine.settle()
    engine.check()
    return found.cached_tokens


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kinds", [("full",), ("window", "full"), KINDS, ("wide", "window")], ids=str)
def test_what_one_engine_has_stored_another_one_hits(made: Made, kinds, workers):
    one, other = made.engine(kinds, workers=workers), made.engine(kinds, workers=workers)
    assert serve(one, TEXT) == 0
    assert serve(other, TEXT) >= len(TEXT) - 8
    assert (one.wrong, other.wrong, other.loads) == (0, 0, 1)
    assert len({name.split("/")[1] for name in made.shared.objects}) == workers
    news = inside.vllm_side(other.connector).news()
    assert news["remote_fetched_objects"] > 0 and news["remote_is_on"] == 1
    assert news["waits_for_remote"] > 0
    assert set(news) <= {*COUNTERS, *GAUGES}
    assert inside.vllm_side(one.connector).news()["remote_spilled_bytes"] > 0


@pytest.mark.parametrize(
    ("uri", "source"), [("file:///nowhere", "disk"), ("s3://nowhere", "external_unspecified")], ids=["file", "s3"]
)
def test_vllm_is_told_which_tokens_of_a_hit_came_from_the_store(made: Made, uri, source):
    serve(made.engine(("full",)), TEXT)
    engine, pushed_out = made.engine(("full",), remote_uri=uri), []
    for text in (TEXT[:33], TEXT, TEXT):
        pushed_out.append(serve(engine, text))
        for block in engine.pool.blocks:
            engine.pool.forget(block)
    begin, whole, again = pushed_out
    assert (begin, again) == (32, whole) and whole > 48
    assert engine.hits == {source: whole, "host": begin + again}, "by then the host had it"


def test_a_reset_turns_the_store_off(made: Made):
    one, other = made.engine(), made.engine()
    serve(one, TEXT)
    serve(other, [1, 2, 3])
    other.reset()
    for store in other.stores:
        store.is_to_be_left_alone = True
    assert serve(other, TEXT) == 0
    assert inside.vllm_side(other.connector).news()["remote_is_on"] == 0


def test_what_a_request_has_stored_whose_logits_are_no_numbers_leaves_the_store(made: Made, monkeypatch):
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    engine = made.engine()
    assert serve(engine, TEXT) == 0
    assert made.shared.objects
    engine.nans = {len(TEXT) + 4: 1}
    serve(engine, TEXT)
    assert made.shared.objects == {}
    assert serve(made.engine(), TEXT) == 0


def test_after_a_reset_a_store_is_not_even_opened(made: Made):
    serve(made.engine(), TEXT)
    engine = made.engine()
    engine.reset()
    assert serve(engine, TEXT) == 0
    assert engine.books.stats().remote is None
    assert [call for store in engine.stores for call in store.made] == []


def test_an_adapters_requests_do_without_the_store(made: Made):
    one = made.engine()
    request = one.add("r", TEXT)
    request.lora_request = "an adapter"
    while one.requests:
        one.step()
    one.settle()
    assert made.shared.objects == {}
    assert [call for store in one.stores for call in store.made] == []


def test_workers_that_tell_nothing_of_themselves_hold_up_requests_for_a_moment(made: Made, monkeypatch, caplog):
    engine = made.engine()
    monkeypatch.setattr("kvtier.integrations.vllm.behind.FACTS_S", 0.0)
    inside.forget_facts(engine.workers)
    assert serve(engine, TEXT) == 0
    assert [call for store in engine.stores for call in store.made] == []
    assert "no remote" in caplog.text


def test_a_store_that_does_not_answer_costs_a_request_a_moment(made: Made, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvtier.coordinator.seek.UNKNOWN_S", 0.02)
    engine = made.engine(hold=True)
    assert engine.serve(TEXT).cached_tokens == 0
    assert engine.books.stats().remote.late_looks == 1
    while engine.connector.has_pending_push_work():  # its text is stored once it has answered
        engine.step()
        for store in engine.stores:
            store.end()
    engine.check()


def test_a_client_that_leaves_while_the_store_is_asked_leaves_nothing(made: Made):
    serve(made.engine(), TEXT)
    engine = made.engine(hold=True)
    free = len(engine.pool.free)
    engine.add("r", TEXT)
    for _ in range(200):
        engine.step()
        if inside.behind_tier(engine.books).moves():
            break
        engine.stores[0].end("look")
    engine.abort("r")
    for _ in range(5):
        engine.step()
        for store in engine.stores:
            store.end()
    engine.settle()
    engine.check()
    assert len(engine.pool.free) == free
    assert inside.tier_pools(engine.books).live.sum() == 0


@pytest.mark.parametrize("seed", range(sized(2, 30)))
@pytest.mark.parametrize("faults", [None, UNKIND], ids=["sound", "unkind"])
def test_random_requests_on_engines_that_share_a_store_read_only_what_was_written(made: Made, seed, faults):
    rnd = random.Random(seed)
    bad = rnd.choice([{}, {"fail": 0.1, "miss": 0.1}, {"damage": 0.2, "tear": 0.1, "swap": 0.2}, {"refuse": 0.3}])
    workers = rnd.choice([1, 2])
    pair = [
        made.engine(blocks=40, workers=workers, seed=seed + k, faults=faults, store=bad, host_memory=12_000 * workers)
        for k in range(2)
    ]
    texts = stems(seed)
    for k in range(sized(60, 300)):
        engine = pair[rnd.randrange(2)]
        text = rnd.choice(texts)
        prompt = [*text[: rnd.randrange(1, len(text) + 1)], *(rnd.randrange(1000) for _ in range(rnd.randrange(4)))]
        engine.add(f"r{k}", prompt, rnd.randrange(1, 12))
        if rnd.random() < 0.05:
            engine.abort(rnd.choice(list(engine.requests)))
        if rnd.random() < 0.004:
            engine.reset()
        for _ in range(rnd.randrange(12)):
            engine.step()
            engine.check()
    for engine in pair:
        for _ in range(500):
            for one in engine.engines:
                one.end_lost()
            engine.step()
            engine.check()
            if not engine.requests:
                break
        for one in engine.engines:
            one.end_lost()
        engine.settle()
        engine.check()
        assert engine.requests == {}
    fetched = sum(engine.books.stats().remote.fetched_objects for engine in pair)
    assert fetched or bad or faults is not None


def test_steps_tell_how_long_prompts_take(made: Made):
    now = [0.0]
    engine = made.engine()
    inside.vllm_clock(engine.connector, lambda: now[0])
    engine.step()
    engine.connector.get_kv_connector_stats()
    engine.add("r", TEXT)
    assert inside.compute_seconds(engine.books)(0, 100) is None
    while engine.requests:
        engine.step()
        now[0] += 16.0  # a step's 16 tokens
        engine.connector.get_kv_connector_stats()
        now[0] += 99.0  # nobody asks for anything
    assert inside.compute_seconds(engine.books)(0, 160) == pytest.approx(160, rel=0.2)


def test_a_fetch_that_takes_longer_than_computing_is_left_out(made: Made):
    other = made.engine()
    texts = [[1000 * k + i for i in range(60)] for k in range(2)]
    for text in texts:
        serve(made.engine(), text)
    assert serve(other, texts[0]) > 0
    other.books.estimate_compute(lambda start, end: 1e-9)
    assert serve(other, texts[1]) == 0
    assert other.books.stats().remote.not_worth == 1


# --- what engines must have in common ---------------------------------------------------------------


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


def test_whatever_cannot_work_is_refused_before_all_weights_are_read(made: Made, monkeypatch: pytest.MonkeyPatch):
    def read(*_: Any) -> str:
        raise AssertionError("the weights are read")

    monkeypatch.setattr("kvtier.integrations.vllm.behind.weights_of", read)
    with pytest.raises(ConfigError, match="xxhash"):
        made.engine(settings={"hashes": "xxhash"})
    with pytest.raises(AssertionError, match="are read"):
        made.engine()
    assert [store.is_closed for store in made.stores] == [True]
    with pytest.raises(ConfigError, match="did you mean 'host_memory'"):
        connector_module.KvtierConnector.requires_piecewise_for_cudagraph({"host_memroy": "1GiB"})
    options = {"host_memory": "1GiB", "remote_uri": "file:///kv", "key_secret_file": str(made.secret)}
    assert connector_module.KvtierConnector.requires_piecewise_for_cudagraph(options) is False


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


def test_the_secret_comes_from_a_file_or_the_environment(made: Made, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SECRET_VARIABLE, "of the environment")
    options = {"host_memory": "1GiB", "remote_uri": "file:///kv"}
    assert Settings.of(options).secret() == b"of the environment"
    assert Settings.of(options | {"key_secret_file": str(made.secret)}).secret() == b"s"
    raw = b"\xff\x80 \xc3"
    made.secret.write_bytes(raw + b"\n")
    monkeypatch.setitem(os.environb, SECRET_VARIABLE.encode(), raw + b"\n")
    assert Settings.of(options).secret() == Settings.of(options | {"key_secret_file": str(made.secret)}).secret() == raw
