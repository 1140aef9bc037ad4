"""Several engines behind a router: does a conversation's next turn go where its prefix is?

    python -m benchmarks.scale_out --router .venv-routers/bin/vllm-router [--json OUT]

Two ``kvtier serve`` processes with the bundled model stand behind ``vllm-router``. Conversations run at once. Where a
turn was served says the engine that answered; what it found there, its ``cached_tokens``. Both are compared with the
engines' own metrics. The same conversations run with ``kv_aware`` and with ``round_robin``; then one engine is killed
among them, and started again. Last, two engines with small tiers share a remote: a turn comes to the wrong one; and an
engine that has a text in the remote alone is weighed against one that has nothing, or a part on its device.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import machine
from benchmarks.output import stdout
from benchmarks.scale_out import stored
from benchmarks.scale_out.fleet import Failed, Fleet, counted
from benchmarks.scale_out.talk import Talks, Turn

NOTICED_S = 3.0
"""After so long the router has seen that an engine is back: it looks every second."""
WANTED = 0.95
"""Of later turns that must go where their prefix is."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.scale_out", description=__doc__.split("\n")[0])
    parser.add_argument("--router", type=Path, required=True, help="the vllm-router command")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between an answer and the next turn, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-kill", action="store_true", help="leave out the engine that dies and comes back")
    parser.add_argument("--no-store", action="store_true", help="leave out the engines that share a remote")
    parser.add_argument("--texts", type=int, default=8, help="of the engines that share a remote, for each question")
    parser.add_argument("--router-option", action="append", default=[], help="one more argument for kv_aware's router")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs there")
    parser.add_argument("--json", type=Path, help="write the figures there, with machine and commit")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            rows = [_policy(args, policy, logs) for policy in ("kv_aware", "round_robin")]
            killed = None if args.no_kill else _killed(args, logs)
            store = None if args.no_store else _stored(args, logs, Path(folder))
        except Failed as problem:
            print(problem, file=sys.stderr)
            return 1
    rows[0]["same_answers"] = rows[1]["same_answers"] = rows[0].pop("answers") == rows[1].pop("answers")
    _show(rows, killed)
    if store is not None:
        _show_stored(store)
    if args.json:
        found = {"machine": machine.describe(), "arguments": _plain(args), "policies": rows, "killed": killed}
        args.json.write_text(json.dumps(found | {"store": store}, indent=2) + "\n")
    return 0 if rows[0]["at_home"] >= WANTED and rows[0]["metrics_agree"] and (store is None or store["is_well"]) else 1


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    names = ("engines", "conversations", "turns", "pause", "seed", "router_option", "texts")
    return {name: getattr(args, name) for name in names}


def _talks(args: argparse.Namespace, fleet: Fleet, **more: Any) -> Talks:
    sizes = {"conversations": args.conversations, "turns": args.turns, "pause_s": args.pause, "seed": args.seed}
    return Talks(fleet.url, **(sizes | more))


def _policy(args: argparse.Namespace, policy: str, logs: Path) -> dict[str, Any]:
    options = args.router_option if policy == "kv_aware" else []
    with Fleet(args.router, policy, args.engines, logs, options) as fleet:
        talks = _talks(args, fleet)
        turns = talks.run()
        told = {engine.name: counted(engine) for engine in fleet.engines}
    return {
        "policy": policy,
        "answers": [turn.answer for turn in turns],
        **_figures(turns, talks),
        **_agree(turns, told),
    }


def _figures(turns: list[Turn], talks: Talks) -> dict[str, Any]:
    later = [turn for turn in turns if turn.home is not None]
    first = [turn.engine for turn in turns if turn.home is None]
    could = sum(turn.could_be_cached for turn in later)
    return {
        "turns": len(turns),
        "later_turns": len(later),
        "at_home": _share(sum(turn.is_at_home for turn in later), len(later)),
        "away_from_load": sum(_was_busier_at_home(turn, turns) for turn in later),
        "away_otherwise": sum(not turn.is_at_home and not _was_busier_at_home(turn, turns) for turn in later),
        "cached_share": _share(sum(turn.cached_tokens for turn in later), could),
        "first_turns": {name: first.count(name) for name in sorted(set(first))},
        "median_s": round(statistics.median(turn.seconds for turn in later), 4) if later else None,
        "failures": sum(turn.failures for turn in turns),
        "given_up": talks.given_up,
    }


def _was_busier_at_home(turn: Turn, turns: list[Turn]) -> bool:
    """Whether it went elsewhere, and more turns were being answered at home than there."""
    beside = [other.engine for other in turns if other is not turn and other.runs_at(turn.began_s)]
    return not turn.is_at_home and beside.count(turn.home or "") > beside.count(turn.engine)


