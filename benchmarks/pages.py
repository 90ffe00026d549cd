"""The pages that show what was measured: the table of README.md, docs/performance.md and its plots.

All are drawn from results.md, so they say what it says; `python -m benchmarks --pages` writes them again without
measuring, and a test asks whether they are up to date. What stands between `<!-- NAME begin -->` and `<!-- NAME end
-->` is written here, all else on these pages by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.bars import Bar, bars
from benchmarks.plot import Point, plot
from benchmarks.record import Figure, Row, Section, read_results

__all__ = ["render_pages", "write_pages"]

ROOT = Path(__file__).resolve().parents[1]
IMAGES = "docs/images/"
LAUNCHING, MEETING, RECOVERY = "Launching, beside torchrun", "Meeting:", "Recovery under torchrun"
RENDEZVOUS, CLIENT, FAILOVER = "Rendezvous:", "Client:", "Failover"
THROUGHPUT, DURABILITY, ETCD = "Throughput:", "Durability:", "etcd:"
TWO = "two cores"

FIGURES = {
    "up": (LAUNCHING, "up", TWO, "torchrun"),
    "back": (LAUNCHING, "back after a kill", TWO, "torchrun"),
    "agent": (LAUNCHING, "memory of the agent", "one core", "torchrun"),
    "others": (LAUNCHING, "memory of the others", "one core", ""),
    "worker": (RECOVERY, "a worker is killed", "", "torch"),
    "node": (RECOVERY, "an agent is killed", "", "torch"),
    "round": (RENDEZVOUS, "round of 64", TWO, "torch"),
    "exchange": (MEETING, "exchange of 1,000", TWO, "torch"),
    "barrier": (MEETING, "barrier of 1,000", TWO, "torch"),
    "add": (THROUGHPUT, "add", TWO, "torch"),
    "alone": (CLIENT, "add", "one core", "torch"),
    "wakes": (CLIENT, "wait wakes", TWO, "torch"),
    "killed": (FAILOVER, "the leading server is killed", "", ""),
    "vanished": (FAILOVER, "its host vanishes, with etcd's leader", "", ""),
}
"""The figures that the sentences below need: the section (how its title begins), what, where, and the peer."""

COMPARED = """
| event | torchrun 2.13 and its store | rallypoint |
|---|---|---|
| start two workers that import nothing | {up.theirs}: it imports torch first | {up.ours} |
| restart after a worker is killed | {back.theirs} | {back.ours}: it does not poll |
| memory of the agent | {agent.theirs} | {agent.ours}, and {others.ours} for its other processes |
| a node is lost | {node.theirs} until training goes on | {node.ours}, with `--rdzv-backend=rallypoint` |
| the node that started the store dies | the job is lost | the job goes on: the server is a process of its own |
| the machine of the store dies | the job is lost | with `--store etcd://…` it goes on after {vanished.ours} |
| `--max-restarts 3` on eight nodes | each agent counts its own restarts | 3 restarts for the whole job |
| a worker raises an exception | its traceback, if the script uses `record` | the first failure, with its traceback |
| a node is preempted | its workers get the signal, at any step | all ranks stop at one step; exit code 75 |
| the agent is killed by SIGKILL | its workers keep running | its workers are killed |
| 64 nodes form a round | {round.theirs} | {round.ours} |
| 1,000 ranks exchange 100 bytes each | {exchange.theirs} | {exchange.ours} |
| 1,000 ranks pass a barrier | {barrier.theirs} | {barrier.ours} |
| one client adds to a counter, on one core | {alone.theirs} | {alone.ours}: the client is Python |
| a `set` wakes a client that waits for it | {wakes.theirs} | {wakes.ours} |
"""


def write_pages() -> None:
    """Write all pages and plots again."""
    for path, text in render_pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")


def render_pages() -> dict[str, str]:
    """Return each page and each plot as it should be, by its path in the repository."""
    results = read_results()
    compared = COMPARED.strip().format_map({name: _find(results, *where) for name, where in FIGURES.items()})
    readme, performance = (ROOT / "README.md").read_text("utf-8"), (ROOT / "docs/performance.md").read_text("utf-8")
    for name, text in (("compared", compared), ("slower", _slower(results)), ("missed", _missed(results))):
        performance = _filled(performance, name, text)
    return {
        "README.md": _filled(readme, "compared", compared),
        "docs/performance.md": performance,
        f"{IMAGES}meeting.svg": _meeting(results),
        f"{IMAGES}recovery.svg": _recovery(results),
        f"{IMAGES}group-commit.svg": _group_commit(results),
    }


def _filled(page: str, name: str, text: str) -> str:
    """Return a page with another text between its marks."""
    found = re.compile(rf"(<!-- {name} begin[^>]*-->\n).*?(<!-- {name} end -->)", re.S)
    filled, count = found.subn(lambda marks: f"{marks[1]}\n{text}\n\n{marks[2]}", page)
    if count not in (0, 1) or (count == 0 and f"<!-- {name}" in page):
        raise ValueError(f"the marks of {name!r} do not fit")
    return filled


def _section(results: Mapping[str, Section], beginning: str) -> Section:
    for title, section in results.items():
        if title.startswith(beginning):
            return section
    raise KeyError(f"benchmarks/results.md has no section {beginning!r}")


def _find(results: Mapping[str, Section], beginning: str, what: str, where: str, peer: str) -> Row:
    return _section(results, beginning).row(what, where, peer)


# Lists


def _missed(results: Mapping[str, Section]) -> str:
    """Return a table of all targets that were not reached."""
    lines = ["| subject | what | where | rallypoint | peer | theirs | target |", "|---|---|---|---|---|---|---|"]
    for title, section in results.items():
        for row in section.rows:
            if row.missed:
                theirs = f"{row.theirs}" if row.theirs else ""
                spread = ", within the spread" if "within" in row.verdict else ""
                cells = (title.partition(":")[0], row.what, row.where, row.ours, row.peer, theirs, row.target + spread)
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


PEERS = ("torch", "torchrun", "redis", "Put")
FASTER_IS_MORE = ("op/s",)
NOTED = 1.2
"""How many times worse than the peer a figure without a target is, to be listed."""


def _slower(results: Mapping[str, Section]) -> str:
    """Return a table of the figures that are worse than those of a peer that others have made."""
    lines = ["| subject | what | where | rallypoint | peer | theirs | times worse |", "|---|---|---|---|---|---|---|"]
    for title, section in results.items():
        for row in section.rows:
            worse = _times_worse(row)
            if worse >= NOTED:
                subject = title.partition(":")[0]
                cells = (subject, row.what, row.where, row.ours, row.peer, row.theirs, f"{worse:.1f}")
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _times_worse(row: Row) -> float:
    if row.theirs is None or not row.peer.startswith(PEERS):
        return 0.0
    ratio = row.ours.value / row.theirs.value
    return 1 / ratio if row.ours.unit in FASTER_IS_MORE else ratio


# Plots


def _meeting(results: Mapping[str, Section]) -> str:
    curves: dict[str, list[Point]] = {}
    for row in _section(results, MEETING).rows:
        what, _, size = row.what.partition(" of ")
        if row.where == TWO and row.theirs:
            for name, figure in (("rallypoint", row.ours), ("torch", row.theirs)):
                point = float(size.replace(",", "")), figure.seconds * 1e3
                curves.setdefault(f"{what}, {name}", []).append(point)
    return plot("Barriers and exchanges of N members, two cores", "N members", "ms, less is better", curves)


def _recovery(results: Mapping[str, Section]) -> str:
    things = []
    for row in _section(results, RECOVERY).rows:
        gave_up = "all agents gave up" if "gave up" in row.peer else ""
        theirs = Bar("c10d", row.theirs.seconds if row.theirs else None, gave_up or str(row.theirs))
        things.append((row.what, [Bar("rallypoint", row.ours.seconds, str(row.ours)), theirs]))
    for row in _section(results, FAILOVER).rows:
        things.append((f"etcd: {row.what}", [Bar("rallypoint", row.ours.seconds, str(row.ours))]))
    return bars("Until a job under torchrun trains again; until a store in etcd answers again", "seconds", things)


def _group_commit(results: Mapping[str, Section]) -> str:
    durable, etcd = _section(results, DURABILITY), _section(results, ETCD)
    curves: dict[str, list[Point]] = {}
    for peer, name in (("memory", "memory"), ("redis", "redis, fsync always")):
        rows = [row for row in durable.rows if row.where == TWO and row.peer == peer]
        curves[name] = sorted((_clients(row), _rate(row.theirs)) for row in rows if row.theirs)
        curves["data directory"] = sorted((_clients(row), _rate(row.ours)) for row in rows)
    rows = [row for row in etcd.rows if row.where == TWO and re.fullmatch(r"set|add, \d+ clients", row.what)]
    curves["etcd"] = sorted({_clients(row): _rate(row.ours) for row in rows}.items())
    return plot("Acknowledged writes, two cores: one commit for all that wait", "clients", "writes a second", curves)


def _clients(row: Row) -> float:
    found = re.search(r"(\d+) clients", row.what)
    return float(found[1]) if found else 1.0


def _rate(figure: Figure) -> float:
    return figure.value if figure.unit == "op/s" else 1 / figure.seconds
