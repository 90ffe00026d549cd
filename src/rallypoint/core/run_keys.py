"""The names of the keys of a run that both sides need: agents, which write them, and servers, which show them."""

from __future__ import annotations

__all__ = ["quoted", "report_key", "report_prefix"]


def quoted(name: str) -> str:
    """Return the name of a run or a node escaped for use in a key, so that no run's prefix is that of another."""
    return name.replace("%", "%25").replace("/", "%2F").replace(":", "%3A")


def report_prefix(run_id: str) -> str:
    """Return the prefix of the reports of a run's nodes (`run_report.py`)."""
    return f"run:{quoted(run_id)}/node:"


def report_key(run_id: str, node: str) -> str:
    """Return the key of a node's report."""
    return f"{report_prefix(run_id)}{quoted(node)}"
