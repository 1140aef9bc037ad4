"""``kvtier serve --exact``: what is answered after a restart is what was answered before it, and without the cache."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from breadth import breadth
from patience import PATIENCE_S
from safetensors.torch import load_file, save_file

from runner import needle

PATIENT = """
import sys
import pytest
from patience import PATIENCE_S, be_patient_with_backends
from runner.cli import main
from runner.engine import service

be_patient_with_backends(pytest.MonkeyPatch())
service.STORE_S = PATIENCE_S
sys.exit(main(sys.argv[1:]))
"""
PROMPTS = [needle.make_prompt(tokens, seed=tokens).text for tokens in (500, 730)]
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "logprobs": 5, "ignore_eos": True}


def noisy(folder: Path) -> Path:
    """The bundled model with noise in all weights: its own are so regular that its sums need no rounding."""
    shutil.copytree(needle.weights_path(), folder)
    (file,), generator = folder.glob("*.safetensors"), torch.Generator().manual_seed(0)
    weights = load_file(file)
    for weight in weights.values():
        weight += weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, file, {"format": "pt"})
    return folder


@contextlib.contextmanager
def served(model: Path, store: Path, *options: str) -> Iterator[str]:
    """The address of a process of its own, which ends in good order."""
    sizes = ["--port", "0", "--device", "cpu", "--device-memory", "24MiB", "--host-memory", "16MiB"]
    command = [sys.executable, "-c", PATIENT, "serve", str(model), *sizes, "--kv-remote", f"file://{store}", *options]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "KVTIER_AUDIT": "0", "KVTIER_KEY_SECRET": "tests"}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = [""]
            while "/v1/completions" not in said[-1]:
                said.append(process.stderr.readline())
                assert said[-1], said
            found = re.search(r"http://127\.0\.0\.1:\d+", said[-1])
            assert found is not None
            yield found[0]
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
        finally:
            process.kill()


def ask(url: str, prompt: str, salt: str | None = None) -> tuple[dict[str, Any], int]:
    """The answer's text with all logprobs, and how many tokens of the prompt were found. ``salt``: finds none."""
    body = DRAWN | {"prompt": prompt} | ({} if salt is None else {"cache_salt": salt})
    told = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    (choice,), usage = told["choices"], told["usage"]
    return {"text": choice["text"], **choice["logprobs"]}, (usage["prompt_tokens_details"] or {})["cached_tokens"]


@breadth
def test_answers_after_a_restart_are_those_before_it_and_those_without_the_cache(tmp_path: Path) -> None:
    """Texts, and every digit of their logprobs: drawn, in other chunks, and beside each other."""
    serving = partial(served, noisy(tmp_path / "model"), tmp_path / "kv", "--exact")
    with serving() as url:
        before = [ask(url, prompt) for prompt in PROMPTS]
    with serving("--max-num-batched-tokens", "200") as url, ThreadPoolExecutor() as pool:
        after = [*pool.map(partial(ask, url), PROMPTS)]
        without = [ask(url, prompt, "a salt of its own") for prompt in PROMPTS]
    assert all(found == 0 for _, found in before + without)
    assert all(found > 400 for _, found in after), after
    answers = [[answer for answer, _ in some] for some in (before, after, without)]
    assert answers[0] == answers[1] == answers[2]
