"""The kernels compile for a Hopper GPU, without one, into code that moves 16 bytes a load.

The interpreter takes Python that the compiler refuses, and says nothing of widths: this is its other half.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from breadth import sample, sized

import kvtier

pytest.importorskip("triton", reason="triton is not installed; `make test` installs it")

LOADS = r"\bld\.global[\w.:]*\.(v4\.b32|v2\.b64)\b"
STORES = r"\bst\.global[\w.:]*\.(v4\.b32|v2\.b64)\b"
PACKED = ["up, few, mxfp4", "down, few, mxfp4", "up, many, mxfp4", "down, many, mxfp4"]
WITHOUT: list[str] = sized(["down, few", "up, many", *PACKED[1:]], [])
"""Products of experts that are as the others; it takes seconds to compile them."""


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(kvtier.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    script = str(Path(__file__).parent / "compiled.py")
    command = [sys.executable, script, "90", *WITHOUT]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout)


def test_nothing_spills(ptx: dict[str, str]) -> None:
    assert len(ptx) == 15 - len(WITHOUT)
    assert not [name for name, text in ptx.items() if re.search(r"\b(ld|st)\.local", text)]


@pytest.mark.parametrize(
    ("kernel", "loads", "stores"), [("checksum", 32, 0), ("write bf16", 2, 2), ("write fp8", 2, 0)]
)
def test_loads_and_stores_are_16_bytes_wide(ptx: dict[str, str], kernel: str, loads: int, stores: int) -> None:
    """Per thread: a tile is 128 threads wide."""
    assert len(re.findall(LOADS, ptx[kernel])) == loads
    assert len(re.findall(STORES, ptx[kernel])) == stores


def test_float8_is_divided_as_the_host_divides(ptx: dict[str, str]) -> None:
    assert set(re.findall(r"\bdiv\.[\w.]+", ptx["write fp8"])) == {"div.rn.f32"}
    assert len(re.findall(r"\bst\.global[\w.]*\.v2\.b32", ptx["write fp8"])) == 2  # 8 values of K, 8 of V


@pytest.mark.parametrize("kernel", sample(["up, few", "down, few"], ["up, few"]))
def test_experts_of_a_decode_step_stream_their_weights(ptx: dict[str, str], kernel: str) -> None:
    """Past the registers, 16 bytes a copy, while the tensor cores work."""
    assert re.search(r"\bcp\.async\.cg\.shared\.global[^;]*, 0x10,", ptx[kernel])
    assert re.search(r"\bmma\.sync\.\S*\.bf16", ptx[kernel])


@pytest.mark.parametrize("kernel", sample(["up, many", "down, many"], ["down, many"]))
def test_experts_of_a_prompt_use_the_tensor_cores_of_hopper(ptx: dict[str, str], kernel: str) -> None:
    assert re.search(r"\bwgmma\.mma_async\.\S*\.bf16", ptx[kernel])


@pytest.mark.parametrize("kernel", sample(PACKED, PACKED[:1]))
def test_experts_in_mxfp4_are_streamed_as_they_are(ptx: dict[str, str], kernel: str) -> None:
    """No byte is loaded alone, and permutations of bytes make numbers of them on the way to a product."""
    text = ptx[kernel]
    assert not re.search(r"\bld\.global[\w.:]*\.[bsu]8\b", text)
    assert re.search(r"\bcp\.async\.c[ag]\.shared\.global", text)
    assert re.search(r"\bprmt\.b32", text)
    assert re.search(r"\bwgmma\.mma_async\.\S*\.bf16", text)
