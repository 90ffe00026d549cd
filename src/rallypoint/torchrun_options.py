"""What `--rdzv-conf` says to the torchrun plug-in: the options that there are, and torch's own that mean nothing here.

A name that is neither, and a value that makes no sense, are refused with the name. Rejected: to ignore what is not
known, as torch does; a misspelled timeout would be found when it is needed.
"""

from __future__ import annotations

import logging
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters

from rallypoint.elastic.job import RANK0, RELAYS

__all__ = ["ACCEPTED", "OPTIONS", "read_flag", "read_options"]

log = logging.getLogger("rallypoint.torchrun")

OPTIONS = {
    "join_timeout": "seconds that a node waits for a round (600)",
    "last_call_timeout": "seconds that a round of enough nodes waits for more (30)",
    "read_timeout": "seconds to reach the server, and that an operation of the store may take (60)",
    "is_host": "whether this node starts the server, if none runs (else found out from the endpoint)",
    "rank": "the rank that this node asks for",
    "relay": "whose relay workers use: rank0, that of rank 0's node, or local, their own (rank0)",
    "node": "the name of this node, by which it gets its rank back (its host name)",
}
"""The options of this back end, and what each says."""

ACCEPTED = {
    "timeout": "torchrun gives it always, for back ends of old",
    "store_type": "there is one kind of store",
    "close_timeout": "closing is one request",
    "keep_alive_interval": "liveness is the connection",
    "keep_alive_max_attempt": "liveness is the connection",
    "heartbeat_timeout": "liveness is the connection",
}
"""Options of torch's own back ends that mean nothing here."""


def read_options(params: RendezvousParameters) -> dict[str, Any]:
    """Return the options of --rdzv-conf; refuse by name what is none."""
    options = {name: value for name, value in params.config.items() if value is not None}
    for name in options:
        if name not in OPTIONS and name not in ACCEPTED:
            known = ", ".join([*OPTIONS, *ACCEPTED])
            raise ValueError(f"--rdzv-conf has no option {name!r} for the rallypoint back end; there are {known}")
        if name in ACCEPTED:
            log.info("--rdzv-conf %s is not needed: %s", name, ACCEPTED[name])
    for name in ("join_timeout", "last_call_timeout", "read_timeout", "rank"):
        try:
            number = int if name == "rank" else float
            if name in options and not 0 <= number(options[name]) < float("inf"):
                raise ValueError
        except ValueError:
            raise ValueError(f"--rdzv-conf {name} must be a number, and not negative: {options[name]!r}") from None
    if options.get("relay", RANK0) not in RELAYS:
        raise ValueError(f"--rdzv-conf relay must be {' or '.join(RELAYS)}, not {options['relay']!r}")
    return options


def read_flag(value: Any) -> bool | None:
    """Return whether an option says yes; None where it is not given."""
    if value is None or isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "t": True, "yes": True, "0": False, "false": False, "f": False, "no": False}
    if str(value).lower() not in words:
        raise ValueError(f"--rdzv-conf is_host must be true or false, not {value!r}")
    return words[str(value).lower()]
