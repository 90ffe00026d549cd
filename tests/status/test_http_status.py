"""The status over HTTP, at real servers: JSON, events, the static page, metrics; standbys and relays."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.etcd.access import base64, post
from tests.pages import read_page
from tests.raw_peer import AMPLE_S, ServerProcess, http, until
from tests.relay.relays import RelayThread
from tests.replicated.servers import Servers
from tests.server.fake_log import FakeLog, in_memory
from tests.server.peers import FakeTransport, native_peer, settle
from tests.status.models import report

import rallypoint
from rallypoint.core import ops
from rallypoint.core.machines.barrier import BarrierArrive
from rallypoint.core.run_report import RankReport
from rallypoint.server.server import StoreServer
from rallypoint.server.status import event_streams
from rallypoint.server.status.model import ServerStatus, decode_status

EVENTS = b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n"


class EventReader:
    """A client of the events."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, AMPLE_S)
        self._socket.sendall(EVENTS)
        self._lines = self._socket.makefile("rb")
        self.head = b"".join(iter(self._lines.readline, b"\r\n")).decode()

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()

    def next(self) -> ServerStatus:
        """Return the next model."""
        for line in self._lines:
            if line.startswith(b"data: "):
                return decode_status(line[6:])
        raise ConnectionError("the stream has ended")


@contextmanager
def waiting_at_a_barrier(url: str) -> Iterator[rallypoint.Store]:
    """Have member 0 of a barrier of two wait, until the end of the block."""
    with rallypoint.connect(url) as store, rallypoint.connect(url) as other:
        barrier = rallypoint.Barrier(store, "sync", 2)
        thread = threading.Thread(target=barrier.wait, args=(0, AMPLE_S))
        thread.start()
        yield other
        rallypoint.Barrier(other, "sync", 2).wait(1, AMPLE_S)
        thread.join()


def status_of(place: Any) -> ServerStatus:
    return decode_status(json.dumps(read_page(place, "/status")).encode())


