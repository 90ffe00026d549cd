"""The upstream session that all PyTorch clients of one namespace share at a relay.

It begins with the first client. The clients' calls are merged (`relay/torch/shared_session.py`) and sent at the end of
each turn of the event loop; answers are delivered as they arrive. After a reconnect, the session gets a new channel and
repeats unanswered requests under their old numbers, so that nothing is executed twice. Calls made during an outage are
queued, and the relay stops reading from a client that reaches its limit.

If the outage exceeds the time that the server's welcome allowed, or the server no longer knows the session, the outcome
of the requests is unknown: every client is disconnected with the reason, and the next client begins a new session.

Rejected: a session for each client. It costs the server more, and a merged request belongs to no single client.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from rallypoint import net
from rallypoint.client.routing.route import backoff_s
from rallypoint.core import ops
from rallypoint.errors import RallypointError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native_client import ClientProtocol, Reply, RoundRef
from rallypoint.relay.torch.client import ReplyReceiver, TorchClient
from rallypoint.relay.torch.requests import MergedRequest
from rallypoint.relay.torch.shared_session import SharedSession
from rallypoint.relay.upstream.channel import UpstreamChannel
from rallypoint.relay.upstream.connection import Upstream
from rallypoint.relay.upstream.outage_timer import UpstreamOutage

__all__ = ["SESSION_BYTES", "TorchSession"]

log = logging.getLogger("rallypoint.relay")

OPENING_S = 30.0
"""How long clients wait for a server that has never answered; later its welcome sets the time."""

UNSENT_BYTES = 1024 * 1024
"""Maximum number of bytes that wait for credit in the channel; unsent requests can still be merged."""

SESSION_BYTES = 64 * 1024 * 1024
"""Limit on the bytes of all unanswered calls; beyond it, clients with new calls are not read from."""

MAX_CLOSED = 5
"""Channels closed in a row, without an answer to a new request, that end the session: an old request may cause it."""


class TorchSession:
    """The current session of the PyTorch clients of one namespace; a lost session is replaced."""

    def __init__(
        self,
        upstream: Upstream,
        run: str = "",
        scope: int = 0,
        round: int | None = None,  # noqa: A002 - as the hello has it
    ) -> None:
        self.held = 0
        """The bytes of all unanswered calls, without waits and without clients that hold only a few bytes."""

        self.is_full = False
        """Whether the calls of all clients together exceed `SESSION_BYTES`."""

        self._upstream = upstream
        self._namespace = RoundRef(run, scope, round)
        self._clients: dict[TorchClient, None] = {}
        self._stalled: dict[ReplyReceiver, None] = {}
        self._outage = UpstreamOutage(upstream, self._end_clients)
        self._retry: asyncio.TimerHandle | None = None
        self._channel: UpstreamChannel | None = None
        self._listener: _ChannelListener | None = None
        self._closed = ""  # the reason, once it is closed
        self.flushing = False
        """Whether a flush is due at the end of this turn of the event loop."""

        self._closed_in_a_row = 0
        self._earlier = (0, 0)  # calls and requests of lost sessions
        self._begin()
        upstream.on_connected(self._connect)
        self._unfinished = lambda: self._shared.core.held  # bytes of an incomplete answer
        upstream.holders.append(self._unfinished)

    def _begin(self) -> None:
        core = ClientProtocol(net.caller_name(), session=secrets.token_bytes(16), namespace=self._namespace)
        self._shared = SharedSession(core, self._upstream.peer)
        self._welcomed = self._greeting = False
        self._away_s = OPENING_S

    @property
    def asked(self) -> int:
        """Number of calls that clients have made."""
        return self._earlier[0] + self._shared.merger.asked

    @property
    def sent(self) -> int:
        """Number of requests sent to the server for them."""
        return self._earlier[1] + self._shared.merger.sent

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self._clients)

    def close(self, why: str) -> None:
        """Disconnect all clients, end the session, and do not reconnect."""
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
            if not shared.merger:  # otherwise the end of the grace period returns items
                channel.write(shared.core.ask(ops.Bye(0)))
        self._end_clients(why)
        if channel is not None:
            channel.close()

    # Called by connections

    def join(self, receiver: ReplyReceiver) -> TorchClient:
        """Add a client."""
        client = TorchClient(self._shared.merger, receiver)
        if self._closed:
            asyncio.get_running_loop().call_soon(receiver.session_lost, self._closed)
            return client
        self._clients[client] = None
        if not self._welcomed and self._channel is None:
            self._outage.begin(self._away_s)
            self._connect()
        return client

    def leave(self, client: TorchClient) -> None:
        """Remove a client and release everything that it holds."""
        if client in self._clients:
            del self._clients[client]
            client.end()
            self._stalled.pop(client.receiver, None)
            self.flush_soon()

    def flush_soon(self) -> None:
        """Send queued requests, if any, at the end of this turn of the event loop."""
        if self.flushing or self._shared.idle:
            return
        self.flushing = True
        channel = self._channel
        if channel is not None and not channel.ended:
            channel.before_flush(self._flush)
        else:
            asyncio.get_running_loop().call_soon(self._flush)

    def delivered(self, request: MergedRequest | None) -> None:
        """Confirm a queue item that was handed to its client's connection."""
        self._shared.delivered(request)

    def count(self, more: int) -> None:
        """Add the bytes of new calls; a negative number for answered ones."""
        self.held += more
        self.is_full = self.held > SESSION_BYTES
        if self._stalled and self.held <= SESSION_BYTES // 2:
            stalled, self._stalled = self._stalled, {}
            for receiver in stalled:
                receiver.read_on()

    def wait_for_room(self, receiver: ReplyReceiver) -> None:
        """Call `read_on` of a connection once the session is no longer full."""
        self._stalled[receiver] = None

    # The channel

    def _connect(self) -> None:
        """Open a channel and send the hello, if there is a connection and a session or client that needs it."""
        if self._closed or self._channel is not None or not self._upstream.connected:
            return
        if self._welcomed or self._clients:
            self._listener = _ChannelListener(self.received, self.closed, self.flush_soon)
            self._channel = self._upstream.open_channel(self._listener)
            self._greeting = True
            self._channel.write(self._shared.core.greet())

    def received(self, data: bytes) -> None:
        """Process bytes from the server."""
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
            self._close_channel(f"malformed reply from the server: {error}")
        if shared.core.servers is not servers:
            self._learn()
        for client in touched:
            client.receiver.deliver()
        if channel is not None and channel is self._channel:
            channel.consumed(len(data))
            if not shared.idle:
                self._flush()

    def closed(self, why: str) -> None:
        """Handle the loss of the channel; the session survives it."""
        self._detach()
        self._greeting = False
        if self._welcomed or self._clients:
            self._outage.begin(self._away_s, why)
        if self._upstream.connected:  # only the channel was closed
            self._closed_in_a_row += 1
            if self._closed_in_a_row >= MAX_CLOSED:
                self._end_clients(f"the server at {self._upstream.peer} closed the session's channel: {why}")
            else:
                pause_s = backoff_s(self._closed_in_a_row)
                self._retry = asyncio.get_running_loop().call_later(pause_s, self._connect)

    def _detach(self) -> None:
        """Forget the channel, and ignore its further events."""
        listener, self._channel, self._listener = self._listener, None, None
        if listener is not None:
            listener.received = listener.closed = listener.writable = _ignore

    def _close_channel(self, why: str) -> None:
        channel = self._channel
        self.closed(why)
        if channel is not None:
            channel.close()

    def _welcome(self, reply: Reply) -> None:
        """Start or resume the session, or end it if the server refuses."""
        self._greeting = False
        try:
            self._away_s = self._shared.core.welcome(reply, self._upstream.peer)
        except (BadMessage, RallypointError) as error:
            channel = self._channel
            self._end_clients(str(error))
            if channel is not None:
                channel.close()
            return
        self._welcomed = True
        self._learn()
        self._outage.end()
        assert self._channel is not None
        self._channel.write(self._shared.repeat(time.monotonic()))

    def _learn(self) -> None:
        """Pass the list of servers, as the connected server reported it, to the upstream."""
        if self._shared.core.servers:
            self._upstream.learn(self._shared.core.servers)

    def _flush(self) -> None:
        """Send requests, up to the limits."""
        self.flushing = False
        channel = self._channel
        if channel is None or self._greeting:
            self._shared.release()
        else:
            channel.write(self._shared.send(UNSENT_BYTES - channel.unsent))

    # The end

    def _end_clients(self, why: str) -> None:
        """Disconnect all clients; the next client begins a new session."""
        self._outage.forget()
        if self._retry is not None:
            self._retry.cancel()
        self._detach()
        self._closed_in_a_row = 0
        self._earlier = (self.asked, self.sent)
        clients, self._clients = self._clients, {}
        self._stalled.clear()
        self.held, self.is_full = 0, False
        self._begin()
        if clients:
            log.warning("disconnecting all PyTorch clients (%d): %s", len(clients), why)
        for client in clients:
            client.receiver.session_lost(why)


@dataclass(slots=True)
class _ChannelListener:
    """The owner of one channel; after `_detach` its events are ignored."""

    received: Callable[[bytes], None]
    closed: Callable[[str], None]
    writable: Callable[[], None]


def _ignore(*event: object) -> None:
    pass
