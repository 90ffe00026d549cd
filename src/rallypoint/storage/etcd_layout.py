"""The keys of a replicated store in etcd, and what is in them; readable with `etcdctl get --prefix NAME/`; pure.

    NAME/lease               the lease on which all of this hangs but `leader` and `servers`: its id
    NAME/epoch               a number, one more with every leader; each append compares it
    NAME/leader              {"url": …, "epoch": …}: where clients are served; goes when that server does
    NAME/servers/ID          {"url": …}: a server that leads or stands by; goes when it does
    NAME/log/INDEX           a batch of entries, or a part of one (`etcd_batch.py`)
    NAME/snapshot            {"index": …, "parts": …, "bytes": …}: up to which index the newest snapshot reaches
    NAME/snapshots/INDEX/N   its parts

An index has 16 digits, so that the order of keys is the order of the log.
"""

from __future__ import annotations

import msgspec

from rallypoint.etcd.messages import Compare, lease_is, next_after, value_is

__all__ = ["Layout", "Leader", "Server", "SnapshotHead", "encode"]


class Leader(msgspec.Struct, frozen=True):
    """Who leads."""

    url: str
    epoch: int


class Server(msgspec.Struct, frozen=True):
    """A server of the store."""

    url: str


class SnapshotHead(msgspec.Struct, frozen=True):
    """Up to which index a snapshot reaches, and in how many parts it is stored."""

    index: int
    parts: int
    bytes: int


encode = msgspec.json.encode
"""Return a value as it is stored."""


class Layout:
    """The keys of one store."""

    def __init__(self, name: str) -> None:
        self.prefix = name.encode() + b"/"
        self.end = next_after(self.prefix)
        self.lease = self.prefix + b"lease"
        self.epoch = self.prefix + b"epoch"
        self.leader = self.prefix + b"leader"
        self.snapshot = self.prefix + b"snapshot"
        self.servers = self.prefix + b"servers/"
        self.entries = self.prefix + b"log/"
        self.entries_end = next_after(self.entries)
        self.snapshots = self.prefix + b"snapshots/"

    def fence(self, epoch: int, lease: int) -> list[Compare]:
        """Return the comparisons that hold while this epoch of this store lasts.

        Numbers of epochs begin again when a store has ended and another of its name begins; its lease is another.
        """
        return [value_is(self.epoch, b"%d" % epoch), lease_is(self.epoch, lease)]

    def entry(self, index: int) -> bytes:
        """Return the key of a place in the log."""
        return b"%s%016d" % (self.entries, index)

    def index(self, key: bytes) -> int:
        """Return the place in the log that a key is of."""
        return int(key[len(self.entries) :])

    def server(self, identity: str) -> bytes:
        """Return the key of a server."""
        return self.servers + identity.encode()

    def parts(self, index: int) -> bytes:
        """Return what the keys of a snapshot's parts begin with."""
        return b"%s%016d/" % (self.snapshots, index)

    def part(self, index: int, number: int) -> bytes:
        """Return the key of a part of a snapshot."""
        return b"%s%06d" % (self.parts(index), number)
