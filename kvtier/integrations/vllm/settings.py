"""What a user can set, and what of vLLM's own settings is refused.

Owns       ``kv_connector_extra_config``: its names, defaults and ranges.
Promises   whatever cannot work raises ``ConfigError`` or ``UnsupportedModel`` at start, and says what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvtier.integrations.vllm.geometry import FAMILIES, MIXED, check_finer_hashes
from kvtier.machine.errors import ConfigError, UnsupportedModel

VERSIONS = ((0, 30), (0, 33))
"""The first and the last vLLM with the interface that this connector is written for."""
ADAPTERS_BY_PATH = (0, 31)
"""The first vLLM whose block hashes tell two LoRA adapters of one name apart."""
SECRET_VARIABLE = "KVTIER_KEY_SECRET"
COUNTS_NANS = ("VLLM_COMPUTE_NANS_IN_LOGITS", "VLLM_RAISE_ON_LOGIT_NANS")
"""With one of these vLLM counts the NaNs in each request's logits."""
OF_REMOTE = ("key_secret_file", "model_id")
"""Options that need ``remote_uri``."""


@dataclass(frozen=True)
class Settings:
    """``kv_connector_extra_config``.

    ``host_memory``   bytes of the host tier, of all workers together: an int, or text such as "64GiB".
    ``verify``        "full": a checksum per block, checked after each load; "off".
    ``store``         "eager": blocks are stored once they are full; "off": the host tier is only read.
    ``deadline_s``    seconds after which a copy is given up, and its tokens are computed.
    ``copy_engine``   "threads" or "cuda"; None for what suits the device.
    ``remote_uri``     a remote tier, such as "file:///var/kv".
    ``key_secret_file``  a file with the secret that names its content; else the environment has it.
    ``model_id``      names the weights, in place of a digest of their files.
    """

    host_memory: str | int
    verify: str = "full"
    store: str = "eager"
    deadline_s: float = 30.0
    copy_engine: Any = None
    remote_uri: str | None = None
    key_secret_file: str | None = None
    model_id: str | None = None

    @staticmethod
    def of(given: Mapping[str, Any]) -> Settings:
        """Raises ``ConfigError`` for what is missing, unknown or out of range."""
        from kvtier.geometry.options import FORMER_NAMES, check_choices, seconds
        from kvtier.geometry.sizing import parse_bytes

        names = [field.name for field in fields(Settings)]
        for name in given:
            if name in FORMER_NAMES:
                raise ConfigError(f"kv_connector_extra_config: {name} is called {FORMER_NAMES[name]}")
            if name not in names:
                close = get_close_matches(str(name), names, 1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"
                raise ConfigError(f"kv_connector_extra_config has no option {name!r}{hint}")
        if "host_memory" not in given:
            raise ConfigError('kv_connector_extra_config needs "host_memory", such as "64GiB"')
        found = Settings(**given)
        parse_bytes(found.host_memory, "host_memory")
        seconds(found.deadline_s, "deadline_s")
        check_choices(verify=found.verify)
        if found.copy_engine not in (None, "threads", "cuda") and not callable(found.copy_engine):
            raise ConfigError(f"copy_engine must be 'threads', 'cuda' or left out, got {found.copy_engine!r}")
        if found.store not in ("eager", "off"):
            raise ConfigError(f"store must be 'eager' or 'off', got {found.store!r}")
        found.check_remote()
        return found

    def check_remote(self) -> None:
        """Raises ``ConfigError`` for options of a remote that are half given, or cannot work."""
        from kvtier.remote.backends.uri import parse_uri
        from kvtier.remote.check import check_remote

        if self.remote_uri is None:
            given = [name for name in OF_REMOTE if getattr(self, name) is not None]
            if given:
                raise ConfigError(f'{given[0]} is for a remote tier; set "remote_uri" as well')
            return
        if self.model_id is not None and (not isinstance(self.model_id, str) or not self.model_id):
            raise ConfigError(f"model_id must be a text that names the weights, got {self.model_id!r}")
        check_remote(self.remote_uri, True, "cpu", "m", self.secret())
        if parse_uri(self.remote_uri).scheme == "memory":
            raise ConfigError(
                "remote_uri is memory://, which vLLM's scheduler and workers do not share; use such as file:///var/kv, "
                "s3://bucket or mooncake://host:port"
            )

    def secret(self) -> bytes:
        """What names the remote's content. Raises ``ConfigError`` if there is none."""
        file = self.key_secret_file
        try:
            found = os.environb.get(SECRET_VARIABLE.encode(), b"") if file is None else Path(file).read_bytes()
        except (OSError, TypeError, ValueError) as problem:
            raise ConfigError(f"key_secret_file {file!r}: {getattr(problem, 'strerror', None) or problem}") from problem
        found = found.strip()
        if not found:
            raise ConfigError(
                f'remote_uri needs a secret: "key_secret_file", a file that is not empty, or {SECRET_VARIABLE} in the '
                "environment"
            )
        return found


def check(config: Any, version: str) -> Settings:
    """The options in a ``VllmConfig``. Raises ``ConfigError`` or ``UnsupportedModel`` for whatever vLLM's own config
    tells that cannot work."""
    check_version(version)
    check_engine(config, version)
    check_model(config)
    return Settings.of(config.kv_transfer_config.kv_connector_extra_config)


def check_version(version: str) -> None:
    """Raises ``ConfigError`` for a vLLM of another interface."""
    numbers = _numbers(version)
    if numbers is not None and not VERSIONS[0] <= numbers <= VERSIONS[1]:
        first, last = (".".join(map(str, v)) for v in VERSIONS)
        raise ConfigError(f"kvtier's connector works with vLLM {first} to {last}; this is {version}")


def _numbers(version: str) -> tuple[int, ...] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else tuple(map(int, found.groups()))


def check_engine(config: Any, version: str) -> None:
    """Raises ``ConfigError`` or ``UnsupportedModel`` for settings of vLLM that cannot work."""
    policy = config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {policy!r}: a request whose load fails would end without text; set "
            '"kv_load_failure_policy": "recompute"'
        )
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(f"{name}={getattr(parallel, name)}: kvtier's connector needs 1")
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            "distributed_executor_backend 'external_launcher' has a scheduler in each rank; kvtier's connector needs "
            "one for all ranks, as with 'mp' or 'ray'"
        )
    if config.speculative_config is not None:
        raise UnsupportedModel(
            "speculative decoding writes KV of tokens that may be taken back; kvtier's connector does not follow that "
            "yet: leave --speculative-config out"
        )
    if getattr(config, "lora_config", None) is not None and (_numbers(version) or VERSIONS[1]) < ADAPTERS_BY_PATH:
        raise ConfigError(
            f"vLLM {version} names the blocks of a LoRA adapter by its name alone: another adapter under an old name "
            "would find the old one's K and V. Take vLLM 0.31 or later, or leave --enable-lora out"
        )


