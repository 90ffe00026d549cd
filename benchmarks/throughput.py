"""Throughput: four torch clients on our server, against the same clients on torch's own server."""

from __future__ import annotations

import os

from benchmarks.clients import SLICE_S, compare
from benchmarks.rig import need
from benchmarks.table import Line, Target

TITLE = "Throughput: four PyTorch clients, 32-byte values"
NOTES = (
    "Calls a second of all four clients together: more is better. A PyTorch `get` is two round trips. *Server's CPU* "
    "is the processor time that the server itself used for each call: less is better, and background load touches it "
    "far less. *before* is our own server as it was in the checkout that RALLYPOINT_BEFORE names, if it names one."
)


def run(quick: bool) -> list[Line]:
    """Measure get, add and check."""
    need("torch")
    rounds, slice_s = (2, 0.2) if quick else (10, SLICE_S)
    lines = compare(("torch",), Target(at_least=0.85), rounds, slice_s)
    if "RALLYPOINT_BEFORE" in os.environ:
        lines += compare(("before",), Target(at_least=0.95), rounds, slice_s)
    return lines
