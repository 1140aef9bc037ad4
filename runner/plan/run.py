"""Makes a plan: reads the config, then asks ``kvtier.geometry.capacity``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.geometry import capacity
from kvtier.geometry.kinds import Kind
from kvtier.geometry.layout import Layout
from kvtier.geometry.sizing import layout_of, parse_bytes, spare_blocks
from kvtier.geometry.spec import CacheSpec, GroupSpec
from kvtier.integrations.refusals import field
from kvtier.integrations.transformers import text_config
from kvtier.machine.errors import ConfigError, UnsupportedModel
from kvtier.machine.integers import shown
from runner.model.checkpoint import find_config
from runner.plan import compute
from runner.plan.hits import TraceOptions, plan_hits
from runner.plan.remote import first_unit, plan_remote
from runner.plan.report import Assumptions, Fit, GroupPlan, LengthPlan, Plan, StatePlan, TierPlan, Transient

LEAST_RATE = 1e-6
"""Least rate: with less, times grow beyond what a float or JSON can say."""
_OPTIONS = {
    "link_gb_per_s": "--link-gbps",
    "peak_tflops": "--tflops",
    "utilisation": "--utilisation",
    "remote_gb_per_s": "--remote-gbps",
}
LENGTHS = (2_048, 8_192, 32_768, 90_112, 131_072)


@dataclass(frozen=True)
class Options:
    """What to plan for. Memory as bytes or as text such as "80GiB", for KV alone.

    ``context``: a length to plan for beside ``LENGTHS``. ``link_gb_per_s``: from host memory to the device.
    ``peak_tflops``: of dense matrix products; ``utilisation``: the part of it that a forward pass reaches. ``remote``:
    bytes of a remote tier, which gives ``remote_gb_per_s``; both or neither. ``trace``: requests to be replayed.
    """

    device_memory: str | int
    host_memory: str | int = 0
    context: int | None = None
    dtype: str | None = None
    block_tokens: int = 16
    max_batched_tokens: int = 8192
    link_gb_per_s: float = 55.0
    peak_tflops: float = 989.0
    utilisation: float = 0.4
    remote: str | int = 0
    remote_gb_per_s: float | None = None
    trace: TraceOptions | None = None

    def __post_init__(self) -> None:
        for name in _OPTIONS:
            value = getattr(self, name)
            if name == "remote_gb_per_s" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not LEAST_RATE <= value < math.inf:
                raise ConfigError(f"{_OPTIONS[name]} must be a number, {LEAST_RATE:g} at least, got {shown(value)}")
        if self.utilisation > 1:
            raise ConfigError(f"--utilisation is a part of the peak, 1 at most, got {shown(self.utilisation)}")
        for name in ("context", "max_batched_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < capacity.MOST_TOKENS:
                raise ConfigError(f"{name} must be in 1..{capacity.MOST_TOKENS - 1:,} tokens, got {shown(value)}")


def run(model: str | Path | Any, options: Options, tell: Callable[[str], object] = lambda news: None) -> Plan:
    """Plans for a model: a folder, a config.json, a hub id, or a transformers config. Reads no weights. ``tell`` gets
    lines of news while a trace is replayed.

    Raises ``ModelLoadError`` for files that cannot be read, ``UnsupportedModel`` for layers that cannot be cached,
    ``ConfigError`` and ``MemoryUnavailable`` for options that cannot work.
    """
    config = find_config(model) if isinstance(model, (str, Path)) else model
    spec = read_spec(config, options)
    device, device_plan = _tier(spec, options.device_memory, "--device-memory", spare_blocks(spec))
    has_host = parse_bytes(options.host_memory, "--host-memory") > 0
    host, host_plan = _tier(spec, options.host_memory, "--host-memory") if has_host else (None, None)
    store_bytes = _store_bytes(options, has_host)
    text = text_config(config)
    positions = field(text, "max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        positions = None
    weights, unknown = _weights(config)
    wanted = sorted({*LENGTHS, *([options.context] if options.context else [])})
    lengths = tuple(_length(config, spec, n, positions, device, host, weights, options) for n in wanted)
    remote = None
    compute_s = None if weights is None else partial(_compute_s, config, spec, weights, options)
    if options.remote_gb_per_s is not None:
        rates = options.remote_gb_per_s, options.link_gb_per_s
        fits = partial(_fits, spec, device, host, positions)
        remote = plan_remote(spec, store_bytes, *rates, lengths, fits, compute_s)
    sizes, trace = (device_plan.num_bytes, host_plan.num_bytes if host_plan else 0), None
    if options.trace is not None:
        trace = plan_hits(spec, *sizes, options.max_batched_tokens, options.trace, tell)
    return Plan(
        spec=spec,
        model=str(model if isinstance(model, (str, Path)) else config.model_type),
        model_type=config.model_type,
        dtype=spec.groups[0].dtype,
        block_tokens=options.block_tokens,
        model_tokens=positions,
        groups=tuple(_group(group) for group in spec.groups),
        device=device_plan,
        host=host_plan,
        lengths=lengths,
        transient=_transient(spec, device, options.max_batched_tokens),
        assumptions=Assumptions(
            options.link_gb_per_s,
            options.peak_tflops,
            options.utilisation,
            weights.total if weights else None,
            weights.per_token if weights else None,
            unknown,
        ),
        states=_states(spec, options, compute_s),
        remote=remote,
        trace=trace,
        growth_bytes=sum(g.entry_bytes / g.entry_tokens for g in spec.groups if g.attention.kind is Kind.FULL),
    )


def read_spec(config: Any, options: Options) -> CacheSpec:
    """The groups of a decoder."""
    compute.check_decoder(config)
    return CacheSpec.from_config(config, dtype=options.dtype, block_tokens=options.block_tokens)


def _store_bytes(options: Options, has_host: bool) -> int:
    """Raises ``ConfigError`` for a remote tier that cannot be planned for."""
    num_bytes = parse_bytes(options.remote, "--remote")
    if bool(num_bytes) != (options.remote_gb_per_s is not None):
        raise ConfigError("--remote and --remote-gbps go together: bytes of the remote tier, and its GB/s")
    if num_bytes and not has_host:
        raise ConfigError("--remote needs --host-memory: blocks come from the remote tier into the host tier")
    return num_bytes


def _tier(spec: CacheSpec, memory: str | int, setting: str, spare: Sequence[bool] = ()) -> tuple[Layout, TierPlan]:
    num_bytes = parse_bytes(memory, setting)
    layout = layout_of(spec, num_bytes, setting, spare)
    return layout, TierPlan(num_bytes, layout.slab_bytes, layout.num_slabs, capacity.longest(layout, spec))


def _group(group: GroupSpec) -> GroupPlan:
    span, kind = group.attention.span_tokens, group.attention.kind
    full = "full" if group.entry_tokens == 1 else f"full, 1 in {group.entry_tokens:,}"
    names = {Kind.FULL: full, Kind.WINDOW: f"window {span:,}", Kind.CHUNK: f"chunk {span:,}", Kind.STATE: "state"}
    return GroupPlan(
        group.name,
        names[kind],
        span,
        group.num_layers,
        group.num_kv_heads,
        *group.head_dims,
        group.entry_tokens,
        group.token_bytes,
        group.block_bytes,
    )


def _length(
    config: Any,
    spec: CacheSpec,
    n: int,
    positions: Any,
    device: Layout,
    host: Layout | None,
    weights: compute.Weights | None,
    options: Options,
) -> LengthPlan:
    held = capacity.bytes_of(spec, capacity.held_blocks(spec, n))
    factor = capacity.saving_factor(spec, n)
    load_bytes = sum(capacity.bytes_of(spec, capacity.hit_blocks(spec, n)))
    attention = compute.attention_flops(config, spec, n)
    flops = compute.weight_flops(weights, n) + attention if weights else None
    return LengthPlan(
        tokens=n,
        beyond_model=positions is not None and n > positions,
        held_bytes=dict(zip(spec.names, held, strict=True)),
        full_bytes=sum(capacity.bytes_of(spec, capacity.full_blocks(spec, n))),
        factor=factor if math.isfinite(factor) else None,
        device=_running(spec, device, n),
        host=_kept(spec, host, n) if host else None,
        load_bytes=load_bytes,
        load_s=load_bytes / (options.link_gb_per_s * 1e9),
        recompute_flops=flops,
        recompute_attention_flops=attention,
        recompute_s=None if flops is None else _seconds(flops, options),
    )


def _seconds(flops: int, options: Options) -> float:
    return flops / (options.peak_tflops * 1e12 * options.utilisation)


def _compute_s(config: Any, spec: CacheSpec, weights: compute.Weights, options: Options, n: int) -> float:
    """Seconds to compute a prompt of n tokens."""
    return _seconds(compute.weight_flops(weights, n) + compute.attention_flops(config, spec, n), options)


def _running(spec: CacheSpec, layout: Layout, n: int) -> Fit:
    """Requests that fit, as admission counts: others hold what their next token needs, the last runs its prompt."""
    each, peak = capacity.running_blocks(spec, n), capacity.peak_blocks(spec, n + 1)
    requests = capacity.requests(layout, each, peak)
    return Fit(requests, requests * n, capacity.requests(layout, peak))


def _kept(spec: CacheSpec, layout: Layout, n: int) -> Fit:
    stored = capacity.stored_blocks(spec, n)
    requests = capacity.requests(layout, stored) if any(stored) else 0
    return Fit(requests, requests * n, None)


def _fits(spec: CacheSpec, device: Layout, host: Layout | None, positions: int | None, n: int) -> bool:
    """Whether a request of n tokens can be fetched into the host and run."""
    stored = capacity.stored_blocks(spec, n)
    has_room = host is None or not any(stored) or capacity.requests(host, stored) > 0
    return has_room and _running(spec, device, n).requests > 0 and (positions is None or n <= positions)


def _transient(spec: CacheSpec, device: Layout, step_tokens: int) -> Transient:
    """The memory of a step for a request so long that its windows and chunks are full."""
    longest = 2 * step_tokens + max(group.attention.span_tokens for group in spec.groups)
    local = [g for g, group in enumerate(spec.groups) if group.attention.kind is not Kind.FULL]
    peak = capacity.bytes_of(spec, capacity.peak_blocks(spec, longest, step_tokens))
    least = capacity.bytes_of(spec, capacity.peak_blocks(spec, longest))
    return Transient(
        step_tokens,
        {spec.names[g]: peak[g] for g in local},
        sum(peak[g] - least[g] for g in local),
        capacity.longest(device, spec, step_tokens),
    )


def _states(spec: CacheSpec, options: Options, compute_s: Callable[[int], float] | None) -> StatePlan | None:
    """None for models without recurrent layers."""
    groups = [group for group in spec.groups if group.attention.kind is Kind.STATE]
    if not groups:
        return None
    rate, snapshot = options.link_gb_per_s * 1e9, sum(group.block_bytes for group in groups)

    def is_sooner(n: int) -> bool:
        loaded = sum(capacity.bytes_of(spec, capacity.hit_blocks(spec, n)))
        return compute_s is not None and loaded / rate < compute_s(n)

    return StatePlan(
        snapshot_bytes=snapshot,
        running_bytes=sum(group.block_bytes * group.peak_blocks(2 * group.block_tokens) for group in groups),
        as_tokens=-(-snapshot // spec.token_bytes) if spec.token_bytes else None,
        restore_s=snapshot / rate,
        break_even_tokens=first_unit(is_sooner, spec.hit_tokens, max(LENGTHS)),
    )


def _weights(config: Any) -> tuple[compute.Weights | None, str | None]:
    try:
        return compute.weights(config), None
    except UnsupportedModel as problem:
        return None, str(problem)
