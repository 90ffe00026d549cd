"""The arguments with which a node joins a rendezvous, validated before anything is sent; errors name the argument.

Also the names derived from them: the key prefix of a round, and the address at which other nodes reach this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from rallypoint.core.machines.machine import MAX_MEMBERS, MAX_NAME
from rallypoint.core.machines.rendezvous import MAX_SETTINGS, MAX_TEXT
from rallypoint.core.policy.round_policy import MAX_LAST_CALL_S, NodeLimits
from rallypoint.core.run_keys import quoted
from rallypoint.deadline import Timeout, seconds
from rallypoint.net import is_loopback
from rallypoint.store.base import Store
from rallypoint.store.internal import backend_of

__all__ = ["address_of", "other_is_dead", "host_of", "limits", "node_name", "quoted", "rank",
           "round_prefix", "settings", "shortened"]  # fmt: skip


def node_name(name: str, what: str = "node") -> str:
    """Return a node's name or address, if it is valid."""
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a string, not {name!r}")
    if not 1 <= len(name) <= MAX_NAME:
        raise ValueError(f"{what} must have 1 to {MAX_NAME} characters, not {len(name)}: {name[:40]!r}")
    return name


def limits(min_nodes: int, max_nodes: int | None, last_call: Timeout) -> NodeLimits:
    """Return the limits on the number of nodes and the last call, if they are valid."""
    least, most = min_nodes, min_nodes if max_nodes is None else max_nodes
    for what, count in (("min_nodes", least), ("max_nodes", most)):
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{what} must be a number of nodes, not {count!r}")
        if not 1 <= count <= MAX_MEMBERS:
            raise ValueError(f"{what} must be 1 to {MAX_MEMBERS}, not {count}")
    if least > most:
        raise ValueError(f"min_nodes must not exceed max_nodes, but {least} is more than {most}")
    last_call_s = seconds(last_call, "last_call")
    if last_call_s > MAX_LAST_CALL_S:
        raise ValueError(f"last_call must be at most {MAX_LAST_CALL_S:g} s, not {last_call_s:g}")
    return NodeLimits(least, most, last_call_s)


def rank(asked: int) -> int:
    """Return the requested rank, if it is valid."""
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise TypeError(f"rank must be a number, not {asked!r}")
    if not 0 <= asked < MAX_MEMBERS:
        raise ValueError(f"rank must be 0 to {MAX_MEMBERS - 1}, not {asked}")
    return asked


def settings(given: Mapping[str, object]) -> dict[str, str]:
    """Return the settings as strings; long values are replaced by their digest, which suffices to compare them."""
    if not isinstance(given, Mapping):
        raise TypeError(f"settings must be a mapping of names to values, not {given!r}")
    if len(given) > MAX_SETTINGS:
        raise ValueError(f"too many settings: {len(given)}, limit {MAX_SETTINGS}")
    for name, value in given.items():
        if not isinstance(name, str) or len(name) > MAX_NAME:
            raise ValueError(f"the name of a setting must be a string of at most {MAX_NAME} characters, not {name!r}")
        if isinstance(value, (set, frozenset)):
            raise ValueError(f"the setting {name!r} is a set, whose order differs between processes: use a sorted list")
    texts = {name: str(value) for name, value in given.items()}
    return {name: text if len(text) <= MAX_TEXT else _digest(text) for name, text in texts.items()}


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def shortened(text: str, what: str) -> str:
    """Return a text shortened to the limit: its beginning and its end."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a string, not {text!r}")
    half = MAX_TEXT // 2 - 4
    return text if len(text) <= MAX_TEXT else f"{text[:half]} ... {text[-half:]}"


def round_prefix(run_id: str, scope: int | str) -> str:
    """Return the key prefix of a round; no key of another run starts with it."""
    return f"round:{quoted(run_id)}:{scope}"


def other_is_dead(other: str) -> bool:
    """Return whether a node, by the host and pid in its description, is a dead process of this machine."""
    match = re.search(r"\((?P<host>[^()]*):(?P<pid>\d+)", other)
    if match is None or match["host"] != socket.gethostname():
        return False
    try:
        os.kill(int(match["pid"]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False


def host_of(store: Any) -> str:
    """Return the host of a store's server; empty if the store has none."""
    return str(getattr(backend_of(store) if isinstance(store, Store) else store, "host", ""))


def address_of(store: Any) -> str:
    """Return an address at which other nodes reach this machine: the local address of its route to the store.

    If the server runs on this machine and its name resolves to loopback here, return that name: other nodes use it.
    """
    host = host_of(store)
    if not host or is_loopback(host):
        return host or socket.gethostname()
    with contextlib.suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            own = str(probe.getsockname()[0])
            return host if is_loopback(own) else own
    return socket.gethostname()
