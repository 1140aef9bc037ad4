"""The documents as a site: the strict build, its links, its reference, and nothing that is fetched from elsewhere."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from inspect import getattr_static
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import kvtier
import kvtier.testing
import runner

ROOT = Path(__file__).parent.parent
BUILD = """
import sys
sys.modules |= dict.fromkeys(["torch", "numba", "numpy", "transformers", "kvtier", "runner"])  # none can be imported
from mkdocs.__main__ import cli
cli(["build", "--strict", "--site-dir", sys.argv[1]])
"""
AUDITS = "for auditing"
"""Stands in the docstrings of what only audits read."""
NAV = ["index.md", {"Use": [{"Serving": "SERVING.md"}]}, {"Changes": "CHANGELOG.md"}]
CODE_COLUMNS = 130
"""Of the widest line of code that a window of 1280 pixels shows whole (docs/assets/site.css, mkdocs.yml's toc)."""
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""What a browser fetches by itself, by tag."""


class Read(HTMLParser):
    """A page of the site: its anchors, its links, what it loads, and the text of its blocks of code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.code: list[str] = []
        self._in_code = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        self.links += [found["href"]] if tag == "a" and "href" in found else []
        self.loads += [found[LOADS[tag]]] if LOADS.get(tag) in found else []
        if tag == "pre":
            self._in_code = True
            self.code.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_code = self._in_code and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self.code[-1] += data


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The folder of the built site. What the library needs is not needed to read its docstrings."""
    pytest.importorskip("mkdocstrings_handlers", reason="mkdocstrings-python is not installed; `make test` installs it")
    folder = tmp_path / "site"
    quiet = {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, env=os.environ | quiet, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def broken(pages: dict[Path, Read], site: Path) -> Iterator[str]:
    """Links to pages, files or anchors that are not there. Those of 404.html begin with /: it answers any address."""
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            name = unquote(parts.path)
            target = (
                (site / name.lstrip("/") if name.startswith("/") else path.parent / name).resolve() if name else path
            )
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].ids if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in anchors):
                yield f"{path.relative_to(site)}: {link}"


def fetched(pages: dict[Path, Read], site: Path) -> Iterator[str]:
    """What pages or style sheets load from another host."""
    yield from {load for page in pages.values() for load in page.loads if urlsplit(load).scheme not in ("", "data")}
    yield from {load for page in pages.values() for load in page.loads if load.startswith("//")}
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        yield from (f"{path.name}: {found}" for found in ("url(http", "url(//", "@import") if found in text)


def test_the_site_builds_and_its_links_lead_somewhere_and_it_fetches_nothing(site: Path) -> None:
    """One test, so that the site is built once."""
    pages = {path: Read(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert [*broken(pages, site)] == []
    assert [*fetched(pages, site)] == []
    assert f"kvtier {kvtier.__version__}" in (site / "SERVING.html").read_text(encoding="utf-8")
    lines = [line for page in pages.values() for code in page.code for line in code.splitlines()]
    assert len(lines) > 1000
    assert [line for line in lines if len(line) > CODE_COLUMNS] == []
    anchors = {name for path, page in pages.items() if path.parent.name == "reference" for name in page.ids}
    assert {*public_names()} - anchors == set(), "add these to a page of docs/reference"


def public_names() -> Iterator[str]:
    """All that packages export, and the methods and properties of their classes, inherited ones too."""
    for package in (kvtier, runner, kvtier.testing):
        for name in package.__all__:
            yield f"{package.__name__}.{name}"
            found = getattr(package, name)
            for owner in found.__mro__ if isinstance(found, type) else ():
                if owner.__module__.startswith(("kvtier", "runner")):
                    for part, value in vars(owner).items():
                        is_code = isinstance(value, (FunctionType, classmethod, property, functools.cached_property))
                        if not is_code or part.startswith("_") or getattr_static(found, part) is not value:
                            continue
                        if value.__doc__ and AUDITS not in value.__doc__:
                            yield f"{package.__name__}.{name}.{part}"


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; `make test` installs it")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "tools" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("at", "given", "made"),
    [
        ("index.md", "[s](docs/SERVING.md#over-http)", "[s](SERVING.md#over-http)"),
        ("SERVING.md", "[r](../README.md), [c](../CONTRIBUTING.md)", "[r](index.md), [c](CONTRIBUTING.md)"),
        ("adr/0003.md", "[a](../ARCHITECTURE.md)", "[a](../ARCHITECTURE.md)"),
        (
            "index.md",
            "[SERVING](docs/SERVING.md), [CHANGELOG.md](CHANGELOG.md)",
            "[Serving](SERVING.md), [Changes](CHANGELOG.md)",
        ),
        ("ARCHITECTURE.md", "[all](adr)", "[all](adr/index.md)"),
        ("SERVING.md", "[list](../tests/families/zoo.py)", "list (`tests/families/zoo.py`)"),
        ("SERVING.md", "[zoo.py](../tests/families/zoo.py)", "`tests/families/zoo.py`"),
        ("SERVING.md", "[gone](../tests/gone.py)", "[gone](../tests/gone.py)"),
        ("SERVING.md", "`[x](../README.md)`", "`[x](../README.md)`"),
        ("SERVING.md", "```\n[x](../README.md)\n```", "```\n[x](../README.md)\n```"),
        ("SERVING.md", "[p](https://x.org/a.md), [h](#here)", "[p](https://x.org/a.md), [h](#here)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(hooks: Any, at: str, given: str, made: str) -> None:
    known = {"index.md", "SERVING.md", "CONTRIBUTING.md", "CHANGELOG.md", "ARCHITECTURE.md", "adr/index.md"}
    files = SimpleNamespace(get_file_from_path=lambda path: path in known)
    page, config = SimpleNamespace(file=SimpleNamespace(src_uri=at)), SimpleNamespace(extra={}, nav=NAV)
    assert hooks.on_page_markdown(given, page, config, files) == made


def test_sources_are_linked_once_their_place_is_known(hooks: Any) -> None:
    page, config = SimpleNamespace(file=SimpleNamespace(src_uri="SERVING.md")), SimpleNamespace(extra={}, nav=NAV)
    config.extra["sources_url"] = "https://x.org/blob/"
    files = SimpleNamespace(get_file_from_path=lambda path: None)
    made = hooks.on_page_markdown("[list](../tests/families/zoo.py#L3)", page, config, files)
    assert made == "[list](https://x.org/blob/tests/families/zoo.py#L3)"


def test_a_folder_in_the_nav_is_all_of_its_pages_and_a_page_to_come_is_left_out(hooks: Any) -> None:
    nav = [{"Soon": "NOWHERE.md"}, {"Wrong": "NEVER.md"}, {"Project": [{"Decisions": "adr/"}]}]
    config = hooks.on_config(SimpleNamespace(extra={"soon": ["NOWHERE.md"]}, nav=nav, mdx_configs={}))
    wrong, project = config.nav
    assert wrong == {"Wrong": "NEVER.md"}, "the strict build names it"
    first, *pages = project["Project"][0]["Decisions"]
    assert first == "adr/index.md"
    assert [place for page in pages for place in page.values()] == sorted(
        f"adr/{path.name}" for path in (ROOT / "docs" / "adr").glob("*.md")
    )
