"""PyTorch's TCPStore protocol: bytes to operations, answers to bytes. Incremental, bounded, without I/O.

A message is an opcode byte and its fields, little-endian: `k` a key and `v` a value (a 64-bit length, then bytes), `q`
a 64-bit integer, `I` a 32-bit integer, `*` a 64-bit count of the groups that follow. There are no frames, request
numbers or error replies: a bad message raises `BadMessage`, and the host closes that connection.

`Decoder` reads one client's bytes in pieces of any size. Complete messages of a common shape take a short path; all
others are collected field by field in a `Partial`, so that no byte is examined twice, however slowly it arrives. No
operation is returned before its message is complete. `ENCODE_ANSWER` encodes the reply. The client's end needs no
state: `encode` encodes a request, and the caller knows which answer to expect.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

from rallypoint.core import ops
from rallypoint.core.limits import MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES
from rallypoint.core.records import PopResult
from rallypoint.protocol import BadMessage

__all__ = [
    "Decoder",
    "Opcode",
    "Partial",
    "MAGIC",
    "ENCODE_ANSWER",
    "WAITED",
    "encode",
    "encode_item_head",
    "encode_items",
    "encode_list_head",
    "hello",
]

MAGIC = 0x3C85F7CE
"""The first number a client sends, which tells it from a stray connection."""

FIELD_BYTES = 64
"""The cost of a field of a partial message besides its own bytes; accurate enough for a limit."""

_U64 = struct.Struct("<Q").unpack_from
_I64 = struct.Struct("<q").unpack_from
_LEN = struct.Struct("<Q").pack
_INT = struct.Struct("<q").pack
_ZERO = _LEN(0)


class Opcode:
    """The opcodes."""

    VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, GETNUMKEYS, DELETE_KEY, APPEND = range(10)
    MULTI_GET, MULTI_SET, CANCEL_WAIT, PING, QUEUE_PUSH, QUEUE_POP, QUEUE_LEN, LIST_KEYS, BARRIER = range(10, 19)


_FIELDS = {
    Opcode.VALIDATE: "I",
    Opcode.SET: "kv",
    Opcode.COMPARE_SET: "kvv",
    Opcode.GET: "k",
    Opcode.ADD: "kq",
    Opcode.CHECK: "*k",
    Opcode.WAIT: "*k",
    Opcode.GETNUMKEYS: "",
    Opcode.DELETE_KEY: "k",
    Opcode.APPEND: "kv",
    Opcode.MULTI_GET: "*k",
    Opcode.MULTI_SET: "*kv",
    Opcode.CANCEL_WAIT: "",
    Opcode.PING: "I",
    Opcode.QUEUE_PUSH: "kv",
    Opcode.QUEUE_POP: "k",
    Opcode.QUEUE_LEN: "k",
    Opcode.LIST_KEYS: "",
    Opcode.BARRIER: "kq",
}
_WIDTH = {"I": 4, "q": 8, "*": 8}
_KEY_LIMIT = MAX_KEY_BYTES + 1  # PyTorch's client prefixes every key with `/`
_LIMIT = {"k": _KEY_LIMIT, "v": MAX_VALUE_BYTES}
_K, _KV, _KQ, _ONE, _KVV = 1, 2, 3, 4, 5  # common shapes: a key; and a value; a number; one key in a list; two values
_SHAPE = bytes(
    {"k": _K, "kv": _KV, "kq": _KQ, "kvv": _KVV}.get(fields, _ONE if op in (Opcode.CHECK, Opcode.WAIT) else 0)
    for op, fields in _FIELDS.items()
)

WAITED = b"\0"
"""The reply to any wait that has ended."""


def encode(op: int, *fields: bytes | int) -> bytes:
    """Encode a request. A list of keys is passed as its count and then the keys."""
    parts = [bytes((op,))]
    for field in fields:
        if isinstance(field, int):
            parts.append(field.to_bytes(4, "little") if op in (Opcode.VALIDATE, Opcode.PING) else _INT(field))
        else:
            parts += (_LEN(len(field)), field)
    return b"".join(parts)


def hello(nonce: int) -> bytes:
    """Encode the first bytes of a connection: the magic number, and a ping whose answer identifies the server."""
    return encode(Opcode.VALIDATE, MAGIC) + encode(Opcode.PING, nonce)


class Partial:
    """One message, collected field by field as its bytes arrive."""

    __slots__ = ("_buffer", "_kinds", "_limit", "_need", "_repeat", "_total", "fields", "op")

    def __init__(self, op: int, limit: int) -> None:
        if op >= len(_FIELDS):
            raise BadMessage(f"unknown opcode {op}")
        self.op = op
        self.fields: list[Any] = []
        self._kinds = _FIELDS[op]
        self._repeat = -1 if self._kinds.startswith("*") else 1
        self._buffer = bytearray()
        self._need = -1  # the length of the current string, or -1 until it is known
        self._total = 1
        self._limit = limit

    @property
    def held(self) -> int:
        """How many bytes the partial message takes so far."""
        return self._total + FIELD_BYTES * len(self.fields)

    def feed(self, data: bytes, at: int) -> tuple[int, bool]:
        """Take bytes from `at` on; return where they end, and whether the message is complete."""
        while not self._whole():
            if self._repeat >= 0 and self._need < 0 and not self._buffer and "q" not in self._kinds:
                at = self._take_strings(data, at)
                if self._whole():
                    break
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

    def _take_strings(self, data: bytes, at: int) -> int:
        """Take the complete strings within their limits; return where they end."""
        start, end, room = at, len(data), self._limit - self._total
        limits, append = cycle([_LIMIT.get(kind, -1) for kind in self._kinds]), self.fields.append
        left = self._repeat * len(self._kinds) - len(self.fields)
        for limit in islice(limits, self._position(), self._position() + left):
            if at + 8 > end:
                break
            size = _U64(data, at)[0]
            stop = at + 8 + size
            if stop > end or size > limit or stop - start > room:
                break
            append(data[at + 8 : stop])
            at = stop
        self._total += at - start
        return at

    def _position(self) -> int:
        return len(self.fields) % len(self._kinds)

    def _whole(self) -> bool:
        return self._repeat >= 0 and self._need < 0 and len(self.fields) == self._repeat * len(self._kinds)

    def _field(self, kind: str) -> None:
        """Make a field, or the length of one, from the collected bytes."""
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


class Decoder:
    """Decodes the requests of one client; `limit` bounds one request in bytes."""

    __slots__ = ("_limit", "_partial", "greeted", "held")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._partial: Partial | None = None
        self.greeted = False
        self.held = 0
        """How many bytes of an incomplete message are held."""

    def read(self, data: bytes, at: int) -> tuple[ops.Op | None, int]:
        """Decode one operation from `at` on; return it and its end, or None if all bytes were taken and more must come.

        Raises BadMessage, and is unusable after that.
        """
        if self._partial is None and self.greeted:
            end, opcode = len(data), data[at]
            shape = _SHAPE[opcode] if opcode < len(_SHAPE) else 0
            start = at + 17 if shape == _ONE else at + 9
            if shape and start <= end and (shape != _ONE or (data[at + 1] == 1 and _U64(data, at + 1)[0] == 1)):
                stop: int = start + _U64(data, start - 8)[0]
                if stop - start > _KEY_LIMIT:
                    _fits("k", stop - start)
                if shape in (_K, _ONE):
                    if stop <= end:
                        return _OF_KEY[opcode](0, data[start:stop]), stop
                elif stop + 8 <= end:
                    key = data[start:stop]
                    if shape == _KQ:
                        return _OF_KEY[opcode](0, key, _I64(data, stop)[0]), stop + 8
                    start, stop = stop + 8, stop + 8 + _U64(data, stop)[0]
                    if stop - start > MAX_VALUE_BYTES:
                        _fits("v", stop - start)
                    if shape == _KV:
                        if stop <= end:
                            return _OF_KEY[opcode](0, key, data[start:stop]), stop
                    elif stop + 8 <= end:
                        value, start, stop = data[start:stop], stop + 8, stop + 8 + _U64(data, stop)[0]
                        if stop - start > MAX_VALUE_BYTES:
                            _fits("v", stop - start)
                        if stop <= end:
                            return _OF_KEY[opcode](0, key, value, data[start:stop]), stop
        return self._collect(data, at)

    def _collect(self, data: bytes, at: int) -> tuple[ops.Op | None, int]:
        """Add bytes to the partial message, and decode it once complete."""
        while at < len(data):
            if self._partial is None:
                self._partial = Partial(data[at], self._limit)
                at += 1
                if (self._partial.op == Opcode.VALIDATE) == self.greeted:
                    raise BadMessage("a second greeting" if self.greeted else "no greeting")
            at, whole = self._partial.feed(data, at)
            self.held = 0 if whole else self._partial.held
            if whole:
                opcode, fields, self._partial = self._partial.op, self._partial.fields, None
                if opcode != Opcode.VALIDATE:
                    return self._make(opcode, fields), at
                if fields[0] != MAGIC:
                    raise BadMessage(f"greeting {fields[0]:#x}, not {MAGIC:#x}")
                self.greeted = True
        return None, at

    def _make(self, opcode: int, fields: list[Any]) -> ops.Op:
        if opcode in _OF_LIST:
            return _OF_LIST[opcode](fields)
        return _OF_KEY[opcode](0, *fields) if opcode in _OF_KEY else _OF_OTHERS[opcode](*fields)


_OF_KEY: dict[int, Callable[..., ops.Op]] = {
    Opcode.SET: ops.Set,
    Opcode.COMPARE_SET: ops.CompareSet,
    Opcode.GET: ops.Peek,
    Opcode.ADD: ops.Add,
    Opcode.CHECK: lambda number, key: ops.Check(0, [key]),
    Opcode.WAIT: ops.WaitOrTurn,
    Opcode.DELETE_KEY: ops.Delete,
    Opcode.APPEND: ops.Append,
    Opcode.QUEUE_PUSH: ops.Push,
    Opcode.QUEUE_POP: ops.TurnPop,
    Opcode.QUEUE_LEN: ops.QueueLen,
    Opcode.BARRIER: ops.Arrive,
}
_OF_LIST: dict[int, Callable[[list[bytes]], ops.Op]] = {
    Opcode.CHECK: lambda keys: ops.Check(0, keys),
    Opcode.WAIT: lambda keys: ops.WaitOrTurn(0, keys[0]) if len(keys) == 1 else ops.Wait(0, keys, ops.MAX_WAIT_S),
    Opcode.MULTI_GET: lambda keys: ops.MultiPeek(0, keys),
    Opcode.MULTI_SET: lambda fields: ops.MultiSet(0, list(zip(fields[::2], fields[1::2], strict=True))),
}
_OF_OTHERS: dict[int, Callable[..., ops.Op]] = {
    Opcode.GETNUMKEYS: lambda: ops.Count(0, b""),
    Opcode.CANCEL_WAIT: lambda: ops.Drop(0, 0),
    Opcode.PING: ops.Ping,
    Opcode.LIST_KEYS: lambda: ops.List(0, b""),
}


def _nothing(op: Any, answer: Any, limit: int) -> bytes:
    return b""


def _integer(op: Any, answer: Any, limit: int) -> bytes:
    return _INT(answer)


def _waited(op: Any, answer: Any, limit: int) -> bytes:
    return WAITED


def _checked(op: Any, answer: Any, limit: int) -> bytes:
    return b"\0" if answer else b"\1"


def _value(op: Any, answer: bytes | None, limit: int) -> bytes:
    if answer is None:
        return _ZERO
    if len(answer) > limit:
        raise BadMessage(f"an answer of {len(answer)} bytes, the limit is {limit}")
    return _LEN(len(answer)) + answer


def _values(op: Any, answer: Sequence[bytes | None], limit: int) -> bytes:
    size = sum(map(len, filter(None, answer))) + 8 * len(answer)
    if size > limit:
        raise BadMessage(f"an answer of {size} bytes, the limit is {limit}")
    return encode_items(answer)


def encode_items(items: Sequence[bytes | None]) -> bytes:
    """Encode a slice of a list of keys or values; a missing value is empty."""
    return b"".join([part for item in items for part in ((_LEN(len(item)), item) if item else (_ZERO,))])


def encode_item_head(size: int) -> bytes:
    """Encode what precedes the bytes of an item."""
    return _LEN(size)


def encode_list_head(op: ops.Op, length: int) -> bytes:
    """Encode the first part of a reply that is a list of `length` items."""
    return _INT(length) if isinstance(op, ops.List) else b""


def _keys(op: Any, answer: list[bytes], limit: int) -> bytes:
    return _INT(len(answer)) + _values(op, answer, limit)


def _drawn(op: Any, answer: PopResult, limit: int) -> bytes:
    return _INT(0) if answer.item is None else _INT(answer.length) + _value(op, answer.item, limit)


ENCODE_ANSWER: dict[type[ops.Op], Callable[[Any, Any, int], bytes]] = {
    ops.Set: _nothing,
    ops.Append: _nothing,
    ops.MultiSet: _nothing,
    ops.Push: _nothing,
    ops.CompareSet: _value,
    ops.Peek: _value,
    ops.MultiPeek: _values,
    ops.Add: _integer,
    ops.Check: _checked,
    ops.WaitOrTurn: _waited,
    ops.Wait: _waited,
    ops.Arrive: _waited,
    ops.Drop: lambda op, answer, limit: b"\1",
    ops.Count: _integer,
    ops.Delete: _integer,
    ops.QueueLen: _integer,
    ops.TurnPop: _drawn,
    ops.List: _keys,
    ops.Ping: lambda op, answer, limit: op.number.to_bytes(4, "little"),
}
"""The encoder of each operation's reply: operation, answer and size limit; raises BadMessage above the limit."""
