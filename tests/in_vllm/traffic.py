"""Random requests of many clients at once, each of which has one right text."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from driving import Answer, Engine, Tokens, prompt

TIE = 0.07
"""In bfloat16: two of a step's tokens whose logprobs lie within it may change places, as they do from batch to batch
without a connector: two steps of a logit of 8, or one of 16. Logprobs that are seen to move by more allow more."""


@dataclass
class Seen:
    """What random requests have shown."""

    same: int = 0
    ties: list[float] = field(default_factory=list)
    """Texts that part from the right one where its two likeliest tokens lie so close together."""
    wrong: list[tuple[int, int, float]] = field(default_factory=list)
    """Of each other text: its prompt's number, the token at which it parts, and how much likelier the right one was."""
    counts: Counter[str] = field(default_factory=Counter)
    difference: float = 0.0
    """The largest of logprobs, up to where texts part."""

    def __str__(self) -> str:
        return f"{self.same} same, ties {self.ties}, wrong {self.wrong}, {self.difference:.1e}, {dict(self.counts)}"

    def judge(self, number: int, answer: Answer, cold: Answer, tie: float) -> None:
        """A text against the right one; where it parts, ``tie`` is what is not wrong yet."""
        for ids in (answer.ids, *answer.others):
            apart = next((k for k, (a, b) in enumerate(zip(ids, cold.ids, strict=False)) if a != b), None)
            if apart is None:
                self.same += 1
            elif cold.gaps[apart] <= tie:
                self.ties.append(cold.gaps[apart])
            else:
                self.wrong.append((number, apart, cold.gaps[apart]))
            if ids is answer.ids:
                pairs = list(zip(answer.logprobs, cold.logprobs, strict=False))[:apart]
                self.difference = max([self.difference, *(abs(a - b) for a, b in pairs)])


STEMS = [prompt(seed, size) for seed, size in ((101, 160), (102, 256), (103, 448), (104, 96), (105, 700))]


def drawn(rnd: random.Random, num: int, most: int = 300) -> list[Tokens]:
    """Prompts that share stems, of random lengths; some go on from others."""
    found: list[Tokens] = []
    for _ in range(num):
        stem = rnd.choice([*STEMS, *found[-8:]])
        shared = stem[: rnd.randrange(32, len(stem) + 1)]
        found.append((shared + prompt(rnd.randrange(6), rnd.randrange(1, most)))[:1500])
    return found


def send(
    engine: Engine,
    prompts: list[Tokens],
    colds: list[Answer],
    requests: int,
    seed: int,
    tie: float = 0.0,
    each: Callable[[], None] = lambda: None,
    resets: float = 0.02,
    most: int = 6,
) -> Seen:
    """Sends so many requests. Some clients leave, some ask for three texts, some are more urgent than others.

    ``resets``: the chance, in each step, that a cache is reset. ``each`` is called in each step.

    What was decoded before a request gave way, vLLM computes again as a prompt's. In bfloat16 (``tie``) that rounds
    otherwise, and can choose other experts. So its right text from there on is that of a prompt which has it all.
    """
    rnd, seen, wanted, asked = random.Random(seed), Seen(), dict[str, tuple[int, int]](), 0
    preemptions, resumed = engine.preemptions, list[tuple[int, Answer]]()
    while asked < requests or wanted:
        while asked < requests and len(wanted) < most and rnd.random() < 0.5:
            number, n = rnd.randrange(len(prompts)), 3 if rnd.random() < 0.1 else 1
            num_tokens = rnd.randrange(1, len(colds[number].ids) + 1)
            name = engine.add(prompts[number], num_tokens, n=n, priority=rnd.randrange(3))
            wanted[name] = number, n
            asked += 1
        for name, answer in engine.step().items():
            number, n = wanted.pop(name)
            assert len(answer.others) == n - 1
            seen.counts["ended"] += 1
            seen.counts["loaded"] += answer.loaded > 0
            seen.counts["loaded_tokens"] += answer.loaded
            seen.counts["cached_tokens"] += answer.cached
            if tie and n == 1 and 0 < answer.resumed < len(answer.ids):
                resumed.append((number, answer))
                answer = answer.part(0, answer.resumed)
            seen.judge(number, answer, colds[number], tie)
        if wanted and rnd.random() < 0.01:
            name = rnd.choice([*wanted])
            engine.abort(name)
            seen.counts["left"] += 1
            del wanted[name]
        if rnd.random() < resets:
            engine.llm.reset_prefix_cache(reset_connector=rnd.random() < 0.2)
        each()
    engine.settle()
    seen.counts["preempted"] = engine.preemptions - preemptions
    for number, answer in resumed:
        start, size = answer.resumed, len(answer.ids)
        right = engine.cold(prompts[number] + answer.ids[:start], size - start)
        seen.judge(number, answer.part(start), right, tie)
    return seen
