"""The `--rdzv-conf` options of the torchrun plug-in, and torch's own options, which it accepts and ignores.

Unknown options and invalid values are refused by name. Rejected: ignore unknown options, as torch does; a misspelled
timeout would be noticed only when it is needed.
"""

from __future__ import annotations

import logging
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters

from rallypoint.launch.job import RANK0, RELAYS
from rallypoint.security.credentials import Credentials, resolve

__all__ = ["ACCEPTED", "OPTIONS", "read_credentials", "read_flag", "read_options"]

log = logging.getLogger("rallypoint.torchrun")

OPTIONS = {
    "join_timeout": "seconds that a node waits for a round (600)",
    "last_call_timeout": "seconds that a round with enough nodes waits for more (30)",
    "read_timeout": "timeout in seconds to reach the server, and of each store operation (60)",
    "is_host": "whether this node starts the server if none runs (default: derived from the endpoint)",
    "rank": "the rank that this node requests",
    "relay": "the relay that workers use: rank0 (that of rank 0's node) or local (their own node's) (rank0)",
    "node": "the name of this node, under which it gets its rank back (its host name)",
    "token_file": "a file with the token of the store (RALLYPOINT_TOKEN or RALLYPOINT_TOKEN_FILE)",
    "tls_ca": "the CA by which servers are verified (RALLYPOINT_TLS_CA)",
    "tls_cert": "the certificate of this node (RALLYPOINT_TLS_CERT)",
    "tls_key": "the key of tls_cert (RALLYPOINT_TLS_KEY)",
    "tls_client_ca": "the CA whose certificates clients must have (RALLYPOINT_TLS_CLIENT_CA)",
}
"""The options of this backend, with their meaning and default."""

ACCEPTED = {
    "timeout": "torchrun always sets it, for old backends",
    "store_type": "there is only one type of store",
    "close_timeout": "closing is one request",
    "keep_alive_interval": "a node's session tells whether it is alive",
    "keep_alive_max_attempt": "a node's session tells whether it is alive",
    "heartbeat_timeout": "a node's session tells whether it is alive",
}
"""Options of torch's own backends that have no meaning here, and the reason."""


def read_options(params: RendezvousParameters) -> dict[str, Any]:
    """Return the options of --rdzv-conf. Raises ValueError for an unknown option or an invalid value."""
    options = {name: value for name, value in params.config.items() if value is not None}
    for name in options:
        if name not in OPTIONS and name not in ACCEPTED:
            known = ", ".join([*OPTIONS, *ACCEPTED])
            raise ValueError(f"unknown --rdzv-conf option {name!r}; the rallypoint backend accepts {known}")
        if name in ACCEPTED:
            log.info("--rdzv-conf %s is ignored: %s", name, ACCEPTED[name])
    for name in ("join_timeout", "last_call_timeout", "read_timeout", "rank"):
        try:
            number = int if name == "rank" else float
            if name in options and not 0 <= number(options[name]) < float("inf"):
                raise ValueError
        except ValueError:
            raise ValueError(f"--rdzv-conf {name} must be a non-negative number, got {options[name]!r}") from None
    if options.get("relay", RANK0) not in RELAYS:
        raise ValueError(f"--rdzv-conf relay must be {' or '.join(RELAYS)}, got {options['relay']!r}")
    return options


def read_credentials(options: dict[str, Any]) -> Credentials:
    """Return the credentials of the options and the environment. Raises ValueError for unusable ones."""
    files = ("token_file", "tls_ca", "tls_cert", "tls_key", "tls_client_ca")
    try:
        return resolve(None, **{name: options.get(name) for name in files})
    except ValueError as error:
        raise ValueError(f"--rdzv-conf or environment: {error}") from None


def read_flag(params: RendezvousParameters, name: str) -> bool | None:
    """Return a boolean option; None if it is not given. Raises ValueError for an invalid value."""
    try:
        flag: bool | None = params.get_as_bool(name)
    except ValueError:
        raise ValueError(f"--rdzv-conf {name} must be true or false, got {params.get(name)!r}") from None
    return flag
