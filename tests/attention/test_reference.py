"""The reference backend against a brute-force oracle: float64, one explicit (i, j) mask, every unseen slot NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from breadth import covering, sized
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvtier.attention import _decode, _parts, _plan
from kvtier.attention._plan import Bands, Geometry, Singles, Span
from kvtier.attention.reference import PagedBatch, attend, write_kv
from kvtier.geometry.kinds import Attention, ChunkedLocal, FullAttention, SlidingWindow
from kvtier.geometry.spec import GroupSpec
from kvtier.machine.errors import StepError

pytestmark = pytest.mark.usefixtures("one_thread")

NAN = float("nan")
LONG = sized(24_576, 90_112)
MIXED = [(1, 1), (5, 5), (1, 33), (12, 50), (1, 16), (40, 40), (17, 49), (1, 64), (1, 65), (2, 34), (33, 97)]
"""(queries, tokens after the step) of each entry: fresh and later chunks of prompts mixed with decodes."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KINDS = [FullAttention(), SlidingWindow(24), SlidingWindow(16), SlidingWindow(1), ChunkedLocal(32), ChunkedLocal(16)]


def sees(attention: Attention, i: Tensor, j: Tensor) -> Tensor:
    """Whether token i sees token j, from the definitions; not from the spec's own arithmetic."""
    seen = j <= i
    if isinstance(attention, SlidingWindow):
        seen = seen & (j > i - attention.window_tokens)
    if isinstance(attention, ChunkedLocal):
        seen = seen & (j // attention.chunk_tokens == i // attention.chunk_tokens)
    return seen


@dataclass
class Case:
    """A step over a poisoned pool: only what some query of the step sees, or the step writes, is not NaN."""

    attention: Attention
    entries: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    block_tokens: int = 8
    layers: int = 2
    twice: bool = False  # let rows use one block id for two logical blocks
    spread: float = 1.0  # standard deviation of the queries
    slack: int = 2  # columns of the table that no entry needs
    seed: int = 0
    device: str = "cpu"
    query: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)
        self._place()
        self._make_pool()
        starts = np.cumsum([0] + [n for n, _ in self.entries]).tolist()
        self.query_start = [int(x) for x in starts]
        tokens = self.query_start[-1]
        self.query = (self._normal(tokens, self.heads, self.dims[0]) * self.spread).to(self.dtype).to(self.device)
        self.new_k = torch.cat([k[end - n : end] for (n, end), k in zip(self.entries, self.keys, strict=True)] or [])
        self.new_v = torch.cat([v[end - n : end] for (n, end), v in zip(self.entries, self.values, strict=True)] or [])
        slots = [
            self.table[r, j // self.block_tokens] * self.block_tokens + j % self.block_tokens
            for r, (n, end) in enumerate(self.entries)
            for j in range(end - n, end)
        ]
        self.batch = PagedBatch(
            attention=self.attention,
            block_tokens=self.block_tokens,
            query_start=self.query_start,
            seq_lens=[end for _, end in self.entries],
            block_table=self.table.to(self.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
        )

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng)

    def _place(self) -> None:
        """Scattered ids for the blocks that the step's queries reach; null everywhere else."""
        bt, width = self.block_tokens, max(-(-end // self.block_tokens) for _, end in self.entries) + self.slack
        self.table = torch.zeros(len(self.entries), width, dtype=torch.int64)
        self.blocks = 1 + 2 * sum(-(-end // bt) for _, end in self.entries)
        ids = (torch.randperm(self.blocks - 1, generator=self.rng) + 1).tolist()
        self.keys, self.values, self.first = [], [], []
        for r, (n, end) in enumerate(self.entries):
            past = torch.arange(end + 1)
            first = int(past[sees(self.attention, torch.tensor(end - n), past)].min())
            self.first.append(first)
            for b in range(first // bt, -(-end // bt)):
                self.table[r, b] = ids.pop()
            k = self._normal(end, self.kv_heads, self.dims[0]).to(self.dtype)
            v = self._normal(end, self.kv_heads, self.dims[1]).to(self.dtype)
            whole = range(-(-first // bt), (end - n) // bt)
            if self.twice and len(whole) > 1:
                a, b = whole[0], whole[-1]
                self.table[r, b] = self.table[r, a]
                k[b * bt : b * bt + bt], v[b * bt : b * bt + bt] = k[a * bt : a * bt + bt], v[a * bt : a * bt + bt]
            self.keys.append(k)
            self.values.append(v)

    def _make_pool(self) -> None:
        """Block-major, as kvtier's arena: K beside V, or in one last dimension where their sizes differ."""
        bt, (d, dv) = self.block_tokens, self.dims
        if d == dv:
            pool = torch.full((self.blocks, self.layers, 2, bt, self.kv_heads, d), NAN).to(self.dtype).to(self.device)
            self.k, self.v = pool[:, -1, 0], pool[:, -1, 1]
        else:
            pool = torch.full((self.blocks, self.layers, bt, self.kv_heads, d + dv), NAN).to(self.dtype).to(self.device)
            self.k, self.v = pool[:, -1, ..., :d], pool[:, -1, ..., d:]
        self.pool = pool
        for r, (n, end) in enumerate(self.entries):
            past = torch.arange(self.first[r], end - n)
            at = self.table[r, past // bt].to(self.device), (past % bt).to(self.device)
            self.k[at], self.v[at] = self.keys[r][past].to(self.device), self.values[r][past].to(self.device)

    def run(self, **kwargs: object) -> Tensor:
        kwargs.setdefault("scale", self.dims[0] ** -0.5)
        write_kv(self.k, self.v, self.new_k.to(self.device), self.new_v.to(self.device), self.batch)
        return attend(self.query, self.k, self.v, self.batch, **kwargs)

    def oracle(self, scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        scale = self.dims[0] ** -0.5 if scale is None else scale
        outs = []
        for r, (n, end) in enumerate(self.entries):
            rows = slice(self.query_start[r], self.query_start[r + 1])
            q = self.query[rows].cpu().double().transpose(0, 1)
            k, v = (
                x.double().repeat_interleave(self.heads // self.kv_heads, 1).transpose(0, 1)
                for x in (self.keys[r], self.values[r])
            )
            scores = q @ k.transpose(1, 2) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            i, j = torch.arange(end - n, end)[:, None], torch.arange(end)[None, :]
            scores = scores.masked_fill(~sees(self.attention, i, j), -math.inf)
            if sinks is not None:
                column = sinks.cpu().double()[:, None, None].expand(-1, n, 1)
                weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            outs.append((weights @ v).transpose(0, 1))
        return torch.cat(outs)

    def check(self, **kwargs: object) -> None:
        got, want = self.run(**kwargs), self.oracle(**kwargs)
        assert got.dtype == self.dtype and got.shape == want.shape
        error = (got.cpu().double() - want).abs()
        rounding = 0.0 if self.dtype == torch.float32 else torch.finfo(self.dtype).eps * want.abs()
        assert not (bad := ~(error <= 1e-5 + rounding)).any(), f"{int(bad.sum())} off, worst {error.max():.2e}"


def sinks_of(heads: int) -> Tensor:
    return torch.linspace(-3.0, 4.0, heads)


@pytest.fixture(params=["flash", "tiled"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU: compiled loops for single queries, torch's fused kernel for more; and score tiles for all."""
    if request.param == "tiled":
        monkeypatch.setattr(_parts, "_FLASH", None)
        monkeypatch.setattr(_decode, "takes", lambda *_: False)
    elif _parts._FLASH is None:
        pytest.skip("this torch has no fused CPU kernel; `make test` installs one that has")
    return str(request.param)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which short entries already take several tiles, spans and bands."""
    plan = PagedBatch.plan
    monkeypatch.setattr(PagedBatch, "plan", lambda batch, *a: plan(batch, max(24, 4 * batch.block_tokens), 4, a[2]))
    monkeypatch.setattr(_plan, "_MAX_ROWS", 8)
    monkeypatch.setattr(_plan, "_ROW_STEP", 4)
    monkeypatch.setattr(_parts, "_ROWS", 3)
    monkeypatch.setattr(_parts, "_KEYS", 5)


# --- against the oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("dims", [(16, 16), (24, 8), (5, 12)])
def test_all_kinds_and_heads(
    attention: Attention, heads: int, kv_heads: int, dims: tuple[int, int], kernel: str
) -> None:
    Case(attention, MIXED, heads, kv_heads, dims).check()


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("dims", [(16, 16), (24, 8)])
def test_softcap_and_sinks(
    attention: Attention, with_sinks: bool, softcap: float | None, dims: tuple[int, int], kernel: str
) -> None:
    Case(attention, MIXED, 6, 2, dims).check(softcap=softcap, sinks=sinks_of(6) if with_sinks else None, scale=0.4)


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (24, 8)])
def test_half_precision(attention: Attention, dtype: torch.dtype, dims: tuple[int, int], kernel: str) -> None:
    Case(attention, MIXED, dims=dims, dtype=dtype).check(sinks=sinks_of(4).to(dtype))


@pytest.mark.parametrize("attention", [*KINDS, SlidingWindow(7), SlidingWindow(100)], ids=str)
@pytest.mark.parametrize(("block_tokens", "softcap"), covering([1, 8, 16], [None, 3.0]))
def test_many_tiles(
    attention: Attention, softcap: float | None, block_tokens: int, kernel: str, small_tiles: None
) -> None:
    Case(attention, MIXED, 6, 2, block_tokens=block_tokens).check(softcap=softcap, sinks=sinks_of(6))


@pytest.mark.parametrize("threads", [1, 2, 8, 64])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_pieces_for_many_threads(threads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, and for a few queries keys, are cut so that every thread has work."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    entries = [(1, 8192), (3, 2051), (768, 1536), (250, 5000), (1, 5000), (97, 1121)]
    Case(FullAttention(), entries, 2, kv_heads, block_tokens=16, layers=1).check(sinks=sinks_of(2))


@pytest.mark.parametrize("attention", KINDS, ids=str)
def test_one_id_twice_in_a_row(attention: Attention, kernel: str) -> None:
    """Two logical blocks of the past in one physical block; so a reader may not invert the table."""
    Case(attention, [(4, 80), (1, 90), (33, 97), (1, 64)], twice=True, block_tokens=4).check()


@pytest.mark.parametrize("spread", [1e-3, 300.0])
@pytest.mark.parametrize("attention", [FullAttention(), SlidingWindow(24)], ids=str)
def test_extreme_scores(attention: Attention, spread: float, kernel: str) -> None:
    """Scores of hundreds neither overflow nor lose the winner; the oracle's rounding of them sets the tolerance."""
    case = Case(attention, MIXED, spread=spread)
    got, want = case.run().double(), case.oracle()
    assert (got - want).abs().max() <= 1e-5 * max(1.0, spread)


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_extreme_sinks(sink: float, kernel: str) -> None:
    case = Case(FullAttention(), MIXED)
    got = case.run(sinks=torch.full((4,), sink))
    assert torch.equal(got, torch.zeros_like(got) if sink > 0 else case.run())


def check_float8(attention: Attention, dtype: torch.dtype, device: str = "cpu") -> None:
    case = Case(attention, MIXED, device=device)
    case.keys, case.values = ([x.to(dtype).float() for x in xs] for xs in (case.keys, case.values))
    case.k, case.v = (x.to(dtype) for x in (case.k, case.v))
    assert (case.run().cpu().double() - case.oracle()).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_pools(dtype: torch.dtype) -> None:
    check_float8(FullAttention(), dtype)


class OnlyCastsOf8Bits(TorchDispatchMode):
    """Refuses float8 tensors to whatever is not a view, a cast or plain memory: on CUDA the rest may not exist."""

    ALLOWED = frozenset({torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten.empty})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        narrow = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dtype in FLOAT8]
        assert not narrow or func.is_view or func.overloadpacket in self.ALLOWED, f"{func} of {narrow[0].dtype}"
        return func(*args, **kwargs)


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_pools_are_read_and_written_as_bytes(attention: Attention, dtype: torch.dtype) -> None:
    case = Case(attention, MIXED)
    case.k, case.v = (x.to(dtype) for x in (case.k, case.v))
    with OnlyCastsOf8Bits():
        case.run()


@st.composite
def steps(draw: st.DrawFn) -> Case:
    block_tokens = draw(st.sampled_from([1, 2, 3, 8, 16]))
    span = draw(st.integers(1, 40))
    chunk = block_tokens * draw(st.integers(1, 5))
    attention = draw(st.sampled_from([FullAttention(), SlidingWindow(span), ChunkedLocal(chunk)]))
    marks = st.sampled_from([block_tokens, span, chunk, 32])
    near = st.builds(lambda unit, times, by: max(1, unit * times + by), marks, st.integers(1, 4), st.integers(-1, 1))
    entries = []
    for end in draw(st.lists(near | st.integers(1, 120), min_size=1, max_size=6)):
        queries = draw(st.just(1) | st.just(end) | near | st.just(0))
        entries.append((min(queries, end), end))
    kv_heads = draw(st.integers(1, 3))
    return Case(
        attention,
        entries,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        dims=draw(st.sampled_from([(8, 8), (4, 12), (12, 4), (1, 1)])),
        block_tokens=block_tokens,
        layers=draw(st.integers(1, 2)),
        twice=draw(st.booleans()),
        slack=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=sized(40, 150), deadline=None)
@given(steps(), st.sampled_from([None, 4.0]), st.booleans(), st.booleans())
def test_any_step(case: Case, softcap: float | None, with_sinks: bool, tiny: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if tiny:
            plan = PagedBatch.plan
            patch.setattr(PagedBatch, "plan", lambda batch, *a: plan(batch, 16, 3, a[2]))
        case.check(softcap=softcap, sinks=sinks_of(case.heads) if with_sinks else None)


@pytest.mark.parametrize("attention", [FullAttention(), SlidingWindow(4096), ChunkedLocal(8192)], ids=str)
def test_long_context(attention: Attention) -> None:
    """A later chunk, a question and a decode at up to 90k tokens, as accurate as short ones."""
    Case(attention, [(40, LONG), (1, LONG + 1)], 2, 1, (64, 64), block_tokens=16, layers=1).check(sinks=sinks_of(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: `make gpu` on a machine with one")
@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_cuda(attention: Attention, dtype: torch.dtype) -> None:
    Case(attention, MIXED, dims=(24, 8), dtype=dtype, device="cuda").check(sinks=sinks_of(4).cuda())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: `make gpu` on a machine with one")
@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_on_cuda(attention: Attention, dtype: torch.dtype) -> None:
    check_float8(attention, dtype, "cuda")


# --- the step's edges --------------------------------------------------------------------------------------------


def test_empty_step() -> None:
    case = Case(FullAttention(), [(0, 8)])
    assert case.run().shape == (0, 4, 16)


@pytest.mark.parametrize("attention", KINDS, ids=str)
def test_table_no_wider_than_needed(attention: Attention, kernel: str) -> None:
    """What pads a batch of decodes is not read from beyond a row."""
    Case(attention, [(1, 63), (1, 64), (1, 50), (3, 64)], slack=0).check()


def test_query_layout_does_not_matter(kernel: str) -> None:
    """The model hands over transposed queries; the fused kernel reads wrong ones without a word."""
    case = Case(SlidingWindow(24), MIXED)
    want = case.run()
    plain = case.query
    case.query = plain.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.allclose(case.run(), want, atol=1e-6)
    case.query = plain.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.allclose(case.run(), want, atol=1e-6)


@pytest.mark.parametrize("attention", KINDS, ids=str)
def test_bits_do_not_depend_on_where_blocks_lie(attention: Attention, kernel: str) -> None:
    """What an evicted and reloaded context says is what it said before."""
    case = Case(attention, MIXED)
    want = case.run()
    moved = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(case.blocks - 1, generator=case.rng)])
    k, v = torch.full_like(case.k, NAN), torch.full_like(case.v, NAN)
    k[moved], v[moved] = case.k, case.v
    batch = replace(case.batch, block_table=moved[case.table])
    assert torch.equal(attend(case.query, k, v, batch, scale=0.25), want)


@pytest.mark.parametrize("tokens", [-1, 1])
def test_refuses_rows_that_are_not_the_steps(tokens: int) -> None:
    case = Case(FullAttention(), MIXED)
    case.run()
    before = case.k.clone()
    rows = torch.zeros(case.query_start[-1] + tokens, 4, 16)
    with pytest.raises(StepError):
        attend(rows, case.k, case.v, case.batch, scale=1.0)
    with pytest.raises(StepError):
        write_kv(case.k, case.v, rows[:, :2], rows[:, :2], case.batch)
    assert torch.equal(case.k.nan_to_num(), before.nan_to_num())


def test_no_gradients_are_recorded() -> None:
    case = Case(FullAttention(), MIXED)
    case.query.requires_grad_()
    case.new_k.requires_grad_()
    assert not case.run().requires_grad and not case.k.requires_grad


def test_from_step() -> None:
    """A step's own arrays: int32 tables wider than needed, read-only, and dead after the next schedule."""
    case = Case(SlidingWindow(24), MIXED)
    want = case.run()
    table = np.pad(case.table.numpy().astype(np.int32), ((0, 0), (0, 9)))
    slots = case.batch.slot_mapping.numpy().copy()
    view = SimpleNamespace(block_table=table, slot_mapping=slots)
    step = SimpleNamespace(
        query_start=np.array(case.query_start, np.int32),
        seq_lens=np.array([end for _, end in MIXED], np.int32),
        group={"swa": view}.__getitem__,
    )
    for array in (table, slots, step.query_start, step.seq_lens):
        array.flags.writeable = False
    group = GroupSpec("swa", SlidingWindow(24), 2, 2, 16, "float32", block_tokens=8)
    case.batch = PagedBatch.from_step(step, group, "cpu")
    for array in (table, slots):
        array.flags.writeable = True
        array[...] = -1
    assert case.batch.block_table.dtype == case.batch.slot_mapping.dtype == torch.int64
    assert torch.equal(case.run(), want)


# --- writing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (24, 8)])
def test_write_kv_writes_its_slots_and_nothing_else(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    case = Case(FullAttention(), MIXED, dims=dims, dtype=dtype)
    case.pool.copy_(torch.randn(case.pool.shape))
    before = case.pool.clone()
    want_k, want_v = case.k.clone(), case.v.clone()
    for t, slot in enumerate(case.batch.slot_mapping.tolist()):
        want_k[slot // 8, slot % 8], want_v[slot // 8, slot % 8] = case.new_k[t], case.new_v[t]
    write_kv(case.k, case.v, case.new_k, case.new_v, case.batch)
    assert torch.equal(case.k, want_k) and torch.equal(case.v, want_v)
    assert torch.equal(case.pool[:, :-1], before[:, :-1]), "another layer was written"
    assert torch.equal(case.pool[0], before[0]), "the null block was written"


def test_write_kv_casts_to_the_pool() -> None:
    case = Case(FullAttention(), MIXED, dtype=torch.bfloat16)
    write_kv(case.k, case.v, case.new_k.float(), case.new_v.float(), case.batch)
    at = case.batch.slots
    assert torch.equal(case.k[at], case.new_k) and torch.equal(case.v[at], case.new_v)


# --- the plan ----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(steps(), st.integers(1, 64), st.integers(1, 40))
def test_plan_covers_every_query_once(case: Case, tile_tokens: int, band_queries: int) -> None:
    batch = case.batch
    geometry = Geometry(batch.attention, batch.block_tokens, batch.query_start, batch.seq_lens, batch.block_table)
    rows: list[int] = []
    for work in geometry.plan(tile_tokens, band_queries):
        rows += range(case.query_start[-1])[work.rows] if isinstance(work.rows, slice) else work.rows.tolist()
    assert sorted(rows) == list(range(case.query_start[-1]))


def test_window_work_is_linear() -> None:
    """A window of W costs queries * (W + tile), not queries squared; so does a chunk."""
    table = torch.ones(1, 4096, dtype=torch.int64)
    for attention in (SlidingWindow(256), ChunkedLocal(256)):
        works = Geometry(attention, 16, [0, 32768], [65536], table).plan(8192, 32)
        pairs = 0
        for work in works:
            if isinstance(work, Bands):
                pairs += (work.rows.stop - work.rows.start) * work.width
            elif isinstance(work, Span):
                rows = work.rows.stop - work.rows.start
                pairs += rows * (sum(keys.tokens for keys in work.past) + rows)
        assert pairs <= 32768 * (256 + 32)


def test_short_decodes_are_few_batches_with_little_padding() -> None:
    table = torch.ones(256, 64, dtype=torch.int64)
    like = Geometry(FullAttention(), 16, range(101), range(400, 500), table).plan(65536, 32)
    assert len(like) == 1 and isinstance(like[0], Singles)
    unlike = Geometry(FullAttention(), 16, range(257), range(1, 1025, 4), table).plan(2**20, 32)
    assert len(unlike) <= 16
    needed = sum(-(-end // 16) for end in range(1, 1025, 4))
    assert sum(work.blocks.numel() for work in unlike) <= needed * 4 / 3
