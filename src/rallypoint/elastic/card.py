"""What a node says of itself when it joins, checked before anything is sent: a wrong thing is refused by name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from rallypoint.core.gathering import MAX_LAST_CALL_S, Limits
from rallypoint.core.machine import MAX_MEMBERS, MAX_NAME
from rallypoint.core.rendezvous import MAX_SETTINGS, MAX_TEXT
from rallypoint.deadline import Timeout, seconds
from rallypoint.elastic.home import is_loopback

__all__ = ["address_of", "cut", "has_died", "host_of", "limits", "node_name", "quoted", "rank",
           "round_prefix", "settings"]  # fmt: skip


def node_name(name: str, what: str = "node") -> str:
    """Check the name of a node, or its address."""
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a text, not {name!r}")
    if not 1 <= len(name) <= MAX_NAME:
        raise ValueError(f"{what} must have 1 to {MAX_NAME} characters, not {len(name)}: {name[:40]!r}")
    return name


def limits(min_nodes: int, max_nodes: int | None, last_call: Timeout) -> Limits:
    """Check how many nodes there may be, and how long last call is."""
    least, most = min_nodes, min_nodes if max_nodes is None else max_nodes
    for what, count in (("min_nodes", least), ("max_nodes", most)):
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{what} must be a number of nodes, not {count!r}")
        if not 1 <= count <= MAX_MEMBERS:
            raise ValueError(f"{what} must be 1 to {MAX_MEMBERS}, not {count}")
    if least > most:
        raise ValueError(f"min_nodes must not be more than max_nodes, but {least} is more than {most}")
    last_call_s = seconds(last_call, "last_call")
    if last_call_s > MAX_LAST_CALL_S:
        raise ValueError(f"last_call must be at most {MAX_LAST_CALL_S:g} s, not {last_call_s:g}")
    return Limits(least, most, last_call_s)


def rank(asked: int) -> int:
    """Check a rank that is asked for."""
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise TypeError(f"rank must be a number, not {asked!r}")
    if not 0 <= asked < MAX_MEMBERS:
        raise ValueError(f"rank must be 0 to {MAX_MEMBERS - 1}, not {asked}")
    return asked


def settings(told: Mapping[str, object]) -> dict[str, str]:
    """Return settings as texts, of which only the digest is compared where they are long."""
    if not isinstance(told, Mapping):
        raise TypeError(f"settings must be a mapping of names to values, not {told!r}")
    if len(told) > MAX_SETTINGS:
        raise ValueError(f"there may be {MAX_SETTINGS} settings, and these are {len(told)}")
    for name, value in told.items():
        if not isinstance(name, str) or len(name) > MAX_NAME:
            raise ValueError(f"the name of a setting must be a text of at most {MAX_NAME} characters, not {name!r}")
        if isinstance(value, (set, frozenset)):
            raise ValueError(f"the setting {name!r} is a set, which looks different in every process: sort it")
    texts = {name: str(value) for name, value in told.items()}
    return {name: text if len(text) <= MAX_TEXT else _digest(text) for name, text in texts.items()}


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def cut(text: str, what: str) -> str:
    """Return the beginning and the end of a text that people read."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a text, not {text!r}")
    half = MAX_TEXT // 2 - 4
    return text if len(text) <= MAX_TEXT else f"{text[:half]} ... {text[-half:]}"


def round_prefix(run_id: str, scope: int | str) -> str:
    """Return what the keys of a round begin with; no other run's can."""
    return f"round:{quoted(run_id)}:{scope}"


def quoted(run_id: str) -> str:
    """Return the name of a run as a part of a key, so that no key of one run begins like those of another."""
    return run_id.replace("%", "%25").replace("/", "%2F").replace(":", "%3A")


def has_died(other: str) -> bool:
    """Say whether a node is a process of this machine that is not there any more, as far as its name tells."""
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
    """Return by which host a store is reached; empty where that means nothing."""
    return str(getattr(getattr(store, "_backend", store), "host", ""))


def address_of(store: Any) -> str:
    """Return an address of this machine that others can use: the one from which it reaches the store.

    Where the server is on this machine, and its name a loopback address here, others use that very name.
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
