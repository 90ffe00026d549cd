"""A session that many clients share, with a real server: who owns a popped item, and what is repeated."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.fake_server import items_of, value_of, waiting

from rallypoint.core import ops
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native_client import CONFIRM_EVERY, Reply
from rallypoint.relay.torch import shared_session
from rallypoint.relay.torch.client import TorchClient

from .lossy_relays import LossySimulation

Q, N = b"/q", b"/n"


class Shared:
    """One relay with two clients; the test controls its line to the server."""

    def __init__(self) -> None:
        self.world = LossySimulation(0, relays=1)
        (self.relay,) = self.world.relays
        self.world.run_until_quiet()
        self.shared = self.relay.shared
        self.a, self.b = TorchClient(self.shared.merger), TorchClient(self.shared.merger)
        self.world.direct(ops.Push(0, Q, b"item"))

    def exchange(self) -> list[Reply]:
        """Send the queued requests; return the replies, which the test delivers."""
        self.relay._line.receive(self.shared.send(1 << 20))
        data, self.relay._down = self.relay._down, b""
        return self.shared.core.receive(data)

    def take(self, replies: list[Reply]) -> None:
        for reply in replies:
            self.shared.take(reply)

    def hears(self, client: TorchClient) -> list[Any]:
        heard = []
        while (call := client.next_reply()) is not None:
            if call.op.__class__ is ops.TurnPop:
                self.shared.delivered(call.request)
            heard.append(call.answer)
        return heard

    def confirm_much(self) -> None:
        """Let another client send so many requests that the relay has to confirm."""
        for _ in range(2 * CONFIRM_EVERY):
            self.b.ask(ops.Set(0, N, b""), 1)
            self.take(self.exchange())

    @property
    def items(self) -> list[bytes]:
        return items_of(self.world.engine, Q)


def test_an_undelivered_item_is_not_confirmed() -> None:
    table = Shared()
    table.a.ask(ops.TurnPop(0, Q), 1)
    table.take(table.exchange())
    table.confirm_much()
    table.a.end()
    table.exchange()
    assert table.items == [b"item"]


def test_a_delivered_item_is_confirmed_at_once() -> None:
    table = Shared()
    table.a.ask(ops.TurnPop(0, Q), 1)
    table.take(table.exchange())
    assert [drawn.item for drawn in table.hears(table.a)] == [b"item"]
    table.exchange()
    (session,) = table.world.server.state.sessions.values()
    assert not session.taken
    session.end()
    assert table.items == []


def test_the_reply_to_a_call_being_dropped_is_not_confirmed() -> None:
    table = Shared()
    table.a.ask(ops.TurnPop(0, Q), 1)
    replies = table.exchange()
    table.b.ask(ops.Set(0, N, b"1"), 1)  # sent before the `Drop`, and could carry a confirmation
    table.a.end()
    table.take(replies)
    table.exchange()
    assert table.items == [b"item"]


def test_a_reply_is_not_delivered_again_after_a_cut() -> None:
    table = Shared()
    table.a.ask(ops.TurnPop(0, Q), 1)
    table.a.ask(ops.Add(0, N, 1), 1)
    replies = table.exchange()
    table.take(replies)
    table.relay.cut()
    table.world.run_until_quiet()  # the item is still unconfirmed, so the server repeats it
    table.take(replies)
    heard = table.hears(table.a)
    assert [heard[0].item, heard[1]] == [b"item", 1] and len(heard) == 2
    assert value_of(table.world.engine, N) == b"1"


def test_a_wait_whose_answer_crossed_its_repetition_is_not_left_behind() -> None:
    table = Shared()
    table.a.ask(ops.Wait(0, [N, b"/m"], ops.MAX_WAIT_S), 1)
    assert table.exchange() == []
    repetition = table.shared.repeat(0.0)
    table.world.direct(ops.MultiSet(0, [(N, b"1"), (b"/m", b"1")]))
    replies = table.exchange()
    table.world.direct(ops.Delete(0, N))
    table.relay._line.receive(repetition)
    assert waiting(table.world.engine) == 1
    table.take(replies)
    table.exchange()
    assert table.hears(table.a) == [None] and waiting(table.world.engine) == 0


def test_requests_in_flight_are_limited_to_what_the_server_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_session, "MAX_IN_FLIGHT", 10)
    table = Shared()
    table.b.ask(ops.WaitOrTurn(0, b"/never"), 1)  # waits do not count
    for _ in range(25):
        table.a.ask(ops.Append(0, N, b"."), 1)
    for done in (10, 20, 25):
        replies = table.exchange()
        assert value_of(table.world.engine, N) == b"." * done
        assert table.exchange() == []
        table.take(replies)
    assert len(table.hears(table.a)) == 25


def test_a_pop_reply_that_is_not_an_item_is_malformed() -> None:
    table = Shared()
    table.a.ask(ops.TurnPop(0, Q), 1)
    (reply,) = table.exchange()
    with pytest.raises(BadMessage, match="not an item of a queue: 7"):
        table.shared.take(Reply(reply.number, 0, 7))
