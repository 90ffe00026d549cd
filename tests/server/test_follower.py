"""How a server that stands by notices that the leader is gone, and does not think so too early."""

from __future__ import annotations

import asyncio

from tests.wire import AMPLE_S

from rallypoint import net
from rallypoint.protocol import channels
from rallypoint.protocol.native import STANDBY
from rallypoint.server.follower import leader_gone


class Answering:
    """A server that answers every preface with the same bytes, and hangs up where it is told to."""

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
    """Return whether a leader that answers so is still thought to be there after so many answers; then it goes."""

    async def body() -> bool:
        server = Answering(answer, hangs_up)
        gone = asyncio.ensure_future(leader_gone(await server.open()))
        for _ in range(times):
            await asyncio.wait_for(server.answered.acquire(), AMPLE_S)
        there = not gone.done()
        server.close()
        await asyncio.wait_for(gone, AMPLE_S)
        return there

    return asyncio.run(body())


def test_a_leader_is_gone_when_its_address_refuses() -> None:
    assert watched(channels.ACCEPTED, hangs_up=False, times=1)


def test_a_leader_that_hangs_up_is_asked_again() -> None:
    assert watched(channels.ACCEPTED, hangs_up=True, times=5)


def test_a_leader_that_does_not_serve_yet_is_not_gone() -> None:
    assert watched(STANDBY, hangs_up=True, times=5)


def test_another_program_at_the_address_is_no_leader() -> None:
    async def body() -> None:
        server = Answering(b"HTTP", hangs_up=False)
        await asyncio.wait_for(leader_gone(await server.open()), AMPLE_S)
        server.close()

    asyncio.run(body())
