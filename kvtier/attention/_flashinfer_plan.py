"""FlashInfer's wrappers: their kinds, the time at which one may be planned again, and the input of a plan.

Owns       the wrappers, their workspaces, and the order of plans and copies.
Promises   one wrapper serves one combination of values that FlashInfer compiles or fixes in ``plan`` (``PlanKey``). A
           plan is neither overwritten nor let go while its copy to the device is queued. A batch that runs a wrapper
           runs its own plan, or gets ``StepError``.
Does not   know steps, pools or layers.

``plan`` fills a pinned buffer of the wrapper and queues its copy to the device. A second ``plan`` before this copy has
run would change the first plan's bytes under way. So a wrapper is planned again only after the event recorded behind
its last plan. Eager steps take turns on ``ring`` wrappers, so that the event is long past at its wait.

The pinned buffer must not be free before either. torch knows nothing of a copy that FlashInfer's own code has queued:
it would give the memory to the next allocation. So a wrapper that dies waits for the copy of its last plan.

Attention sinks need a kernel of their own: ``run(sinks=...)`` is silently ignored by FlashInfer's Hopper kernels. Its
BatchAttentionWithAttentionSinkWrapper is a prefill wrapper with a variant compiled in. The variant's name lacks the
head size and the KV type, so two geometries in one process would share one wrong library. ``_sink_kernel`` asks for the
same variant under a name that has them.
"""

from __future__ import annotations

import importlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvtier.attention._flashinfer_version import installed_version, too_old
from kvtier.attention._moment import Moment, new_moment
from kvtier.machine.device import install_extra
from kvtier.machine.errors import AttentionUnavailable, ConfigError, KVTierError, MemoryUnavailable, StepError

INT_WORKSPACE_BYTES = 8 << 20
"""Per wrapper, on the device and pinned, each; FlashInfer's own choice."""
GRAPH_INT_WORKSPACE_BYTES = 1 << 20
"""Per wrapper for captured decode steps, of which there are dozens: some KiB of it are used."""
KV_LENS_BYTES = 32768 * 4
"""Bytes that a wrapper allocates beside it."""

PICKED_PLANS = 4
"""Plans of queries that pick their keys: all decodes of long texts share one, all chunks of their prompts another."""

OVERFLOW = "Increase the workspace buffer size"
"""Part of FlashInfer's message if a plan does not fit into its workspaces."""
OUT_OF_MEMORY = "out of memory"
"""Part of CUDA's message, in torch's errors and in FlashInfer's, if an allocator other than torch's has no memory
left."""


class Indices(NamedTuple):
    """One step of one group, int32. The first three on the CPU (FlashInfer reads them there), pinned on CUDA."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_last_page_len: Tensor
    kv_indices: Tensor
    """On the pools' device: it is only copied, and a copy from the CPU would make a graph wait."""


class Held(NamedTuple):
    """Memory beside the pools."""

    device_bytes: int
    pinned_bytes: int
    """Pinned memory of the host."""


class GraphBuffers(NamedTuple):
    """The place from which a captured step's kernels read its index arrays.

    int32 on the device, [E+1], [E+1], [most pages], [E].
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor


class Key(Protocol):
    """What a wrapper is made, planned and run for. The group is part of it: its index arrays are."""

    @property
    def group(self) -> str:
        """The name of the group."""

    @property
    def int_bytes(self) -> tuple[int, int]:
        """Of a wrapper's integers, on the device and pinned, each: for eager steps, and for captured ones."""

    def make(self, library: Any, workspace: Tensor, buffers: GraphBuffers | None) -> Any:
        """A wrapper of FlashInfer's; ``buffers``: for captured steps."""

    def plan(self, wrapper: Any, indices: Indices, split_kv: bool) -> None:
        """Plans it; with ``split_kv`` keys of a query may go to several thread blocks."""

    def run(self, wrapper: Any, query: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor) -> None:
        """Attention of a layer, into ``out``."""

    def described(self) -> str:
        """What distinguishes it, for an error."""


