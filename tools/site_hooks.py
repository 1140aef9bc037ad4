"""What turns the repository's Markdown into a site (mkdocs.yml names this file).

Owns       the pages that lie outside docs/, the lists of folders, and links from one to the other.
Promises   Markdown is written for a code host, and its links work there and on the site. A link to a file that is no
           page leads to ``extra.sources_url``, or is plain text with the file's path while there is none. A link to
           nothing is left as it is: the strict build refuses it. A link whose text is the name of a page's file shows
           the page's title in the nav.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages outside docs/, and their places on the site."""
FOLDERS = {
    "adr": "# Decisions\n\nEach says what was chosen, what it costs, and what was rejected.",
    "log": "# Earlier runs\n\nFigures by date, and what was run when.",
}
"""Folders of docs/ that get a page with a list, and what it begins with."""

_LINK = re.compile(r"(?P<code>^ *```.*?^ *```|`[^`\n]+`(?!\]))|\[(?P<text>[^\]\[]*)\]\((?P<to>[^)\s]+)\)", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A folder in the nav stands for its list and all its pages. Anchors are a code host's; feet have the version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.copyright = f"{project['name']} {project['version']}"
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    absent = {page for page in config.extra.get("soon", ()) if not (ROOT / "docs" / page).exists()}
    config.nav = _unfolded(config.nav, absent)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for folder, head in FOLDERS.items():
        pages = sorted((ROOT / "docs" / folder).glob("*.md"))
        lines = [f"- [{_title(page)}]({page.name})" for page in pages]
        files.append(File.generated(config, f"{folder}/index.md", content="\n".join([head, "", *lines, ""])))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links of the repository into links of the site."""
    place = page.file.src_uri
    home = next((source for source, there in OUTSIDE.items() if there == place), f"docs/{place}")
    titles = dict(_titles(config.nav))

    def rewritten(found: re.Match[str]) -> str:
        to = found["to"]
        if found["code"] or to.startswith("#") or re.match(r"\w+:", to):
            return found[0]
        path, hash_, section = to.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), path))
        there = _place(path)
        if there is not None and files.get_file_from_path(there):
            names_file = found["text"] in (path, Path(path).name, Path(path).stem)
            text = titles.get(there, found["text"]) if names_file else found["text"]
            return f"[{text}]({posixpath.relpath(there, posixpath.dirname(place) or '.')}{hash_}{section})"
        if not (ROOT / path).exists():
            return found[0]
        prefix = config.extra.get("sources_url")
        if prefix:
            return f"[{found['text']}]({prefix}{path}{hash_}{section})"
        is_named = found["text"].strip("`") in path
        return f"`{path}`" if is_named else f"{found['text']} (`{path}`)"

    return _LINK.sub(rewritten, markdown)


def slug(heading: str, separator: str) -> str:
    """The anchor that a code host gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def _place(path: str) -> str | None:
    """Where a file of the repository is on the site, if it may be there."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if not path.startswith("docs/"):
        return None
    inside = path.removeprefix("docs/")
    return f"{inside}/index.md" if inside in FOLDERS else inside


def _unfolded(nav: Any, absent: set[str]) -> Any:
    if isinstance(nav, list):
        return [
            _unfolded(one, absent) for one in nav if not (isinstance(one, dict) and absent & {*map(str, one.values())})
        ]
    if isinstance(nav, dict):
        return {title: _unfolded(one, absent) for title, one in nav.items()}
    if nav.endswith("/"):
        folder = nav.removesuffix("/")
        pages = sorted((ROOT / "docs" / folder).glob("*.md"))
        return [f"{folder}/index.md", *({_title(page): f"{folder}/{page.name}"} for page in pages)]
    return nav


def _titles(nav: Any) -> Iterator[tuple[str, str]]:
    """The places of pages, and their titles."""
    for one in nav:
        for title, what in one.items() if isinstance(one, dict) else ():
            yield from _titles(what) if isinstance(what, list) else [(what, title)]


def _title(page: Path) -> str:
    first = page.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()
