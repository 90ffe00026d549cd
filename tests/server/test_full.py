"""A server at its limit of connections or sessions: new ones are refused, and existing ones are not affected."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.raw_peer import SERVE, RawPeer, ServerProcess, http, read_line, script, until

import rallypoint
from rallypoint import aio
from rallypoint.protocol.native import PREFACE
from rallypoint.server.event_loop import FILES_KEPT
from rallypoint.server.http_site import LISTED
from rallypoint.server.server import StoreServer
from rallypoint.server.settings import Settings

GET = "GET {} HTTP/1.0\r\n\r\n"


@pytest.mark.parametrize("uvloop", [True, False])
def test_a_connection_over_the_limit_is_refused_and_logged(tmp_path: Path, uvloop: bool) -> None:
    with ServerProcess(tmp_path, uvloop, max_connections=3) as server:
        peers = [server.peer() for _ in range(3)]
        for _ in range(5):
            with server.peer(greet=False) as late:
                try:
                    late.send(PREFACE)
                except ConnectionError:
                    pass
                assert late.rest() == b""
            for peer in peers:
                peer.work(1)
        log = until(server.log, lambda log: counted(log) == 5)
        assert "the limit of 3 is reached; allow more with --max-connections" in log
        peers.pop().close()
        seen = until(lambda: fetch(server), lambda page: b"HTTP/1.1 200" in page)  # there is room again
        assert b"5 connections refused so far" in seen
        for peer in peers:
            peer.work(1)
            peer.close()


def counted(log: str) -> int:
    return sum(map(int, re.findall(r"refused (\d+) connections", log)))


def fetch(server: ServerProcess) -> bytes:
    try:
        return http(server.address, GET.format("/").encode())
    except ConnectionError:
        return b""


@pytest.mark.parametrize("asked", [None, 10**9])
def test_connections_are_limited_by_the_open_files(asked: int | None) -> None:
    few = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({FILES_KEPT + 10}, {FILES_KEPT + 10}))\n"
    settings = json.dumps({"port": 0, "max_connections": asked})
    with script(few + SERVE, settings, stderr=subprocess.DEVNULL) as child, ExitStack() as stack:
        host, port = read_line(child).removeprefix("tcp://").split(":")
        peers = [stack.enter_context(RawPeer((host, int(port)))) for _ in range(10)]
        with RawPeer((host, int(port)), greet=False) as late:
            assert late.rest() == b""
        for peer in peers:
            peer.work(1)


def test_a_session_over_the_limit_is_refused_and_logged(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, max_sessions=2, grace_s=0.2) as server:
        first, second = (rallypoint.connect(server.url) for _ in range(2))
        second.set("k", "v")
        why = r"refused: too many sessions: 2 is the limit \(serve --max-sessions, --max-memory\)"
        with pytest.raises(rallypoint.ConnectFailed, match=why):
            rallypoint.connect(server.url)
        with pytest.raises(rallypoint.ConnectFailed, match=why):
            asyncio.run(aio.connect(server.url))
        until(server.log, lambda log: "the limit of 2 is reached; allow more with --max-sessions" in log)
        with server.peer() as torch_client:
            torch_client.work(1)  # has a connection, and needs no session
        assert first.get("k") == b"v"
        first.close()
        third = until(lambda: opened(server.url), bool)  # there is room again
        assert third is not None
        with third:
            assert third.get("k") == b"v" == second.get("k")
        second.close()


def opened(url: str) -> rallypoint.Store | None:
    try:
        return rallypoint.connect(url)
    except rallypoint.ConnectFailed:
        return None


# Statistics of many clients


class _Caller:
    """A connection, with what the statistics use of it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def describe(self) -> dict[str, Any]:
        return {"peer": f"10.0.0.1:{self.number}", "speaks": "<torch>", "waits_for": ["/secret"]}


def crowd(count: int) -> StoreServer:
    crowded = StoreServer(Settings(max_connections=count))
    for number in range(count):
        crowded.listener.admit(_Caller(number))  # type: ignore[arg-type]
    return crowded


def test_the_statistics_list_a_limited_number_of_clients_and_count_the_rest() -> None:
    facts, clients, sessions = crowd(LISTED + 5).statistics()
    assert (len(list(clients)), facts["more_clients"]) == (LISTED, 5)
    assert facts["connections"] == LISTED + 5
    assert (list(sessions), facts["more_sessions"]) == ([], 0)


def test_the_statistics_are_written_in_steps_between_which_others_are_served() -> None:
    written: list[bytes] = []
    steps = crowd(LISTED).statistics().encode(written.append)
    assert sum(1 for _ in steps) == LISTED, "one step for each client"
    facts = json.loads(written[0])
    assert len(facts["clients"]) == LISTED == facts["connections"]
    assert facts["sessions"] == [] and {"10.0.0.1:0", "10.0.0.1:7"} <= {client["peer"] for client in facts["clients"]}


def test_the_statistics_of_a_real_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, server.peer() as peer:
        peer.ping()
        body = http(server.address, GET.format("/statistics").encode()).partition(b"\r\n\r\n")[2]
        assert {client["speaks"] for client in json.loads(body)["clients"]} == {"torch", "http"}
