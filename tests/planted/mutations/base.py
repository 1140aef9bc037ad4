"""What a mutation is, and short names for what it changes and who should see it."""

from __future__ import annotations

from dataclasses import dataclass, field

CONNECTOR = "kvtier/cpu_offload/connector.py"
STORE_HANG = "kvtier/cpu_offload/store_hang.py"
WAKEUP = "kvtier/wakeup.py"
STREAMS = "kvtier/cpu_offload/engines/streams.py"
THREADS = "kvtier/cpu_offload/engines/threads.py"
MEMORY = "kvtier/cpu_offload/tier_memory.py"
COORDINATOR = "kvtier/coordinator/coordinator.py"
SCHEDULER = "kvtier/coordinator/scheduler.py"
ADMISSION = "kvtier/coordinator/admission.py"
INBOX = "kvtier/coordinator/inbox.py"
ROSTER = "kvtier/coordinator/roster.py"
MATCH = "kvtier/coordinator/match.py"
PLAN = "kvtier/coordinator/plan.py"
CHUNK = "kvtier/coordinator/chunk.py"
ADVANCE = "kvtier/coordinator/advance.py"
VICTIMS = "kvtier/coordinator/victims.py"
STEP = "kvtier/coordinator/step.py"
TABLE = "kvtier/gpu_pool/block_table.py"
LOOPS = "kvtier/pools/pool_loops.py"
BATCHES = "kvtier/pools/batches.py"
ROWS = "kvtier/gpu_pool/row_state.py"
SEALS = "kvtier/gpu_pool/seals.py"
POOL = "kvtier/pools/block_pool.py"
KEYS = "kvtier/keys.py"
SPEC = "kvtier/spec.py"
SIZING = "kvtier/sizing.py"
CACHE = "kvtier/cache.py"
EVENTS = "kvtier/events.py"
EXPORTS = "kvtier/gpu_pool/exports.py"
STATE = "kvtier/pools/pool_state.py"
ENTRIES = "kvtier/coordinator/entries.py"
REPORTS = "kvtier/coordinator/reports.py"
NEEDS = "kvtier/coordinator/needs.py"
KEY_INDEX = "kvtier/pools/key_index.py"
RING = "kvtier/pools/cached_ring.py"
SLABS = "kvtier/pools/slab_loops.py"
EXCHANGE = "kvtier/pools/exchange.py"
COMPACTOR = "kvtier/coordinator/compactor.py"
WANTED = "kvtier/coordinator/wanted.py"
LAYOUT = "kvtier/layout.py"


@dataclass(frozen=True)
class Mutation:
    """``old`` and the first part of each pair in ``also`` occur exactly once in ``file``."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    invariants: str
    tests: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = field(default=())
    hangs: bool = False
    """Whether the mistake may show as a test that never ends."""

    def apply(self, source: str) -> str:
        """``source`` with the mistake."""
        for old, new in ((self.old, self.new), *self.also):
            if source.count(old) != 1:
                raise ValueError(f"{self.name}: occurs {source.count(old)} times in {self.file}: {old!r}")
            source = source.replace(old, new)
        return source


def core(*names: str) -> tuple[str, ...]:
    """Test modules of tests/core."""
    return tuple(f"tests/core/test_{name}.py" for name in names)


def regressions(*names: str) -> tuple[str, ...]:
    """Test modules of tests/regressions."""
    return tuple(f"tests/regressions/test_{name}.py" for name in names)


def field_bugs(*names: str) -> tuple[str, ...]:
    """Test modules of tests/field."""
    return tuple(f"tests/field/test_{name}.py" for name in names)


STREAM_TESTS = ("tests/model/test_streams.py",)
