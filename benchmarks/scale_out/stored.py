"""Two engines that share a remote: what a turn at the wrong engine costs, and what the router credits the remote with.

Owns       the questions, and what their answers should say.
Promises   where a text lies is read off the engines' answers (cached tokens by tier), not off what was sent where.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.scale_out.fleet import Failed, Fleet, Process

SMALL = ("--device-memory", "4MiB", "--host-memory", "4MiB", "--disable-uvicorn-access-log")
"""Both tiers forget a text after a few others."""
BLOCK_TOKENS = 16
WORDS = 1600
SHARES = (0.1, 0.2, 0.4, 0.6)
"""Of a text, that the other engine has on its device: below and above the remote's credit, 0.3."""
FLUSHES = 8
"""Other texts, until an engine has lost one."""
SETTLE_S = 30.0
HEARD_S = 0.5
"""So much later the router has heard of what was computed: an engine tells 20 times a second at most."""


@dataclass(frozen=True)
class Answer:
    """One completion."""

    engine: str
    text: str
    prompt_tokens: int
    by_tier: dict[str, int]
    seconds: float


def measure(router: Path, logs: Path, folder: Path, texts: int, seed: int, options: Sequence[str]) -> dict[str, Any]:
    """All of it, as plain values; ``folder``: where the remote may be."""
    secret = folder / "secret"
    secret.write_text("of this benchmark")
    words, found = random.Random(seed), dict[str, Any]()
    for name, credit in (("credited", []), ("not_credited", ["--kv-penalty-disk", "0"])):
        of_remote = ["--kv-remote", f"file://{folder / name}", "--kv-remote-secret-file", str(secret)]
        with Fleet(router, "kv_aware", 2, logs, [*options, *credit], [*SMALL, *of_remote]) as fleet, _web() as web:
            if name == "credited":
                found["wrong_engine"] = _wrong_engine(web, fleet.engines, [_text(words) for _ in range(texts)])
                found["weights"] = [_weigh(web, fleet, _text(words), share, words) for share in SHARES]
            found[name] = _left_in_store(web, fleet, [_text(words) for _ in range(texts)], words)
    found["is_well"] = _is_well(found)
    return found


def _wrong_engine(web: httpx.Client, engines: list[Process], texts: list[str]) -> dict[str, Any]:
    """A conversation's next turn comes to the engine that has not seen it, and then to the one that has."""
    home, other = engines
    for engine in engines:
        ask(web, engine.url, "w1 w2 w3")  # the first request of a process takes longer
    before = _metrics(web, other)
    cold, away, same, next_turns = [], [], True, []
    for text in texts:
        first = ask(web, home.url, text)
        cold.append(first)
        _wait_until_stored(web, home)
        next_turns.append(f"{text} {first.text} ask K7 ?")
        away.append(ask(web, other.url, next_turns[-1]))
    for turn, answer in zip(next_turns, away, strict=True):
        same &= ask(web, home.url, turn).text == answer.text
    after = _metrics(web, other)
    counted = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after}
    return {
        "turns": len(texts),
        "same_answers_as_at_home": same,
        "prompt_tokens": sum(answer.prompt_tokens for answer in away),
        "cached_by_tier": _sum_of(answer.by_tier for answer in away),
        "metrics_agree": _agrees(counted, away),
        "fetched_objects": counted.get("kvtier:remote_objects_total{fetch}", 0.0),
        "late_looks": counted.get("kvtier:remote_late_looks_total{file}", 0.0),
        "not_worth": counted.get("kvtier:remote_not_worth_total{file}", 0.0),
        "fetched_bytes": counted.get("kvtier:remote_bytes_total{fetch}", 0.0),
        "cold_median_s": round(statistics.median(answer.seconds for answer in cold), 4),
        "fetched_median_s": round(statistics.median(answer.seconds for answer in away), 4),
    }


def _agrees(counted: dict[str, float], answers: list[Answer]) -> bool:
    """Whether the engine's metrics say the same as its answers."""
    said = _sum_of(answer.by_tier for answer in answers)
    told = {tier: counted.get(f"kvtier:prefix_tokens_total{{{tier}}}", 0.0) for tier in said}
    return told == said and counted.get("kvtier:remote_objects_total{fetch}", 0.0) > 0


