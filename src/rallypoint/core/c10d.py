"""PyTorch's TCPStore protocol: bytes in, engine calls, bytes out. Fed incrementally, bounded, without I/O.

A message is an opcode byte and its fields, little-endian: `k` a key and `v` a value (a 64-bit length, then bytes), `q`
a 64-bit integer, `I` a 32-bit one, `*` a 64-bit count of what follows it. There is no frame, no request number and no
error reply: a bad message raises `BadMessage`, on which the host closes that connection.

`Conversation` is the server's end of one connection. Its `receive` takes what came, in pieces of any size, and returns
what to send. Messages that arrived whole and are of the four common shapes take a short path; everything else is
collected field by field in a `Partial`, so that no byte is looked at twice, however slowly it comes. Nothing of a
message takes effect before all of it is there.

The client's end needs no state: `encode` makes a request, and the caller knows what answer it asked for.

Better than the reference server, and safe for its clients: waits end only when true, poppers get their turn in the
order they came, a barrier's arrival that gives up is taken back, and multi_set and multi_get are atomic.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from rallypoint.core.engine import Engine
from rallypoint.core.limits import MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES
from rallypoint.core.records import Answer, Turn, Waiter, Watch
from rallypoint.errors import StoreError

__all__ = ["BadMessage", "Conversation", "Op", "Partial", "MAGIC", "encode", "hello"]

MAGIC = 0x3C85F7CE
"""What a client says first, so that a stray caller is told apart."""

REPLIES_BYTES = 256 * 1024
"""How much is answered before the host must have sent it; then the rest of what came waits."""

FIELD_BYTES = 64
"""What a field of a message under way costs beside its own bytes; near enough for a limit."""

_U64 = struct.Struct("<Q").unpack_from
_I64 = struct.Struct("<q").unpack_from
_LEN = struct.Struct("<Q").pack
_INT = struct.Struct("<q").pack


class Op:
    """The opcodes."""

    VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, GETNUMKEYS, DELETE_KEY, APPEND = range(10)
    MULTI_GET, MULTI_SET, CANCEL_WAIT, PING, QUEUE_PUSH, QUEUE_POP, QUEUE_LEN, LIST_KEYS, BARRIER = range(10, 19)


_FIELDS = {
    Op.VALIDATE: "I",
    Op.SET: "kv",
    Op.COMPARE_SET: "kvv",
    Op.GET: "k",
    Op.ADD: "kq",
    Op.CHECK: "*k",
    Op.WAIT: "*k",
    Op.GETNUMKEYS: "",
    Op.DELETE_KEY: "k",
    Op.APPEND: "kv",
    Op.MULTI_GET: "*k",
    Op.MULTI_SET: "*kv",
    Op.CANCEL_WAIT: "",
    Op.PING: "I",
    Op.QUEUE_PUSH: "kv",
    Op.QUEUE_POP: "k",
    Op.QUEUE_LEN: "k",
    Op.LIST_KEYS: "",
    Op.BARRIER: "kq",
}
_WIDTH = {"I": 4, "q": 8, "*": 8}
_KEY_LIMIT = MAX_KEY_BYTES + 1  # a client writes a `/` before every key of its user
_LIMIT = {"k": _KEY_LIMIT, "v": MAX_VALUE_BYTES}
_K, _KV, _KQ, _ONE = 1, 2, 3, 4  # the common shapes: a key; and a value; and a number; a list of one key
_SHAPE = bytes(
    {"k": _K, "kv": _KV, "kq": _KQ}.get(fields, _ONE if op in (Op.CHECK, Op.WAIT) else 0)
    for op, fields in _FIELDS.items()
)

_WAITED, _CANCELLED = b"\0", b"\1"


class BadMessage(Exception):
    """The peer said something that this protocol has no answer to; its connection has to go."""


def encode(op: int, *fields: bytes | int) -> bytes:
    """Make a request. A list of keys is given as its count and then the keys."""
    parts = [bytes((op,))]
    for field in fields:
        if isinstance(field, int):
            parts.append(field.to_bytes(4, "little") if op in (Op.VALIDATE, Op.PING) else _INT(field))
        else:
            parts += (_LEN(len(field)), field)
    return b"".join(parts)


def hello(nonce: int) -> bytes:
    """Make the first bytes of a connection: the magic number, and a ping that shows who answers."""
    return encode(Op.VALIDATE, MAGIC) + encode(Op.PING, nonce)


class Partial:
    """One message, collected field by field as its bytes come."""

    __slots__ = ("_buffer", "_kinds", "_limit", "_need", "_repeat", "_total", "fields", "op")

    def __init__(self, op: int, limit: int) -> None:
        if op >= len(_FIELDS):
            raise BadMessage(f"unknown opcode {op}")
        self.op = op
        self.fields: list[Any] = []
        self._kinds = _FIELDS[op]
        self._repeat = -1 if self._kinds.startswith("*") else 1
        self._buffer = bytearray()
        self._need = -1  # the length of the string under way, or -1 where its length is yet to come
        self._total = 1
        self._limit = limit

    @property
    def held(self) -> int:
        """How many bytes are held for the message so far."""
        return self._total + FIELD_BYTES * len(self.fields)

    def feed(self, data: bytes, at: int) -> tuple[int, bool]:
        """Take bytes from `at` on; return where they end, and whether the message is whole."""
        while not self._whole():
            kind = "*" if self._repeat < 0 else self._kinds[self._position()]
            need = self._need if self._need >= 0 else _WIDTH.get(kind, 8)
            take = min(need - len(self._buffer), len(data) - at)
            self._buffer += data[at : at + take]
            at += take
            self._total += take
            if len(self._buffer) < need:
                return at, False
            self._field(kind)
        return at, True

    def _position(self) -> int:
        return len(self.fields) % len(self._kinds)

    def _whole(self) -> bool:
        return self._repeat >= 0 and self._need < 0 and len(self.fields) == self._repeat * len(self._kinds)

    def _field(self, kind: str) -> None:
        """Make a field, or the length of one, of the collected bytes."""
        raw, self._buffer = self._buffer, bytearray()
        if kind == "*":
            self._repeat = int.from_bytes(raw, "little")
            self._kinds = self._kinds[1:]
            if self._repeat > MAX_KEYS:
                raise BadMessage(f"{self._repeat} keys in one message, the limit is {MAX_KEYS}")
        elif kind in "qI":
            self.fields.append(int.from_bytes(raw, "little", signed=kind == "q"))
        elif self._need >= 0:
            self.fields.append(bytes(raw))
            self._need = -1
        else:
            size = int.from_bytes(raw, "little")
            _fits(kind, size)
            if self._total + size > self._limit:
                raise BadMessage(f"a message of more than {self._limit} bytes")
            self._need = size


def _fits(kind: str, size: int) -> None:
    if size > _LIMIT[kind]:
        name = "key" if kind == "k" else "value"
        raise BadMessage(f"a {name} of {size} bytes, the limit is {_LIMIT[kind]}")


class Conversation:
    """The server's end of one PyTorch client's connection; `limit` bounds one request and one answer in bytes."""

    __slots__ = ("_engine", "_limit", "_owed", "_partial", "_rest", "_turn", "_waiter", "greeted", "held", "link")

    def __init__(self, engine: Engine, limit: int, link: object = None) -> None:
        self.link = link
        self._engine = engine
        self._limit = limit
        self.greeted = False
        self._partial: Partial | None = None
        self._rest = b""
        self._owed = 0
        self._waiter: Waiter | None = None
        self._turn: Turn | None = None
        self.held = 0
        """How many bytes of requests are held that could not be carried out yet."""

    @property
    def blocked(self) -> bool:
        """Whether requests wait until the answers so far have been sent: call `receive(b"")` then."""
        return bool(self._rest)

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that this client waits for."""
        return tuple(self._waiter.keys) if self._waiter is not None else ()

    def receive(self, data: bytes, now: float = 0.0) -> bytes:
        """Carry out the requests in what came, and return the answers. Raises BadMessage, and is of no use after."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        replies: list[bytes] = []
        at, end, told, self._owed = 0, len(data), 0, 0
        try:
            while at < end:
                if self._owed > REPLIES_BYTES:
                    self._rest = data[at:]
                    break
                stop = self._quick(data, at, end, replies) if self._partial is None and self.greeted else 0
                at = stop or self._collect(data, at, replies)
                if self._waiter is not None:
                    told = self._wake_self(told, replies)
        except StoreError as error:
            raise BadMessage(str(error)) from error
        if self.held or self._rest or self._partial is not None:
            self.held = len(self._rest) + (self._partial.held if self._partial is not None else 0)
        return replies[0] if len(replies) == 1 else b"".join(replies)

    def answer(self, waiter: Waiter | Watch, answer: Answer) -> bytes:
        """Return what to send when the engine has answered a wait of this connection."""
        self._waiter = None
        if isinstance(answer, Turn):
            self._turn = answer
        return _WAITED

    def end(self, now: float = 0.0) -> None:
        """Forget the connection: drop its wait and its turn."""
        self._engine.end(self)

    # Messages

    def _quick(self, data: bytes, at: int, end: int, replies: list[bytes]) -> int:
        """Carry out one message of a common shape; return where it ends, or 0 where it is another or not all there."""
        op = data[at]
        shape = _SHAPE[op] if op < len(_SHAPE) else 0
        if not shape:
            return 0
        start = at + 9
        if shape == _ONE:
            if end - at < 17 or data[at + 1] != 1 or _U64(data, at + 1)[0] != 1:
                return 0
            start = at + 17
        elif end < start:
            return 0
        stop: int = start + _U64(data, start - 8)[0]
        if stop - start > _KEY_LIMIT:
            _fits("k", stop - start)
        if stop > end:
            return 0
        if self._turn is not None and op != Op.QUEUE_POP:
            return 0  # it ends the turn, once it is whole, and `_collect` knows when
        key = data[start:stop]
        if shape in (_K, _ONE):
            reply = _QUICK[op](self, key)
        elif end - stop < 8:
            return 0
        elif shape == _KQ:
            reply = _QUICK[op](self, key, _I64(data, stop)[0])
            stop += 8
        else:
            start, stop = stop + 8, stop + 8 + _U64(data, stop)[0]
            if stop - start > MAX_VALUE_BYTES:
                _fits("v", stop - start)
            if stop > end:
                return 0
            reply = _QUICK[op](self, key, data[start:stop])
        if reply:
            replies.append(reply)
        return stop

    def _collect(self, data: bytes, at: int, replies: list[bytes]) -> int:
        """Add bytes to the message under way, and carry it out when it is whole; return where they end."""
        if self._partial is None:
            self._partial = Partial(data[at], self._limit)
            at += 1
            if (self._partial.op == Op.VALIDATE) == self.greeted:
                raise BadMessage("a second greeting" if self.greeted else "no greeting")
        at, whole = self._partial.feed(data, at)
        if whole:
            op, fields, self._partial = self._partial.op, self._partial.fields, None
            if self._turn is not None and op != Op.QUEUE_POP:
                self._end_turn()
            reply = _QUICK[op](self, *fields) if op in _SPREAD else _LISTED[op](self, fields)
            if reply:
                replies.append(reply)
        return at

    def _end_turn(self) -> None:
        """A turn ends with the next request; when that is a pop, after it."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self._engine.drop(turn)

    def _wake_self(self, told: int, replies: list[bytes]) -> int:
        """Answer a wait that the client's own request ended before what it asked next; return how far was looked."""
        outbox = self._engine.outbox
        for place in range(told, len(outbox)):
            waiter, answer = outbox[place]
            if waiter is self._waiter:
                del outbox[place]
                replies.append(self.answer(self._waiter, answer))
                break
        return len(outbox)

    # Operations: each returns its reply

    def _validate(self, magic: int) -> bytes:
        if magic != MAGIC:
            raise BadMessage(f"greeting {magic:#x}, not {MAGIC:#x}")
        self.greeted = True
        return b""

    def _set(self, key: bytes, value: bytes) -> bytes:
        self._engine.set(key, value)
        return b""

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        return self._string(self._engine.compare_set(key, expected, desired))

    def _get(self, key: bytes) -> bytes:
        value = self._engine.get(key)
        return self._string(b"" if value is None else value)

    def _add(self, key: bytes, amount: int) -> bytes:
        return _INT(self._engine.add(key, amount))

    def _check(self, key: bytes) -> bytes:
        return b"\0" if self._engine.check((key,)) else b"\1"

    def _check_all(self, keys: list[bytes]) -> bytes:
        return b"\0" if self._engine.check(keys) else b"\1"

    def _wait(self, key: bytes) -> bytes:
        if self._waiter is not None:
            self._forget_wait()
        outcome = self._engine.wait_turn(key, self)
        if isinstance(outcome, Turn):
            self._turn, outcome = outcome, None
        return self._park(outcome)

    def _wait_all(self, keys: list[bytes]) -> bytes:
        if len(keys) == 1:
            return self._wait(keys[0])
        self._forget_wait()
        return self._park(self._engine.wait(keys, self))

    def _barrier(self, key: bytes, size: int) -> bytes:
        self._forget_wait()
        return self._park(self._engine.barrier(key, size, self))

    def _park(self, outcome: Waiter | None) -> bytes:
        self._waiter = outcome
        return b"" if outcome is not None else _WAITED

    def _forget_wait(self) -> None:
        """Withdraw the wait under way; a client has one at most, so a new one takes the place of the old."""
        if self._waiter is not None:
            self._engine.drop(self._waiter)
            self._waiter = None

    def _cancel_wait(self) -> bytes:
        self._forget_wait()
        return _CANCELLED

    def _num_keys(self) -> bytes:
        return _INT(self._engine.num_keys())

    def _delete(self, key: bytes) -> bytes:
        return _INT(self._engine.delete(key))

    def _append(self, key: bytes, value: bytes) -> bytes:
        if len(self._engine.get(key) or b"") + len(value) > self._limit:
            raise BadMessage(f"append would grow a value past {self._limit} bytes, and nobody could read it")
        self._engine.append(key, value)
        return b""

    def _multi_get(self, keys: list[bytes]) -> bytes:
        return self._strings([value or b"" for value in self._engine.multi_get(keys)])

    def _multi_set(self, fields: list[bytes]) -> bytes:
        self._engine.multi_set(list(zip(fields[::2], fields[1::2], strict=True)))
        return b""

    def _ping(self, nonce: int) -> bytes:
        return nonce.to_bytes(4, "little")

    def _queue_push(self, key: bytes, value: bytes) -> bytes:
        self._engine.queue_push(key, value)
        return b""

    def _queue_pop(self, key: bytes) -> bytes:
        length = self._engine.queue_len(key)
        item = self._engine.queue_pop(key)
        if self._turn is not None:
            self._end_turn()
        return _INT(0) if item is None else _INT(length) + self._string(item)

    def _queue_len(self, key: bytes) -> bytes:
        return _INT(self._engine.queue_len(key))

    def _list_keys(self) -> bytes:
        keys = self._engine.list_keys()
        return _INT(len(keys)) + self._strings(keys)

    def _string(self, value: bytes) -> bytes:
        size = len(value)
        if size > self._limit:
            raise BadMessage(f"an answer of {size} bytes, the limit is {self._limit}")
        self._owed += size
        return _LEN(size) + value

    def _strings(self, values: list[bytes]) -> bytes:
        size = sum(map(len, values)) + 8 * len(values)
        if size > self._limit:
            raise BadMessage(f"an answer of {size} bytes, the limit is {self._limit}")
        self._owed += size
        return b"".join([part for value in values for part in (_LEN(len(value)), value)])


