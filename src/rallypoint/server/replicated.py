"""`ReplicatedServer`: one of several servers of a store whose log is in etcd. One of them leads, the others stand by.

Who stands by follows the log with a state of its own, and tells native clients where the leader is. It takes over when
the leader's address refuses connections, when the leader does not show in etcd that it lives (`follower.py`), or when
its key there has gone with its lease. To lead is to write the next epoch, which only one server can (`candidate.py`),
and to read the rest of the log, to which nobody else can append any more. The first entry of every leader says that it
starts; from then on everything is as after a restart of a server with a data directory: sessions have a grace to come
back.

A leader ends when another has taken over, which its next commit or read finds out, or when it has not reached etcd for
`STEP_DOWN_S`: then others may lead, and its clients should look for them. Each life of the process as a standby and a
leader is a `StoreServer` of its own, so nothing of an earlier life can be answered from.

A server that is told to end hands over: it commits what it has, answers, and revokes its lease.

Rejected: a leader elected by etcd's election API. The same lease and transaction, with more round trips.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import DiskFull, NoQuorum, StoreError
from rallypoint.etcd import messages
from rallypoint.etcd.address import Address
from rallypoint.etcd.answers import WatchAnswer
from rallypoint.etcd.client import Client, Refusal
from rallypoint.etcd.lease import Lease
from rallypoint.etcd.watch import watch
from rallypoint.protocol.native import MAX_WHY, Standby, standby
from rallypoint.server.candidate import CALL_S, PAUSE_S, Candidate
from rallypoint.server.clock import MOVE_S, RETURN_S
from rallypoint.server.follower import BEAT_S, Follower, Silence, leader_gone
from rallypoint.server.running import url_of
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import DEFAULT_RECOVERY_S, Settings
from rallypoint.storage.errors import Deposed, StoreGone
from rallypoint.storage.etcd import EtcdStorage
from rallypoint.storage.etcd_layout import Layout, Leader, encode
from rallypoint.storage.etcd_reader import Head, Overtaken

__all__ = ["ReplicatedServer"]

log = logging.getLogger("rallypoint.server")

STEP_DOWN_S = 5.0
"""How long a leader goes on without etcd; others may have taken over after `candidate.LEASE_S` and a moment."""

REACH_S = 10.0
"""How long etcd may take to answer when the server starts."""


class OutOfReach(Exception):
    """A leader has not reached etcd for so long that another may lead, or cannot write to it."""


class ReplicatedServer:
    """One of the servers of a store in etcd."""

    def __init__(self, settings: Settings, address: Address) -> None:
        self.on_alone: Callable[[], None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self.failed: BaseException | None = None
        """Why the server cannot go on, if so."""

        self.life = StoreServer(settings)
        """The state, and those who are connected, since this server last stood by."""

        self.url = ""
        self._settings, self._address = settings, address
        self._layout = Layout(address.space)
        self._sockets: list[socket.socket] = []
        self._settled = asyncio.Event()
        self._back_s = MOVE_S
        """How long clients have to come back to their sessions, if this server leads next."""

        self._dead_epoch = 0
        """Of the last leader whose address refused connections."""

        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._told: Standby | None = None
        self._silence: Silence | None = None

    # Beginning and end

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Take part in the store; return once there is a leader, which may be this server. NoQuorum: etcd is silent."""
        self._sockets = list(sockets)
        self.url = url_of(self._sockets)
        self._client = Client(self._address.endpoints, self._address.access, self._address.name)
        told_s = self._settings.recovery_s
        store_s = DEFAULT_RECOVERY_S if told_s is None else told_s
        self._candidate = Candidate(self._client, self._address, self.url, store_s, self._tell_trouble)
        await self._client.prefer_leader(Deadline(REACH_S))
        self._task = asyncio.ensure_future(self._run())
        settled = asyncio.ensure_future(self._settled.wait())
        try:
            await asyncio.wait((self._task, settled), return_when=asyncio.FIRST_COMPLETED)
        finally:
            settled.cancel()
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Answer what was asked, and let another server lead."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        await self.life.close()
        await self._candidate.close()
        await self._client.close()
        for sock in self._sockets:
            sock.close()

    async def _run(self) -> None:
        """Live one life after the other, until something is wrong that another life would not mend."""
        try:
            while True:
                self.life = StoreServer(self._settings)
                self.life.on_alone = self.on_alone
                await self.life.stand_by([sock.dup() for sock in self._sockets], standby(self._told or Standby("", [])))
                try:
                    await self._live()
                except (Deposed, OutOfReach, StoreGone) as error:
                    log.warning("stands by from now on: %s", error)
                    self._tell_trouble(str(error), isinstance(error, OutOfReach))
                finally:
                    if not self._closing:
                        await self.life.abandon()
        except Exception as error:
            self.failed = error
            self.on_failure()
            if not self._settled.is_set():
                raise

    async def _live(self) -> None:
        """Stand by, until this server leads and is deposed."""
        follower = Follower(self._candidate.reader, self.life)
        while True:
            own = await self._candidate.register()
            head = await self._catch_up(follower)
            if head.leader is None or head.leader.url == self.url or head.leader.epoch == self._dead_epoch:
                epoch = await self._candidate.claim(head)
                if epoch:
                    await self._lead(follower, epoch)
            else:
                await self._stand_by(follower, head, head.leader, own)

    # Standing by

    async def _catch_up(self, follower: Follower) -> Head:
        head: Head = await self._candidate.attempt(follower.catch_up)
        self._tell(head)
        self._candidate.keep_store(head)
        return head

    async def _stand_by(self, follower: Follower, head: Head, leader: Leader, own: Lease) -> None:
        """Follow the log until the leader is gone, or something else than the log has changed."""
        self._settled.set()
        changed = asyncio.Event()
        layout = self._layout

        def take(answer: WatchAnswer) -> None:
            for change in answer.changes:
                if change.key.startswith(layout.entries):
                    if change.value is not None:
                        follower.take(layout.index(change.key), change.value)
                elif not change.key.startswith(layout.snapshots) and (change.key, change.value) != beat:
                    changed.set()

        self._back_s = MOVE_S
        beat = (layout.leader, encode(leader))
        following = watch(self._client, layout.prefix, layout.end, head.revision + 1, take)
        if self._silence is None or self._silence.epoch != leader.epoch:
            self._silence = Silence(leader.epoch, self._candidate.reader, self._candidate.enlist)
        silent, gone = self._silence.wait(), leader_gone(_endpoint(leader.url))
        waits = [*map(asyncio.ensure_future, (gone, following, silent, changed.wait(), own.ended.wait()))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[1].done():
                await asyncio.sleep(PAUSE_S)  # what broke its stream may break the next one
            for one, why in ((waits[0], "its address refuses connections"), (waits[2], "it is silent in etcd")):
                if one.done() and not one.cancelled():
                    log.warning("the leader at %s is gone: %s", leader.url, why)
                    self._dead_epoch = leader.epoch
                    self._back_s = RETURN_S if one is waits[0] else MOVE_S
            for one in waits[1:2]:
                if one.done():
                    with contextlib.suppress(Overtaken):
                        one.result()
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _tell(self, head: Head) -> None:
        """Have clients told where the leader is."""
        leader = head.leader.url if head.leader is not None and head.leader.url != self.url else ""
        self._set_told(Standby(leader, head.servers, "another server leads" if leader else "no server leads yet"))

    def _tell_trouble(self, why: str, no_quorum: bool) -> None:
        """Have clients told why there is no leader."""
        servers = self._told.servers if self._told is not None else []
        self._set_told(Standby("", servers, why[:MAX_WHY], no_quorum))

    def _set_told(self, told: Standby) -> None:
        self._told = told
        if self.life.elsewhere:
            self.life.elsewhere = standby(told)

    # Leading

    async def _lead(self, follower: Follower, epoch: int) -> None:
        """Read the rest of the log, and serve, until deposed."""
        head = await self._catch_up(follower)
        if head.epoch != epoch:
            raise Deposed(store=self._address.name, epoch=epoch)
        life, own, store = self.life, self._candidate.own, self._candidate.store
        assert own is not None and store is not None
        failed = asyncio.Event()
        life.on_failure = failed.set
        sizes = (follower.index, follower.log_bytes, follower.snapshot_bytes)
        life.storage = EtcdStorage(self._client, self._address, epoch, head.lease, *sizes)
        try:
            await life.begin(self._back_s)
        except StoreError as error:
            if not isinstance(error.__cause__, DiskFull):
                raise
            raise OutOfReach(str(error)) from None
        life.storage.on_trouble = life.notices.set_trouble
        life.notices.set_servers(head.servers)
        life.elsewhere = b""
        self._settled.set()
        log.info("leads %s in epoch %d, with a log of %d places", self._address.name, epoch, follower.index)
        waits: list[asyncio.Task[Any]] = [asyncio.ensure_future(one.wait()) for one in (failed, own.ended, store.ended)]
        watching = asyncio.ensure_future(self._watch_servers(life, head))
        beating = asyncio.ensure_future(self._beat(epoch, head.lease))
        waits.append(beating)
        try:
            while not any(one.done() for one in waits):
                await asyncio.wait(waits, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if time.monotonic() - own.reached_at > STEP_DOWN_S:
                    break
        finally:
            for one in (*waits, watching):
                one.cancel()
        self._dead_epoch = epoch
        if life.failed is not None:
            raise life.failed
        if beating.done() and not beating.cancelled():
            raise Deposed(store=self._address.name, epoch=epoch)
        if store.ended.is_set():
            raise StoreGone(store=self._address.name)
        if own.ended.is_set():
            raise OutOfReach("its lease in etcd has ended, so another may lead")
        raise OutOfReach(f"etcd was out of reach for {time.monotonic() - own.reached_at:.1f} s")

    async def _beat(self, epoch: int, lease: int) -> None:
        """Show the others that this leader lives; return when another leads, for its clients may all only wait."""
        while True:
            with contextlib.suppress(NoQuorum, Refusal):
                if not await self._candidate.beat(epoch, lease):
                    return
            await asyncio.sleep(BEAT_S)

    async def _watch_servers(self, life: StoreServer, head: Head) -> None:
        """Have clients told which servers there are, whenever one comes or goes."""
        while True:
            if not await self._servers_change(head.revision):
                await asyncio.sleep(PAUSE_S)
            with contextlib.suppress(NoQuorum, Refusal):
                head = await self._candidate.reader.head(Deadline(CALL_S))
                life.notices.set_servers(head.servers)

    async def _servers_change(self, revision: int) -> bool:
        """Return True when a server has come or gone since a revision, False when that cannot be seen."""
        changed, first = asyncio.Event(), self._layout.servers

        def take(answer: WatchAnswer) -> None:
            if answer.changes:
                changed.set()

        following = watch(self._client, first, messages.next_after(first), revision + 1, take)
        waits = [*map(asyncio.ensure_future, (following, changed.wait()))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return changed.is_set()


def _endpoint(url: str) -> net.Endpoint:
    return net.parse_endpoint(url.removeprefix("tcp://"), 0)
