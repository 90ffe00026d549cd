"""What is to be done after sessions that died: one live session of a store, the executor, sees to their wills.

Most of what a session has vanishes with its lease. What does not, an arrival that is counted at a barrier, is written
down in a *will*, in the same transaction, and struck out when it is settled. The executor looks whenever a session has
ended whether it left one. When the executor itself dies, another session takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib

from rallypoint.deadline import Deadline
from rallypoint.errors import RallypointError
from rallypoint.etcd import messages
from rallypoint.etcd.client import LeaseGone, Refusal
from rallypoint.etcd.messages import Txn
from rallypoint.etcd.session import Session
from rallypoint.etcd.space import Space

__all__ = ["Executor"]

PAUSE_S = 1.0
"""How long it pauses after an error before it tries again."""

_FOREVER = Deadline(float("inf"))


class Executor:
    """A session's readiness to be the executor, until stopped."""

    def __init__(self, space: Space, session: Session) -> None:
        self._space = space
        self._session = session
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Be ready no more."""
        self._task.cancel()

    async def _run(self) -> None:
        while not self._session.lost.is_set():
            try:
                if await self._claim():
                    await self._serve()
            except (RallypointError, Refusal):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._session.lost.wait(), PAUSE_S)

    async def _claim(self) -> bool:
        """Become the executor and say so, or wait until somebody has ceased to be it."""
        space, session, office = self._space, self._session, self._space.layout.executor
        take = [messages.put(office, session.place, session.lease)]
        txn = Txn([messages.version_is(office, 0)], take, [messages.get(office, names_only=True)])
        try:
            result, _ = await space.ties.writes.commit(txn, Deadline(space.patience_s))
        except LeaseGone:
            raise session.end_of_it() from None
        if result.succeeded or result.answers[0].kvs[0].lease == session.lease:  # the second: by an earlier attempt
            return True
        await space.change_of([(office, b"")], result.revision, _FOREVER)
        return False

    async def _serve(self) -> None:
        """Look for wills now, and whenever a session has come or gone."""
        space, layout = self._space, self._space.layout
        looks = [
            messages.get(*layout.wills()),
            messages.get(*layout.all_sessions(), names_only=True),
            messages.get(layout.executor, names_only=True),
        ]
        while True:
            wills, sessions, office = await space.look(looks)
            if not office.kvs or office.kvs[0].lease != self._session.lease:
                return
            alive = {kv.key for kv in sessions.kvs}
            for will in wills.kvs:
                if layout.testator(will.key) not in alive:
                    await space.undo(self._session, will.key, will.value)
            spans = [layout.all_sessions(), (layout.executor, b"")]
            await space.change_of(spans, wills.revision, _FOREVER)