class PlanKey(NamedTuple):
    """A key of layers with K and V per head: FlashInfer compiles and fixes these values."""

    group: str
    block_tokens: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    window_left: int
    """FlashInfer's: a key is seen iff query - key <= window_left; -1 for all."""
    softcap: float | None
    scale: float
    sinks: bool
    kernels: str = "fa2"
    """FlashInfer's name of them; "fa3": Hopper's own."""

    @property
    def int_bytes(self) -> tuple[int, int]:
        """As in ``Key``."""
        return INT_WORKSPACE_BYTES, GRAPH_INT_WORKSPACE_BYTES

    def make(self, library: Any, workspace: Tensor, buffers: GraphBuffers | None) -> Any:
        """As in ``Key``; with sinks the kernel is compiled here."""
        options: dict[str, Any] = {"backend": self.kernels}
        if buffers is not None:
            options |= {
                "use_cuda_graph": True,
                "qo_indptr_buf": buffers.qo_indptr,
                "paged_kv_indptr_buf": buffers.kv_indptr,
                "paged_kv_indices_buf": buffers.kv_indices,
                "paged_kv_last_page_len_buf": buffers.kv_last_page_len,
            }
        if self.sinks:
            options |= _sink_kernel(self)
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **options)
        if buffers is not None:
            small = torch.empty(GRAPH_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=workspace.device)
            wrapper.reset_workspace_buffer(workspace, small)
        return wrapper

    def plan(self, wrapper: Any, indices: Indices, split_kv: bool) -> None:
        """As in ``Key``."""
        wrapper.plan(
            indices.qo_indptr,
            indices.kv_indptr,
            indices.kv_indices,
            indices.kv_last_page_len,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            self.block_tokens,
            head_dim_vo=self.head_dim_v,
            causal=True,
            sm_scale=self.scale,
            window_left=self.window_left,
            logits_soft_cap=self.softcap,
            q_data_type=self.q_dtype,
            kv_data_type=self.kv_dtype,
            disable_split_kv=not split_kv,
        )

    def run(self, wrapper: Any, query: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor) -> None:
        """As in ``Key``."""
        more = () if sinks is None else (sinks, self.scale)
        wrapper.run(query, (k, v), *more, out=out)

    def described(self) -> str:
        """As in ``Key``."""
        return (
            f"head sizes {self.head_dim} and {self.head_dim_v}, {self.q_dtype}, K and V in {self.kv_dtype}, "
            f"window_left {self.window_left}"
        )


@dataclass(eq=False)
class Lane:
    """A wrapper, its plan key, and the moment behind its last plan."""

    key: Key
    wrapper: Any
    planned: Moment
    proven: set[Key]
    """Keys that have run once, on any lane."""
    owner: weakref.ref[Any] | None = None
    """The owner of the step planned last. A batch holds its lanes; if they held it too, both would outlive their
    last user."""
    has_run: bool = False

    def __del__(self) -> None:
        with suppress(Exception):  # a device that is lost copies nothing
            self.planned.synchronize()

    def plan(self, owner: object, indices: Indices, split_kv: bool) -> None:
        """Plans ``owner``'s step. Waits only for the copy of this wrapper's last plan."""
        self.owner = None
        self.planned.synchronize()
        with _explained(self.key, self.key in self.proven):
            self.key.plan(self.wrapper, indices, split_kv)
        self.planned.record()
        self.owner = weakref.ref(owner)

    def run(self, owner: object, query: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor) -> None:
        """Attention of ``owner``'s step, for one layer, into ``out``; ``StepError`` if another step was planned
        since."""
        if self.owner is None or self.owner() is not owner:
            raise StepError("this step's attention plan was given to a later step; attend while the step is current")
        try:
            self.key.run(self.wrapper, query, k, v, sinks, out)
        except Exception:
            with _explained(self.key, self.has_run or self.key in self.proven):  # only now: it takes time
                raise
        if not self.has_run:
            self.has_run = True
            self.proven.add(self.key)


class Picked:
    """A plan of queries that have picked their keys; each run has other keys, so many as were planned.

    ``rows``: int32 on the device, where a run puts the rows of all queries' keys. ``kept``: of those that a run has,
    int64; None for all.
    """

    def __init__(self, lengths: Sequence[int], most: int, device: torch.device) -> None:
        ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.rows = torch.zeros(int(ends[-1]), dtype=torch.int32, device=device)
        self.kept: Tensor | None = None
        if len(self.rows) < len(lengths) * most:
            seen = torch.arange(most) < torch.tensor(lengths)[:, None]
            self.kept = seen.flatten().nonzero()[:, 0].to(device)
        zero, ones = torch.zeros(1, dtype=torch.int32), torch.ones(len(lengths), dtype=torch.int32)
        self.indices = Indices(
            torch.arange(len(lengths) + 1, dtype=torch.int32), torch.cat([zero, ends]), ones, self.rows
        )
        self.lane: Lane

    def take(self, rows: Tensor) -> None:
        """The rows of the keys of a run, [n, most]."""
        self.rows.copy_(rows.flatten() if self.kept is None else rows.flatten()[self.kept])