def test_a_barrier_and_a_run_are_in_the_status_the_events_and_the_static_page(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        events = EventReader(server.address)
        assert "200" in events.head and "text/event-stream" in events.head
        assert events.next().meetings == []
        with waiting_at_a_barrier(server.url) as store:
            store.lease("run:demo/node:n0", report("demo", "n0", RankReport(rank=5, local_rank=0, pid=1)))
            seen = until(events.next, lambda model: bool(model.meetings and model.runs))
            assert (seen.meetings[0].name, seen.meetings[0].missing) == ("sync", ["1"])
            assert seen.runs[0].nodes[0].ranks[0].rank == 5 and seen.watchers == 1
            assert status_of(server.url).meetings[0].missing == ["1"]
            page = http(server.address, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").decode()
            assert "barrier sync: 1 of 2 for " in page and "missing: 1" in page and "run demo" in page
            metrics = http(server.address, b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").decode()
            assert 'rallypoint_meetings_waiting{kind="barrier"} 1' in metrics
            assert "content-type: text/plain; version=0.0.4; charset=utf-8" in metrics
            assert "rallypoint_rank_state" not in metrics
            by_rank = http(server.address, b"GET /metrics?ranks=1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert b'rallypoint_rank_state{run="demo",rank="5",state="running"} 1' in by_rank
        until(events.next, lambda model: not model.meetings)
    with events, pytest.raises(ConnectionError):  # the server has ended
        until(events.next, lambda model: False)


def test_a_relay_says_what_it_relays_and_whether_it_is_connected() -> None:
    with rallypoint.Server(port=0) as server, RelayThread(server.port) as relay:
        relay.connected()
        found = status_of(relay.url)
        assert (found.role, found.upstream, found.trouble) == ("relay", relay.server.upstream.label, "")
        port = relay.open_round("run", 1, 1)
        assert status_of(f"127.0.0.1:{port}").role == "relay"
    with RelayThread(1) as relay:
        found = until(lambda: status_of(relay.url), lambda model: bool(model.trouble))
        assert "no connection to the server at 127.0.0.1:1" in found.trouble


@pytest.mark.needs("etcd")
def test_a_standby_says_where_the_leader_is(etcd_url: str, tmp_path: Path) -> None:
    with Servers(etcd_url, tmp_path, 2) as servers:
        (standby,) = servers.standbys()
        leader = servers[servers.leader()]
        found = until(lambda: status_of(servers[standby].url), lambda model: model.leader == leader.url)
        assert found.role == "standby" and set(found.servers) == {one.url for one in servers.all}
        at_leader = until(lambda: status_of(leader.url), lambda model: len(model.servers) == 2)
        assert at_leader.role == "leader" and at_leader.storage["epoch"] >= 1
        page = http(servers[standby].address, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").decode()
        assert f"the leader is at {leader.url}" in page


@pytest.mark.needs("etcd")
def test_a_leader_says_how_far_its_followers_are_behind(etcd_url: str, tmp_path: Path) -> None:
    with Servers(etcd_url, tmp_path, 3) as servers, rallypoint.connect(servers.url()) as store:
        leader, standbys = servers[servers.leader()], {servers[index].url for index in servers.standbys()}
        before = until(lambda: status_of(leader.url), lambda model: len(model.followers) == 2)
        for number in range(20):
            store.set(f"key {number}", b"")

        def caught_up(model: ServerStatus) -> bool:
            head = int(model.storage["index"])
            return head >= int(before.storage["index"]) + 20 and all(one.index == head for one in model.followers)

        found = until(lambda: status_of(leader.url), caught_up)
        assert {one.url for one in found.followers} == standbys
        assert [one.behind for one in found.followers] == [0, 0]
        place, _, space = etcd_url.removeprefix("etcd://").rpartition("/")
        for name, value in (("bad", "no JSON"), ("slow", '{"url": "tcp://slow:1", "index": 3}')):
            body = {"key": base64(f"{space}/followers/{name}"), "value": base64(value)}
            post(place.partition(",")[0], "/v3/kv/put", body)  # the bad one does not disturb the leader
        slow = until(lambda: status_of(leader.url), lambda model: len(model.followers) == 3)
        assert {one.behind for one in slow.followers if one.url == "tcp://slow:1"} == {int(slow.storage["index"]) - 3}
        servers.kill(servers.standbys()[0])
        until(lambda: status_of(leader.url), lambda model: len(model.followers) == 2)


def test_watchers_over_the_limit_are_refused_and_others_make_room(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, ExitStack() as stack:
        first = EventReader(server.address)
        for _ in range(event_streams.MAX_WATCHERS - 1):
            stack.enter_context(EventReader(server.address)).next()
        with EventReader(server.address) as refused:
            assert " 503 " in refused.head
        first.__exit__()
        until(lambda: status_of(server.url).watchers, lambda watchers: watchers < event_streams.MAX_WATCHERS)
        assert stack.enter_context(EventReader(server.address)).next().role == "server"


# In this event loop


class _Watching(FakeTransport):
    """A peer that watches; it reads only when told to."""

    def models(self) -> int:
        return self.pending.count(b"event: status")


@in_memory()
async def test_a_watcher_that_does_not_read_is_skipped_and_then_dropped(
    server: StoreServer, log: FakeLog | None
) -> None:
    peer = await native_peer(server)
    for number in range(1, 201):  # a model that is longer than what a transport buffers
        peer.asks(ops.Act(number, b"/%d" % number, "0" * 200, number, BarrierArrive(["0" * 200, "1" * 200]), 1000.0))
    await settle()
    slow = _Watching(server)
    slow.says(EVENTS)
    await settle()
    assert slow.paused and slow.models() == 1
    streams = server.status.source().streams
    (watcher,) = streams._watchers
    for _ in range(3):
        streams._send(server.status.source()._last)
    assert slow.models() == 1 and not slow.closing, "it is skipped"
    assert watcher.slow_since is not None
    watcher.slow_since -= event_streams.SLOW_S + 1
    streams._send(server.status.source()._last)
    await settle()
    assert slow.closing and len(streams) == 0


@in_memory()
async def test_the_model_is_built_once_for_all_and_only_if_something_has_changed(
    server: StoreServer, log: FakeLog | None
) -> None:
    source = server.status.source()
    builds: list[int] = []
    build = source._build
    source._build = lambda: (builds.append(1), build())[1]  # type: ignore[func-returns-value]
    watchers = [_Watching(server) for _ in range(3)]
    for one in watchers:
        one.says(EVENTS)
    await settle()
    assert [one.models() for one in watchers] == [1, 1, 1] and len(builds) == 1
    streams = source.streams
    streams._tick()
    await settle()
    seen = [one.models() for one in watchers]
    streams._tick()
    await settle()
    assert [one.models() for one in watchers] == seen, "nothing has changed"
    streams._sent_at -= event_streams.RESYNC_S
    streams._tick()
    await settle()
    assert [one.models() for one in watchers] == [count + 1 for count in seen]
    assert len(builds) <= 3
