"""The timeouts and settings of a dynamic rendezvous, as in PyTorch's `…elastic.rendezvous.dynamic_rendezvous`.

They have their own module, so that creating settings does not load the handler.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from rallypoint.core.machines.machine import MAX_MEMBERS

__all__ = ["DEFAULTS_S", "RendezvousSettings", "RendezvousTimeout", "check", "check_nodes"]

DEFAULTS_S = {"join": 600, "last_call": 30, "close": 30, "heartbeat": 5}
"""The default timeouts of a rendezvous, as in PyTorch."""


class RendezvousTimeout:
    """The timeouts of a rendezvous; None means the default."""

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
            timeout = timedelta(seconds=DEFAULTS_S[name]) if value is None else value
            if timeout <= timedelta(0):
                raise ValueError(f"the {name} timeout must be positive, not {timeout}")
            self._timeouts[name] = timeout

    @property
    def join(self) -> timedelta:
        """How long a round may take to form (600 s)."""
        return self._timeouts["join"]

    @property
    def last_call(self) -> timedelta:
        """How much longer a round with enough nodes waits for more (30 s)."""
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
    """The settings of a run, which must be the same on all its nodes."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int


def check(settings: RendezvousSettings) -> None:
    """Raise ValueError if the settings are invalid."""
    if not settings.run_id:
        raise ValueError("the run id must not be empty")
    check_nodes(settings.min_nodes, settings.max_nodes)
    if settings.max_nodes > MAX_MEMBERS:
        raise ValueError(f"max_nodes must be at most {MAX_MEMBERS}, not {settings.max_nodes}")
    interval_s, attempts = settings.keep_alive_interval.total_seconds(), settings.keep_alive_max_attempt
    if interval_s <= 0 or attempts < 1:
        raise ValueError(
            f"keep_alive_interval and keep_alive_max_attempt must be positive, not {interval_s:g} and {attempts}"
        )


def check_nodes(min_nodes: int, max_nodes: int) -> None:
    """Raise ValueError unless there is a number of nodes within the limits."""
    if min_nodes < 1:
        raise ValueError(f"the minimum number of nodes must be greater than zero: min_nodes is {min_nodes}")
    if max_nodes < min_nodes:
        raise ValueError(
            f"the maximum, max_nodes ({max_nodes}), must not be less than the minimum, min_nodes ({min_nodes})"
        )
