"""`--rdzv-conf` of `rallypoint run`, compatible with torchrun, and the notes on ignored options."""

from __future__ import annotations

from typing import Any

import click

from rallypoint.core.policy.round_policy import MAX_LAST_CALL_S

__all__ = ["CONF", "HOST", "NOTES", "note", "read_conf", "read_seconds"]

CONF = {"join_timeout": 600.0, "last_call_timeout": 5.0}
"""The keys of --rdzv-conf whose values are seconds, with their defaults."""

HOST = "is_host"
"""The key that says whether this node starts the server, whatever the endpoint's address is."""

IGNORED_KEYS = {
    "store_type": "there is only one type of server",
    "read_timeout": "a lost server is detected without a timeout",
    "timeout": "a lost server is detected without a timeout",
    "close_timeout": "closing takes one request",
    "keep_alive_interval": "liveness is the connection",
    "keep_alive_max_attempt": "liveness is the connection",
    "heartbeat_timeout": "liveness is the connection",
}
"""Keys of torch's own backends that are accepted and ignored, with the reason."""

NOTES = f"{__name__}.notes"
"""The key in click's context for notes that the agent prints."""


def read_conf(text: str) -> dict[str, Any]:
    """Parse --rdzv-conf; quotes are part of a value, as for torchrun."""
    if not text.strip():
        return dict(CONF)
    from rallypoint.compat.rendezvous.api import RendezvousParameters
    from rallypoint.compat.rendezvous.endpoint import _parse_rendezvous_config

    conf: dict[str, Any] = dict(CONF)
    for name, value in _parse_rendezvous_config(text).items():
        if name in IGNORED_KEYS:
            note(f"--rdzv-conf {name}", IGNORED_KEYS[name])
        elif name == HOST:
            conf[name] = RendezvousParameters("rallypoint", "", "none", 1, 1, is_host=value).get_as_bool(name)
        elif name not in CONF:
            raise ValueError(f"unknown key {name!r}; valid keys: {', '.join([*CONF, HOST, *IGNORED_KEYS])}")
        else:
            conf[name] = read_seconds(name, value)
    return conf


def read_seconds(name: str, value: str) -> float:
    """Parse a number of seconds; raise ValueError that names the option."""
    try:
        given = float(value)
    except ValueError:
        given = -1.0
    if not 0 <= given <= MAX_LAST_CALL_S:
        raise ValueError(f"{name}={value}: not a number of seconds from 0 to {MAX_LAST_CALL_S:.0f}")
    return given


def note(what: str, why: str) -> None:
    """Record a note for the agent to print."""
    click.get_current_context().meta.setdefault(NOTES, []).append(f"{what} is ignored: {why}")
