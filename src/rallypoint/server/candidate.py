"""A server as a candidate in etcd: its leases, its entry in the list of servers, and its claims to lead.

A server has a lease of its own: with it go the server's entry in the list and, if it leads, the key that says so. The
store has another, which all servers keep: with it goes everything. Where etcd does not answer, or has no room, a call
is made again for as long as that lasts; `on_trouble` hears of it.

To lead is to write the next epoch, by a transaction that only one candidate wins. Where the fate of that is not known,
the head of the store tells.

Rejected: to give up when etcd is silent. A supervisor would start the server again, which then knows less.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Any

from rallypoint.deadline import Deadline
from rallypoint.errors import EtcdRefused, NoQuorum, RallypointError
from rallypoint.etcd import answers, messages
from rallypoint.etcd.address import Address
from rallypoint.etcd.client import Client, LeaseGone, Refusal
from rallypoint.etcd.lease import Lease
from rallypoint.etcd.messages import Method, Txn
from rallypoint.storage.etcd import LATE_S
from rallypoint.storage.etcd_layout import Layout, Leader, Server, encode
from rallypoint.storage.etcd_reader import Head, Reader

__all__ = ["CALL_S", "LEASE_S", "PAUSE_S", "Candidate"]

log = logging.getLogger("rallypoint.server")

LEASE_S = 3
"""How long a server may be out of reach for etcd before another leads."""

CALL_S = 5.0
"""How long to try a call before it is noted that etcd does not answer; the trying goes on."""

PAUSE_S = 0.1
"""How long to wait before something is tried again that failed at once."""

FULL_S = 1.0
"""How long to wait before etcd is asked again that has no room."""

CLOSE_S = 2.0
"""How long handing over may take: without it the others wait for the lease to end."""

LATE = f"etcd does not answer for {LATE_S:g} s"


class Candidate:
    """One server's part in a store; `store_s` is how long the store outlives its last server."""

    def __init__(
        self, client: Client, address: Address, url: str, store_s: float, on_trouble: Callable[[str, bool], None]
    ) -> None:
        self.reader = Reader(client, Layout(address.space))
        self.own: Lease | None = None
        self.store: Lease | None = None
        self._client, self._address, self._url = client, address, url
        self._layout = Layout(address.space)
        self._key = self._layout.server(secrets.token_hex(8))
        self._store_s = max(store_s, 2.0 * LEASE_S)
        self._on_trouble = on_trouble

    async def attempt(self, call: Callable[[Deadline], Any]) -> Any:
        """Make a call until etcd answers, and has room, however long that takes; raise LeaseGone and EtcdRefused."""
        why = ""
        while True:
            late = asyncio.get_running_loop().call_later(LATE_S, self._on_trouble, why or LATE, True)
            try:
                return await call(Deadline(CALL_S))
            except NoQuorum as error:
                if not why:
                    log.warning("cannot reach the log: %s", error)
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
                    log.warning("cannot take part: %s", refused)
                why = str(refused)
                self._on_trouble(why, False)
                await asyncio.sleep(FULL_S)
            finally:
                late.cancel()

    async def register(self) -> Lease:
        """Have a lease, and be listed among the servers of the store; return the lease."""
        if self.own is not None and not self.own.ended.is_set():
            return self.own
        own: Lease = await self.attempt(lambda deadline: Lease.grant(self._client, LEASE_S, deadline))
        own.keep()
        self.own = own
        try:
            await self.attempt(self.enlist)
        except LeaseGone:  # etcd was silent for so long
            own.ended.set()
        return own

    async def enlist(self, deadline: Deadline) -> None:
        """Write the entry in the list of servers, again perhaps; NoQuorum or Refusal where that fails."""
        assert self.own is not None
        put = messages.put(self._key, encode(Server(self._url)), self.own.id)
        await self._client.call(Method.TXN, Txn([], [put]).encode(), deadline)

    def keep_store(self, head: Head) -> None:
        """Keep the lease of the store, where there is one."""
        if head.lease and (self.store is None or self.store.id != head.lease):
            if self.store is not None:
                self.store.close()
            self.store = Lease(self._client, head.lease, self._store_s)
            self.store.keep()

    async def claim(self, head: Head) -> int:
        """Try to be the next leader; return the epoch, or 0 where another was faster."""
        own = await self.register()
        layout, epoch = self._layout, head.epoch + 1
        lease = head.lease or await self._found()
        if not lease:
            return 0
        before = (
            messages.value_is(layout.epoch, b"%d" % head.epoch) if head.epoch else messages.version_is(layout.epoch, 0)
        )
        puts = [
            messages.put(layout.epoch, b"%d" % epoch, lease),
            messages.put(layout.leader, encode(Leader(self._url, epoch)), own.id),
        ]
        try:
            answer = await self._make(Txn([before, messages.value_is(layout.lease, b"%d" % lease)], puts))
        except LeaseGone:  # this server's own, or the store's: the next look tells
            own.ended.set()
            await asyncio.sleep(PAUSE_S)
            return 0
        if answers.read_txn(answer.data).succeeded:
            return epoch
        found: Head = await self.attempt(self.reader.head)  # an earlier attempt may have succeeded
        return epoch if found.leader == Leader(self._url, epoch) else 0

    async def beat(self, epoch: int, lease: int) -> bool:
        """Write the leader's key again, so that others see that it lives; return whether it still leads.

        NoQuorum, Refusal: that is not known.
        """
        assert self.own is not None
        put = messages.put(self._layout.leader, encode(Leader(self._url, epoch)), self.own.id)
        request = Txn(self._layout.fence(epoch, lease), [put]).encode()
        answer = await self._client.call(Method.TXN, request, Deadline(CALL_S))
        return answers.read_txn(answer.data).succeeded

    async def close(self) -> None:
        """Keep nothing any more, and have the others know that this server has gone."""
        for lease in (self.own, self.store):
            if lease is not None:
                lease.close()
        if self.own is not None:
            with contextlib.suppress(RallypointError, Refusal):
                await self.own.revoke(Deadline(CLOSE_S))

    async def _found(self) -> int:
        """Begin a store, where there is none: all of it hangs on one lease, which its servers keep."""
        lease: Lease = await self.attempt(lambda deadline: Lease.grant(self._client, round(self._store_s), deadline))
        place = self._layout.lease
        try:
            answer = await self._make(
                Txn([messages.version_is(place, 0)], [messages.put(place, b"%d" % lease.id, lease.id)])
            )
        except LeaseGone:
            return 0
        if not answers.read_txn(answer.data).succeeded and not answer.repeated:
            with contextlib.suppress(NoQuorum, Refusal):
                await lease.revoke(Deadline(CALL_S))
            return 0
        return lease.id

    async def _make(self, txn: Txn) -> Any:
        request = txn.encode()
        return await self.attempt(lambda deadline: self._client.call(Method.TXN, request, deadline))
