"""A server as a candidate in etcd: its leases, its entry in the list of servers, and its claims to lead.

A server has a lease of its own, on which its entry in the list and, if it leads, the leader's key depend. The store has
another lease, which all servers keep alive and on which everything else depends. While etcd does not answer, or has no
room, a call is retried without limit, and `on_trouble` receives the reason.

A server leads by writing the next epoch, in a transaction that only one candidate wins. If the outcome of the
transaction is unknown, the head of the store shows it.

Rejected: giving up when etcd is silent. A supervisor would restart the server, which would then know less.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from rallypoint.deadline import Deadline
from rallypoint.errors import EtcdRefused, NoQuorum, RallypointError
from rallypoint.etcd import requests, responses
from rallypoint.etcd.address import Address
from rallypoint.etcd.client import EtcdClient, LeaseGone, Refusal
from rallypoint.etcd.lease import EtcdLease
from rallypoint.etcd.requests import Method, Txn
from rallypoint.storage.etcd.layout import FollowerEntry, Layout, LeaderEntry, ServerEntry, encode
from rallypoint.storage.etcd.reader import Head, Reader
from rallypoint.storage.etcd.storage import LATE_S

__all__ = ["CALL_S", "LEASE_S", "PAUSE_S", "Candidate"]

log = logging.getLogger("rallypoint.server")

LEASE_S = 3
"""Time to live of a server's lease: how long its keys outlive its last contact with etcd."""

CALL_S = 5.0
"""Timeout of one attempt of a call; the server then logs that etcd does not answer, and retries."""

PAUSE_S = 0.1
"""Pause before the retry of an operation that failed at once."""

FULL_S = 1.0
"""Pause before the retry of a call that etcd refused for lack of space."""

CLOSE_S = 2.0
"""How long revoking the lease may take at the end; if it fails, the lease expires by itself."""

REPORT_S = 0.5
"""Interval of a standby's reports, if it has followed the log further; with every write of its own, etcd grows."""

MAX_FOLLOWERS = 64
"""Maximum number of reports read."""

LATE_REPLY = f"no answer from etcd for {LATE_S:g} s"


