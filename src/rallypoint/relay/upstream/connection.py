"""The connection of a relay to its server, which reconnects whenever it is lost, as long as the relay runs.

It searches by the rules of every client (`client/routing/search.py`): it tries several addresses in turn, with jittered
backoff from 10 ms to `PAUSE_S`. A server that keeps closing the connection is tried at growing intervals, and one of
several servers that hangs is abandoned (`relay/upstream/hang_detector.py`). If a server without channels answers, `why`
says so, and the search continues: the server may be replaced by one with channels.

A channel ends at the latest with its connection. Each owner is then notified once, and opens another channel after the
next `on_connected`. Sessions outlive channels, as they outlive connections.

Rejected: channels that survive a reconnect. Only sessions know what was lost, and they repeat it already.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from rallypoint import net
from rallypoint.client.async_connection import why_failed
from rallypoint.client.routing.route import CutCounter, Look, Route
from rallypoint.client.routing.search import Search
from rallypoint.client.routing.server_replies import IsStandby
from rallypoint.deadline import Deadline
from rallypoint.in_thread import in_thread
from rallypoint.protocol import BadMessage, challenge
from rallypoint.protocol.challenge import ClientGreeting, Denied
from rallypoint.protocol.channels import ACCEPTED, PREFACE
from rallypoint.relay.upstream.channel import ChannelOwner, UpstreamChannel
from rallypoint.relay.upstream.channel_connection import ChannelConnection
from rallypoint.relay.upstream.hang_detector import until_lost
from rallypoint.relay.upstream.traffic import Traffic
from rallypoint.security.client_security import ClientSecurity
from rallypoint.within import within

__all__ = ["UpstreamChannel", "ChannelOwner", "Upstream"]

log = logging.getLogger("rallypoint.relay")

PAUSE_S = 0.2
"""Maximum pause between two attempts: a whole node waits for this connection, and the grace period of its sessions, two
seconds by default, is running."""

SILENT_S = 2.0
"""Timeout for accepting a connection. Accepting needs no commit, and meanwhile another server may become leader."""

DOWN_S = 1.0
"""How long an outage lasts before it is logged."""

NO_CHANNELS = (
    "a PyTorch server, or a rallypoint server too old for relays, is running there; a relay needs a rallypoint "
    "server of its own version"
)
"""The reason to reject a server that treats the preface as a ping."""

CLOSED = "the server closed it"

DENIED_S = 5.0
"""Pause after the server and the relay could not authenticate; somebody must change a setting."""


class Upstream:
    """The connection to the server. Call `start` in the event loop, and `close` at the end.

    For a store in etcd, `name` is its name in messages, and `look` finds its servers, in a thread.
    """

    def __init__(
        self,
        endpoints: net.Endpoints,
        name: str = "",
        look: Look | None = None,
        security: ClientSecurity | None = None,
    ) -> None:
        self.route = Route(endpoints, None, name, look, security)
        """The way to the server: the current or last address, one of those in `peer`, and how the relay connects."""

        self.peer, self.label = self.route.name, self.route.label
        """The server's addresses or the name of the store, for messages; and the same as a URL."""

        self.why = "not connected yet"
        """Why there is no connection; "" while there is one."""

        self.trouble = ""
        """Why there is no leader, if a server reported that etcd has no quorum."""

        self.since = time.monotonic()
        """When the connection was made or lost."""

        self.holders: list[Callable[[], int]] = []
        """Each returns the number of bytes of incomplete answers that a session holds."""

        self.traffic = Traffic()
        self.connections = 0
        """Number of connections made so far."""

        self._cuts = CutCounter(self.route)
        self._connection: ChannelConnection | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._troubled: list[Callable[[], None]] = []
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._logged = False
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether channels can be opened."""
        return self._connection is not None

    @property
    def channels(self) -> int:
        """Number of open channels."""
        return 0 if self._connection is None else self._connection.count

    @property
    def held_bytes(self) -> int:
        """Number of bytes that wait for credit in closed channels, and of incomplete answers."""
        unsent = 0 if self._connection is None else self._connection.unsent
        return unsent + sum(held() for held in self.holders)

    def start(self) -> None:
        """Start to connect."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """Stop reconnecting, and close the connection after all written bytes are sent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._connection is not None:
            self._connection.close()
            await asyncio.sleep(0)

    def open_channel(self, owner: ChannelOwner) -> UpstreamChannel:
        """Open a channel; raise ConnectionError if not connected."""
        if self._connection is None:
            raise ConnectionError(f"not connected to {self.peer}: {self.why}")
        return self._connection.open(owner)

    def learn(self, servers: Iterable[str]) -> None:
        """Update the addresses of the store's servers, as reported by one of them."""
        self.route.update_servers(servers)

    def on_trouble(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `trouble` appears or ends while there is no connection."""
        self._troubled.append(callback)

    def on_connected(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every connect; if already connected, soon."""
        self._callbacks.append(callback)
        if self.connected:
            asyncio.get_running_loop().call_soon(self._call, callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Undo `on_connected`."""
        self._callbacks.remove(callback)

    def forget_trouble(self, callback: Callable[[], None]) -> None:
        """Undo `on_trouble`."""
        self._troubled.remove(callback)

    def statistics(self) -> dict[str, Any]:
        """Return the state of the connection and its traffic."""
        traffic = self.traffic
        return {
            "upstream": self.label,
            "upstream_address": str(self.route.at),
            "upstream_connected": self.connected,
            "upstream_why": self.why,
            "upstream_since_s": round(time.monotonic() - self.since, 1),
            "upstream_connections": self.connections,
            "channels": self.channels,
            "channels_opened": traffic.channels_opened,
            "frames_sent": traffic.frames_sent,
            "frames_received": traffic.frames_received,
            "bytes_sent": traffic.bytes_sent,
            "bytes_received": traffic.bytes_received,
        }

    # Inside

    async def _keep(self) -> None:
        """Connect, and reconnect whenever the connection is lost."""
        while True:
            self._lost.clear()
            connection = await self._search()
            if self._closed:
                connection.close()
                return
            self._adopt(connection)
            frames = self.traffic.frames_received
            await until_lost(self._lost.wait(), connection, self.route, self.traffic)
            if self.traffic.frames_received > frames:  # the connection worked
                self._cuts.in_a_row = 0
            await asyncio.sleep(self._cuts.count(recovers=True))

    async def _search(self) -> ChannelConnection:
        """Try until a server accepts a connection, and return it."""
        search = Search(self.route, Deadline(float("inf")), resumes=True, longest_s=SILENT_S)
        while True:
            denied = False
            for endpoint, turn in search.round():
                assert isinstance(endpoint, net.Endpoint)
                greeting = self.route.security.new_greeting(PREFACE)
                connection = ChannelConnection(self.traffic, self._ended, greeting)
                try:
                    await within(turn.remaining(), self._greet(connection, endpoint, greeting))
                except (OSError, BadMessage, Denied, ValueError, asyncio.TimeoutError) as error:
                    failed = self.route.security.failure(error, str(endpoint))
                    denied = denied or failed is not None
                    if isinstance(error, IsStandby):
                        search.stands_by(endpoint, error.answer)
                    else:
                        search.failed(endpoint, why_failed(error) if failed is None else failed.why)
                else:
                    if not connection.is_closing:
                        self.route.at = endpoint
                        return connection
                    search.failed(endpoint, connection.why or CLOSED)
            if search.wants_look:
                await in_thread(search.look)
            self.why = search.explain_failure
            self._note(search.explain_failure if search.no_quorum else "")
            self._log_outage()
            await asyncio.sleep(DENIED_S if denied else min(search.pause_s(), PAUSE_S))

    async def _greet(self, connection: ChannelConnection, endpoint: net.Endpoint, greeting: ClientGreeting) -> None:
        """Connect to an address; raise if no server with channels answers."""
        transport, _ = await self.route.open(endpoint, lambda: connection)
        try:
            answer = await connection.greeted
            if answer in (PREFACE[-len(ACCEPTED) :], challenge.NO_CHANNELS):
                raise BadMessage(NO_CHANNELS)
            if greeting.standby is not None:
                raise IsStandby(greeting.standby)
            if answer:
                greeting.require(ACCEPTED)
            if not answer or transport.is_closing():
                raise ConnectionError(connection.why or CLOSED)
        except BaseException:
            transport.abort()
            raise

    def _adopt(self, connection: ChannelConnection) -> None:
        self._connection = connection
        self.connections += 1
        self.why = self.trouble = ""
        away_s, self.since = time.monotonic() - self.since, time.monotonic()
        if self._logged:
            self._logged = False
            log.warning("connected to the server at %s after %.1f s", self.route.at, away_s)
        for callback in list(self._callbacks):
            asyncio.get_running_loop().call_soon(self._call, callback)

    def _call(self, callback: Callable[[], None]) -> None:
        if self.connected and callback in self._callbacks:
            callback()

    def _ended(self, connection: ChannelConnection) -> None:
        """Handle the loss of a connection, if it is the current one."""
        if connection is self._connection:
            self._connection = None
            self.why = connection.why
            self.since = time.monotonic()
            self._lost.set()

    def _note(self, trouble: str) -> None:
        """Set `trouble`, and call back if it appears or ends."""
        changed, self.trouble = bool(trouble) != bool(self.trouble), trouble
        if changed:
            for callback in list(self._troubled):
                callback()

    def _log_outage(self) -> None:
        """Log an outage, once, after `DOWN_S`."""
        away_s = time.monotonic() - self.since
        if away_s >= DOWN_S and not self._logged:
            self._logged = True
            log.warning("no connection to the server at %s for %.1f s: %s", self.peer, away_s, self.why)
