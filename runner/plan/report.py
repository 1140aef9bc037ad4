"""What ``kvtier plan`` finds out, as plain values.

All sizes are bytes, all times seconds, lengths tokens. ``by_group`` maps group names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvtier.geometry.spec import CacheSpec


@dataclass(frozen=True)
class GroupPlan:
    """A group's geometry. ``span_tokens``: its window or chunk, 0 for full attention. ``entry_tokens``: tokens that
    share an entry of K and V. ``head_dim_v`` is 0 if K is all that is kept."""

    name: str
    attention: str
    span_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    entry_tokens: int
    token_bytes: int
    block_bytes: int


@dataclass(frozen=True)
class TierPlan:
    """A tier's arena. ``longest_tokens``: the largest context that one request can have in it, None without limit."""

    num_bytes: int
    slab_bytes: int
    num_slabs: int
    longest_tokens: int | None


@dataclass(frozen=True)
class Fit:
    """Requests of one length in one tier.

    ``requests``: with room for each one's next token (device), or for the needs of a later hit (host). ``at_worst``: if
    all requests hold their maximum at the same time (device only).
    """

    requests: int
    tokens: int
    at_worst: int | None


@dataclass(frozen=True)
class LengthPlan:
    """A request of ``tokens`` tokens. ``beyond_model``: longer than the config's positions.

    ``held_bytes``: what it holds between two steps; ``full_bytes``: if every layer kept all tokens; ``factor``: their
    quotient, None where nothing is held. ``load_*``: what a full hit loads from the host tier. ``recompute_*`` are None
    where the weights cannot be told from the config.
    """

    tokens: int
    beyond_model: bool
    held_bytes: Mapping[str, int]
    full_bytes: int
    factor: float | None
    device: Fit
    host: Fit | None
    load_bytes: int
    load_s: float
    recompute_flops: int | None
    recompute_attention_flops: int
    recompute_s: float | None


@dataclass(frozen=True)
class Transient:
    """What one request needs while up to ``step_tokens`` tokens of its prompt are computed in one step.

    ``peak_bytes`` by group: the most that it holds meanwhile; ``extra_bytes``: beyond the most that it ever holds at
    one token a step. ``longest_tokens``: the largest context that can run in such steps; what is longer takes shorter
    ones.
    """

    step_tokens: int
    peak_bytes: Mapping[str, int]
    extra_bytes: int
    longest_tokens: int | None


@dataclass(frozen=True)
class StatePlan:
    """What recurrent layers keep of a request: one state, whatever its length.

    ``snapshot_bytes``: of a state that is kept for later hits; ``running_bytes``: of those that a request holds while
    it decodes. ``as_tokens``: tokens whose K and V take as much as a snapshot, None without K and V. ``restore_s``: to
    load a snapshot from the host. ``break_even_tokens``: from this length on, loading a hit, K and V too, takes less
    time than computing; None if it never does, or if computing cannot be estimated.
    """

    snapshot_bytes: int
    running_bytes: int
    as_tokens: int | None
    restore_s: float
    break_even_tokens: int | None


@dataclass(frozen=True)
class RemoteLength:
    """A hit of ``tokens`` tokens that is in the remote tier alone, and a text of them there.

    ``fetch_*``: all objects that the hit needs, with trailers. The time includes the way from the host to the device.
    It is None if ``why_not`` says why the hit cannot be fetched.
    ``read_amplification``: these bytes over those of the blocks. ``text_*``: what is stored of a prompt, which is
    enough for two hits, on all of it and on the same prompt sent again. ``further_end_bytes``: what another end, such
    as that of the answer, stores again beside new tokens. ``texts``: how many the tier holds, none sharing anything.
    """

    tokens: int
    fetch_bytes: int
    fetch_objects: int
    read_amplification: float | None
    fetch_s: float | None
    why_not: str
    text_bytes: int
    text_objects: int
    further_end_bytes: int
    texts: int
    tokens_held: int


@dataclass(frozen=True)
class RemotePlan:
    """A remote tier. ``gb_per_s`` is what the user says; ``call_s``: what a fetch takes beside bytes.

    ``tile_tokens``, ``tile_bytes``: of a tile, 0 without one; ``most_end_bytes``: of the largest end. A hit that is
    here in part reads at most so much in vain. ``big_blocks``: groups whose blocks are objects by themselves.
    ``longest_tokens``: the longest hit that fits host and device and the model's positions, up to the plan's longest
    length. ``break_even_tokens``: from here on a fetch takes less time than computing; None if it never does up to the
    longest hit, or if computing cannot be estimated.
    """

    num_bytes: int
    gb_per_s: float
    call_s: float
    trailer_bytes: int
    tile_tokens: int
    tile_bytes: int
    most_end_bytes: int
    big_blocks: Mapping[str, int]
    longest_tokens: int
    break_even_tokens: int | None
    lengths: tuple[RemoteLength, ...]


@dataclass(frozen=True)
class MemoryHits:
    """What tiers of these sizes find of a trace. ``tokens``: prompt tokens found, by tier; ``rate``: of all prompt
    tokens; ``of_bound``: of those that a cache without limits finds, None if it finds none. ``too_large``: requests
    that never fit; ``failed``: that ran out of room."""

    device_bytes: int
    host_bytes: int
    tokens: Mapping[str, int]
    rate: float
    of_bound: float | None
    preemptions: int
    too_large: int
    failed: int


@dataclass(frozen=True)
class TracePlan:
    """A trace, replayed with ``at_once`` requests at a time. ``bound_tokens``: prompt tokens that a cache without
    limits finds, whatever it is asked for; ``distinct_tokens``: tokens of different content, prompts and answers."""

    trace: str
    requests: int
    sessions: int
    prompt_tokens: int
    bound_tokens: int
    distinct_tokens: int
    at_once: int
    memories: tuple[MemoryHits, ...]


@dataclass(frozen=True)
class Assumptions:
    """Values that were not measured.

    ``weights``: of the decoder; ``active_weights``: the weights multiplied with each token.
    """

    link_gb_per_s: float
    peak_tflops: float
    utilisation: float
    weights: int | None
    active_weights: int | None
    weights_unknown: str | None


@dataclass(frozen=True)
class Plan:
    """Everything. ``model_tokens``: the positions that the config gives, None if it does not say. ``growth_bytes``: of
    one more token in a text longer than all windows and chunks."""

    spec: CacheSpec
    model: str
    model_type: str
    dtype: str
    block_tokens: int
    model_tokens: int | None
    groups: tuple[GroupPlan, ...]
    device: TierPlan
    host: TierPlan | None
    lengths: tuple[LengthPlan, ...]
    transient: Transient
    assumptions: Assumptions
    states: StatePlan | None = None
    remote: RemotePlan | None = None
    trace: TracePlan | None = None
    growth_bytes: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; ``groups`` stand for the spec."""
        return {name: value for name, value in asdict(self).items() if name != "spec"}
