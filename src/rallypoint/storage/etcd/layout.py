"""The keys of a replicated store in etcd and their values. Readable with `etcdctl get --prefix NAME/`. Pure.

    NAME/lease               the id of the store's lease; keys are attached to it unless noted
    NAME/epoch               a number, incremented by every new leader; each append compares it
    NAME/leader              {"url": …, "epoch": …}: the leader; attached to the lease of that server
    NAME/servers/ID          {"url": …}: a leader or standby; attached to the lease of that server
    NAME/followers/ID        {"url": …, "index": …}: how far a standby has followed the log; on the lease of that server
    NAME/seats/N             a permit to start a server (`lookup.py`); attached to a lease of its own
    NAME/log/INDEX           a batch of entries, or a part of one (`batch.py`)
    NAME/snapshot            {"index": …, "parts": …, "bytes": …}: the head of the newest snapshot
    NAME/snapshots/INDEX/N   the parts of a snapshot

An index has 16 digits, so that the order of keys is the order of the log.
"""

from __future__ import annotations

import msgspec

from rallypoint.etcd.requests import Compare, lease_is, next_after, value_is

__all__ = ["FollowerEntry", "Layout", "LeaderEntry", "ServerEntry", "SnapshotHead", "encode"]


class LeaderEntry(msgspec.Struct, frozen=True):
    """The leader of the store."""

    url: str
    epoch: int


class ServerEntry(msgspec.Struct, frozen=True):
    """A server of the store."""

    url: str


class FollowerEntry(msgspec.Struct, frozen=True):
    """A standby, and the last log index that it has applied."""

    url: str
    index: int


class SnapshotHead(msgspec.Struct, frozen=True):
    """The head of a snapshot: the log index up to which it covers, the number of its parts, and its size."""

    index: int
    parts: int
    bytes: int


encode = msgspec.json.encode
"""Encode a value for etcd."""


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
        self.followers = self.prefix + b"followers/"
        self.permits = self.prefix + b"seats/"
        self.entries = self.prefix + b"log/"
        self.entries_end = next_after(self.entries)
        self.snapshots = self.prefix + b"snapshots/"

    def fence(self, epoch: int, lease: int) -> list[Compare]:
        """Return the comparisons that hold as long as this epoch of this store lasts.

        The lease is compared as well: a new store of the same name starts again at epoch 1, with another lease.
        """
        return [value_is(self.epoch, b"%d" % epoch), lease_is(self.epoch, lease)]

    def entry(self, index: int) -> bytes:
        """Return the key of a log index."""
        return b"%s%016d" % (self.entries, index)

    def index(self, key: bytes) -> int:
        """Return the log index of a key."""
        return int(key[len(self.entries) :])

    def server(self, identity: str) -> bytes:
        """Return the key of a server."""
        return self.servers + identity.encode()

    def follower(self, identity: str) -> bytes:
        """Return the key of a standby's report."""
        return self.followers + identity.encode()

    def parts(self, index: int) -> bytes:
        """Return the prefix of the keys of a snapshot's parts."""
        return b"%s%016d/" % (self.snapshots, index)

    def part(self, index: int, number: int) -> bytes:
        """Return the key of a part of a snapshot."""
        return b"%s%06d" % (self.parts(index), number)