def _agree(turns: list[Turn], told: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Whether the engines' metrics say what the answers said."""
    said = {name: _said([turn for turn in turns if turn.engine == name]) for name in told}
    return {"metrics": told, "metrics_agree": told == said}


def _said(turns: list[Turn]) -> dict[str, float]:
    return {
        "requests": float(len(turns)),
        "prompt_tokens": float(sum(turn.prompt_tokens for turn in turns)),
        "cached_tokens": float(sum(turn.cached_tokens for turn in turns)),
    }


def _killed(args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Conversations go on while an engine is killed after a third of their turns, and started again after half."""
    with Fleet(args.router, "kv_aware", args.engines, logs, args.router_option) as fleet:
        talks, victim = _talks(args, fleet, turns=3 * args.turns), fleet.engines[-1]
        thread = threading.Thread(target=talks.run)
        thread.start()
        total = talks.conversations * talks.turns
        _until(lambda: talks.num_done >= total // 3 or not thread.is_alive())
        victim.end(signal.SIGKILL)
        killed_s = time.monotonic()
        _until(lambda: talks.num_done >= total // 2 or not thread.is_alive())
        victim.start()
        victim.wait()
        back_s = time.monotonic()
        thread.join()
        time.sleep(max(0.0, back_s + NOTICED_S - time.monotonic()))
        late = _talks(args, fleet, seed=args.seed + 1)
        afterwards = late.run()
    turns = talks.done
    during = [turn for turn in turns if killed_s <= turn.began_s < back_s]
    return {
        "turns": len(turns),
        "failures": sum(turn.failures for turn in turns),
        "given_up": talks.given_up,
        "down_s": round(back_s - killed_s, 1),
        "answered_while_down": len(during),
        "at_victim_after_return": sum(turn.engine == victim.name for turn in turns if turn.began_s >= back_s),
        "new_conversations": _figures(afterwards, late),
    }


def _stored(args: argparse.Namespace, logs: Path, folder: Path) -> dict[str, Any]:
    logs = logs / "store"
    logs.mkdir(exist_ok=True)
    return stored.measure(args.router, logs, folder, args.texts, args.seed, args.router_option)


def _until(done: Any) -> None:
    while not done():
        time.sleep(0.02)


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def _show(rows: list[dict[str, Any]], killed: dict[str, Any] | None) -> None:
    table = Table(title="Later turns of conversations, behind vllm-router")
    for column in (
        "policy",
        "went where their prefix is",
        "home was busier",
        "cached of what could be",
        "first turns",
        "a turn",
        "failures",
    ):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in [*rows, *([{"policy": "kv_aware, after a kill", **killed["new_conversations"]}] if killed else [])]:
        table.add_row(
            row["policy"],
            f"{row['at_home']:.1%} of {row['later_turns']}",
            str(row["away_from_load"]),
            f"{row['cached_share']:.1%}",
            " : ".join(str(n) for n in row["first_turns"].values()),
            f"{1000 * row['median_s']:.0f} ms",
            str(row["failures"]),
        )
    console = stdout()
    console.print(table)
    console.print(
        f"Engines' metrics agree with their answers: {'yes' if all(row['metrics_agree'] for row in rows) else 'NO'}. "
        f"Same answers with both policies: {'yes' if rows[0]['same_answers'] else 'NO'}."
    )
    if killed:
        console.print(
            f"One engine killed for {killed['down_s']} s: {killed['turns']} turns answered, {killed['failures']} "
            f"tries failed and were repeated, {killed['given_up']} conversations given up; after its return it served "
            f"{killed['at_victim_after_return']} of their turns."
        )


def _show_stored(found: dict[str, Any]) -> None:
    wrong = found["wrong_engine"]
    table = Table("", "", title="Two engines, one remote", show_header=False)
    share = wrong["cached_by_tier"]["remote"] / wrong["prompt_tokens"]
    table.add_row("turns at the wrong engine: tokens from the remote", f"{share:.1%} of {wrong['prompt_tokens']:,}")
    table.add_row("  as its metrics say, and with the same answers", "yes" if _is_true(wrong) else "NO")
    table.add_row("  computed whole, and fetched", f"{wrong['cold_median_s']:.3f} s, {wrong['fetched_median_s']:.3f} s")
    for name, credit in (("credited", "0.3, the default"), ("not_credited", "0")):
        row = found[name]
        table.add_row(f"left in the remote alone; credit {credit}", f"{row['at_home']:.0%} of {row['turns']} at home")
    for row in found["weights"]:
        went = "the remote" if row["went_to_the_store"] else "the device"
        table.add_row(f"the other has {row['share_on_the_other_device']:.0%} on its device: went to", went)
    stdout().print(table)


def _is_true(wrong: dict[str, Any]) -> bool:
    return bool(wrong["same_answers_as_at_home"] and wrong["metrics_agree"])


if __name__ == "__main__":
    sys.exit(main())