def _left_in_store(web: httpx.Client, fleet: Fleet, texts: list[str], words: random.Random) -> dict[str, Any]:
    """Each engine in turn computes a text and loses it in both tiers. Where does the router send the next turn?"""
    rows = []
    for k, text in enumerate(texts):
        home, other = fleet.engines[k % 2], fleet.engines[1 - k % 2]
        first = ask(web, home.url, text)
        _lose(web, home, other, words)
        answer = ask(web, fleet.url, f"{text} {first.text} ask K7 ?")
        rows.append((home.name, answer))
    home_rows = [answer for name, answer in rows if answer.engine == name]
    return {
        "turns": len(rows),
        "at_home": round(len(home_rows) / len(rows), 4),
        "cached_by_tier": _sum_of(answer.by_tier for _, answer in rows),
        "prompt_tokens": sum(answer.prompt_tokens for _, answer in rows),
    }


def _weigh(web: httpx.Client, fleet: Fleet, text: str, share: float, words: random.Random) -> dict[str, Any]:
    """The remote has the text for one engine; the other one has ``share`` of it on its device."""
    home, other = fleet.engines
    ask(web, home.url, text)
    _lose(web, home, other, words)
    part = text.split()[: int(share * len(text.split())) // BLOCK_TOKENS * BLOCK_TOKENS]
    ask(web, other.url, " ".join(part), 1)
    time.sleep(HEARD_S)
    answer = ask(web, fleet.url, text)
    return {"share_on_the_other_device": share, "went_to_the_store": answer.engine == home.name}


def _lose(web: httpx.Client, home: Process, other: Process, words: random.Random) -> None:
    """The engine computes other texts until neither tier has what it had. The other one computes as many, for a like
    load."""
    _wait_until_stored(web, home)
    for _ in range(FLUSHES):
        ask(web, home.url, _text(words), 1)
        ask(web, other.url, _text(words), 1)
    _wait_until_stored(web, home)
    time.sleep(HEARD_S)


def _is_well(found: dict[str, Any]) -> bool:
    wrong, weights = found["wrong_engine"], found["weights"]
    fetched = wrong["cached_by_tier"]["remote"] > 0.9 * wrong["prompt_tokens"]
    credited = found["credited"]["at_home"] == 1.0 > found["not_credited"]["at_home"]
    weighed = all(row["went_to_the_store"] == (row["share_on_the_other_device"] < 0.3) for row in weights)
    return bool(wrong["same_answers_as_at_home"] and wrong["metrics_agree"] and fetched and credited and weighed)


# --- engines --------------------------------------------------------------------------------------


def ask(web: httpx.Client, url: str, prompt: str, max_tokens: int = 8) -> Answer:
    """One completion; raises ``Failed``."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    began_s = time.monotonic()
    reply = web.post(f"{url}/v1/completions", json=body)
    if reply.status_code != 200:
        raise Failed(f"{url} answered {reply.status_code}: {reply.text[:200]}")
    told, seconds = reply.json(), time.monotonic() - began_s
    usage = told["usage"]
    by_tier = dict(usage["prompt_tokens_details"]["cached_tokens_by_tier"])
    return Answer(told["model"], told["choices"][0]["text"], usage["prompt_tokens"], by_tier, seconds)


@contextmanager
def _web() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60.0) as web:
        yield web


def _metrics(web: httpx.Client, engine: Process) -> dict[str, float]:
    """Of the remote and of prompts' sources, by the last label."""
    found: dict[str, float] = {}
    for line in web.get(f"{engine.url}/metrics").text.splitlines():
        if line.startswith(("kvtier:remote_", "kvtier:prefix_tokens_total", "kvtier:live_transfers")):
            name, _, labels = line.partition("{")
            found[f"{name}{{{labels.rpartition('}')[0].split('=')[-1].strip(chr(34))}}}"] = float(line.split()[-1])
    return found


def _wait_until_stored(web: httpx.Client, engine: Process) -> None:
    """Until nothing is on its way to the host tier or the remote, twice in a row."""
    quiet, until = 0, time.monotonic() + SETTLE_S
    while quiet < 2 and time.monotonic() < until:
        told = _metrics(web, engine)
        busy = sum(value for name, value in told.items() if name.startswith(("kvtier:remote_live", "kvtier:live_")))
        quiet = quiet + 1 if not busy else 0
        time.sleep(0.05)


def _sum_of(tiers: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for tier in tiers:
        for name, tokens in tier.items():
            total[name] = total.get(name, 0) + tokens
    return total


def _text(words: random.Random) -> str:
    """Filler of its own, with a fact that can be asked for."""
    filler = [f"w{words.randrange(120)}" for _ in range(WORDS - 8)]
    fact = f"key K7 = {' '.join(str(words.randrange(10)) for _ in range(5))} ."
    return " ".join([*filler[: WORDS // 2], fact, *filler[WORDS // 2 :]])
