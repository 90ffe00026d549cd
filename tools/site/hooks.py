"""What `mkdocs.yml` cannot say: pages that are made from the code, and links out of docs/.

mkdocs calls these functions by their names. Each page that is made has its own module here.
"""

from __future__ import annotations

import api_pages
import cli_page
import metrics_page
import repository
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

MADE = {
    **api_pages.PAGES,
    "reference/commands.md": cli_page.render,
    "reference/metrics.md": metrics_page.render,
}
"""Pages that are made from the code, each with the function that makes it."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and the files outside docs/ that pages link to."""
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for uri, make in MADE.items():
        files.append(File.generated(config, uri, content=make()))
    for path in repository.linked_files(pages):
        if path.endswith(repository.IMAGES):
            file = File.generated(config, repository.place(path), abs_src_path=str(repository.ROOT / path))
        else:
            file = File.generated(config, repository.place(path), content=repository.as_page(path))
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to where their targets are on the site, and call pages by their titles."""
    uri = page.file.src_uri
    path = uri.removeprefix("files/") if uri.startswith("files/") else f"docs/{uri}"
    path = path if (repository.ROOT / path).is_file() else path.removesuffix(".md")
    titles = {f"docs/{file.src_uri}": repository.title_of(file.content_string) for file in files.documentation_pages()}
    return repository.bare_pipes(repository.rewritten(path, repository.titled(path, markdown, titles)))
