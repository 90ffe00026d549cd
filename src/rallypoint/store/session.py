"""The backend of our own server: every operation as one request of our protocol on a `Wire`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rallypoint.core import native
from rallypoint.core.machine import Command, Done, Refused, Waiting
from rallypoint.core.native import Request
from rallypoint.core.records import Event, Swap, TimedOut
from rallypoint.deadline import Deadline
from rallypoint.store.base import Backend, Feed
from rallypoint.store.route import Route
from rallypoint.store.wire import Wire

__all__ = ["SessionBackend"]

LEAST_TTL_S = 1.0
"""The fastest heartbeat that can be kept."""

WINDOW = 512
"""How many requests of a pipeline are under way at once."""

_BULK: dict[str, type[Request]] = {
    "set": native.Set,
    "append": native.Append,
    "add": native.Add,
    "delete": native.Delete,
    "queue_push": native.Push,
}


_OUTCOMES: dict[int, type[Done] | type[Refused] | type[Waiting]] = {
    native.DONE: Done,
    native.REFUSED: Refused,
    native.WAITING: Waiting,
}


class SessionBackend(Backend):
    """A session with one of our servers; raises `NotOurs` where PyTorch's answers."""

    root = b"/"

    def __init__(self, route: Route, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._route = route
        self._wire = Wire(route, timeout_s)
        self.name = self._wire.label
        self.hosts_objects = self._wire.hosts_objects
        self.keeps_leases = not self.hosts_objects

    @property
    def host(self) -> str:
        """The host that the session is at now."""
        return self._route.at.host

    @property
    def port(self) -> int:
        """That server's port."""
        return self._route.at.port

    def be_patient(self, patience_s: float) -> None:
        """Give the server so long for every answer, whatever it took to connect."""
        self.timeout_s = patience_s
        self._wire.patience_s = patience_s

    @property
    def server_id(self) -> bytes:
        """The identity of the server: one that was restarted and has forgotten everything has another."""
        return self._wire.server

    # Calls that answer at once

    def set(self, key: bytes, value: bytes) -> None:
        self._wire.ask("set", native.Set, (key, value))

    def add(self, key: bytes, amount: int) -> int:
        return int(self._wire.ask("add", native.Add, (key, amount)))

    def append(self, key: bytes, value: bytes) -> None:
        self._wire.ask("append", native.Append, (key, value))

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._wire.ask("compare_set", native.CompareSet, (key, expected, desired)))

    def swap(self, key: bytes, expected: bytes | None, desired: bytes) -> Swap:
        return Swap(*self._wire.ask("swap", native.Swap, (key, expected, desired)))

    def multi_set(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self._wire.ask("multi_set", native.MultiSet, (pairs,))

    def check(self, keys: Sequence[bytes]) -> bool:
        return bool(self._wire.ask("check", native.Check, (keys,)))

    def delete(self, key: bytes) -> bool:
        return bool(self._wire.ask("delete_key", native.Delete, (key,)))

    def delete_prefix(self, prefix: bytes) -> int:
        return int(self._wire.ask("delete_prefix", native.DeletePrefix, (prefix,)))

    def num_keys(self, prefix: bytes) -> int:
        return int(self._wire.ask("num_keys", native.Count, (prefix,)))

    def list_keys(self, prefix: bytes) -> list[bytes]:
        return list(self._wire.ask("list_keys", native.List, (prefix,)))

    def queue_push(self, key: bytes, value: bytes) -> None:
        self._wire.ask("queue_push", native.Push, (key, value))

    def queue_pop(self, key: bytes) -> bytes | None:
        item: bytes | None = self._wire.ask("queue_pop", native.Pop, (key,))
        self._wire.confirm()
        return item

    def queue_len(self, key: bytes) -> int:
        return int(self._wire.ask("queue_len", native.QueueLen, (key,)))

    def lease(self, key: bytes, value: bytes, ttl_s: float) -> None:
        if 0 < ttl_s < LEAST_TTL_S:
            raise ValueError(f"a heartbeat of {ttl_s:g} s is too fast to be kept; {LEAST_TTL_S:g} s is the least")
        self._wire.ask("lease", native.Lease, (key, value, ttl_s))
        if ttl_s:
            self._wire.beat_s = min(self._wire.beat_s, ttl_s / 3)

    def unlease(self, key: bytes) -> bool:
        return bool(self._wire.ask("lease", native.Unlease, (key,)))

    # Calls that may wait

    def wait(self, keys: Sequence[bytes], deadline: Deadline) -> TimedOut | None:
        wait_s = _left(deadline)
        outcome: TimedOut | None = self._wire.ask("wait", native.Wait, (keys, wait_s), wait_s)
        return outcome

    def wait_values(self, keys: Sequence[bytes], deadline: Deadline) -> list[bytes] | TimedOut:
        wait_s = _left(deadline)
        values: list[bytes] | TimedOut
        if len(keys) == 1:
            values = self._wire.ask("get", native.Get, (keys[0], wait_s), wait_s)
        else:
            values = self._wire.ask("multi_get", native.MultiGet, (keys, wait_s), wait_s)
        return values

    def wait_item(self, key: bytes, deadline: Deadline) -> bytes | TimedOut:
        wait_s = _left(deadline)
        item: bytes | TimedOut = self._wire.ask("queue_pop", native.Take, (key, wait_s), wait_s)
        self._wire.confirm()
        return item

    def barrier(self, key: bytes, size: int, deadline: Deadline) -> TimedOut | None:
        wait_s = _left(deadline)
        outcome: TimedOut | None = self._wire.ask("barrier", native.Arrive, (key, size, wait_s), wait_s)
        return outcome

    def act(self, name: bytes, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        kind, *facts = self._wire.ask(command.machine.kind, native.Act, (name, member, call, command, wait_s), wait_s)
        self._wire.confirm()
        return _OUTCOMES[kind](*facts)

    def watch(self, prefix: bytes) -> Feed:
        return _SessionFeed(self._wire, prefix)

    def pipeline(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        results: list[Any] = []
        for start in range(0, len(calls), WINDOW):
            results += self._wire.ask_all(
                [(_BULK[name], arguments) for name, arguments in calls[start : start + WINDOW]]
            )
        return results

    def clone(self) -> SessionBackend:
        return SessionBackend(self._route.copy(), self.timeout_s)

    def close(self) -> None:
        self._wire.close()


def _left(deadline: Deadline) -> float:
    return min(deadline.remaining(), native.MAX_WAIT_S)


class _SessionFeed(Feed):
    def __init__(self, wire: Wire, prefix: bytes) -> None:
        self._wire = wire
        self._number, self._slot = wire.watch(prefix)

    def next(self, deadline: Deadline) -> Event | TimedOut:
        return self._wire.event(self._slot, deadline)

    def close(self) -> None:
        self._wire.unwatch(self._number, self._slot)
