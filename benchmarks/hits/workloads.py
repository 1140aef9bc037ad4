"""Workloads: what clients ask, one after another. A request may begin once the one before it in its session has ended.

Tokens are drawn anew for each piece of text, so texts share what they are said to share and nothing else. Sessions are
open ``AT_ONCE`` at a time, and a random one of these asks next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

AT_ONCE = 16
VOCABULARY = 100_000
NOTHING: Tokens = np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class Ask:
    """A prompt and the answer that it gets, int32 [n] each. ``ends``: lengths at which the system prompt and messages
    end, for caches that are told."""

    session: int
    prompt: Tokens
    answer: Tokens
    ends: tuple[int, ...] = ()


class Writer:
    """Texts of one workload; ``seed`` makes it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._tokens = np.random.default_rng(seed)

    def text(self, tokens: int) -> Tokens:
        """New text of this length."""
        return self._tokens.integers(1, VOCABULARY, tokens, dtype=np.int32)

    def about(self, tokens: int) -> Tokens:
        """New text of some 60 to 140 % of this length."""
        return self.text(max(8, int(tokens * self.random.uniform(0.6, 1.4))))

    def retrimmed(self, answer: Tokens) -> Tokens:
        """Without its last tokens, or with others instead, as many or fewer."""
        cut = self.random.randrange(1, 6)
        return np.concatenate([answer[:-cut], self.text(self.random.choice([0, self.random.randrange(1, cut + 1)]))])

    def interleaved(self, sessions: Sequence[Sequence[Ask]], at_once: int = AT_ONCE) -> list[Ask]:
        """``at_once`` sessions are open at a time; a random one of them asks next."""
        waiting = [list(session) for session in reversed(sessions)]
        open_ones: list[list[Ask]] = []
        asked = []
        while waiting or open_ones:
            while waiting and len(open_ones) < at_once:
                open_ones.append(waiting.pop())
            session = self.random.choice(open_ones)
            asked.append(session.pop(0))
            if not session:
                open_ones.remove(session)
        return asked


class Habit(NamedTuple):
    """How a conversation's next prompt differs from the text that is cached.

    ``dropped``: tokens that the template puts at the end of each prompt and not into the history. ``thought``: tokens
    of thinking before each answer, likewise. ``edited``: how often an answer is asked for again, or a message of the
    last four turns is written anew, half each. ``retrimmed``: how often an answer's last tokens are cut off or become
    others in the history, half each, as when text is tokenised again.
    """

    dropped: int = 0
    thought: int = 0
    edited: float = 0.0
    retrimmed: float = 0.0


PLAIN = Habit()


def talks(write: Writer, system: Tokens, sessions: range, turns: int, habit: Habit, first: int) -> list[list[Ask]]:
    """Conversations with this beginning."""
    made = []
    for number in sessions:
        history, asks, starts = np.concatenate([system, write.about(first)]), list[Ask](), list[Tokens]()
        for turn in range(turns):
            starts.append(history)
            message, tail, thinking = write.about(300), write.text(habit.dropped), write.text(habit.thought)
            prompt, answer = np.concatenate([history, message, tail]), write.about(200)
            ends = len(system), len(history), len(history) + len(message)
            asks.append(Ask(number, prompt, np.concatenate([thinking, answer]), ends))
            if habit.retrimmed and write.random.random() < habit.retrimmed:
                answer = write.retrimmed(answer)
            history = np.concatenate([history, message, answer])
            chance = write.random.random()
            if chance < habit.edited / 2:
                asks.append(Ask(number, prompt, write.about(200), ends))
            elif chance < habit.edited and turn > 1:
                history = starts[write.random.randrange(max(0, turn - 4), turn)]
        made.append(asks)
    return made


def chats(seed: int, sessions: int = 48, turns: int = 8, habit: Habit = PLAIN, first: int = 1200) -> list[Ask]:
    """Conversations with one system prompt."""
    write = Writer(seed)
    return write.interleaved(talks(write, write.text(700), range(sessions), turns, habit, first))