_QUICK: dict[int, Callable[..., bytes]] = {
    Op.VALIDATE: Conversation._validate,
    Op.SET: Conversation._set,
    Op.COMPARE_SET: Conversation._compare_set,
    Op.GET: Conversation._get,
    Op.ADD: Conversation._add,
    Op.CHECK: Conversation._check,
    Op.WAIT: Conversation._wait,
    Op.GETNUMKEYS: Conversation._num_keys,
    Op.DELETE_KEY: Conversation._delete,
    Op.APPEND: Conversation._append,
    Op.CANCEL_WAIT: Conversation._cancel_wait,
    Op.PING: Conversation._ping,
    Op.QUEUE_PUSH: Conversation._queue_push,
    Op.QUEUE_POP: Conversation._queue_pop,
    Op.QUEUE_LEN: Conversation._queue_len,
    Op.LIST_KEYS: Conversation._list_keys,
    Op.BARRIER: Conversation._barrier,
}
_LISTED: dict[int, Callable[[Conversation, list[bytes]], bytes]] = {
    Op.CHECK: Conversation._check_all,
    Op.WAIT: Conversation._wait_all,
    Op.MULTI_GET: Conversation._multi_get,
    Op.MULTI_SET: Conversation._multi_set,
}
_SPREAD = _QUICK.keys() - _LISTED.keys()