class Candidate:
    """One server's part in a store; `store_s` is how long the store outlives its last server."""

    def __init__(
        self, client: EtcdClient, address: Address, url: str, store_s: float, on_trouble: Callable[[str, bool], None]
    ) -> None:
        self.reader = Reader(client, Layout(address.space))
        self.own: EtcdLease | None = None
        self.store: EtcdLease | None = None
        self._client, self._address, self._url = client, address, url
        self._layout = Layout(address.space)
        identity = secrets.token_hex(8)
        self._key, self._report_key = self._layout.server(identity), self._layout.follower(identity)
        self._store_s = max(store_s, 2.0 * LEASE_S)
        self._on_trouble = on_trouble

    async def attempt(self, call: Callable[[Deadline], Any]) -> Any:
        """Retry a call until etcd answers and has room, however long that takes. Raises LeaseGone, EtcdRefused."""
        why = ""
        while True:
            late = asyncio.get_running_loop().call_later(LATE_S, self._on_trouble, why or LATE_REPLY, True)
            try:
                return await call(Deadline(CALL_S))
            except NoQuorum as error:
                if not why:
                    log.warning("cannot reach the log in etcd: %s", error)
                why = str(error)
                self._on_trouble(why, True)
            except LeaseGone:
                raise
            except Refusal as refusal:
                late.cancel()
                refused = EtcdRefused(store=self._address.name, key=self._address.space, why=refusal.why)
                if "space exceeded" not in refusal.why:
                    raise refused from None
                if not why:
                    log.warning("cannot write to etcd: %s", refused)
                why = str(refused)
                self._on_trouble(why, False)
                await asyncio.sleep(FULL_S)
            finally:
                late.cancel()

    async def register(self) -> EtcdLease:
        """Obtain a lease and list this server in the store, unless it has a live lease; return the lease."""
        if self.own is not None and not self.own.ended.is_set():
            return self.own
        own: EtcdLease = await self.attempt(lambda deadline: EtcdLease.grant(self._client, LEASE_S, deadline))
        own.keep()
        self.own = own
        try:
            await self.attempt(self.enlist)
        except LeaseGone:  # etcd was silent for longer than the lease lives
            own.ended.set()
        return own

    async def enlist(self, deadline: Deadline) -> None:
        """Write the entry in the list of servers; repeating it is harmless. Raises NoQuorum, Refusal."""
        assert self.own is not None
        put = requests.put(self._key, encode(ServerEntry(self._url)), self.own.id)
        await self._client.call(Method.TXN, Txn([], [put]).encode(), deadline)

    def keep_store(self, head: Head) -> None:
        """Keep the lease of the store alive, if there is a store."""
        if head.lease and (self.store is None or self.store.id != head.lease):
            if self.store is not None:
                self.store.close()
            self.store = EtcdLease(self._client, head.lease, self._store_s)
            self.store.keep()

    async def claim(self, head: Head) -> int:
        """Try to become the next leader; return the epoch, or 0 if another server was faster."""
        own = await self.register()
        layout, epoch = self._layout, head.epoch + 1
        lease = head.lease or await self._found()
        if not lease:
            return 0
        before = (
            requests.value_is(layout.epoch, b"%d" % head.epoch) if head.epoch else requests.version_is(layout.epoch, 0)
        )
        puts = [
            requests.put(layout.epoch, b"%d" % epoch, lease),
            requests.put(layout.leader, encode(LeaderEntry(self._url, epoch)), own.id),
        ]
        try:
            answer = await self._make(Txn([before, requests.value_is(layout.lease, b"%d" % lease)], puts))
        except LeaseGone:  # this server's or the store's: the next read of the head shows which
            own.ended.set()
            await asyncio.sleep(PAUSE_S)
            return 0
        if responses.read_txn(answer.data).succeeded:
            return epoch
        found: Head = await self.attempt(self.reader.head)  # an earlier attempt may have succeeded
        return epoch if found.leader == LeaderEntry(self._url, epoch) else 0

    async def report(self, index: Callable[[], int]) -> None:
        """Report the last log index that this standby has applied, whenever it has changed; never returns."""
        written = -1
        while True:
            now = index()
            if now != written and self.own is not None:
                put = requests.put(self._report_key, encode(FollowerEntry(self._url, now)), self.own.id)
                with contextlib.suppress(NoQuorum, Refusal):
                    await self._client.call(Method.TXN, Txn([], [put]).encode(), Deadline(CALL_S))
                    written = now
            await asyncio.sleep(REPORT_S)

    async def beat(self, epoch: int, lease: int) -> list[FollowerEntry] | None:
        """Write the leader's key as its heartbeat; return the reports of the standbys, None if another server leads.

        Raises NoQuorum or Refusal if the outcome is unknown.
        """
        assert self.own is not None
        put = requests.put(self._layout.leader, encode(LeaderEntry(self._url, epoch)), self.own.id)
        reports = requests.get(self._layout.followers, requests.next_after(self._layout.followers), MAX_FOLLOWERS)
        request = Txn(self._layout.fence(epoch, lease), [put, reports]).encode()
        result = responses.read_txn((await self._client.call(Method.TXN, request, Deadline(CALL_S))).data)
        if not result.succeeded:
            return None
        found = (_read_follower(one.value) for answer in result.answers for one in answer.kvs)
        return [one for one in found if one is not None and one.url != self._url]

    async def close(self) -> None:
        """Stop keeping leases alive, and revoke this server's own, so that others notice at once."""
        for lease in (self.own, self.store):
            if lease is not None:
                lease.close()
        if self.own is not None:
            with contextlib.suppress(RallypointError, Refusal):
                await self.own.revoke(Deadline(CLOSE_S))

    async def _found(self) -> int:
        """Create a store: grant the lease on which all of it depends; return its id, or 0 if another was faster."""
        lease: EtcdLease = await self.attempt(
            lambda deadline: EtcdLease.grant(self._client, round(self._store_s), deadline)
        )
        place = self._layout.lease
        try:
            answer = await self._make(
                Txn([requests.version_is(place, 0)], [requests.put(place, b"%d" % lease.id, lease.id)])
            )
        except LeaseGone:
            return 0
        if not responses.read_txn(answer.data).succeeded and not answer.repeated:
            with contextlib.suppress(NoQuorum, Refusal):
                await lease.revoke(Deadline(CALL_S))
            return 0
        return lease.id

    async def _make(self, txn: Txn) -> Any:
        request = txn.encode()
        return await self.attempt(lambda deadline: self._client.call(Method.TXN, request, deadline))


def _read_follower(value: bytes) -> FollowerEntry | None:
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(value, type=FollowerEntry)
    return None