def mixed(seed: int, each: int = 24, turns: int = 6) -> list[Ask]:
    """Conversations whose answers are kept, and as many whose thinking is dropped, at the same time."""
    write = Writer(seed)
    kept = talks(write, write.text(700), range(each), turns, PLAIN, 1200)
    dropped = talks(write, write.text(700), range(each, 2 * each), turns, Habit(thought=800), 1200)
    sessions = kept + dropped
    write.random.shuffle(sessions)
    return write.interleaved(sessions)


def round_robin(seed: int, sessions: int = 24, turns: int = 5) -> list[Ask]:
    """Long conversations with short turns, in strict turn: what is least recent is what is asked for next."""
    write = Writer(seed)
    made = talks(write, write.text(700), range(sessions), turns, PLAIN, 9000)
    return [session[turn] for turn in range(turns) for session in made]


def tools(seed: int, users: int = 60, turns: int = 4) -> list[Ask]:
    """One system prompt, at whose end each user has some tools of their own."""
    write = Writer(seed)
    system, known = write.text(3500), [write.about(200) for _ in range(12)]
    made = []
    for user in range(users):
        own = [known[k] for k in sorted(write.random.sample(range(12), write.random.randrange(1, 5)))]
        made += talks(write, np.concatenate([system, *own]), range(user, user + 1), turns, PLAIN, 100)
    return write.interleaved(made)


def bursts(seed: int, count: int = 20, asks: tuple[int, int] = (10, 4), later: int = 5) -> list[Ask]:
    """New long documents that many ask about at once; some more ask when ``later`` other documents have come."""
    write = Writer(seed)
    system, texts = write.text(500), [write.about(8000) for _ in range(count)]
    order = []
    for k in range(count + later):
        order += [k] * asks[0] if k < count else []
        order += [k - later] * asks[1] if k >= later else []
    return [
        Ask(n, np.concatenate([system, texts[k], write.about(120)]), write.about(100), (500, 500 + len(texts[k])))
        for n, k in enumerate(order)
    ]


def popular(seed: int, count: int = 150, asks: int = 500) -> list[Ask]:
    """Single questions with system prompts of Zipf popularity."""
    write = Writer(seed)
    texts = [write.text(write.random.randrange(1200, 4000)) for _ in range(count)]
    chosen = write.random.choices(range(count), [1 / (k + 1) for k in range(count)], k=asks)
    return [
        Ask(n, np.concatenate([texts[k], write.about(300)]), write.about(60), (len(texts[k]),))
        for n, k in enumerate(chosen)
    ]


def scanned(seed: int, sessions: int = 32, turns: int = 6) -> list[Ask]:
    """Conversations, and between any two of their turns a long prompt that nobody asks again."""
    write = Writer(seed)
    asked = write.interleaved(talks(write, write.text(700), range(sessions), turns, PLAIN, 1200))
    once = (Ask(sessions + n, write.about(3000), write.about(50)) for n in range(len(asked)))
    return [ask for pair in zip(asked, once, strict=True) for ask in pair]


def trees(seed: int, roots: int = 16, width: int = 3, depth: int = 3) -> list[Ask]:
    """Thoughts that go on in ``width`` ways each, level by level, as a search does."""
    write = Writer(seed)
    system, made, numbers = write.text(600), list[list[Ask]](), count()
    for _ in range(roots):
        level, asks = [np.concatenate([system, write.about(2500)])], list[Ask]()
        for _ in range(depth):
            below = []
            for text in level:
                for _ in range(width):
                    prompt, answer = np.concatenate([text, write.about(30)]), write.about(250)
                    asks.append(Ask(next(numbers), prompt, answer, (len(system), len(text))))
                    below.append(np.concatenate([prompt, answer]))
            level = below
        made.append(asks)
    return list(_in_runs(write, made, at_once=4, run=width))


def stems(seed: int, count: int, asks: int, tokens: tuple[int, int], question: int, answer: int) -> list[Ask]:
    """``count`` long beginnings, each asked about ``asks`` times, in any order: system prompts, examples."""
    write = Writer(seed)
    texts = [write.text(write.random.randrange(*tokens)) for _ in range(count)]
    order = [k % count for k in range(count * asks)]
    write.random.shuffle(order)
    return [
        Ask(n, np.concatenate([texts[k], write.about(question)]), write.about(answer), (len(texts[k]),))
        for n, k in enumerate(order)
    ]


