"""The table of results in docs/frameworks.md, generated from frameworks/results.json.

Each test that passes records its outcome at once. A test that fails leaves the earlier one.
"""

from __future__ import annotations

import json
import re

from frameworks.cases import WAYS, pins
from frameworks.jobs import ROOT

__all__ = ["Results", "page", "read", "record", "render", "shown"]

Results = dict[str, dict[str, str]]
"""By framework: its version, and its outcome for each way."""

FILE = ROOT / "frameworks" / "results.json"
PAGE = ROOT / "docs" / "frameworks.md"
TABLE = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- end -->)", re.S)


def read() -> Results:
    """Return the results of earlier runs."""
    found: Results = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return found


def record(framework: str, way: str, outcome: str) -> None:
    """Keep one outcome, and write the table; outcomes of another version of the framework go."""
    results, version = read(), pins()[framework]
    row = results.get(framework, {})
    kept = row if row.get("version") == version else {}
    results[framework] = {**kept, "version": version, way: outcome}
    FILE.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: render(results), page()), encoding="utf-8")


def render(results: Results) -> str:
    """Return the table."""
    ways = [way.name for way in WAYS]
    lines = ["| framework | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for name, row in sorted(results.items()):
        cells = [row.get(way, "not run") for way in ways]
        lines.append(f"| {name} {row['version']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page as it is."""
    return PAGE.read_text(encoding="utf-8")


def shown() -> str:
    """Return the table in the page."""
    found = TABLE.search(page())
    return found[0] if found else ""
