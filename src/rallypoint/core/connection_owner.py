"""An owner that is one connection: a PyTorch client, which has no session.

It has at most one wait and one turn, and ends with its connection. Like a `Session`, it knows no bytes, clocks or
sockets.
"""

from __future__ import annotations

from typing import Any

from rallypoint.core import ops
from rallypoint.core.engine import Engine
from rallypoint.core.records import LATER, Turn, Waiter, WatchHandle
from rallypoint.core.session import SHOWN
from rallypoint.errors import StoreError

__all__ = ["ConnectionOwner", "EndedOwner"]


class ConnectionOwner:
    """One PyTorch client: its wait and its turn."""

    __slots__ = ("_engine", "handler", "namespace", "serial", "turn", "waiter")

    def __init__(self, serial: int, namespace: int, engine: Engine) -> None:
        self.serial = serial
        """Unique among the owners of a state; negative, unlike a session's."""

        self.namespace = namespace
        self.waiter: Waiter | None = None
        self.turn: Turn | None = None
        self.handler: Any = None
        self._engine = engine

    @property
    def holds(self) -> bool:
        """Whether the state contains something of it."""
        return self.turn is not None or (self.waiter is not None and not self.waiter.reads)

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The first keys that this client waits for."""
        return tuple(self.waiter.keys[:SHOWN]) if self.waiter is not None else ()

    def changes(self, op: ops.Op) -> bool:
        """Return whether an operation changes the state, so that it must be logged."""
        kind = op.__class__
        if self.holds:
            return kind.changes or self.turn is not None or kind in _REPLACES
        if isinstance(op, ops.WaitOrTurn):
            return not self._engine.holds(op.key)
        return kind.changes and kind is not ops.Drop

    def execute(self, op: ops.Op) -> Any:
        """Run a request; return its answer, `LATER`, or the error that ends the connection. Never raises."""
        kind = op.__class__
        if self.turn is not None and kind is not ops.TurnPop:
            self._end_turn()  # it ends with the next request; after it, if that pops
        if self.waiter is not None and kind in _REPLACES:
            self._engine.drop(self.waiter)
            self.waiter = None
        if kind is ops.Drop:
            return None
        try:
            answer = self._engine.execute(op, self)
        except StoreError as error:
            return error.with_traceback(None)
        except MemoryError:
            raise
        except Exception as error:
            return self._engine.note_bug(error, kind.__name__)
        if answer.__class__ is Waiter:
            self.waiter = answer
            return LATER
        if answer.__class__ is Turn:
            self.turn = answer
        elif self.turn is not None:
            self._end_turn()
        return answer

    def answer(self, handle: Waiter | WatchHandle, answer: Any) -> Any:
        """Return what to send when the engine answers the wait."""
        if handle is not self.waiter:
            return LATER
        self.waiter = None
        if isinstance(answer, Turn):
            self.turn = answer
        return answer

    def take_back(self, number: int) -> None:
        """Take back an unused turn."""
        if self.turn is not None and self.turn.number == number:
            self._end_turn()

    def end(self) -> None:
        """Drop its wait and its turn."""
        self.waiter = self.turn = None
        self._engine.end(self)

    def _end_turn(self) -> None:
        turn, self.turn = self.turn, None
        if turn is not None:
            self._engine.drop(turn)


_REPLACES = frozenset((ops.WaitOrTurn, ops.Wait, ops.Arrive, ops.Drop))
"""Requests that replace the current wait: a client has at most one."""


class EndedOwner:
    """A session that has ended, some of whose leases are still to be deleted."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
