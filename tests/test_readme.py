"""The examples of the README and of docs/SERVING.md run as they stand, and what the documents link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.needle import make_prompt, weights_path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVING = (ROOT / "docs" / "SERVING.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = re.findall(r"```python\n(.*?)```", README + SERVING, re.DOTALL)


def test_the_embedding_example(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [code for code in EXAMPLES if "Scheduler" in code]
    exec(compile(example, "README.md", "exec"), {})
    assert f"```\n{capsys.readouterr().out}```" in README
    assert len(example.strip().splitlines()) <= 17


@pytest.mark.parametrize("face", ["LLM", "AsyncLLM"])
def test_the_serving_examples(face: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [code for code in EXAMPLES if f"with {face}(" in code]
    prompt = make_prompt(600, seed=0)
    example = example.replace("path/or/hub-id", str(weights_path())).replace("Once upon a time", prompt.text)
    example = example.replace("8GiB", "64MiB").replace("32GiB", "64MiB")
    example = example.replace(f'{face}("{weights_path()}")', f'{face}("{weights_path()}", "cpu", "64MiB", "64MiB")')
    exec(compile(example, "SERVING.md", "exec"), {})
    assert prompt.answer.removesuffix(" .") in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_section_that_a_document_links_to_is_there(page: Path) -> None:
    gone = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, section = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (section and section not in sections(target)):
            gone.append(link)
    assert gone == []


def sections(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