def agents(seed: int, parents: int = 24, children: int = 6, turns: int = 4) -> list[Ask]:
    """Parents whose context their children begin with; the children take turns, then the parent goes on."""
    write = Writer(seed)
    tools, families = write.text(3000), list[list[Ask]]()
    for parent in range(parents):
        stem = np.concatenate([tools, write.about(5000)])
        name = parent * (children + 1)
        said = write.about(100)
        family = [Ask(name, stem, said, (len(tools),))]
        talks = [np.concatenate([stem, write.about(300)]) for _ in range(children)]
        for _ in range(turns):
            for child in range(children):
                answer = write.about(80)
                family.append(Ask(name + 1 + child, talks[child], answer, (len(tools), len(stem))))
                talks[child] = np.concatenate([talks[child], answer, write.about(400)])
        for more in (900, 300):
            stem = np.concatenate([stem, said, write.about(more)])
            said = write.about(200)
            family.append(Ask(name, stem, said, (len(tools),)))
        families.append(family)
    return list(_in_runs(write, families, at_once=4, run=children))


def _in_runs(write: Writer, families: list[list[Ask]], at_once: int, run: int) -> Iterator[Ask]:
    waiting, open_ones = families[::-1], list[list[Ask]]()
    while waiting or open_ones:
        while waiting and len(open_ones) < at_once:
            open_ones.append(waiting.pop())
        family = write.random.choice(open_ones)
        yield from family[:run]
        del family[:run]
        if not family:
            open_ones.remove(family)


def best_of(seed: int, prompts: int = 40, answers: int = 8) -> list[Ask]:
    """Each prompt several times in a row."""
    write = Writer(seed)
    system = write.text(600)
    asked = []
    for k in range(prompts):
        prompt = np.concatenate([system, write.about(3000)])
        asked += [Ask(k * answers + n, prompt, write.about(120), (600,)) for n in range(answers)]
    return asked


def documents(seed: int, count: int = 100, asks: int = 250, each: int = 5) -> list[Ask]:
    """Questions about a few of ``count`` documents, some asked for more often, in any order within the prompt."""
    write = Writer(seed)
    system, texts = write.text(500), [write.about(800) for _ in range(count)]
    weights = [1 / (k + 1) ** 0.9 for k in range(count)]
    asked = []
    for number in range(asks):
        chosen = dict[int, None]()
        while len(chosen) < each:
            chosen[write.random.choices(range(count), weights)[0]] = None
        prompt = np.concatenate([system, *(texts[k] for k in chosen), write.about(100)])
        asked.append(Ask(number, prompt, write.about(48), (len(system),)))
    return asked


WORKLOADS: dict[str, Callable[[], list[Ask]]] = {
    "chat": lambda: chats(3),
    "think": lambda: chats(15, 32, 6, Habit(thought=1000)),
    "drop3": lambda: chats(13, habit=Habit(dropped=3)),
    "drop40": lambda: chats(14, habit=Habit(dropped=40)),
    "edit": lambda: chats(16, habit=Habit(edited=0.5)),
    "retrim": lambda: chats(17, habit=Habit(retrimmed=0.7)),
    "mixed": lambda: mixed(18),
    "roundrobin": lambda: round_robin(19),
    "scan": lambda: scanned(20),
    "agents": lambda: agents(7),
    "tools": lambda: tools(21),
    "tree": lambda: trees(22),
    "bestofn": lambda: best_of(8),
    "burst": lambda: bursts(23),
    "system60": lambda: stems(2, 60, 5, (3500, 4700), 400, 48),
    "system1": lambda: stems(1, 1, 300, (4101, 4102), 400, 48),
    "fewshot": lambda: stems(5, 40, 10, (2500, 3500), 120, 16),
    "zipf": lambda: popular(24),
    "rag": lambda: documents(6),
}
