"""The site builds without warnings and without network, its links resolve, and it loads nothing from elsewhere."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import pytest
from tests.docs.site_build import ROOT, HtmlPage, build, read_site

import rallypoint

pytestmark = [pytest.mark.needs("docs"), pytest.mark.needs("netns")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("site")
    done = build(into, offline=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "WARNING" not in said and "ERROR" not in said, said
    return into


@pytest.fixture(scope="module")
def site(folder: Path) -> dict[str, HtmlPage]:
    return read_site(folder)


def test_every_page_in_docs_is_on_the_site(site: dict[str, HtmlPage]) -> None:
    """`strict` also refuses a page that is not in nav; this says so if somebody takes that setting away."""
    written = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert written <= set(site)
    contents = {posixpath.normpath(link.partition("#")[0]) for link in site["index.html"].links}
    assert not {page for page in written if page not in contents}, "add them to nav in mkdocs.yml"


def test_links_resolve(site: dict[str, HtmlPage], folder: Path) -> None:
    broken = []
    for name, page in site.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or (name == "404.html" and link.startswith("/")):
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            there = site.get(target)
            if not (folder / target).exists() or (anchor and there is not None and anchor not in there.ids):
                broken.append(f"{name}: {link}")
    assert not broken


def test_pages_load_nothing_from_elsewhere(site: dict[str, HtmlPage], folder: Path) -> None:
    foreign = {url for page in site.values() for url in page.loaded if re.match(r"(https?:)?//", url)}
    assert not foreign
    for style in folder.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_the_api_pages_have_every_public_name(site: dict[str, HtmlPage]) -> None:
    documented = {one for name, page in site.items() if name.startswith("reference/api/") for one in page.ids}
    missing = [name for name in rallypoint.__all__ if f"rallypoint.{name}" not in documented]
    assert not missing, "an object without a docstring is left out"
