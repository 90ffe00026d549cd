"""The session upstream that all PyTorch clients of one namespace share at a relay.

It begins with the first client. What the clients ask is merged (`relay/shared_session.py`) and sent at the end of the
turn of the event loop; answers are handed out as they come. The channel that carries the session is opened again
whenever the upstream connection is back: then unanswered requests are repeated, with their numbers, so nothing is done
twice. What is asked meanwhile gathers, and a client that asks too much is not read from.

When the server has been away for longer than its welcome said, or knows the session no more, nobody can say what
became of the requests: every client is disconnected with the reason, and the next one begins a new session.

Rejected: a session for each client. It costs the server more, and a merged request belongs to no single one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from rallypoint import net
from rallypoint.core import ops
from rallypoint.errors import RallypointError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.client import Client, Reply, Round
from rallypoint.relay.absence import Absence
from rallypoint.relay.channel import Channel
from rallypoint.relay.requests import Request
from rallypoint.relay.shared_session import SharedSession
from rallypoint.relay.torch_client import TorchClient, TorchLink
from rallypoint.relay.upstream import Upstream
from rallypoint.store.route import backoff_s

__all__ = ["SESSION_BYTES", "TorchSession"]

log = logging.getLogger("rallypoint.relay")

OPENING_S = 30.0
"""How long clients wait for a server that has never answered; afterwards its welcome says how long."""

UNSENT_BYTES = 1024 * 1024
"""How many bytes may wait for credit in the channel; what is not sent yet can still be merged."""

SESSION_BYTES = 64 * 1024 * 1024
"""How many bytes all clients' unanswered calls may take before those that ask more are not read from."""

MAX_CLOSED = 5
"""How often in a row the server may close the channel before it answers a new request: an old one may be the reason."""


