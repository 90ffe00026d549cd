"""Every fenced block of the README and of docs/ is run, or `not_run.py` says why not.

console     typed into shells on two hosts, host-a and host-b (terminals.py)
python      run, with a server of its own at 127.0.0.1:29400; what its comments say must be so (python_blocks.py).
            A block whose first line is `# name.py` is written to that file instead, for the shells
py          an excerpt of an example to which the page links
sh          needs something that is not here; its `rallypoint` commands and options must exist (command_lines.py)
text        output, or a format: no code
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.docs.blocks import PAGES, ROOT, Block, blocks_of
from tests.docs.command_lines import check_commands, commands_in
from tests.docs.not_run import ELSEWHERE, NOT_RUN, reason_for
from tests.docs.python_blocks import run_block
from tests.docs.terminals import Terminal, type_block
from tests.hosts import Host, hosts

import rallypoint

TORCH = {"docs/migrate.md", "README.md"}
"""Pages with blocks that need torch."""

ETCD = {"docs/tutorial/etcd.md"}
"""Pages with commands that need etcd."""


def of(page: str, *languages: str) -> list[Block]:
    """Return the blocks of a page in these languages that are to be run here."""
    return [block for block in blocks_of(page) if block.language in languages and reason_for(block) is None]


def pages(*languages: str) -> list[Any]:
    """Return the pages that have such blocks, marked with what they need."""
    found = []
    for page in PAGES:
        if of(page, *languages):
            needed = [part for part, those in (("torch", TORCH), ("etcd", ETCD)) if page in those]
            found.append(pytest.param(page, marks=[pytest.mark.needs(part) for part in needed]))
    return found


def test_every_block_is_run_or_has_a_reason_not_to_be() -> None:
    known = ("console", "python", "py", "text")
    unknown = [
        f"{block.page}:{block.line}: {block.language or 'no language'}"
        for page in PAGES
        for block in blocks_of(page)
        if block.language not in known and reason_for(block) is None
    ]
    assert not unknown, "give them a reason in not_run.py"


def test_the_exceptions_are_about_something() -> None:
    found = {reason_for(block) for page in PAGES for block in blocks_of(page)}
    assert not {*NOT_RUN, *ELSEWHERE} - found
    for (page, _), test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(), f"{test} does not name {page}"


def test_every_file_of_a_page_is_used() -> None:
    for page in PAGES:
        blocks = blocks_of(page)
        commands = "".join(block.text for block in blocks if block.language == "console")
        assert not [block.file for block in blocks if block.file and block.file not in commands], page


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_commands_and_options_exist(page: str) -> None:
    wrong = [said for block in blocks_of(page) if block.language == "sh" for said in check_commands(block.text)]
    assert not wrong


def test_a_wrong_option_is_noticed() -> None:
    assert not check_commands("srun rallypoint run --nnodes 2 \\\n  train.py --any thing  # rallypoint none")
    assert len(check_commands("x=1 rallypoint serve --prot 1 &\nrallypoint runs stop job | rallypoint lok")) == 3
    assert list(commands_in("a && rallypoint get k > f; rallypoint ls")) == [["get", "k"], ["ls"]]


@pytest.mark.parametrize("page", pages("py"))
def test_excerpts_are_of_examples(page: str) -> None:
    text = (ROOT / page).read_text()
    examples = [(ROOT / "examples" / name).read_text() for name in re.findall(r"examples/(\w+\.py)\)", text)]
    lines = {line.strip() for example in examples for line in example.splitlines()}
    for block in of(page, "py"):
        foreign = [line for line in block.text.splitlines() if line.strip() and line.strip() not in lines]
        assert not foreign, f"{block.page}:{block.line}"


@pytest.mark.parametrize("page", pages("python"))
def test_python(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RALLYPOINT_RELAY", "")  # some pages set it
    names: dict[str, Any] = {"__name__": "__main__"}
    with rallypoint.Server() as server:
        for block in of(page, "python"):
            if not block.file:
                text = re.sub(r"(127\.0\.0\.1(?::|\", ))29400", rf"\g<1>{server.port}", block.text)
                run_block(block._replace(text=text), names)
        for store in names.values():
            if isinstance(store, rallypoint.Store):
                store.close()


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Any]:
    """A function that returns the shell with a title, on one of two hosts."""
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    (tmp_path / "bin").mkdir()
    for name, module in (("rallypoint", "rallypoint"), ("torchrun", "torch.distributed.run")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        command.chmod(0o755)
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    opened: dict[str, Terminal] = {}
    with hosts(2) as known:

        def shell(title: str) -> Terminal:
            if title not in opened:
                host: Host = next((one for one in known if one.name == title.partition(",")[0]), known[0])
                opened[title] = Terminal(host, folder, env)
            return opened[title]

        try:
            yield shell
        finally:
            for terminal in opened.values():
                terminal.close()


@pytest.mark.needs("netns")
def test_the_picture_shows_what_the_launcher_prints(shells: Any) -> None:
    """Order and numbers may differ; which rank is how far at the kill, too."""
    drawn = ElementTree.parse(ROOT / "docs" / "images" / "first-run.svg")
    command, *lines = ["".join(text.itertext()) for text in drawn.iterfind(".//{*}text[@class='line']")]
    assert command.startswith("$ rallypoint run ") and len(lines) > 15
    terminal = shells("")
    terminal.type(command.removeprefix("$ "))
    terminal.expect([line.replace("[node0:", "[host-a:") for line in lines], command)


@pytest.mark.needs("netns")
@pytest.mark.parametrize("page", pages("console"))
def test_console(page: str, shells: Any, tmp_path: Path) -> None:
    pids: dict[str, str] = {}
    for block in of(page, "console", "python"):
        if block.file:
            (tmp_path / "checkout" / block.file).write_text(block.text)
        elif block.language == "console":
            type_block(shells(block.title), block, pids)
