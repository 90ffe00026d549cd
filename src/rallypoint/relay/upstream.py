"""The one connection of a relay to its server, made again whenever it is lost, for as long as the relay lives.

It searches by the rules of every client (`store/search.py`): several addresses in turn, with pauses that grow from
10 ms to a second and are cut by chance. Who hangs up again and again is called at growing intervals, and one of several
that hangs is left (`relay/hang_watch.py`). Where a server
that knows no channels answers, `why` says so, and the search goes on: it may be replaced by one that does.

A channel lives at most as long as the connection that it was opened on: when that is lost, each owner is told once,
and opens another after the next `on_connected`. Sessions outlive channels, as they do connections.

Rejected: channels that survive a reconnection. What is lost is known only to sessions, which repeat it already.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.protocol import BadMessage
from rallypoint.protocol.channels import ACCEPTED, PREFACE
from rallypoint.protocol.native import STANDBY, read_standby
from rallypoint.relay.channel import Channel, ChannelOwner
from rallypoint.relay.channel_connection import ChannelConnection
from rallypoint.relay.hang_watch import until_lost
from rallypoint.relay.traffic import Traffic
from rallypoint.store.route import Cuts, Look, Route
from rallypoint.store.search import Search, StandsBy
from rallypoint.within import within

__all__ = ["Channel", "ChannelOwner", "Upstream"]

log = logging.getLogger("rallypoint.relay")

PAUSE_S = 0.2
"""The longest pause between two attempts: a whole node waits for this one connection, and the grace of its sessions,
two seconds by default, has begun."""

DOWN_S = 1.0
"""How long a server may be away before the log says so."""

NO_CHANNELS = (
    "a PyTorch server, or a rallypoint server too old for relays, answers there; a relay needs a rallypoint "
    "server of its own version"
)
"""Why a server that takes the preface for a ping cannot be used."""

CLOSED = "the server closed it"


class Upstream:
    """The connection to the server. Call `start` in the event loop, and `close` at the end.

    Of a store in etcd, `name` is how messages call it, and `look` finds its servers, in a thread.
    """

    def __init__(self, endpoints: net.Endpoints, name: str = "", look: Look | None = None) -> None:
        self._route = Route(endpoints, None, name, look)
        self.peer, self.label = self._route.name, self._route.label
        """The server's addresses, or the name of the store, for messages; and the same as a URL."""

        self.why = "not connected yet"
        """Why there is no connection; "" while there is one."""

        self.trouble = ""
        """Why no server leads, where one said that etcd has no quorum."""

        self.since = time.monotonic()
        """Since when there is a connection, or none."""

        self.holders: list[Callable[[], int]] = []
        """Each says how many bytes of the server's answers a session holds before they are whole."""

        self.traffic = Traffic()
        self.connections = 0
        """How many connections have been made."""

        self._cuts = Cuts(self._route)
        self._connection: ChannelConnection | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._troubled: list[Callable[[], None]] = []
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._said = False
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether channels can be opened."""
        return self._connection is not None

    @property
    def address(self) -> str:
        """Where it is connected, or was last: one of the addresses that `peer` lists."""
        return str(self._route.at)

    @property
    def endpoint(self) -> net.Endpoint:
        """The same as a host and a port."""
        return self._route.at

    @property
    def channels(self) -> int:
        """How many channels are open."""
        return 0 if self._connection is None else self._connection.count

    @property
    def held_bytes(self) -> int:
        """How many bytes wait for credit in channels that their owners have closed, or are answers not yet whole."""
        unsent = 0 if self._connection is None else self._connection.unsent
        return unsent + sum(held() for held in self.holders)

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """Connect no more, and end the connection once what was written is sent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._connection is not None:
            self._connection.close()
            await asyncio.sleep(0)

    def open_channel(self, owner: ChannelOwner) -> Channel:
        """Open a channel; only while connected."""
        if self._connection is None:
            raise ConnectionError(f"not connected to {self.peer}: {self.why}")
        return self._connection.open(owner)

    def learn(self, servers: Iterable[str]) -> None:
        """Take the addresses of all servers of the store, as one of them said."""
        self._route.learn(servers)

    def on_trouble(self, callback: Callable[[], None]) -> None:
        """Call back when `trouble` changes, while there is no connection."""
        self._troubled.append(callback)

    def on_connected(self, callback: Callable[[], None]) -> None:
        """Call back at every connection that is made; soon, if there is one already."""
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
        """Return where it is connected, or why not, and what went over it."""
        traffic = self.traffic
        return {
            "upstream": self.label,
            "upstream_address": self.address,
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
        """Have a connection at all times."""
        while True:
            self._lost.clear()
            connection = await self._search()
            if self._closed:
                connection.close()
                return
            self._adopt(connection)
            frames = self.traffic.frames_received
            await until_lost(self._lost.wait(), connection, self._route, self.traffic)
            if self.traffic.frames_received > frames:  # it was of use
                self._cuts.in_a_row = 0
            await asyncio.sleep(self._cuts.count(recovers=True))

    async def _search(self) -> ChannelConnection:
        """Return a connection that the server has accepted, however long that takes."""
        search = Search(self._route, Deadline(float("inf")), resumes=True)
        while True:
            for endpoint, turn in search.round():
                assert isinstance(endpoint, net.Endpoint)
                connection = ChannelConnection(self.traffic, self._ended)
                try:
                    await within(turn.remaining(), _greet(connection, endpoint))
                except (OSError, BadMessage, ValueError, asyncio.TimeoutError) as error:
                    if isinstance(error, StandsBy):
                        search.stands_by(endpoint, error.answer)
                    else:
                        search.failed(endpoint, _why_failed(error))
                else:
                    if not connection.is_closing:
                        self._route.at = endpoint
                        return connection
                    search.failed(endpoint, connection.why or CLOSED)
            if search.wants_look:
                await asyncio.get_running_loop().run_in_executor(None, search.look)
            self.why = search.why
            self._note(search.why if search.no_quorum else "")
            self._say()
            await asyncio.sleep(min(search.pause_s(), PAUSE_S))

    def _adopt(self, connection: ChannelConnection) -> None:
        self._connection = connection
        self.connections += 1
        self.why = self.trouble = ""
        away_s, self.since = time.monotonic() - self.since, time.monotonic()
        if self._said:
            self._said = False
            log.warning("connected to the server at %s after %.1f s", self.address, away_s)
        for callback in list(self._callbacks):
            asyncio.get_running_loop().call_soon(self._call, callback)

    def _call(self, callback: Callable[[], None]) -> None:
        if self.connected and callback in self._callbacks:
            callback()

    def _ended(self, connection: ChannelConnection) -> None:
        """Note that a connection is lost, if it is the one that is used."""
        if connection is self._connection:
            self._connection = None
            self.why = connection.why
            self.since = time.monotonic()
            self._lost.set()

    def _note(self, trouble: str) -> None:
        """Tell those who wait why no server leads, if there is news."""
        changed, self.trouble = bool(trouble) != bool(self.trouble), trouble
        if changed:
            for callback in list(self._troubled):
                callback()

    def _say(self) -> None:
        """Tell the log, once, that there has been no connection for a while."""
        away_s = time.monotonic() - self.since
        if away_s >= DOWN_S and not self._said:
            self._said = True
            log.warning("no connection to the server at %s for %.1f s: %s", self.peer, away_s, self.why)


async def _greet(connection: ChannelConnection, endpoint: net.Endpoint) -> None:
    """Connect to an address; raise where no server with channels answers there."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(lambda: connection, *endpoint)
    try:
        answer = await connection.greeting
        if answer == PREFACE[-len(ACCEPTED) :]:
            raise BadMessage(NO_CHANNELS)
        if answer.startswith(STANDBY) and (told := read_standby(answer)) is not None:
            raise StandsBy(told)
        if answer and answer != ACCEPTED:
            raise BadMessage(f"not a store: it answered {answer!r}")
        if not answer or transport.is_closing():
            raise ConnectionError(connection.why or CLOSED)
    except BaseException:
        transport.abort()
        raise


def _why_failed(error: Exception) -> str:
    """Say why a connection failed; where a name has several addresses, asyncio joins their errors into one text."""
    numbers = set(re.findall(r"\[Errno (\d+)\]", str(error)))
    return net.why_failed(OSError(int(*numbers), str(error)) if len(numbers) == 1 else error) or "no answer"
