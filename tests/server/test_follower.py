"""How a standby notices that the leader is gone, and not too early."""

from __future__ import annotations

import asyncio

import pytest
from tests.raw_peer import AMPLE_S, until

import rallypoint
from rallypoint import net
from rallypoint.in_thread import in_thread
from rallypoint.protocol import channels
from rallypoint.protocol.native import STANDBY
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import OPEN, Credentials, new_token
from rallypoint.server.replication.log_follower import leader_gone

OPEN_CLIENT = ClientSecurity(OPEN)
WITHOUT_PROBE = "the leader is lost only when its heartbeat in etcd stops"


class Answering:
    """A server that answers every preface with the same bytes, and then may disconnect."""

    def __init__(self, answer: bytes, hangs_up: bool) -> None:
        self._answer, self._hangs_up = answer, hangs_up
        self._writers: list[asyncio.StreamWriter] = []
        self.answered = asyncio.Semaphore(0)

    async def open(self) -> net.Endpoint:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return net.Endpoint("127.0.0.1", self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        await reader.readexactly(len(channels.PREFACE))
        writer.write(self._answer)
        if self._hangs_up:
            writer.close()
        self.answered.release()


def watched(answer: bytes, hangs_up: bool, times: int) -> bool:
    """Return whether a leader with these replies still counts as present after `times` of them; then stop it."""

    async def body() -> bool:
        server = Answering(answer, hangs_up)
        gone = asyncio.ensure_future(leader_gone(await server.open(), OPEN_CLIENT))
        for _ in range(times):
            await asyncio.wait_for(server.answered.acquire(), AMPLE_S)
        there = not gone.done()
        server.close()
        await asyncio.wait_for(gone, AMPLE_S)
        return there

    return asyncio.run(body())


def test_a_leader_is_gone_when_its_address_refuses() -> None:
    assert watched(channels.ACCEPTED, hangs_up=False, times=1)


def test_a_leader_that_closes_the_connection_is_probed_again() -> None:
    assert watched(channels.ACCEPTED, hangs_up=True, times=5)


def test_a_leader_that_does_not_serve_yet_is_not_gone() -> None:
    assert watched(STANDBY, hangs_up=True, times=5)


def test_another_program_at_the_leaders_address_means_it_is_gone() -> None:
    async def body() -> None:
        server = Answering(b"HTTP", hangs_up=False)
        await asyncio.wait_for(leader_gone(await server.open(), OPEN_CLIENT), AMPLE_S)
        server.close()

    asyncio.run(body())


def test_a_leader_with_a_token_is_gone_when_its_address_refuses() -> None:
    known = Credentials(token=new_token())

    async def body() -> None:
        with rallypoint.Server(credentials=known) as server:
            gone = asyncio.ensure_future(leader_gone(net.Endpoint("127.0.0.1", server.port), ClientSecurity(known)))
            await asyncio.to_thread(until, lambda: speaks_channels(server), bool)
            assert not gone.done()
            await asyncio.to_thread(server.close)
            await asyncio.wait_for(gone, AMPLE_S)

    asyncio.run(body())


def speaks_channels(server: rallypoint.Server) -> bool:
    return any(client["speaks"] == "rallypoint channels" for client in server.statistics()["clients"])


def test_a_leader_with_another_token_is_not_gone(caplog: pytest.LogCaptureFixture) -> None:
    """It would be deposed again and again, and so would this server: the heartbeat must tell."""

    async def body() -> None:
        with rallypoint.Server(credentials=Credentials(token=new_token())) as server:
            other = ClientSecurity(Credentials(token=new_token()))
            gone = asyncio.ensure_future(leader_gone(net.Endpoint("127.0.0.1", server.port), other))
            told = await in_thread(lambda: until(lambda: caplog.text, lambda text: WITHOUT_PROBE in text))
        assert not gone.done() and "the server has another token" in told
        gone.cancel()

    asyncio.run(asyncio.wait_for(body(), AMPLE_S))
