"""vLLM's own scheduler core, measured in the same run: which of its figures stands beside which row of ours.

``DIR`` holds what runs it: ``venv/``, the unpacked wheel in ``src/``, and ``bench_vllm_core.py``, which times vLLM's
real classes (Request, KVCacheManager, AsyncScheduler, its CPU offload) without a GPU and writes rows of (name, median)
as JSON. Where vLLM does the work of one of our rows in several calls, their times are added.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

_ADMIT, _MATCH = (
    "A alloc+free 90112 tok {} chunk=8192 steady(evict)",
    "C get_computed_blocks 90k prefix hit (+17 new) {}",
)
_STEP = "E total {} running, {}, AsyncScheduler(default)"
_STORE = ("build_connector_meta", "completion")
GEMMA, LLAMA4 = "full+5xswa1024", "full+3xchunk8192"  # vLLM needs as many groups of equal page size

ROWS: dict[tuple[str, str], tuple[float, tuple[str, ...]]] = {
    ("keys of 90,112 tokens", "L"): (1.0, ("B per block algo=sha256",)),
    ("admit + free 90,112", "L"): (1.0, (_ADMIT.format("full"),)),
    ("admit + free 90,112", "G"): (1.0, (_ADMIT.format(f"{GEMMA}/ret=0"),)),
    ("admit + free 90,112", "C"): (1.0, (_ADMIT.format(f"{LLAMA4}/ret=0"),)),
    ("match 90,112, full hit", "L"): (1.0, (_MATCH.format("full"),)),
    ("match 90,112, full hit", "G"): (1.0, (_MATCH.format(GEMMA),)),
    ("step, 256 running", "L"): (1e3, (_STEP.format(256, "full"),)),
    ("step, 256 running", "G"): (1e3, (_STEP.format(256, GEMMA),)),
    ("step, 1,024 running", "L"): (1e3, (_STEP.format(1024, "full"),)),
    ("step, 1,024 running", "G"): (1e3, (_STEP.format(1024, GEMMA),)),
    ("store 90,112, CPU side", "G"): (
        1.0,
        tuple(f"F 90k prefill store: all {part} calls full+swa1024" for part in _STORE),
    ),
    ("load 90,112, CPU side", "G"): (
        1.0,
        (
            "F get_num_new_matched_tokens 90k CPU hit full+swa1024",
            "F update_state_after_alloc 90k load full+swa1024",
            "F load completion (unpin) 90k full+swa1024",
        ),
    ),
    ("1,000,000 blocks, build", "-"): (1.0, ("G BlockPool(1M blocks) construct",)),
    ("1,000,000 blocks, each", "-"): (
        1.0,
        (
            "G BlockPool RSS per block (empty)",
            "G extra RSS per cached block (dict entry + key bytes + int)",
        ),
    ),
}
"""(row, shape) -> (factor to the row's unit, names of vLLM's figures that add up to it)."""


def measure(folder: Path) -> dict[tuple[str, str], float]:
    """vLLM's figures by (row, shape), in the units of our rows; takes some two minutes."""
    source = str((folder / "src").resolve())
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "vllm.json"
        subprocess.run(
            [
                str(folder.resolve() / "venv" / "bin" / "python"),
                str(folder.resolve() / "bench_vllm_core.py"),
                *("hash", "alloc", "lookup", "sched", "offload", "pool", "--json", str(out)),
            ],
            env=os.environ | {"VLLM_SRC": source, "PYTHONPATH": source},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=scratch,
            check=True,
        )
        found = {" ".join(row["name"].split()): row["median"] for row in json.loads(out.read_text(encoding="utf-8"))}
    return {row: factor * sum(found[name] for name in names) for row, (factor, names) in ROWS.items()}
