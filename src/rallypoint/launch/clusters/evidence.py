"""What one scheduler says in the environment of an agent, before options are considered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

__all__ = ["Evidence", "Facts", "Unusable", "number"]

MAX_NUMBER_DIGITS = 18


class Facts(msgspec.Struct, frozen=True):
    """What a decision may depend on, besides options."""

    environ: Mapping[str, str]
    hostname: str = ""
    fqdn: str = ""
    """The first name of this host in /etc/hosts, where Kubernetes writes its full name; may be empty."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The job as a scheduler describes it; each value with the variable that it comes from, for messages."""

    what: str
    """The scheduler and its job, as in `Slurm step 7.0`."""

    nodes: int
    nodes_from: str
    rank: int | None
    """The rank that this node requests; None for a node that may be one too many."""

    rank_from: str
    head: str = ""
    """The host for the server; empty if the scheduler does not say."""

    head_is_first: bool = True
    """Whether the head is known to be the node of rank 0; otherwise the node with that address is the host."""

    run_id: str
    """A name that no other job has; empty if the scheduler does not say."""


class Unusable(NamedTuple):
    """Signs of a scheduler from which no job can be derived: what is wrong, and what to do.

    If they are no more than a hint, `fatal` is false: the node then runs as without them, and says so.
    """

    reason: str
    fatal: bool = True


def number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is set to a number, or None."""
    for name in names:
        text = environ.get(name, "").strip()
        if text.isascii() and text.isdigit() and len(text) <= MAX_NUMBER_DIGITS:
            return int(text)
    return None
