"""`ReplicatedServer`: one of several servers of a store whose log is in etcd. One leads, the others are standbys.

A standby follows the log with a state of its own, and tells native clients where the leader is. It takes over when the
leader's address refuses connections, when the leader's heartbeat in etcd is missing (`log_follower.py`), or when the
leader's key expired with its lease. A server becomes the leader by writing the next epoch, which only one server can
(`candidate.py`); then it reads the rest of the log, to which no other server can append any more. The first entry of
every leader is `StartServer`; from then on it acts like a restarted server with a data directory: clients have a grace
period to resume their sessions.

A leader steps down when another server has taken over, as its next commit, read or heartbeat shows, or when it has not
reached etcd for `STEP_DOWN_S`: another server may lead by then, and the clients should search for it. Each term of the
process, as a standby and then as a leader, has a `StoreServer` of its own, so no reply can come from stale state.

A server that receives a request to stop hands over: it commits and answers pending requests, and revokes its lease.

Rejected: leader election by etcd's election API. It uses the same lease and transaction, with more round trips.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.client.routing.route import NOWHERE, read_server
from rallypoint.deadline import Deadline
from rallypoint.errors import DiskFull, NoQuorum, StoreError
from rallypoint.etcd import requests
from rallypoint.etcd.address import Address
from rallypoint.etcd.client import EtcdClient, Refusal
from rallypoint.etcd.lease import EtcdLease
from rallypoint.etcd.responses import WatchAnswer
from rallypoint.etcd.watch import watch
from rallypoint.protocol.native import MAX_WHY, Standby, standby
from rallypoint.security.client_security import ClientSecurity
from rallypoint.server.admission import Admission
from rallypoint.server.clock import MOVE_S, RETURN_S
from rallypoint.server.event_loop import url_of
from rallypoint.server.replication.candidate import CALL_S, PAUSE_S, Candidate
from rallypoint.server.replication.log_follower import BEAT_S, LeaderSilence, LogFollower, leader_gone
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import DEFAULT_RECOVERY_S, Settings
from rallypoint.storage.errors import Deposed, StoreGone
from rallypoint.storage.etcd.layout import Layout, LeaderEntry, encode
from rallypoint.storage.etcd.reader import Head, Overtaken
from rallypoint.storage.etcd.storage import EtcdStorage

__all__ = ["ReplicatedServer"]

log = logging.getLogger("rallypoint.server")

STEP_DOWN_S = 5.0
"""How long a leader continues without contact to etcd; standbys take over sooner, once its heartbeat has been missing
for `log_follower.SILENT_S`."""

REACH_S = 10.0
"""How long etcd may take to answer when the server starts."""


class OutOfReach(Exception):
    """The leader has not reached etcd for so long that another server may lead, or cannot write to etcd."""


class ReplicatedServer:
    """One of the servers of a store in etcd."""

    def __init__(self, settings: Settings, address: Address, admission: Admission, security: ClientSecurity) -> None:
        self.on_idle: Callable[[], None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self.failed: BaseException | None = None
        """The error that ended the server, if any."""

        self._admission, self._security = admission, security
        self.server = StoreServer(settings, None, self._admission)
        """The state and the connections of the current term."""

        self.url = ""
        self._settings, self._address = settings, address
        self._layout = Layout(address.space)
        self._sockets: list[socket.socket] = []
        self._settled = asyncio.Event()
        self._back_s = MOVE_S
        """How long clients have to resume their sessions, if this server leads next."""

        self._dead_epoch = 0
        """The epoch of the last leader that was lost, this server included."""

        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._standby_answer: Standby | None = None
        self._silence: LeaderSilence | None = None

    # Start and stop

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Join the store; return once there is a leader, which may be this server. Raises NoQuorum."""
        self._sockets = list(sockets)
        self.url = url_of(self._sockets, self._admission.tls is not None)
        self._client = EtcdClient(self._address.endpoints, self._address.access, self._address.name)
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
        """Answer pending requests, and let another server lead."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        await self.server.close()
        await self._candidate.close()
        self._client.close()
        for sock in self._sockets:
            sock.close()

    async def _run(self) -> None:
        """Serve one term after another, until an error that another term would not fix."""
        try:
            while True:
                self.server = StoreServer(self._settings, None, self._admission)
                self.server.listener.on_idle = self.on_idle
                await self.server.stand_by(
                    [sock.dup() for sock in self._sockets], standby(self._standby_answer or Standby("", []))
                )
                try:
                    await self._serve_term()
                except (Deposed, OutOfReach, StoreGone) as error:
                    log.warning("stepping down to standby: %s", error)
                    self._tell_trouble(str(error), isinstance(error, OutOfReach))
                finally:
                    if not self._closing:
                        await self.server.abandon()
        except Exception as error:
            self.failed = error
            self.on_failure()
            if not self._settled.is_set():
                raise

    async def _serve_term(self) -> None:
        """Be a standby until this server leads, then lead until it is deposed."""
        follower = LogFollower(self._candidate.reader, self.server)
        while True:
            own = await self._candidate.register()
            head = await self._catch_up(follower)
            if head.leader is None or head.leader.url == self.url or head.leader.epoch == self._dead_epoch:
                epoch = await self._candidate.claim(head)
                if epoch:
                    await self._lead(follower, epoch)
            else:
                await self._stand_by(follower, head, head.leader, own)

    # As a standby

    async def _catch_up(self, follower: LogFollower) -> Head:
        head: Head = await self._candidate.attempt(follower.catch_up)
        self._tell(head)
        self._candidate.keep_store(head)
        return head

    async def _stand_by(self, follower: LogFollower, head: Head, leader: LeaderEntry, own: EtcdLease) -> None:
        """Follow the log until the leader is lost, or something other than the log has changed."""
        self._settled.set()
        changed, layout = asyncio.Event(), self._layout

        def take(answer: WatchAnswer) -> None:
            for change in answer.changes:
                if change.key.startswith(layout.entries):
                    if change.value is not None:
                        follower.take(layout.index(change.key), change.value)
                elif not change.key.startswith(ignored) and (change.key, change.value) != beat:
                    changed.set()

        self._back_s = MOVE_S
        beat, ignored = (layout.leader, encode(leader)), (layout.snapshots, layout.followers)
        following = watch(self._client, layout.prefix, layout.end, head.revision + 1, take)
        if self._silence is None or self._silence.epoch != leader.epoch:
            self._silence = LeaderSilence(leader.epoch, self._candidate.reader, self._candidate.enlist)
        silent, gone = self._silence.wait(), leader_gone(read_server(leader.url) or NOWHERE, self._security)
        reporting = self._candidate.report(lambda: follower.index)
        waits = [*map(asyncio.ensure_future, (gone, following, silent, changed.wait(), own.ended.wait(), reporting))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[1].done():
                await asyncio.sleep(PAUSE_S)  # the fault that broke this watch may break the next one
            for one, why in ((waits[0], "address refuses connections"), (waits[2], "no heartbeat in etcd")):
                if one.done() and not one.cancelled():
                    log.warning("leader at %s lost: %s", leader.url, why)
                    self._dead_epoch = leader.epoch
                    self._back_s = RETURN_S if one is waits[0] else MOVE_S
            with contextlib.suppress(Overtaken):
                if waits[1].done():
                    waits[1].result()
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _tell(self, head: Head) -> None:
        """Set the reply that tells clients where the leader is."""
        leader = head.leader.url if head.leader is not None and head.leader.url != self.url else ""
        self._set_standby_answer(
            Standby(leader, head.servers, "another server leads" if leader else "no server leads yet")
        )

    def _tell_trouble(self, why: str, no_quorum: bool) -> None:
        """Set the reply that tells clients why there is no leader."""
        servers = self._standby_answer.servers if self._standby_answer is not None else []
        self._set_standby_answer(Standby("", servers, why[:MAX_WHY], no_quorum))

    def _set_standby_answer(self, told: Standby) -> None:
        self._standby_answer = told
        if self.server.elsewhere:
            self.server.elsewhere = standby(told)

    # As the leader

    async def _lead(self, follower: LogFollower, epoch: int) -> None:
        """Read the rest of the log, then serve until deposed. Raises Deposed, OutOfReach or StoreGone."""
        head = await self._catch_up(follower)
        if head.epoch != epoch:
            raise Deposed(store=self._address.name, epoch=epoch)
        server, own, store = self.server, self._candidate.own, self._candidate.store
        assert own is not None and store is not None
        failed = asyncio.Event()
        server.on_failure = failed.set
        sizes = (follower.index, follower.log_bytes, follower.snapshot_bytes)
        server.storage = EtcdStorage(self._client, self._address, epoch, head.lease, *sizes)
        try:
            await server.begin(self._back_s)
        except StoreError as error:
            if not isinstance(error.__cause__, DiskFull):
                raise
            raise OutOfReach(str(error)) from None
        server.storage.on_trouble = server.notices.set_trouble
        server.notices.set_servers(head.servers)
        server.elsewhere = b""
        self._settled.set()
        log.info("leading %s in epoch %d, log index %d", self._address.name, epoch, follower.index)
        waits: list[asyncio.Task[Any]] = [asyncio.ensure_future(one.wait()) for one in (failed, own.ended, store.ended)]
        watching = asyncio.ensure_future(self._watch_servers(server, head))
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
        if server.failed is not None:
            raise server.failed
        if beating.done() and not beating.cancelled():
            raise Deposed(store=self._address.name, epoch=epoch)
        if store.ended.is_set():
            raise StoreGone(store=self._address.name)
        if own.ended.is_set():
            raise OutOfReach("lease in etcd expired; another server may lead")
        raise OutOfReach(f"no contact with etcd for {time.monotonic() - own.reached_at:.1f} s")

    async def _beat(self, epoch: int, lease: int) -> None:
        """Write heartbeats; return once another server leads. Without requests, only a heartbeat shows that."""
        while True:
            with contextlib.suppress(NoQuorum, Refusal):
                followers = await self._candidate.beat(epoch, lease)
                if followers is None:
                    return
                self.server.status.followers = followers
            await asyncio.sleep(BEAT_S)

    async def _watch_servers(self, server: StoreServer, head: Head) -> None:
        """Notify clients of the list of servers whenever it changes."""
        while True:
            if not await self._servers_change(head.revision):
                await asyncio.sleep(PAUSE_S)
            with contextlib.suppress(NoQuorum, Refusal):
                head = await self._candidate.reader.head(Deadline(CALL_S))
                server.notices.set_servers(head.servers)

    async def _servers_change(self, revision: int) -> bool:
        """Return True when the list of servers has changed since a revision, False if the watch broke."""
        changed, first = asyncio.Event(), self._layout.servers

        def take(answer: WatchAnswer) -> None:
            if answer.changes:
                changed.set()

        following = watch(self._client, first, requests.next_after(first), revision + 1, take)
        waits = [*map(asyncio.ensure_future, (following, changed.wait()))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return changed.is_set()
