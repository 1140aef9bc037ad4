"""Callers of many answers beside callers of few: who computes in which step."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from breadth import sample
from patience import wait_until

from runner import AsyncLLM, RequestOutputKind, SamplingParams
from runner.engine import shares
from runner.engine.shares import LONGEST_DEBT_S, LOOK_EVERY, STRETCH, Shares
from runner.needle import make_prompt, weights_path


class Played:
    """An engine whose steps take ``fixed_s`` and ``row_s`` a row."""

    def __init__(self, fixed_s: float, row_s: float, **callers: int) -> None:
        self.fixed_s, self.row_s = fixed_s, row_s
        self.shares = Shares()
        self.drawn: Counter[str] = Counter()
        self.now_s = 0.0
        for share, size in callers.items():
            for k in range(size):
                self.shares.add(f"{share}{k}", share)
                self.drawn[f"{share}{k}"] = 0

    def step(self, *, prompts_s: float = 0.0) -> set[str]:
        running = list(self.drawn)
        resting = () if self.shares.are_even else self.shares.resting(running)
        rows = set(running) - set(resting)
        took_s = self.fixed_s + self.row_s * len(rows) + prompts_s
        self.shares.note(took_s, prompts_s > 0)
        self.drawn.update(rows)
        self.now_s += took_s
        return rows

    def rate(self, name: str) -> float:
        return self.drawn[name] / self.now_s


@pytest.mark.parametrize("noisy", sample([2, 8, 64, 1000], quick=[64]))
@pytest.mark.parametrize(("fixed_s", "row_s"), [(0.006, 0.0002), (0.001, 0.001), (0.0, 0.001)])
def test_who_asks_for_one_answer_keeps_its_rate(fixed_s: float, row_s: float, noisy: int) -> None:
    engine = Played(fixed_s, row_s, one=1, many=noisy)
    for _ in range(4000):
        engine.step()
    alone = 1 / (fixed_s + row_s)
    assert engine.rate("one0") >= 0.98 * alone / STRETCH
    counts = [engine.drawn[f"many{k}"] for k in range(noisy)]
    assert len({*counts}) == 1, "they go on together"
    if fixed_s + (noisy + 1) * row_s > STRETCH * (fixed_s + row_s):  # no more rest than that needs
        assert engine.rate("one0") <= 1.15 * alone / STRETCH


def test_where_rows_cost_nothing_nobody_rests() -> None:
    engine = Played(0.01, 1e-6, one=1, many=64)
    steps = [len(engine.step()) for _ in range(1000)]
    assert steps.count(65) >= 1000 - 1000 // LOOK_EVERY - 1


def test_callers_of_equally_many_answers_never_rest_and_the_last_answer_of_many_is_not_one_of_one() -> None:
    engine = Played(0.001, 0.001, a=8, b=8, c=8)
    for k in range(7):
        engine.shares.drop(f"a{k}")
        del engine.drawn[f"a{k}"]
    assert all(len(engine.step()) == 17 for _ in range(200))


def test_several_callers_of_many_share_what_is_left() -> None:
    engine = Played(0.001, 0.001, one=1, many=64, more=64)
    for _ in range(4000):
        engine.step()
    assert engine.rate("one0") >= 0.98 / (0.001 + 0.001) / STRETCH
    assert engine.drawn["many0"] == engine.drawn["more0"] > 0


def test_prompts_are_nobodys_debt() -> None:
    engine = Played(0.01, 1e-6, one=1, many=64)
    engine.step()
    assert all(len(engine.step(prompts_s=1.0)) == 65 for _ in range(LOOK_EVERY - 1))


def test_a_stall_is_paid_for_a_second_at_most() -> None:
    engine = Played(0.01, 1e-6, one=1, many=64)
    engine.step()
    engine.fixed_s = 1000.0
    assert len(engine.step()) == 65
    engine.fixed_s = 0.01
    steps = [len(engine.step()) for _ in range(2000)]
    assert steps.index(65) <= LONGEST_DEBT_S / (0.01 * (STRETCH - 1)) + 1


def test_all_ends_with_the_requests() -> None:
    engine = Played(0.001, 0.001, one=1, many=5)
    engine.step()
    for name in list(engine.drawn):
        engine.shares.drop(name)
    assert engine.shares.are_even and not engine.shares.resting([])


def test_answers_rest_in_the_real_engine_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to be measured for it: here, each step with all of them is too long."""
    rested: list[int] = []
    monkeypatch.setattr(shares, "STRETCH", 1e-9)
    real = Shares.resting

    def noted(self: Shares, running: Any) -> Any:
        found = real(self, running)
        rested.append(len(found))
        return found

    monkeypatch.setattr(Shares, "resting", noted)
    prompt = make_prompt(100, seed=0).text

    def params(n: int) -> SamplingParams:
        kind = RequestOutputKind.FINAL_ONLY
        return SamplingParams(max_tokens=30, ignore_eos=True, temperature=1, seed=7, n=n, output_kind=kind)

    async def ask(llm: AsyncLLM, n: int) -> list[list[int]]:
        (output,) = [one async for one in llm.generate(prompt, params(n))]
        return [answer.token_ids for answer in output.outputs]

    async def both(llm: AsyncLLM) -> list[list[list[int]]]:
        return await asyncio.gather(ask(llm, 8), ask(llm, 1))

    options: dict[str, Any] = {"device_memory": "4MiB", "host_memory": 0, "batch_invariant": True}
    with AsyncLLM(weights_path(), "cpu", **options) as llm:
        alone = [asyncio.run(ask(llm, 8)), asyncio.run(ask(llm, 1))]
        assert not any(rested)
        assert asyncio.run(both(llm)) == alone
        assert any(rested)
        wait_until(lambda: not llm.engine.has_requests(), "all is reported")
        assert llm.engine.shares is not None and llm.engine.shares.are_even
        assert asyncio.run(llm.audit()) == []
