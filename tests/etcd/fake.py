"""`FakeEtcd`: etcd in memory, as far as our client needs it, from the bytes of a request to those of the answer.

Keys with their history, transactions with nested ones, leases, watches, compaction, and what etcd refuses: a key that
is written twice in one transaction, too many requests, a lease that is gone, a kept value of no key, old revisions.
It has no clock: who runs it says when a lease expires. That it answers as etcd does is tested in test_fake.py, against
the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rallypoint.etcd.messages import Method
from rallypoint.etcd.protobuf import chars, fields, number

MOST_OPS = 128
CLUSTER, MEMBER = 7, 1


class Refused(Exception):
    """What etcd answers instead: the name of a status code, and why."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code, self.why = code, why


class Stored(NamedTuple):
    """A key at some revision."""

    value: bytes
    created: int
    modified: int
    version: int
    lease: int


class Entry(NamedTuple):
    """One change: a key was written, or deleted (None)."""

    revision: int
    key: bytes
    stored: Stored | None


class FakeEtcd:
    """A cluster that never loses anything."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self.now: dict[bytes, Stored] = {}
        self.log: list[Entry] = []
        self.leases: dict[int, int] = {}  # and their times to live
        self.listeners: list[Callable[[list[Entry]], None]] = []
        self._granted = 1000

    def call(self, method: str, request: bytes) -> bytes:
        """Carry out one call; return the answer, or raise Refused."""
        return {
            Method.RANGE: self._range_call,
            Method.TXN: self._txn_call,
            Method.LEASE_GRANT: self._grant,
            Method.LEASE_REVOKE: self._revoke,
            Method.STATUS: lambda _: self._header() + number(4, MEMBER),
        }[method](request)

    def compact(self) -> None:
        """Forget all history."""
        self.compacted = self.revision

    def expire(self, lease: int) -> None:
        """End a lease, and delete what hangs on it."""
        if self.leases.pop(lease, None) is None:
            return
        gone = [key for key, stored in self.now.items() if stored.lease == lease]
        entries = [Entry(self.revision + 1, key, None) for key in sorted(gone)]
        for key in gone:
            del self.now[key]
        self._commit(entries)

    def keep_alive(self, request: bytes) -> bytes:
        """Answer one message of a stream of keep-alives."""
        lease = int(dict(fields(request)).get(1, 0))
        return self._header() + number(2, lease) + number(3, self.leases.get(lease, 0))

    def since(self, revision: int, key: bytes, end: bytes) -> list[Entry]:
        """Return what has changed in a range from a revision on."""
        return [entry for entry in self.log if entry.revision >= revision and within(entry.key, key, end)]

    def watch_answer(self, watch: int, entries: list[Entry], created: bool = False, compacted: int = 0) -> bytes:
        """Return a message of a watch stream."""
        data = self._header() + number(2, watch)
        data += number(3, 1) if created else b""
        data += number(4, 1) + number(5, compacted) if compacted else b""
        for entry in entries:
            kind = number(1, 1) if entry.stored is None else b""
            kv = encode(entry.key, entry.stored or Stored(b"", 0, entry.revision, 0, 0))
            data += chars(11, kind + chars(2, kv))
        return data

    # Inside

    def _commit(self, entries: list[Entry]) -> None:
        if not entries:
            return
        self.revision += 1
        self.log += entries
        for listener in list(self.listeners):
            listener(entries)

    def _header(self) -> bytes:
        return chars(1, number(1, CLUSTER) + number(2, MEMBER) + number(3, self.revision))

    def _grant(self, request: bytes) -> bytes:
        self._granted += 1
        self.leases[self._granted] = ttl_s = int(dict(fields(request))[1])
        return self._header() + number(2, self._granted) + number(3, ttl_s)

    def _revoke(self, request: bytes) -> bytes:
        lease = int(dict(fields(request)).get(1, 0))
        if lease not in self.leases:
            raise Refused("NOT_FOUND", "etcdserver: requested lease not found")
        self.expire(lease)
        return self._header()

    def _range_call(self, request: bytes) -> bytes:
        wanted = dict(fields(request))
        self._check_revision(wanted)
        return self._range(wanted, self.now)

    def _check_revision(self, wanted: dict[int, Any]) -> None:
        revision = wanted.get(4, 0)
        if revision > self.revision:
            raise Refused("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision")
        if 0 < revision < self.compacted:
            raise Refused("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted")

    def _range(self, wanted: dict[int, Any], state: dict[bytes, Stored]) -> bytes:
        if wanted.get(4, 0) > 0:
            state = {}
            for entry in self.log:
                if entry.revision <= wanted[4]:
                    state.pop(entry.key, None) if entry.stored is None else state.update({entry.key: entry.stored})
        found = sorted(key for key in state if within(key, wanted.get(1, b""), wanted.get(2, b"")))
        if wanted.get(6) == 2:
            found.sort(key=lambda key: state[key].created)
        total = len(found)
        found = found[: wanted.get(3) or total]
        data = self._header()
        if not wanted.get(9):
            for key in found:
                data += chars(2, encode(key, state[key], names_only=bool(wanted.get(8))))
        return data + number(4, total)

    def _txn_call(self, request: bytes) -> bytes:
        txn = _Txn(request)
        txn.check(MOST_OPS)
        txn.check_keys()
        txn.choose(self.now)
        for kind, wanted in txn.chosen_ops():
            self._may(kind, wanted)
        state, entries = dict(self.now), []
        data = self._apply(txn, state, entries)
        self.now = state
        self._commit(entries)
        return self._header() + data

    def _may(self, kind: int, wanted: dict[int, Any]) -> None:
        if kind == 1:
            self._check_revision(wanted)
        if kind == 2:
            if (wanted.get(5) or wanted.get(6)) and wanted.get(1, b"") not in self.now:
                raise Refused("INVALID_ARGUMENT", "etcdserver: key not found")
            if wanted.get(3) and wanted[3] not in self.leases:
                raise Refused("NOT_FOUND", "etcdserver: requested lease not found")

    def _apply(self, txn: _Txn, state: dict[bytes, Stored], entries: list[Entry]) -> bytes:
        data = number(2, 1) if txn.succeeded else b""
        for kind, wanted in txn.ops:
            if kind == 4:
                answer = self._header() + self._apply(wanted, state, entries)
            elif kind == 1:
                answer = self._range(wanted, state)
            else:
                answer = (self._put if kind == 2 else self._delete)(wanted, state, entries)
            data += chars(3, chars(kind, answer))
        return data

    def _put(self, wanted: dict[int, Any], state: dict[bytes, Stored], entries: list[Entry]) -> bytes:
        key, at = wanted.get(1, b""), self.revision + 1
        old = state.get(key)
        value = old.value if wanted.get(5) and old else wanted.get(2, b"")
        lease = old.lease if wanted.get(6) and old else wanted.get(3, 0)
        state[key] = Stored(value, old.created if old else at, at, old.version + 1 if old else 1, lease)
        entries.append(Entry(at, key, state[key]))
        return self._header()

    def _delete(self, wanted: dict[int, Any], state: dict[bytes, Stored], entries: list[Entry]) -> bytes:
        gone = sorted(key for key in state if within(key, wanted.get(1, b""), wanted.get(2, b"")))
        for key in gone:
            del state[key]
            entries.append(Entry(self.revision + 1, key, None))
        return self._header() + number(2, len(gone))


class _Txn:
    """A transaction that is read, and the branch of it that is chosen."""

    def __init__(self, request: bytes) -> None:
        self.compares = [dict(fields(value)) for field, value in fields(request) if field == 1]
        self.branches: dict[bool, list[tuple[int, Any]]] = {True: [], False: []}
        for field, value in fields(request):
            if field in (2, 3):
                ((kind, body),) = fields(value)
                self.branches[field == 2].append((kind, _Txn(body) if kind == 4 else dict(fields(body))))
        self.succeeded = False

    @property
    def ops(self) -> list[tuple[int, Any]]:
        return self.branches[self.succeeded]

    def check(self, left: int) -> None:
        """Refuse too many requests: what one level has, the next has not."""
        most = max(len(self.compares), *map(len, self.branches.values()))
        if most > left:
            raise Refused("INVALID_ARGUMENT", "etcdserver: too many operations in txn request")
        for branch in self.branches.values():
            for kind, nested in branch:
                if kind == 4:
                    nested.check(left - most)

    def check_keys(self) -> None:
        """Refuse a key that is written twice in one branch."""
        for branch in self.branches.values():
            _touched(branch)

    def choose(self, state: dict[bytes, Stored]) -> None:
        """Choose the branches, on the state before anything is carried out."""
        self.succeeded = all(holds(compare, state) for compare in self.compares)
        for kind, nested in self.ops:
            if kind == 4:
                nested.choose(state)

    def chosen_ops(self) -> Iterator[tuple[int, dict[int, Any]]]:
        for kind, wanted in self.ops:
            if kind == 4:
                yield from wanted.chosen_ops()
            else:
                yield kind, wanted


def _touched(branch: list[tuple[int, Any]]) -> tuple[set[bytes], list[tuple[bytes, bytes]]]:
    """Return the keys that a branch puts, and the ranges that it deletes; as etcd finds them, in this order."""
    puts: set[bytes] = set()
    deletes = [(wanted.get(1, b""), wanted.get(2, b"")) for kind, wanted in branch if kind == 3]
    for kind, nested in branch:
        if kind == 4:
            (then, gone), (other, lost) = _touched(nested.branches[True]), _touched(nested.branches[False])
            _only_once(then, puts, deletes)
            _only_once(other, puts - then, deletes)
            puts |= then | other
            deletes += gone + lost
    for kind, wanted in branch:
        if kind == 2:
            _only_once({wanted.get(1, b"")}, puts, deletes)
            puts.add(wanted.get(1, b""))
    return puts, deletes


def _only_once(keys: set[bytes], puts: set[bytes], deletes: list[tuple[bytes, bytes]]) -> None:
    if keys & puts or any(within(key, *span) for key in keys for span in deletes):
        raise Refused("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request")


def holds(compare: dict[int, Any], state: dict[bytes, Stored]) -> bool:
    """Say whether a comparison is true, of all keys it names."""
    first, end = compare.get(3, b""), compare.get(64, b"")
    found = [state[key] for key in state if within(key, first, end)]
    target = compare.get(2, 0)
    if not found:
        if target == 3:
            return False
        found = [Stored(b"", 0, 0, 0, 0)]
    return all(_holds(compare, target, stored) for stored in found)


def _holds(compare: dict[int, Any], target: int, stored: Stored) -> bool:
    is_now = (stored.version, stored.created, stored.modified, stored.value, stored.lease)[target]
    wanted = compare.get(4 + target, b"" if target == 3 else 0)
    return bool((is_now == wanted, is_now > wanted, is_now < wanted)[compare.get(1, 0)])


def within(key: bytes, first: bytes, end: bytes) -> bool:
    """Say whether a key is in a range as etcd writes it."""
    if not end:
        return key == first
    return key >= first and (end == b"\0" or key < end)


def encode(key: bytes, stored: Stored, names_only: bool = False) -> bytes:
    """Return a key as etcd sends it."""
    data = chars(1, key) + number(2, stored.created) + number(3, stored.modified) + number(4, stored.version)
    data += b"" if names_only else chars(5, stored.value)
    return data + (number(6, stored.lease) if stored.lease else b"")
