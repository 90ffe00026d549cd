"""The fenced blocks of the README and of all pages in docs/, and how to tell what a comment says they give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGES", "ROOT", "Block", "blocks_of", "like", "missing_lines", "process_ids"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))]
"""All pages with code, by their paths in the repository."""

FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.M | re.S)
PREFIX = re.compile(r"^\[[\w.-]+(:[\d,-]+)?\] ")
"""What stands in front of a worker's line on a terminal."""

COLOUR = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


class Block(NamedTuple):
    """One fenced block."""

    page: str
    line: int
    language: str
    title: str
    text: str

    @property
    def key(self) -> tuple[str, str]:
        """The page and the first line, which identify the block."""
        return self.page, self.text.partition("\n")[0].strip()

    @property
    def file(self) -> str:
        """The file that the block is the text of, if its first line is `# name.py`; else empty."""
        found = re.match(r"# (\w+\.\w+)\n", self.text)
        return found[1] if found else ""


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        indent, language, info, body = fence.groups()
        title = re.search(r'title="([^"]*)"', info)
        lines = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        found.append(Block(page, text.count("\n", 0, fence.start()) + 1, language, title[1] if title else "", lines))
    return found


def like(shown: str, said: str) -> bool:
    """Return whether a line says what a page shows; numbers may differ, and `...` stands for anything."""
    parts = (re.escape(re.sub(r"\d[\d.,]*", "0", part)) for part in shown.strip().split("..."))
    return re.fullmatch(".*".join(parts), re.sub(r"\d[\d.,]*", "0", said.strip())) is not None


def process_ids(shown: str, said: list[str]) -> dict[str, str]:
    """Return what stands for the process ids in a line of a page, which are 4711 to 4719, in the first line like it."""
    for line in (COLOUR.sub("", one) for one in said):
        for plain in (line, PREFIX.sub("", line)):
            if like(shown, plain):
                pairs = zip(re.findall(r"\d+", shown), re.findall(r"\d+", plain), strict=False)
                return {mine: theirs for mine, theirs in pairs if re.fullmatch("471[1-9]", mine)}
    return {}


def missing_lines(shown: list[str], said: list[str]) -> list[str]:
    """Return the lines of a page that were not printed; a worker's prefix may be left out on the page."""
    plain = [COLOUR.sub("", line).rstrip() for line in said]
    known = [*plain, *(PREFIX.sub("", line) for line in plain)]
    wanted = [line for line in shown if line.strip() not in ("", "...")]
    return [line for line in wanted if not any(like(line, one) for one in known)]
