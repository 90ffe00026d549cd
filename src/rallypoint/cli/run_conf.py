"""`--rdzv-conf` of `rallypoint run`, as torchrun has it, and the notes on what does nothing here."""

from __future__ import annotations

from typing import Any

import click

from rallypoint.core.gathering import MAX_LAST_CALL_S

__all__ = ["CONF", "HOST", "NOTES", "note", "read_conf", "read_seconds"]

CONF = {"join_timeout": 600.0, "last_call_timeout": 5.0}
"""The options of --rdzv-conf that are times, and what they are by default."""

HOST = "is_host"
"""The one that says whether this node starts the server, whatever the endpoint's address is."""

NO_MATTER = {
    "store_type": "there is one kind of server",
    "read_timeout": "the server answers or is known to be gone",
    "timeout": "the server answers or is known to be gone",
    "close_timeout": "closing is one request",
    "keep_alive_interval": "liveness is the connection",
    "keep_alive_max_attempt": "liveness is the connection",
    "heartbeat_timeout": "liveness is the connection",
}
"""Options of torch's own back ends that mean nothing here, and why."""

NOTES = f"{__name__}.notes"
"""Where the context of the command line keeps notes for the agent to say."""


def read_conf(text: str) -> dict[str, Any]:
    """Read --rdzv-conf; quotes are part of a value, as for torchrun."""
    if not text.strip():
        return dict(CONF)
    from rallypoint.compat.rendezvous.api import RendezvousParameters
    from rallypoint.compat.rendezvous.endpoint import _parse_rendezvous_config

    told: dict[str, Any] = dict(CONF)
    for name, value in _parse_rendezvous_config(text).items():
        if name in NO_MATTER:
            note(f"--rdzv-conf {name}", NO_MATTER[name])
        elif name == HOST:
            told[name] = RendezvousParameters("rallypoint", "", "none", 1, 1, is_host=value).get_as_bool(name)
        elif name not in CONF:
            raise ValueError(f"there is no {name!r}; there are {', '.join([*CONF, HOST, *NO_MATTER])}")
        else:
            told[name] = read_seconds(name, value)
    return told


def read_seconds(name: str, value: str) -> float:
    """Read a number of seconds; raise ValueError that names the option."""
    try:
        given = float(value)
    except ValueError:
        given = -1.0
    if not 0 <= given <= MAX_LAST_CALL_S:
        raise ValueError(f"{name}={value} is no time: write a number of seconds, up to {MAX_LAST_CALL_S:.0f}")
    return given


def note(what: str, why: str) -> None:
    """Keep a note for the agent to say."""
    click.get_current_context().meta.setdefault(NOTES, []).append(f"{what} does nothing here: {why}")
