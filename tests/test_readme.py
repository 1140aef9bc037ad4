"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.needle import make_prompt, weights_path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_embedding_example(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [code for code in EXAMPLES if "Scheduler" in code]
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "hello length 8\n"
    assert len(example.strip().splitlines()) <= 16


@pytest.mark.parametrize("face", ["LLM", "AsyncLLM"])
def test_the_serving_examples(face: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [code for code in EXAMPLES if f"with {face}(" in code]
    prompt = make_prompt(600, seed=0)
    example = example.replace("path/or/hub-id", str(weights_path())).replace("Once upon a time", prompt.text)
    example = example.replace("8GiB", "64MiB").replace("32GiB", "64MiB")
    example = example.replace(f'{face}("{weights_path()}")', f'{face}("{weights_path()}", "cpu", "64MiB", "64MiB")')
    exec(compile(example, "README.md", "exec"), {})
    assert prompt.answer.removesuffix(" .") in capsys.readouterr().out


def test_every_file_that_the_readme_names_is_there() -> None:
    root = Path(__file__).parent.parent
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (root / link).exists()] == []
