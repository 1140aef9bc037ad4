"""What operators of kvtier inside vLLM are given: a board, alerts and a page, against the metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from integrations.standin import install

install()

from kvtier.integrations.vllm.stats import COUNTERS, GAUGES  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"
OURS = {*(f"vllm:kvtier_{name}_total" for name in COUNTERS), *(f"vllm:kvtier_{name}" for name in GAUGES)}
VLLMS = {
    "vllm:num_requests_running",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:prompt_tokens_cached_by_source_total",
    "vllm:time_to_first_token_seconds_bucket",
}
"""Of vLLM's own; tests/in_vllm looks for them in a server."""


def named(text: str) -> set[str]:
    """The metrics in it."""
    return set(re.findall(r"(?:vllm|kvtier):\w+", text))


def board() -> Any:
    return json.loads((DOCS / "grafana" / "kvtier-vllm.json").read_text(encoding="utf-8"))


def test_the_board_shows_metrics_that_there_are_and_all_that_tell_of_trouble():
    found = board()
    queries = [target["expr"] for panel in found["panels"] for target in panel.get("targets", [])]
    shown = named(" ".join(queries))
    assert shown - OURS - VLLMS == set()
    assert OURS - shown == set()
    assert all("$model_name" in query for query in queries)
    ids = [panel["id"] for panel in found["panels"]]
    assert len(ids) == len(set(ids))


def test_alerts_are_about_metrics_that_there_are():
    told = named((DOCS / "deploy" / "alerts-vllm.yml").read_text(encoding="utf-8"))
    assert told - OURS - VLLMS == set()
    assert {"vllm:kvtier_damaged_blocks_total", "vllm:kvtier_stores_hang", "vllm:kvtier_remote_breaker_open"} <= told


def test_the_page_names_every_metric():
    told = named((DOCS / "reference" / "metrics-vllm.md").read_text(encoding="utf-8"))
    assert OURS - told == set()
    assert {name for name in told if name.startswith("vllm:kvtier_")} - OURS == set()
