"""The lock machine: one holder at a time, in the order of asking, each with a fence that is larger than any before.

The fence is what makes a lock safe: a holder that slept through the end of its session still believes that it holds.
Whatever the lock protects refuses an old fence. A waiter or holder whose session ends is out, and the next one holds.
"""

from __future__ import annotations

from msgspec import field

from rallypoint.core.machine import WAIT, Call, Command, Done, Machine, Step, Undo, Waiting

__all__ = ["Acquire", "Lock", "Look", "Release"]


class Acquire(Command, tag="lock.acquire"):
    """Wait for the lock; answered by the fence."""


class Look(Command, tag="lock.look"):
    """Made with the call that acquired: answered by its fence while it holds the lock, else by 0."""


class Release(Undo, tag="lock.release"):
    """Give up the lock, or the wait for it; answered by whether that call held it."""


class Lock(Machine, kw_only=True):
    """Who holds, and who waits, in order."""

    kind = "lock"

    line: dict[str, Call] = field(default_factory=dict)
    """The holder, then those who wait."""

    fence: int = 0

    def apply(self, call: Call, command: Acquire | Look | Release, stamp: int) -> Step:
        """Get in line, look, or release."""
        if isinstance(command, Release):
            return self._leave([f"{call.session}/{command.call}"], stamp)
        if isinstance(command, Look):
            holder = self._holder()
            return Step(Done(self.fence if holder is not None and holder.id == call.id else 0))
        changed = call.id not in self.line
        if changed:
            self.line[call.id] = call
            if len(self.line) == 1:
                self.fence = stamp
        return Step(Done(self.fence) if self._holder() == call else WAIT, changed)

    def lost(self, session: str, stamp: int) -> Step:
        """Take a session's calls out of the line; the next one holds."""
        return self._leave([name for name, call in self.line.items() if call.session == session], stamp)

    def keeps(self, call_id: str) -> bool:
        """Say whether a call waits or holds."""
        return call_id in self.line

    def sessions(self) -> set[str]:
        """Return the sessions of all in line."""
        return {call.session for call in self.line.values()}

    def why(self, call: Call) -> Waiting:
        """Name the holder."""
        holder = self._holder()
        place = list(self.line).index(call.id) if call.id in self.line else len(self.line)
        name = str(holder) if holder is not None else "nobody"
        return Waiting(f"held by {name}; {place - 1} others are before us", [name])

    @property
    def idle(self) -> bool:
        """Whether nobody holds it."""
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


Acquire.machine = Look.machine = Release.machine = Lock
