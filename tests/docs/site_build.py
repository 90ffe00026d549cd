"""The site, built as `make docs` does, where there is no network; and what its pages contain."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

__all__ = ["ROOT", "HtmlPage", "build", "read_site"]

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_NETWORK = ["unshare", "--net"]
AMPLE_S = 200


def build(into: Path, offline: bool) -> subprocess.CompletedProcess[str]:
    """Build the site; `offline`: in a network namespace without an interface, which takes root."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(into)]
    return subprocess.run(
        [*WITHOUT_NETWORK, *command] if offline else command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=AMPLE_S,
    )


class HtmlPage(HTMLParser):
    """The ids, the links and what a browser loads by itself, of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value is not None}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag != "a":
            self.loaded += [found[name] for name in ("src", "srcset", "href", "data") if name in found]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read_site(folder: Path) -> dict[str, HtmlPage]:
    """Return all pages of a built site, by their paths in it."""
    pages = sorted(folder.rglob("*.html"))
    return {path.relative_to(folder).as_posix(): HtmlPage(path.read_text(encoding="utf-8")) for path in pages}
