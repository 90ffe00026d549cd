"""Where a file of the repository is on the site, and what its links become there.

A page of docs/ keeps its place. Any other file that a page links to (an example, a manifest, the changelog) becomes a
page below `files/`: Markdown as it is, everything else as a block of code. So links that work in the repository work
on the site. Rejected: links to a code host; the site would not be complete without it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
LINK = re.compile(r"(\]\(|\b(?:src|href|srcset)=\")([^)\s\"]+)")
FENCED = re.compile(r"^(`{3,}).*?^\1`*$", re.M | re.S)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh", ".toml": "toml"}
IMAGES = (".svg", ".png")


def place(path: str) -> str:
    """Return where a file of the repository is on the site, as a path of its source."""
    if path.startswith(f"{DOCS}/"):
        return path[len(DOCS) + 1 :]
    if path.endswith((".md", *IMAGES)):
        return f"files/{path}"
    return f"files/{path}.md"


def links(text: str) -> list[str]:
    """Return the targets of the links in a page that are no URLs, without those in blocks of code."""
    return [found[2] for found in LINK.finditer(FENCED.sub("", text)) if not re.match(r"\w+:|#|//", found[2])]


def target(page: str, link: str) -> str:
    """Return the file of the repository, or the directory, that a link in a page points to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link.partition("#")[0]))


def rewritten(page: str, text: str) -> str:
    """Return a page with its links as they are on the site; `page` is its path in the repository."""
    here = posixpath.dirname(place(page))

    def replace(found: re.Match[str]) -> str:
        link = found[2]
        if re.match(r"\w+:|#|//", link) or not (ROOT / target(page, link)).is_file():
            return found[0]
        _, hash_sign, anchor = link.partition("#")
        return found[1] + posixpath.relpath(place(target(page, link)), here or ".") + hash_sign + anchor

    return outside_fences(text, lambda part: LINK.sub(replace, part))


def titled(page: str, text: str, titles: Mapping[str, str]) -> str:
    """Return a page in which links whose text is the name of a page have its title; in the repository a name helps."""

    def replace(found: re.Match[str]) -> str:
        title = titles.get(target(page, found[2]), "")
        return f"[{title}]({found[2]})" if title and found[1].endswith(".md") else found[0]

    return outside_fences(text, lambda part: re.sub(r"\[([\w/.-]+)\]\(([^)\s]+)\)", replace, part))


def title_of(text: str) -> str:
    """Return the heading of a page."""
    found = re.search(r"^# (.+)$", text, re.M)
    return found[1] if found else ""


def bare_pipes(text: str) -> str:
    """Return a page without backslashes in front of the bars in code of tables: other Markdown needs them there."""

    def bare(line: str) -> str:
        return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line

    return outside_fences(text, lambda part: "\n".join(map(bare, part.split("\n"))))


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Return a text with all but its blocks of code changed."""
    parts, end = [], 0
    for fence in FENCED.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def linked_files(pages: dict[str, str]) -> list[str]:
    """Return the files outside docs/ that pages link to, and those that these link to."""
    found: set[str] = set()
    todo = dict(pages)
    while todo:
        page, text = todo.popitem()
        for link in links(text):
            path = target(page, link)
            if path.startswith(("..", f"{DOCS}/")) or path in found or not (ROOT / path).is_file():
                continue
            found.add(path)
            if path.endswith(".md"):
                todo[path] = (ROOT / path).read_text(encoding="utf-8")
    return sorted(found)


def as_page(path: str) -> str:
    """Return a file of the repository as a page: Markdown as it is, anything else as a block of code."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n```{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}```\n"
