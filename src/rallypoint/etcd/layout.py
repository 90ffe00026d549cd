"""The names of keys in etcd, under the prefix of a store; pure, and readable with `etcdctl get --prefix`.

    PREFIX/k/KEY                 a value
    PREFIX/q/KEY\\0\\1ID           an item of a queue; oldest first
    PREFIX/q/KEY\\0\\0ID           an item that was given back; before all others
    PREFIX/c/KEY\\0\\1ID.N         a part of a value that is too large for one request; its value is a `Parts`
    PREFIX/d/KEY\\0\\1ID.N         a part of an item
    PREFIX/a/KEY\\0\\1SESSION.LANE an addition to a counter that somebody will carry out
    PREFIX/s/SESSION             a session: who it is, and which gateway carries it
    PREFIX/l/SESSION/LANE        the number and the answer of the last request that used this lane
    PREFIX/w/SESSION/ID          what is to be undone when that session has died: the counter of a barrier
    PREFIX/executor              the session that sees to that
    PREFIX/r/RUN                 the lease of a run, on which all hangs that it stores

KEY begins with a slash, as PyTorch's clients write it. A zero byte in the name of a queue or of a large value is
written as `\\0\\xff`, so that no name is the beginning of another's.

A value is stored as it is, unless it begins with `MAGIC`, which then stands before it once more.
"""

from __future__ import annotations

import msgspec

from rallypoint.etcd.messages import next_after

__all__ = ["MAGIC", "Layout", "Parts", "pack", "unpack"]

MAGIC = b"\0rp"
"""What a stored value begins with that is not stored as it is."""

_PLAIN, _PARTS = b"\0", b"\1"


class Parts(msgspec.Struct, array_like=True, frozen=True):
    """What stands for a large value: under which id its parts are, how many, and its size."""

    id: str
    count: int
    size: int


def pack(value: bytes | Parts) -> bytes:
    """Return what is stored for a value."""
    if isinstance(value, Parts):
        return MAGIC + _PARTS + msgspec.json.encode(value)
    return MAGIC + _PLAIN + value if value.startswith(MAGIC) else value


def unpack(stored: bytes) -> bytes | Parts:
    """Return the value that is stored, or what stands for it."""
    if not stored.startswith(MAGIC):
        return stored
    kind, rest = stored[len(MAGIC) : len(MAGIC) + 1], stored[len(MAGIC) + 1 :]
    return msgspec.json.decode(rest, type=Parts) if kind == _PARTS else rest


def _escape(key: bytes) -> bytes:
    return key.replace(b"\0", b"\0\xff") if b"\0" in key else key


def _unescape(key: bytes) -> bytes:
    return key.replace(b"\0\xff", b"\0")


Range = tuple[bytes, bytes]
"""The first key, and the one after the last."""


class Layout:
    """The names under one prefix."""

    def __init__(self, prefix: str) -> None:
        base = prefix.strip("/").encode()
        self.base = base + b"/" if base else b""
        self._values, self._queues, self._counts = (self.base + kind for kind in (b"k", b"q", b"a"))
        self.sessions, self.lanes, self._wills = (self.base + kind for kind in (b"s/", b"l/", b"w/"))
        self.executor = self.base + b"executor"

    def value(self, key: bytes) -> bytes:
        """Return where a value is."""
        return self._values + key

    def values(self, prefix: bytes) -> Range:
        """Return where all values are whose keys start with a prefix."""
        first = self._values + prefix
        return first, next_after(first)

    def key(self, name: bytes) -> bytes:
        """Return the key of a value, from its name in etcd."""
        return name[len(self._values) :]

    @property
    def strip(self) -> int:
        """How much of a value's name is ours."""
        return len(self._values)

    def queue(self, key: bytes) -> Range:
        """Return where all items of a queue are."""
        first = self._queues + _escape(key) + b"\0"
        return first + b"\0", first + b"\2"

    def front(self, key: bytes, made: int) -> bytes:
        """Return where an item is put that was given back, and had been made at some revision."""
        return self._queues + _escape(key) + b"\0\0%020d" % made

    def fronts(self, key: bytes) -> Range:
        """Return where all items are that were given back."""
        first = self._queues + _escape(key) + b"\0"
        return first + b"\0", first + b"\1"

    def item(self, key: bytes, identity: str) -> bytes:
        """Return where an item of a queue is."""
        return self._queues + _escape(key) + b"\0\1" + identity.encode()

    def items(self, key: bytes) -> Range:
        """Return where the items are that were never given back."""
        first = self._queues + _escape(key) + b"\0"
        return first + b"\1", first + b"\2"

    def queues(self, prefix: bytes) -> Range:
        """Return where all items are of queues whose names start with a prefix."""
        first = self._queues + _escape(prefix)
        return first, next_after(first)

    def queue_name(self, name: bytes) -> bytes:
        """Return the queue of an item, from its name in etcd."""
        return _unescape(name[len(self._queues) : max(name.rfind(b"\0\0"), name.rfind(b"\0\1"))])

    def part(self, of_item: bool, key: bytes, identity: str, number: int) -> bytes:
        """Return where a part of a large value or item is."""
        return self.parts(of_item, key, identity)[0] + b"%d" % number

    def parts(self, of_item: bool, key: bytes, identity: str = "") -> Range:
        """Return where all parts are, of one value or item, or of all that a key ever had."""
        first = self.base + (b"d" if of_item else b"c") + _escape(key) + b"\0\1"
        if identity:
            first += identity.encode() + b"."
        return first, next_after(first)

    def all_parts(self, of_items: bool, prefix: bytes) -> Range:
        """Return where all parts are of values or items whose keys start with a prefix."""
        first = self.base + (b"d" if of_items else b"c") + _escape(prefix)
        return first, next_after(first)

    def additions(self, key: bytes) -> Range:
        """Return where additions to a counter wait."""
        first = self._counts + _escape(key) + b"\0\1"
        return first, next_after(first)

    def addition(self, key: bytes, lane: bytes) -> bytes:
        """Return where an addition waits that will be answered in a lane."""
        return self.additions(key)[0] + lane[len(self.lanes) :].replace(b"/", b".")

    def run(self, name: str) -> bytes:
        """Return where the lease of a run is written down."""
        return self.base + b"r/" + name.encode()

    def all_sessions(self) -> Range:
        """Return where all sessions are."""
        return self.sessions, next_after(self.sessions)

    def will(self, session: bytes, identity: str) -> bytes:
        """Return where it is written what is to be undone after a session."""
        return self._wills + session.hex().encode() + b"/" + identity.encode()

    def wills(self) -> Range:
        """Return where all of these are."""
        return self._wills, next_after(self._wills)

    def testator(self, will: bytes) -> bytes:
        """Return where the session is whose will this is."""
        return self.sessions + will[len(self._wills) :].partition(b"/")[0]

    def everything(self) -> Range:
        """Return where all of this is."""
        return (self.base, next_after(self.base)) if self.base else (b"\0", b"\0")
