"""An owner that is one connection: a PyTorch client, which has no session. It waits for one thing at most, holds one
turn at most, and ends with its connection. As a `Session` does, it knows no bytes, clocks or connections.
"""

from __future__ import annotations

from typing import Any

from rallypoint.core import ops
from rallypoint.core.engine import Engine
from rallypoint.core.records import LATER, Turn, Waiter, Watch
from rallypoint.core.session import SHOWN
from rallypoint.errors import StoreError

__all__ = ["Visitor"]


class Visitor:
    """One PyTorch client: what it waits for, and the turn that it has."""

    __slots__ = ("_engine", "link", "namespace", "serial", "turn", "waiter")

    def __init__(self, serial: int, namespace: int, engine: Engine) -> None:
        self.serial = serial
        """Unique among the owners of a state, and negative, as no session's is."""

        self.namespace = namespace
        self.waiter: Waiter | None = None
        self.turn: Turn | None = None
        self.link: Any = None
        self._engine = engine

    @property
    def holds(self) -> bool:
        """Whether the state has something of it."""
        return self.turn is not None or (self.waiter is not None and not self.waiter.reads)

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The first of the keys that this client waits for."""
        return tuple(self.waiter.keys[:SHOWN]) if self.waiter is not None else ()

    def changes(self, op: ops.Op) -> bool:
        """Return whether an operation changes the state, so that a log must have it."""
        kind = op.__class__
        if self.holds:
            return kind.changes or self.turn is not None or kind in _REPLACES
        if isinstance(op, ops.Await):
            return not self._engine.holds(op.key)
        return kind.changes and kind is not ops.Drop

    def execute(self, op: ops.Op) -> Any:
        """Carry out a request; return its answer, `LATER`, or the error that ends the connection. Never raises."""
        kind = op.__class__
        if self.turn is not None and kind is not ops.Draw:
            self._end_turn()  # with the next request; when that draws, after it
        if self.waiter is not None and kind in _REPLACES:
            self._engine.drop(self.waiter)
            self.waiter = None
        if kind is ops.Drop:
            return None
        try:
            answer = self._engine.execute(op, self)
        except StoreError as error:
            return error
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

    def answer(self, handle: Waiter | Watch, answer: Any) -> Any:
        """Return what to send when the engine answered the wait."""
        if handle is not self.waiter:
            return LATER
        self.waiter = None
        if isinstance(answer, Turn):
            self.turn = answer
        return answer

    def take_back(self, number: int) -> None:
        """Take back a turn that was not used."""
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


_REPLACES = frozenset((ops.Await, ops.Wait, ops.Arrive, ops.Drop))
"""A client has one wait at most, so a new one takes the place of the old."""
