"""The time-outs and the settings of a dynamic rendezvous, as in `…elastic.rendezvous.dynamic_rendezvous` of PyTorch.

They are apart from the handler so that whoever only makes settings does not load it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from rallypoint.core.machine import MAX_MEMBERS

__all__ = ["RendezvousSettings", "RendezvousTimeout", "check"]

_DEFAULTS_S = {"join": 600, "last_call": 30, "close": 30, "heartbeat": 5}


class RendezvousTimeout:
    """How long each part of a rendezvous may take; a part that is not given has its default."""

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        given = {"join": join, "last_call": last_call, "close": close, "heartbeat": heartbeat}
        self._timeouts: dict[str, timedelta] = {}
        for name, value in given.items():
            timeout = timedelta(seconds=_DEFAULTS_S[name]) if value is None else value
            if timeout <= timedelta(0):
                raise ValueError(f"the {name} timeout must be positive, not {timeout}")
            self._timeouts[name] = timeout

    @property
    def join(self) -> timedelta:
        """How long a round may take to form (600 s)."""
        return self._timeouts["join"]

    @property
    def last_call(self) -> timedelta:
        """How much longer a round of enough nodes waits for more (30 s)."""
        return self._timeouts["last_call"]

    @property
    def close(self) -> timedelta:
        """How long closing may take (30 s)."""
        return self._timeouts["close"]

    @property
    def heartbeat(self) -> timedelta:
        """How long a keep-alive may take (5 s)."""
        return self._timeouts["heartbeat"]

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={timeout!r}" for name, timeout in self._timeouts.items())
        return f"RendezvousTimeout({facts})"


@dataclass(eq=False, frozen=True)
class RendezvousSettings:
    """What all nodes of a run agree on."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int


def check(settings: RendezvousSettings) -> None:
    """Refuse what cannot be."""
    if not settings.run_id:
        raise ValueError("the run id must not be empty")
    if settings.min_nodes < 1:
        raise ValueError(f"the minimum number of nodes must be greater than zero: min_nodes is {settings.min_nodes}")
    if settings.max_nodes < settings.min_nodes:
        most, least = settings.max_nodes, settings.min_nodes
        raise ValueError(f"the maximum, max_nodes ({most}), must not be less than the minimum, min_nodes ({least})")
    if settings.max_nodes > MAX_MEMBERS:
        raise ValueError(f"max_nodes must be at most {MAX_MEMBERS}, not {settings.max_nodes}")