def check_model(config: Any) -> None:
    """Raises ``UnsupportedModel`` or ``ConfigError`` for a model whose KV cannot be kept.

    As far as vLLM's config tells: ``geometry_of`` sees the rest, once vLLM has made the layers.
    """
    model = config.model_config
    is_mla = getattr(model, "use_mla", False)
    if getattr(model, "is_encoder_decoder", False):
        raise UnsupportedModel("this model attends to an encoder; kvtier's connector cannot keep that")
    family = getattr(getattr(model, "hf_text_config", None), "model_type", None)
    if family in FAMILIES:
        raise UnsupportedModel(
            f"{family} {FAMILIES[family]}; kvtier's connector cannot keep that. Take one of vLLM's own connectors"
        )
    if not config.cache_config.enable_prefix_caching:
        if is_mla and config.device_config.device_type == "cpu":
            raise UnsupportedModel(
                "vLLM has turned prefix caching off, as it does with MLA (multi-head latent attention) on CPUs without "
                "AMX: blocks have no keys, and kvtier's connector can keep none"
            )
        raise ConfigError(
            "prefix caching is off, so that blocks have no keys. Leave --no-enable-prefix-caching out; if it was not "
            "given, vLLM itself has turned prefix caching off for this model, and vLLM's log says why"
        )
    mode = getattr(config.cache_config, "mamba_cache_mode", "none")
    if (getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False)) and mode != "align":
        raise UnsupportedModel(
            f"layers of this model keep a recurrent state, and mamba_cache_mode is {mode!r}, in which a block is not "
            "the state at its end; kvtier's connector needs align, which vLLM takes with prefix caching"
        )
    finer = getattr(config.cache_config, "prefix_match_unit", None)
    if mode == "align" and finer is not None:
        check_finer_hashes(finer, config.cache_config.block_size)
    workers = config.parallel_config.world_size if is_mla else 1
    if workers > 1 and getattr(model, "is_hybrid", False):
        raise UnsupportedModel(MIXED)
    if workers > 1 and getattr(config.parallel_config, "nnodes_within_dp", 1) > 1:
        raise ConfigError(
            f"with MLA (multi-head latent attention) all {workers} ranks share one host memory, and need one machine: "
            "choose a --tensor-parallel-size that fits it, with --data-parallel-size for more GPUs"
        )


def counts_nans() -> bool:
    """Whether vLLM counts the NaNs in logits; it reads these variables in the same way."""
    return any(int(os.getenv(name) or "0") for name in COUNTS_NANS)
