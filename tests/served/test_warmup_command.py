"""``kvtier warmup``."""

from __future__ import annotations

import json

import pytest

import kvtier
from kvtier import WarmUp
from runner import cli


def test_it_says_where_code_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kvtier, "warm_up", lambda: WarmUp(1.5, 50, 12, "/folder", "znver5", ""))
    assert cli.main(["warmup"]) == 0
    assert capsys.readouterr() == ("50 loops for znver5: 12 compiled, 38 loaded, 1.5 s\nkept in /folder\n", "")


def test_it_ends_with_status_1_if_code_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kvtier, "warm_up", lambda: WarmUp(9.0, 50, 50, None, "znver5", "there is no home directory"))
    assert cli.main(["warmup", "--json"]) == 1
    out, err = capsys.readouterr()
    assert (json.loads(out)["kept"], err) == (False, "kvtier: cannot be kept: there is no home directory\n")
