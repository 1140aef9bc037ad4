"""The equivalence kit's input: the prompts that it plans, and what it refuses."""

from __future__ import annotations

import sys

import pytest
import torch

from kvtier import DeviceUnavailable
from runner.cli import main
from runner.model.hybrid import HybridModel
from runner.verify import kit
from runner.verify.plan import _lengths
from runner.verify.scenarios import SCENARIOS


@pytest.mark.parametrize("unit", [1, 8, 16, 48])
@pytest.mark.parametrize("tokens", [150, 511, 2048, 90_112])
def test_prompts_end_within_a_block_of_a_whole_number_of_chunks(unit: int, tokens: int) -> None:
    lengths, chunk = _lengths(tokens, unit, 3, lambda n: True)
    assert max(lengths) <= tokens and tokens - max(lengths) < max(8 * unit, tokens // 10)
    assert chunk % unit == 0 and chunk <= 4096
    for length in lengths:
        hit = (length - 1) // unit * unit
        assert hit % chunk == 0 and hit // chunk >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "./nowhere"], "is not there"),
        (["--tokens", "20"], "too short"),
        (["--tokens", "2000000"], "fewer"),
        (["--prompts", "1"], "at least 2"),
        (["--new-tokens", "1"], "at least 2"),
        (["--dtype", "int8"], "int8"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_input_that_cannot_work_ends_with_status_2_and_the_fix(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_without_cupy_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(HybridModel, "load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(DeviceUnavailable, match=r"need CuPy.*or use host_memory=0"):
        kit.run(device="cuda:0")
    without_host = [scenario for scenario in SCENARIOS if scenario.host is None]
    with pytest.raises(pytest.fail.Exception, match="weights were read"):
        kit.run(device="cuda:0", scenarios=without_host)
