"""How a change is made in etcd: what all operations of `etcd/space.py` rest on.

A change is one transaction: *read, decide, write if nobody was faster*. What a decision rests on, the transaction
compares again, so it holds at the moment of the change; when it does not, the answer brings what is there now, and the
decision is made anew. Where a guess is likely to be right (a blind write; an expected value; a counter that only we
change), the first transaction is sent without reading. Each carries its `Mark` (`etcd/mark.py`), so that an attempt
whose fate is unknown is made again and takes effect once.

What takes more than one transaction is not interrupted half-way: whoever gives up meanwhile (its task is cancelled)
leaves it to be finished and undone, and until then its lane is not used again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from rallypoint.core.records import Event, show
from rallypoint.deadline import Deadline
from rallypoint.errors import EtcdRefused, NoQuorum, SessionLost
from rallypoint.etcd import messages
from rallypoint.etcd.answers import KV, Found, Result
from rallypoint.etcd.client import Compacted, LeaseGone, Refusal
from rallypoint.etcd.layout import Layout
from rallypoint.etcd.messages import Compare, Op, Txn
from rallypoint.etcd.session import Mark, Session
from rallypoint.etcd.ties import Ties, one_of
from rallypoint.etcd.watcher import Feed

__all__ = ["Decision", "Done", "Ground", "Seen", "as_seen", "dated", "only"]

MANY = 100
"""How many requests go into one transaction: etcd takes 128."""

AT_ONCE = 8
"""How many transactions read at once what one does not hold."""

LEAST_S = 3.0
"""How long etcd may take at least, however short a caller means to wait: as long as it takes to elect a leader."""

MUTE_S = 3.0
"""When there has been no watch for so long, it is not known what a wait has missed."""

T = TypeVar("T")


class Decision(NamedTuple):
    """What is to be done about a request: its answer, what must hold for that, and what is written."""

    answer: Any
    compares: Sequence[Compare] = ()
    ops: Sequence[Op] = ()


Seen = list[Found]
"""What was read, to decide on."""

Decide = Callable[[Seen], Awaitable[Decision]]


class Done(NamedTuple):
    """What a change came to: its answer, its revision (0: nothing was written), and what it read if it was just now."""

    answer: Any
    revision: int
    read: Sequence[Any] = ()


class Ground:
    """The ground that a store in etcd stands on: the keys under one prefix; for the tasks of one event loop."""

    def __init__(self, ties: Ties, prefix: str) -> None:
        self.ties = ties
        self.name = ties.client.name
        self.layout = Layout(prefix)
        self.patience_s = ties.patience_s
        self._loose: set[asyncio.Future[Any]] = set()

    @property
    def lease(self) -> int:
        """The lease that all values are written under: 0, or that of a run."""
        return 0 if self.ties.run is None else self.ties.run.lease

    def patience(self, within: Deadline | None = None) -> Deadline:
        """Return until when etcd may take to answer, for a caller that waits at all only until some deadline."""
        if within is None or not within.timeout_s:
            return Deadline(self.patience_s)
        return Deadline(min(self.patience_s, max(within.remaining(), LEAST_S)))

    # Changes

    async def change(
        self,
        mark: Mark,
        key: bytes,
        decide: Decide,
        looks: Sequence[Op] = (),
        seen: Seen | None = None,
        within: Deadline | None = None,
    ) -> Done:
        """Make the change that is decided on what was seen, as often as it takes.

        What is `seen` may be a guess, or nothing at all, where the decision can be made without. A decision to write
        nothing is written down only if an attempt of before may still arrive, which then finds that it is too late.
        """
        deadline = self.patience(within)
        if seen is None and not mark.proven:
            found = await self.look([*looks, *(mark.look() if mark.doubtful else ())], within)
            seen = found[: len(looks)]
            if mark.doubtful:
                mark.took_effect(found[-2].kvs, found[-1].kvs)
        while not mark.proven:
            try:
                decision = await decide(seen or [])
            except Compacted:  # a large value that was seen is gone from etcd's history
                seen = await self.look(looks)
                continue
            if not decision.ops and not mark.doubtful:
                return Done(decision.answer, 0)
            success = [*decision.ops, mark.proof(decision.answer)]
            txn = Txn([*mark.guards(), *decision.compares], success, [*mark.look(), *looks])
            result = await self.commit(mark, key, txn, deadline)
            if result.succeeded:
                mark.wrote(decision.answer, result.revision)
                return Done(decision.answer, result.revision, result.answers)
            record, lane, *seen = dated(result.answers, result.revision)
            mark.took_effect(record.kvs, lane.kvs)
        return Done(mark.answer, mark.at)

    async def commit(self, mark: Mark, key: bytes, txn: Txn, deadline: Deadline) -> Result:
        """Make one attempt at a transaction that the mark guards."""
        try:
            result, repeated = await self.ties.writes.commit(txn, deadline)
        except Refusal as error:
            mark.doubtful = mark.doubtful or error.repeated
            raise await self.refused(mark.session, key, error) from None
        except BaseException:
            mark.doubtful = True
            raise
        mark.doubtful = mark.doubtful or (repeated and not result.succeeded)
        return result

    async def refused(self, session: Session, key: bytes, error: Refusal) -> Exception:
        """Return what callers are told when etcd has refused a change."""
        if isinstance(error, LeaseGone):
            return await self._lease_gone(session)
        perhaps = "; whether an earlier attempt was carried out is not known" if error.repeated else ""
        return EtcdRefused(store=self.name, key=show(key), why=error.why + perhaps)

    async def _lease_gone(self, session: Session) -> SessionLost:
        """Return the error for a change whose lease has ended: that of the session, or that of the run."""
        if self.ties.run is not None and (await self.look([messages.get(session.place)]))[0].kvs:
            return self.ties.run.end_of_it()
        return session.end_of_it()

    async def unbroken(
        self,
        mark: Mark,
        work: Coroutine[Any, Any, T],
        undo: Callable[[T], Coroutine[Any, Any, None]],
        recover: Callable[[], Coroutine[Any, Any, None]],
    ) -> T:
        """Do what is not to be interrupted half-way: for one who gives up meanwhile, it is undone when it is done.

        Where etcd does not answer, and nobody knows what came of it, that is still found out later, and undone.
        """
        doing = asyncio.ensure_future(work)

        async def settle() -> None:
            try:
                done = await doing
            except NoQuorum:
                await recover()
            else:
                await undo(done)

        try:
            return await asyncio.shield(doing)
        except NoQuorum:
            mark.settling = self.loosely(recover())
            raise
        except asyncio.CancelledError:
            if not doing.cancelled():
                mark.settling = self.loosely(settle())
            raise

    async def resolve(self, mark: Mark, key: bytes) -> Done:
        """Find out what came of a request, and see to it that no attempt at it takes effect any more: False if none."""

        async def decide(_: Seen) -> Decision:
            return Decision(False)

        return await self.change(mark, key, decide, (), [])

    async def settled(self, mark: Mark) -> None:
        """Return when nothing is done about a mark any more, for one who gave up and has come back."""
        if mark.settling is not None:
            await asyncio.wait((mark.settling,))

    def loosely(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """See work through that nobody waits for."""
        task = asyncio.ensure_future(work)
        self._loose.add(task)
        task.add_done_callback(self._loosened)
        return task

    def _loosened(self, task: asyncio.Future[Any]) -> None:
        self._loose.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()

    async def settle(self) -> None:
        """Return when all is done that nobody waits for."""
        while self._loose:
            await asyncio.wait(self._loose)

    # Reading

    async def look(self, ops: Sequence[Op], within: Deadline | None = None) -> Seen:
        """Read as of one moment; a caller that waits only so long hears then that etcd does not answer."""
        while True:
            with contextlib.suppress(Compacted):  # what began to be read is gone: read what is there now
                return await self.read(ops, within)

    async def past(self, mark: Mark, ops: Sequence[Op], revision: int) -> Seen:
        """Read as of a revision, for an answer that was lost; SessionLost, for none is known then, if it is gone."""
        try:
            return await self.read([messages.as_of(op, revision) for op in ops])
        except Compacted as error:
            mark.doubtful = True
            raise SessionLost(peer=self.name, why=f"it was carried out, but its answer is lost: {error.why}") from None

    async def read(self, ops: Sequence[Op], within: Deadline | None = None) -> Seen:
        """Read as of one moment; Compacted if that is past, and etcd has no history of it."""
        deadline = self.patience(within)
        unique = list(dict.fromkeys(ops))
        try:
            seen = await self.ties.reads.ranges(unique[:MANY], deadline)
            later = [messages.as_of(op, seen[0].revision) for op in unique[MANY:]]
            for at in range(0, len(later), MANY * AT_ONCE):
                some = [later[here : here + MANY] for here in range(at, min(len(later), at + MANY * AT_ONCE), MANY)]
                for found in await asyncio.gather(*(self.ties.reads.ranges(part, deadline) for part in some)):
                    seen += found
        except Compacted:
            raise
        except Refusal as error:
            raise EtcdRefused(store=self.name, key=show(self.layout.base), why=error.why) from None
        if len(unique) == len(ops):
            return seen
        known = dict(zip(unique, seen, strict=True))
        return [known[op] for op in ops]

    async def change_of(self, spans: Sequence[tuple[bytes, bytes]], revision: int, deadline: Deadline) -> bool:
        """Wait until something in these ranges may have changed after a revision; say whether, or time is up."""
        if deadline.expired():
            return False
        async with contextlib.AsyncExitStack() as stack:
            futures = [await stack.enter_async_context(self.ties.watcher.waiting(*span, revision)) for span in spans]
            return await self._heard(futures, deadline)

    async def next_of(self, feed: Feed, deadline: Deadline, end: asyncio.Event) -> Event | None:
        """Wait for a change; None when there is an end to the waiting, or time is up."""
        change, ended = asyncio.ensure_future(feed.next()), asyncio.ensure_future(end.wait())
        try:
            await self._heard((change, ended), deadline)
            return change.result() if change.done() else None
        finally:
            change.cancel()
            ended.cancel()

    async def _heard(self, futures: Sequence[asyncio.Future[Any]], deadline: Deadline) -> bool:
        """Wait for one of these; NoQuorum when time is up and nobody could have told of a change lately."""
        came = await one_of(futures, deadline)
        if not came and self.ties.watcher.mute_s() > MUTE_S:
            raise self.ties.client.no_quorum(deadline)
        return came


def only(found: Found) -> KV | None:
    """Return the one key that was asked for, if it is there."""
    return found.kvs[0] if found.kvs else None


def dated(answers: list[Any], revision: int) -> Seen:
    """Return what a transaction read, as of its revision."""
    return [found._replace(revision=revision) for found in answers]


def as_seen(name: bytes, seen: Seen) -> Compare:
    """Compare: a key is as it was seen."""
    kv = only(seen[0])
    return messages.modified_at(name, kv.modified if kv else 0)
