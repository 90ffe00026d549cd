"""The report of a failed run, for people: the first failure in full, and later ones in a line each.

Ranks that hang are failures of the same moment, so the stacks of all of them are shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rallypoint.launch.failures import Failure
from rallypoint.text import printable

__all__ = ["RULE", "report"]

OTHERS_SHOWN = PLACES_SHOWN = 20
RULE = "=" * 80
"""The first and the last line of a report."""


def report(first: Failure, others: Sequence[Failure] = ()) -> str:
    """Return the report of a failed run: the first failure in full, the others in a line each."""
    facts = {
        "how": first.how,
        "rank": f"{first.rank} (local rank {first.local_rank})",
        "node": f"{first.node} (host {first.host}, pid {first.pid})",
        "time": first.at,
    }
    lines = [RULE, f"FAILED FIRST: {first.message.rstrip()}"]
    lines += [f"  {name:<5} {printable(value)}" for name, value in facts.items()]
    if first.traceback:
        lines += ["", *first.traceback.rstrip().splitlines()]
    shown = {line.strip() for line in first.traceback.splitlines()}
    rest = [line for line in first.stderr if shown.isdisjoint((line.strip(), _bare(line)))]
    if any(line.strip() for line in rest):
        lines += ["", "  end of its stderr:", *(f"  | {line}" for line in rest)]
    if first.stacks:
        lines += ["", "  where the ranks were:", *(f"  - {printable(line)}" for line in first.stacks[:PLACES_SHOWN])]
    if others:
        lines += ["", f"  {len(others)} more failed {'with' if first.hung else 'after'} it:"]
        for other in others[:OTHERS_SHOWN]:
            lines.append(f"  - {other.summary()}")
            lines += [f"    {line}" for line in other.traceback.splitlines() if other.hung]
        if len(others) > OTHERS_SHOWN:
            lines.append(f"  - and {len(others) - OTHERS_SHOWN} more")
    return "\n".join([*lines, RULE])


def _bare(line: str) -> str:
    """Return a line without PyTorch's prefix in brackets."""
    return re.sub(r"^\[\w+\]:", "", line).strip()
