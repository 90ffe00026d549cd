"""Values that grow by appends: in parts, without a copy of the whole, and otherwise like any other value."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.server.fake_log import FakeLog
from tests.server.peers import native_peer, torch_peer
from tests.turns import AmpleTurns, use_turns

from rallypoint.core import ops
from rallypoint.core.costs import KEY_BYTES
from rallypoint.core.engine import Engine
from rallypoint.core.entries import AttachSession, OpenSession, SessionRequest
from rallypoint.core.long_value import LONG_BYTES, PART_BYTES, LongValue
from rallypoint.core.records import Swap, size_of
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import State
from rallypoint.errors import LimitExceeded, NotAnInteger, StoreFull
from rallypoint.protocol import native
from rallypoint.protocol.c10d import Opcode
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

FIRST = bytes(LONG_BYTES)


def run(engine: Engine, op: ops.Op, owner: str | None = None) -> Any:
    return engine.execute(op, owner)


def grown(*parts: bytes) -> Engine:
    engine = Engine(long_bytes=LONG_BYTES)
    engine.execute(ops.Set(0, b"/k", FIRST))
    for part in parts:
        engine.execute(ops.Append(0, b"/k", part))
    return engine


def test_an_append_copies_only_what_it_adds() -> None:
    engine = grown(*[b"x"] * 1000, b"y" * PART_BYTES)
    value = engine.execute(ops.Peek(0, b"/k"))
    assert value.parts[0] is FIRST, "the first part was not copied"
    assert [len(part) for part in value.parts] == [LONG_BYTES, 1000, PART_BYTES]
    assert bytes(value) == FIRST + b"x" * 1000 + b"y" * PART_BYTES


def test_the_number_of_parts_is_bounded_by_the_size() -> None:
    value = LongValue(FIRST)
    for _ in range(10_000):
        value.append(b"x" * 100)
    assert len(value) == LONG_BYTES + 1_000_000 and len(value.parts) <= 2 + 1_000_000 // PART_BYTES


def test_a_short_value_stays_plain() -> None:
    engine = Engine(long_bytes=LONG_BYTES)
    engine.execute(ops.Set(0, b"/k", FIRST[:-1]))
    engine.execute(ops.Append(0, b"/k", b"x"))
    assert engine.execute(ops.Peek(0, b"/k")).__class__ is bytes


def test_what_was_read_does_not_change_with_later_appends() -> None:
    engine = grown(b"x")
    engine.watch(b"/", "owner", 1)
    engine.execute(ops.Append(0, b"/k", b"y"))
    (pair,) = engine.take()
    event: Any = pair[1]
    read_values = [
        engine.execute(ops.Get(0, b"/k", 1.0))[0],
        engine.execute(ops.Peek(0, b"/k")),
        engine.execute(ops.MultiGet(0, [b"/k"], 1.0))[0],
        engine.execute(ops.MultiPeek(0, [b"/k"]))[0],
        engine.execute(ops.CompareSet(0, b"/k", b"", b"z")),
        engine.execute(ops.CompareSwap(0, b"/k", b"", b"z")).value,
        event.value,
    ]
    waiter = engine.execute(ops.MultiGet(0, [b"/k", b"/none"], 1.0), "owner")
    engine.execute(ops.Set(0, b"/none", b""))
    answers: list[Any] = [answer for handle, answer in engine.take() if handle is waiter]
    engine.execute(ops.Append(0, b"/k", b"z"))
    for value in (*read_values, answers[0][0]):
        assert value == FIRST + b"xy"


def test_sizes_limits_and_comparisons_are_those_of_any_value() -> None:
    engine = grown(b"x", b"y")
    whole = FIRST + b"xy"
    assert engine.size == 2 + len(whole) + KEY_BYTES
    assert engine.execute(ops.CompareSwap(0, b"/k", whole[:-1] + b"z", b"")) == Swap(False, whole)
    with pytest.raises(NotAnInteger):
        engine.execute(ops.Add(0, b"/k", 1))
    engine.memory.answer_limit = len(whole)
    with pytest.raises(LimitExceeded):
        engine.execute(ops.Append(0, b"/k", b"z"))
    engine.memory.answer_limit, engine.memory.limit = 1 << 62, engine.size
    with pytest.raises(StoreFull):
        engine.execute(ops.Append(0, b"/k", b"z"))
    assert engine.execute(ops.Peek(0, b"/k")) == whole and size_of(LongValue(whole)) == size_of(whole)
    assert engine.execute(ops.CompareSwap(0, b"/k", whole, b"short")).won
    assert engine.size == 2 + 5 + KEY_BYTES
    engine.execute(ops.Delete(0, b"/k"))
    assert engine.size == 0


def test_an_append_ends_a_lease_and_notifies_as_any_write() -> None:
    engine = grown()
    engine.execute(ops.SetLease(0, b"/k", FIRST, 0.0), "owner")
    engine.execute(ops.Append(0, b"/k", b"x"))
    assert engine.lease_owner(b"/k") is None


def test_a_snapshot_contains_the_same_bytes_and_is_restored_in_parts() -> None:
    def state(*ops_: ops.Op) -> State:
        made = State()
        made.apply(OpenSession(b"a" * 16, "a", 0, []))
        for op in ops_:
            made.apply(SessionRequest(1, op))  # type: ignore[arg-type]
        made.outputs.clear()
        return made

    appended = state(ops.Set(1, b"/k", FIRST), ops.Append(2, b"/k", b"x"), ops.CompareSet(3, b"/k", b"?", b""))
    chunks = list(write(appended))
    restored = read(chunks)
    assert list(write(restored)) == chunks
    restored.apply(AttachSession(b"a" * 16, 0, 0))
    again = restored.apply(SessionRequest(1, ops.CompareSet(3, b"/k", b"?", b"")))
    assert again.result == FIRST + b"x", "the kept answer"
    value = restored.namespaces[0].engine.execute(ops.Peek(0, b"/k"))
    assert value.__class__ is LongValue and bytes(value) == FIRST + b"x"


def test_a_number_is_the_same_before_and_after_a_snapshot() -> None:
    """It may be behind more blanks than the first part has, which a restored value has as a whole."""

    def applied(restore: bool) -> object:
        state = State()
        state.apply(OpenSession(b"a" * 16, "a", 0, []))
        state.apply(SessionRequest(1, ops.Set(1, b"/k", b" " * LONG_BYTES)))
        state.apply(SessionRequest(1, ops.Append(2, b"/k", b"5")))
        return (read(list(write(state))) if restore else state).apply(SessionRequest(1, ops.Add(3, b"/k", 1)))

    assert repr(applied(False)) == repr(applied(True))


@pytest.mark.parametrize(
    "answer", [lambda v: v, lambda v: (v,), lambda v: [b"", v, None] * 9, lambda v: Swap(False, v)]
)
def test_a_reply_in_parts_is_the_reply_as_a_whole(answer: Any) -> None:
    value = LongValue(FIRST)
    value.append(b"x")
    reply = native.encode_answer(7, answer(value))
    assert FIRST in getattr(reply, "parts", ()), "not copied"
    whole = bytes(native.encode_answer(7, answer(bytes(value))))
    (one,), (other,) = (list(native.Frames(1 << 30).feed(data)) for data in (bytes(reply), whole))
    assert msgspec.msgpack.decode(one) == msgspec.msgpack.decode(other)


@pytest.mark.parametrize("kept", ["memory", "log"])
def test_clients_of_both_protocols_read_it(kept: str) -> None:
    async def test() -> None:
        server = use_turns(StoreServer(Settings(), FakeLog() if kept == "log" else None), AmpleTurns())
        await server.open([])
        ours, torch = await native_peer(server), await torch_peer(server)
        await ours.asked(ops.Set(1, b"/k", FIRST))
        await ours.asked(ops.Append(2, b"/k", b"x"))
        whole = FIRST + b"x"
        assert await ours.asked(ops.Get(3, b"/k", 1.0)) == [whole]
        assert await ours.asked(ops.MultiPeek(4, [b"/k"] + [b"/none"] * 5000)) == [whole] + [None] * 5000
        torch.asks(Opcode.ADD, b"/n", 1)
        torch.asks(Opcode.GET, b"/k")
        assert await torch.number() == 1 and await torch.string() == whole
        torch.asks(Opcode.MULTI_GET, 2, b"/n", b"/k")
        assert await torch.string() == b"1" and await torch.string() == whole
        await torch.pings()
        await server.close()

    asyncio.run(asyncio.wait_for(test(), 60))
