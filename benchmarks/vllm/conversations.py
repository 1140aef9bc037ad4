"""Conversations: tokens that a host tier keeps of them, and hits by turn, beside vLLM's own connectors.

vLLM's real scheduler serves the same conversations through each connector; no bytes are copied (``simulated``). They
share a system prompt, and each turn's prompt is all that was said before with a new message. The device has room for
one prompt and a half, so that what comes back comes from the host tier, in two orders:

* ``in turn``: all conversations, one after the other, again and again: what is least recent is asked for next.
* ``some open``: a few are open at a time, a random one of them is next, and a new one begins when one has ended.

Host memory is a quarter, half and all of what the conversations take in the end: all tokens of full layers once, and a
window or a state for each conversation. ``hits``: the share of prompt tokens that were not computed, by turn.
``kept_tokens``: what the connector offers of all conversations in the end, the newest first. The first turn's prompts
share their beginning alone. ``bounds``: what would be found by conversations kept whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from benchmarks.vllm.shapes import SHAPES, Shape
from benchmarks.vllm.simulated import CONNECTORS, KVTIER, SAID, Simulated

MODELS = ("Gemma-3-27B", "gpt-oss-120b", "Qwen3-Next-80B")
MEMORIES = (0.25, 0.5, 1.0)
ORDERS = ("in turn", "some open")
SESSIONS, TURNS, OPEN = 24, 8, 8
SYSTEM_TOKENS, FIRST_TOKENS, MESSAGE_TOKENS, ANSWER_TOKENS = 700, 1600, 400, 100
CHUNK_TOKENS = 2048


class Ask(NamedTuple):
    """``turn`` of a ``session``."""

    session: int
    turn: int
    prompt: list[int]
    answer_tokens: int


def talks(seed: int, sessions: int, turns: int) -> list[list[Ask]]:
    """Conversations, turn by turn; the last turn of each is what it would ask next."""
    random = Random(seed)

    def about(tokens: int) -> list[int]:
        return random.choices(range(1000, 60_000), k=int(tokens * random.uniform(0.6, 1.4)))

    system, made = about(SYSTEM_TOKENS), list[list[Ask]]()
    for session in range(sessions):
        history, asks = [*system, *about(FIRST_TOKENS)], list[Ask]()
        for turn in range(turns + 1):
            history = [*history, *about(MESSAGE_TOKENS)]
            asks.append(Ask(session, turn, history, len(about(ANSWER_TOKENS))))
            history = [*history, *[SAID] * asks[-1].answer_tokens]
        made.append(asks)
    return made


def ordered(order: str, made: Sequence[Sequence[Ask]], seed: int) -> list[Ask]:
    """All turns but the last of each."""
    if order == "in turn":
        return [asks[turn] for turn in range(len(made[0]) - 1) for asks in made]
    random, waiting, open_ones, asked = Random(seed), [list(asks[:-1]) for asks in made], list[list[Ask]](), list[Ask]()
    while waiting or open_ones:
        while waiting and len(open_ones) < OPEN:
            open_ones.append(waiting.pop(0))
        chosen = random.choice(open_ones)
        asked.append(chosen.pop(0))
        open_ones = [asks for asks in open_ones if asks]
    return asked


def whole_bytes(shape: Shape, made: Sequence[Sequence[Ask]]) -> int:
    """What all conversations take before their last turn, with the system prompt once."""
    tokens = sum(len(asks[-1].prompt) - MESSAGE_TOKENS for asks in made) - (len(made) - 1) * SYSTEM_TOKENS
    return tokens * shape.windowed.count(False) * shape.layer_token_bytes + len(made) * shape.end_bytes


def device_blocks(shape: Shape, num_tokens: int) -> int:
    """Room for one prompt and a half. A group is as many layers as are of the fewer kind."""
    layers = min(shape.windowed.count(True), shape.windowed.count(False))
    local = 4 if shape.state else (shape.window_tokens + CHUNK_TOKENS) // shape.block_tokens + 2
    return (num_tokens // shape.block_tokens + 2 + local * -(-shape.windowed.count(True) // layers)) * 3 // 2


def measure(model: str, order: str, memory: float, sessions: int, turns: int) -> list[dict[str, Any]]:
    """A row for each connector."""
    shape, made = SHAPES[model], talks(0, sessions, turns)
    asked, host_bytes = ordered(order, made, 1), int(memory * whole_bytes(shape, made))
    blocks = device_blocks(shape, max(len(asks[-1].prompt) for asks in made))
    rows, most = [], bounds(shape, made, asked, host_bytes)
    for name in CONNECTORS:
        engine = Simulated(name, shape, blocks, host_bytes, chunk_tokens=CHUNK_TOKENS)
        found, prompts = Counter[int](), Counter[int]()
        for ask in asked:
            request = engine.add(f"{ask.session}.{ask.turn}", ask.prompt, ask.answer_tokens)
            engine.finish()
            found[ask.turn] += engine.found[request.request_id]
            prompts[ask.turn] += len(ask.prompt)
        engine.forget_device()
        newest = list(dict.fromkeys(ask.session for ask in reversed(asked)))
        kept = sum(engine.offered(f"{session} next", made[session][-1].prompt) for session in newest)
        rows.append(
            {
                "model": model,
                "order": order,
                "memory": memory,
                "host_gib": round(host_bytes / 2**30, 1),
                "connector": name,
                "kept_tokens": kept,
                "hits": [round(100 * found[turn] / prompts[turn], 1) for turn in range(turns)],
                "hit_tokens": found.total(),
                "prompt_tokens": prompts.total(),
                "bounds": most,
            }
        )
    return rows


def bounds(shape: Shape, made: Sequence[Sequence[Ask]], asked: Sequence[Ask], host_bytes: int) -> dict[str, float]:
    """Hits, %, of a cache that keeps conversations whole and loses nothing to padding or to what turns leave behind.

    ``use``: the one that was used least recently goes first. ``clairvoyant``: the one that is asked for last, or never.
    """
    token, prompts = shape.windowed.count(False) * shape.layer_token_bytes, (asks[0].prompt for asks in made[:2])
    shared = next(n for n, (one, other) in enumerate(zip(*prompts, strict=False)) if one != other)
    found = dict[str, float]()
    for order in ("use", "clairvoyant"):
        kept, hits = dict[int, int](), 0  # by session, its tokens; the least recently used first
        for at, ask in enumerate(asked):
            hits += kept.pop(ask.session, shared if at else 0) // shape.block_tokens * shape.block_tokens
            kept[ask.session] = len(ask.prompt) + (0 if shape.state else ask.answer_tokens)
            later = [other.session for other in asked[at + 1 :]]

            def is_asked_after(session: int, later: list[int] = later) -> int:
                return later.index(session) if session in later else len(later)

            while (shared + sum(n - shared for n in kept.values())) * token + (
                len(kept) + 1
            ) * shape.end_bytes > host_bytes:
                del kept[next(iter(kept)) if order == "use" else max(kept, key=is_asked_after)]
        found[order] = round(100 * hits / sum(len(ask.prompt) for ask in asked), 1)
    return found


def times_the_better(rows: Sequence[dict[str, Any]], figure: str) -> float:
    """kvtier's figure, in those of the better of vLLM's connectors."""
    (own,) = (row[figure] for row in rows if row["connector"] == KVTIER)
    return float(round(own / max(1, *(row[figure] for row in rows if row["connector"] != KVTIER)), 2))


def run(quick: bool) -> list[dict[str, Any]]:
    """All models, orders and memories."""
    sessions, turns = (6, 3) if quick else (SESSIONS, TURNS)
    return [
        row
        for model in MODELS
        for order in ORDERS
        for memory in MEMORIES
        for row in measure(model, order, memory, sessions, turns)
    ]
