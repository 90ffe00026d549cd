"""The lease of a run: what all who take part in it write hangs on it, and is gone when none of them is left.

Whoever comes first grants the lease and writes down which it is, under itself; all keep it alive. When the last of them
has ended, or died, it ends after its time to live, and with it every key of the run.
"""

from __future__ import annotations

import asyncio

from rallypoint.deadline import Deadline
from rallypoint.errors import SessionLost
from rallypoint.etcd import answers, messages
from rallypoint.etcd.client import Client, LeaseGone
from rallypoint.etcd.keeper import Keeper
from rallypoint.etcd.messages import Method, Txn

__all__ = ["RUN_TTL_S", "RunLease"]

RUN_TTL_S = 30
"""How long the keys of a run outlive the last who took part in it."""


class RunLease:
    """One process's part in keeping a run."""

    def __init__(self, client: Client, run: str, lease: int) -> None:
        self.lease = lease
        self.lost = asyncio.Event()
        self._client = client
        self._run = run

    @classmethod
    async def join(cls, client: Client, keeper: Keeper, place: bytes, run: str, deadline: Deadline) -> RunLease:
        """Take part in keeping a run."""
        while True:
            data = (await client.call(Method.LEASE_GRANT, messages.lease(0, RUN_TTL_S), deadline)).data
            lease, _ = answers.read_lease(data)
            claim = messages.put(place, b"%d" % lease, lease)
            txn = Txn([messages.version_is(place, 0)], [claim], [messages.get(place)])
            try:
                result = answers.read_txn((await client.call(Method.TXN, txn.encode(), deadline)).data)
            except LeaseGone:  # it took longer than it lives
                continue
            found = lease if result.succeeded else int(result.answers[0].kvs[0].value)
            if found != lease:
                await client.call(Method.LEASE_REVOKE, messages.lease(lease), deadline)
            kept = cls(client, run, found)
            keeper.add(kept)
            return kept

    def end_of_it(self) -> SessionLost:
        """Note that the lease is gone, and return the error that says so."""
        self.lost.set()
        why = f"the lease of run {self._run!r} has ended in etcd, and all that was stored for it is gone"
        return SessionLost(peer=self._client.name, why=why)
