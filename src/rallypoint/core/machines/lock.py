"""The lock machine: one holder at a time, in request order, each with a fence larger than any before.

The fence makes the lock safe: a holder that slept through the end of its session still believes that it holds the lock,
and the protected resource refuses the old fence. When the session of a waiter or holder ends, it leaves the line, and
the next waiter becomes the holder.
"""

from __future__ import annotations

from msgspec import field

from rallypoint.core.machines.machine import WAIT, Call, Command, Done, Machine, Step, Undo, Waiting

__all__ = ["LockAcquire", "LockMachine", "LockQuery", "LockRelease"]


class LockAcquire(Command, tag="lock.acquire"):
    """Wait for the lock; answered by the fence."""


class LockQuery(Command, tag="lock.look"):
    """Sent with the call that acquired: answered by its fence while it holds the lock, else by 0."""


class LockRelease(Undo, tag="lock.release"):
    """Release the lock, or withdraw from the line; answered by whether that call held the lock."""


class LockMachine(Machine, kw_only=True):
    """The holder and the waiters, in order."""

    kind = "lock"

    line: dict[str, Call] = field(default_factory=dict)
    """The holder, then the waiters."""

    fence: int = 0

    def apply(self, call: Call, command: LockAcquire | LockQuery | LockRelease, stamp: int) -> Step:
        """Get in line, query, or release."""
        if isinstance(command, LockRelease):
            return self._leave([f"{call.session}/{command.call}"], stamp)
        if isinstance(command, LockQuery):
            holder = self._holder()
            return Step(Done(self.fence if holder is not None and holder.id == call.id else 0))
        changed = call.id not in self.line
        if changed:
            self.line[call.id] = call
            if len(self.line) == 1:
                self.fence = stamp
        return Step(Done(self.fence) if self._holder() == call else WAIT, changed)

    def session_ended(self, session: str, stamp: int) -> Step:
        """Remove a session's calls from the line; the next waiter becomes the holder."""
        return self._leave([name for name, call in self.line.items() if call.session == session], stamp)

    def holds(self, call_id: str) -> bool:
        """Return whether a call waits or holds."""
        return call_id in self.line

    def sessions(self) -> set[str]:
        """Return the sessions of all calls in line."""
        return {call.session for call in self.line.values()}

    def explain(self, call: Call) -> Waiting:
        """Name the holder."""
        holder = self._holder()
        place = list(self.line).index(call.id) if call.id in self.line else len(self.line)
        name = str(holder) if holder is not None else "nobody"
        return Waiting(f"held by {name}; waiters ahead: {place - 1}", [name])

    @property
    def idle(self) -> bool:
        """Whether nobody holds or waits."""
        return not self.line

    def _holder(self) -> Call | None:
        return next(iter(self.line.values()), None)

    def _leave(self, ids: list[str], stamp: int) -> Step:
        before = self._holder()
        gone = [self.line.pop(name) for name in ids if name in self.line]
        after = self._holder()
        held = before in gone
        if held and after is not None:
            self.fence = stamp
        return Step(Done(held), bool(gone), (after,) if held and after is not None else ())


LockAcquire.machine = LockQuery.machine = LockRelease.machine = LockMachine