class TorchSession:
    """One session, or one after the other, for the PyTorch clients of one namespace."""

    def __init__(
        self,
        upstream: Upstream,
        run: str = "",
        scope: int = 0,
        round: int | None = None,  # noqa: A002 - as the hello has it
    ) -> None:
        self.held = 0
        """The bytes of all unanswered calls, waits apart, and a few bytes of clients that ask little."""

        self.crowded = False
        """Whether the calls of all clients together take too much."""

        self._upstream = upstream
        self._namespace = Round(run, scope, round)
        self._clients: dict[TorchClient, None] = {}
        self._stalled: dict[TorchLink, None] = {}
        self._absence = Absence(upstream, self._lose)
        self._retry: asyncio.TimerHandle | None = None
        self._channel: Channel | None = None
        self._carrier: _Carrier | None = None
        self._closed = ""  # why, once it is
        self.flushing = False
        """Whether what is asked now will be sent at the end of this turn of the event loop."""

        self._closed_in_a_row = 0
        self._before = (0, 0)  # calls and requests of sessions that were lost
        self._begin()
        upstream.on_connected(self._connect)
        self._unfinished = lambda: self._shared.core.held  # of an answer that is not whole
        upstream.holders.append(self._unfinished)

    def _begin(self) -> None:
        core = Client(net.caller_name(), session=secrets.token_bytes(16), namespace=self._namespace)
        self._shared = SharedSession(core, self._upstream.peer)
        self._welcomed = self._greeting = False
        self._away_s = OPENING_S

    @property
    def asked(self) -> int:
        """How many requests clients have made."""
        return self._before[0] + self._shared.merger.asked

    @property
    def sent(self) -> int:
        """How many requests to the server came of them."""
        return self._before[1] + self._shared.merger.sent

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self._clients)

    def close(self, why: str) -> None:
        """Disconnect all clients, end the session and connect no more."""
        if self._closed:
            return
        self._closed = why
        self._upstream.forget(self._connect)
        self._upstream.holders.remove(self._unfinished)
        channel, shared = self._channel, self._shared
        if channel is not None and not self._greeting:
            for client in self._clients:
                client.end()
            channel.write(shared.send(1 << 62))
            if not shared.merger:  # else items may have to go back: that is done when the grace is over
                channel.write(shared.core.ask(ops.Bye(0)))
        self._lose(why)
        if channel is not None:
            channel.close()

    # What connections call

    def join(self, link: TorchLink) -> TorchClient:
        """Let a client in."""
        client = TorchClient(self._shared.merger, link)
        if self._closed:
            asyncio.get_running_loop().call_soon(link.session_lost, self._closed)
            return client
        self._clients[client] = None
        if not self._welcomed and self._channel is None:
            self._absence.begin(self._away_s)
            self._connect()
        return client

    def leave(self, client: TorchClient) -> None:
        """Let a client go: what it holds is given back."""
        if client in self._clients:
            del self._clients[client]
            client.end()
            self._stalled.pop(client.link, None)
            self.flush_soon()

    def flush_soon(self) -> None:
        """Send what was asked, if anything, at the end of this turn of the event loop."""
        if self.flushing or self._shared.idle:
            return
        self.flushing = True
        channel = self._channel
        if channel is not None and not channel.ended:
            channel.before_flush(self._flush)
        else:
            asyncio.get_running_loop().call_soon(self._flush)

    def delivered(self, request: Request | None) -> None:
        """Note that an item was handed to its client's connection, and is the client's now."""
        self._shared.delivered(request)

    def count(self, more: int) -> None:
        """Count the bytes of calls that came, or were answered."""
        self.held += more
        self.crowded = self.held > SESSION_BYTES
        if self._stalled and self.held <= SESSION_BYTES // 2:
            stalled, self._stalled = self._stalled, {}
            for link in stalled:
                link.read_on()

    def wait_for_room(self, link: TorchLink) -> None:
        """Call `read_on` of a connection when clients may ask more again."""
        self._stalled[link] = None

    # The channel

    def _connect(self) -> None:
        """Open a channel, and say hello, if there is a connection and anybody who needs it."""
        if self._closed or self._channel is not None or not self._upstream.connected:
            return
        if self._welcomed or self._clients:
            self._carrier = _Carrier(self.received, self.closed, self.flush_soon)
            self._channel = self._upstream.open_channel(self._carrier)
            self._greeting = True
            self._channel.write(self._shared.core.greet())

    def received(self, data: bytes) -> None:
        """Take bytes from the server."""
        shared, channel = self._shared, self._channel
        servers = shared.core.servers
        touched: dict[TorchClient, None] = {}
        try:
            for reply in shared.core.receive(data):
                if self._greeting:
                    self._welcome(reply)
                    if shared is not self._shared:
                        return
                else:
                    if self._closed_in_a_row and reply.number >= shared.repeated_to:
                        self._closed_in_a_row = 0
                    for client in shared.take(reply):
                        touched[client] = None
        except BadMessage as error:
            self._hang_up(f"malformed reply from the server: {error}")
        if shared.core.servers is not servers:
            self._learn()
        for client in touched:
            client.link.deliver()
        if channel is not None and channel is self._channel:
            channel.consumed(len(data))
            if not shared.idle:
                self._flush()

    def closed(self, why: str) -> None:
        """Note that the channel is gone; the session is not."""
        self._detach()
        self._greeting = False
        if self._welcomed or self._clients:
            self._absence.begin(self._away_s, why)
        if self._upstream.connected:  # only the channel was closed
            self._closed_in_a_row += 1
            if self._closed_in_a_row >= MAX_CLOSED:
                self._lose(f"the server at {self._upstream.peer} closed the session's channel: {why}")
            else:
                pause_s = backoff_s(self._closed_in_a_row)
                self._retry = asyncio.get_running_loop().call_later(pause_s, self._connect)

    def _detach(self) -> None:
        """Have no channel for now."""
        carrier, self._channel, self._carrier = self._carrier, None, None
        if carrier is not None:
            carrier.received = carrier.closed = carrier.writable = _ignore

    def _hang_up(self, why: str) -> None:
        channel = self._channel
        self.closed(why)
        if channel is not None:
            channel.close()

    def _welcome(self, reply: Reply) -> None:
        """Begin, or go on, or learn that it is over."""
        self._greeting = False
        try:
            self._away_s = self._shared.core.welcome(reply, self._upstream.peer)
        except (BadMessage, RallypointError) as error:
            channel = self._channel
            self._lose(str(error))
            if channel is not None:
                channel.close()
            return
        self._welcomed = True
        self._learn()
        self._absence.over()
        assert self._channel is not None
        self._channel.write(self._shared.repeat(time.monotonic()))

    def _learn(self) -> None:
        """Take in which servers there are, as the one that we are at has said."""
        if self._shared.core.servers:
            self._upstream.learn(self._shared.core.servers)

    def _flush(self) -> None:
        """Send requests, as many as may be under way."""
        self.flushing = False
        channel = self._channel
        if channel is None or self._greeting:
            self._shared.release()
        else:
            channel.write(self._shared.send(UNSENT_BYTES - channel.unsent))

    # The end

    def _lose(self, why: str) -> None:
        """Disconnect all clients; whoever comes next begins a new session."""
        self._absence.forget()
        if self._retry is not None:
            self._retry.cancel()
        self._detach()
        self._closed_in_a_row = 0
        self._before = (self.asked, self.sent)
        clients, self._clients = self._clients, {}
        self._stalled.clear()
        self.held, self.crowded = 0, False
        self._begin()
        if clients:
            log.warning("disconnecting all PyTorch clients (%d): %s", len(clients), why)
        for client in clients:
            client.link.session_lost(why)


@dataclass(slots=True)
class _Carrier:
    """The owner of one channel; what comes by it once the session has another, or none, is nobody's."""

    received: Callable[[bytes], None]
    closed: Callable[[str], None]
    writable: Callable[[], None]


def _ignore(*told: object) -> None:
    pass