class Wrappers:
    """All wrappers of a backend; they share one float workspace, so they must run on one stream."""

    def __init__(self, device: torch.device, workspace_bytes: int, ring: int, split_kv: bool) -> None:
        if ring < 2:
            raise ConfigError(
                f"the ring of FlashInfer wrappers needs 2 or more, got {ring}; one is planned while one runs"
            )
        self._device = device
        self._ring = ring
        self._split_kv = split_kv
        self._rings: dict[Key, list[Lane]] = {}
        self._turns: dict[Key, int] = {}
        self._graph_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._picked: OrderedDict[tuple[Key, tuple[int, ...]], Picked] = OrderedDict()
        self._proven: set[Key] = set()
        self._most_int_bytes = (INT_WORKSPACE_BYTES, GRAPH_INT_WORKSPACE_BYTES)
        self._library = load_library()
        self._float_workspace = _workspace(workspace_bytes, device)

    def eager(self, key: Key, owner: object, indices: Indices) -> Lane:
        """The next wrapper in turn for ``key``, planned."""
        ring = self._rings.setdefault(key, [])
        turn = (self._turns.get(key, -1) + 1) % self._ring
        if turn == len(ring):
            ring.append(self._make(key))
        self._turns[key] = turn
        ring[turn].plan(owner, indices, self._split_kv)
        return ring[turn]

    def picked(self, key: Key, lengths: tuple[int, ...], most: int) -> Picked:
        """A plan of queries with so many keys each, of ``most`` that they could have picked; pages are single rows.

        Long texts pick as many keys at each token, so few plans serve all of their layers and steps.
        """
        found = self._picked.get((key, lengths))
        if found is None:
            while len(self._picked) >= PICKED_PLANS:
                self._picked.popitem(last=False)
            found = Picked(lengths, most, self._device)
            found.lane = self._make(key)
            found.lane.plan(found, found.indices, self._split_kv)
            self._picked[key, lengths] = found
        self._picked.move_to_end((key, lengths))
        return found

    def graphed(self, key: Key, owner: object, indices: Indices, buffers: GraphBuffers) -> Lane:
        """A wrapper that reads ``buffers`` for as long as it lives, planned."""
        lane = self._make(key, buffers)
        self._graph_lanes.add(lane)
        lane.plan(owner, indices, self._split_kv)
        return lane

    def replan(self, lane: Lane, owner: object, indices: Indices) -> None:
        """Plans a wrapper of ``graphed`` for its next step."""
        lane.plan(owner, indices, self._split_kv)

    def enlarge(self, workspace_bytes: int) -> None:
        """Gives wrappers that are made from now on a larger workspace, if theirs is smaller."""
        if workspace_bytes > self._float_workspace.numel():
            self.forget()
            self._float_workspace = _workspace(workspace_bytes, self._device)

    def kinds(self, expected: Set[PlanKey]) -> int:
        """The number of keys that eager steps have been planned for or are ``expected``, each with a ring of its own.

        Plans of picked keys count as so many rings as hold their wrappers.
        """
        return len(self._rings.keys() | expected) + (-(-PICKED_PLANS // self._ring) if self._picked else 0)

    def forget(self) -> None:
        """Gives up the wrappers of eager steps; new ones are made when they are needed."""
        self._rings.clear()
        self._turns.clear()
        self._picked.clear()

    def drop(self, key: PlanKey) -> None:
        """Gives up the wrappers of eager steps for ``key``."""
        self._rings.pop(key, None)
        self._turns.pop(key, None)

    def held(self) -> Held:
        """The memory that is held now."""
        lanes = [lane for ring in self._rings.values() for lane in ring]
        lanes += [picked.lane for picked in self._picked.values()]
        eager = sum(lane.key.int_bytes[0] for lane in lanes)
        return self._total(
            eager + sum(lane.key.int_bytes[1] for lane in self._graph_lanes), len(lanes) + len(self._graph_lanes)
        )

    def most(self, kinds: int, captured: int) -> Held:
        """The memory that is held in the end: full rings of ``kinds``, and ``captured`` sizes of decode steps.

        Of the largest kind that has been planned so far.
        """
        eager, graphed = self._most_int_bytes
        return self._total(kinds * (self._ring * eager + captured * graphed), kinds * (self._ring + captured))

    def _total(self, integers: int, lanes: int) -> Held:
        """Memory of this many wrappers with so many bytes of integers, and of the workspace that they share."""
        return Held(self._float_workspace.numel() + integers + lanes * KV_LENS_BYTES, integers)

    def _make(self, key: Key, buffers: GraphBuffers | None = None) -> Lane:
        eager, graphed = self._most_int_bytes
        self._most_int_bytes = max(eager, key.int_bytes[0]), max(graphed, key.int_bytes[1])
        with _explained(key, key in self._proven):
            wrapper = key.make(self._library, self._float_workspace, buffers)
        return Lane(key, wrapper, new_moment(self._device), self._proven)


def _workspace(num_bytes: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as problem:
        raise MemoryUnavailable(
            f"FlashInfer's workspace of {num_bytes:,} bytes on {device} was refused: {problem}"
        ) from problem


def _sink_kernel(key: PlanKey) -> dict[str, Any]:
    """The wrapper's options for a kernel with sinks: one more logit per query head, in the denominator only."""
    variants = importlib.import_module("flashinfer.jit.attention.variants")
    q, kv, window = (str(x).removeprefix("torch.") for x in (key.q_dtype, key.kv_dtype, key.window_left >= 0))
    return {
        "jit_args": [
            f"kvtier_prefill_sink_q_{q}_kv_{kv}_d_{key.head_dim}_{key.head_dim_v}_window_{window.lower()}_{key.kernels}",
            key.q_dtype,
            key.kv_dtype,
            key.q_dtype,
            torch.int32,
            key.head_dim,
            key.head_dim_v,
            ["sink"],
            ["float"],
            ["sm_scale"],
            ["double"],
            "AttentionSink",
            variants.attention_sink_decl[key.kernels],
        ],
        "jit_kwargs": {"use_sliding_window": key.window_left >= 0},
    }


def load_library() -> Any:
    """FlashInfer's module. Raises ``AttentionUnavailable`` if it is too old or cannot be imported."""
    version = installed_version()
    if version is not None and (problem := too_old(version)):
        raise AttentionUnavailable(f"{problem}, or use attention='reference'")
    try:
        return importlib.import_module("flashinfer")
    except Exception as problem:  # its own imports fail in many ways
        raise AttentionUnavailable(
            f"FlashInfer cannot be imported ({type(problem).__name__}: {problem}); {install_extra()}, or use "
            "attention='reference'"
        ) from problem


@contextmanager
def _explained(key: Key, has_run: bool) -> Iterator[None]:
    """Translates FlashInfer's errors if memory is short, or if ``key`` is tried for the first time.

    In the second case any error means that FlashInfer cannot be used. Later errors are the device's and stay as they
    are.
    """
    try:
        yield
    except (KVTierError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        if OVERFLOW in str(problem):
            raise MemoryUnavailable(
                f"a workspace of FlashInfer's is too small for group {key.group!r}: {problem}"
            ) from problem
        if OUT_OF_MEMORY in str(problem):
            raise MemoryUnavailable(
                f"a wrapper of FlashInfer's for group {key.group!r} takes up to {INT_WORKSPACE_BYTES:,} bytes on the "
                f"device and as many pinned on the host, and CUDA refused: {problem}"
            ) from problem
        if has_run or isinstance(problem, torch.AcceleratorError):  # a device that is lost serves no other backend
            raise
        raise unusable(key, problem) from problem


def unusable(key: Key, problem: Exception) -> AttentionUnavailable:
    """The error for a plan key that FlashInfer does not support here."""
    return AttentionUnavailable(
        f"FlashInfer cannot run group {key.group!r} ({key.described()}): {type(problem).__name__}: "
        f"{problem}; if a kernel is missing: it compiles them at first use, which takes the CUDA toolkit's nvcc "
        "(CUDA_HOME), and those that are there must be for this GPU (FLASHINFER_CUDA_ARCH_LIST); or use "
        "attention='reference'"
    )
