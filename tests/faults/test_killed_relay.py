"""A relay is killed repeatedly; native clients that also know the server's address see no failure.

Their sessions continue, through the next relay or directly, with their leases; no call fails, and each is executed
once. PyTorch's clients of that relay are disconnected, and can reconnect.
"""

from __future__ import annotations

import contextlib
import operator
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from tests.raw_peer import AMPLE_S, RawPeer, read_line, script, until

import rallypoint

KILLS, CLIENTS = 5, 3

WORK = """
import sys
import rallypoint

url, name = sys.argv[1:]
store = rallypoint.connect(url, timeout=60)
lease = store.lease(f"lease/{name}", "held")
print("begun", flush=True)
step = 0
while not store.check(["stop"]):
    step += 1
    store.add("count", 1)
    store.append(f"log/{name}", f"{step};")
    store.queue_push("items", f"{name}.{step}")
    store.queue_pop("items")
    store.set(f"step/{name}", str(step))
    assert store.check([f"lease/{name}"]), "the lease was lost"
assert store.get(f"log/{name}").decode() == "".join(f"{n};" for n in range(1, step + 1))
print(step, flush=True)
"""


def steps(store: rallypoint.Store) -> list[int]:
    return [int(value) for value in store.multi_get([f"step/{number}" for number in range(CLIENTS)])]


def work_on(store: rallypoint.Store) -> None:
    """Return when all clients have made a few more steps."""
    before = steps(store)
    until(lambda: min(map(int.__sub__, steps(store), before)), lambda more: more >= 3)


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_clients_that_know_both_addresses_continue(unix: bool, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(rallypoint.Server(grace=AMPLE_S))
        relay = stack.enter_context(rallypoint.Relay(server.url, unix=str(tmp_path / "relay") if unix else None))
        store = stack.enter_context(rallypoint.connect(server.url, timeout=AMPLE_S))
        environment = {**os.environ, **relay.environ}
        children = [stack.enter_context(script(WORK, server.url, number, env=environment)) for number in range(CLIENTS)]
        assert [read_line(child) for child in children] == ["begun"] * CLIENTS
        for _ in range(KILLS):
            work_on(store)
            pid = relay.pid
            os.kill(pid, signal.SIGKILL)
            until(lambda: relay.pid, partial(operator.ne, pid))
        work_on(store)
        store.set("stop", "")
        made = [int(read_line(child)) for child in children]
        assert int(store.get("count")) == sum(made)
        assert store.queue_len("items") == 0


def test_torchs_clients_are_disconnected_and_can_reconnect() -> None:
    with rallypoint.Server() as server, rallypoint.Relay(server.url) as relay:
        address = ("127.0.0.1", relay.port)
        with RawPeer(address) as peer, RawPeer(address) as waits:
            peer.work(1)
            peer.set(b"/kept", b"value")
            waits.wait(b"/never")
            peer.ping()
            os.kill(relay.pid, signal.SIGKILL)
            assert peer.rest() == waits.rest() == b""
        with RawPeer(address) as again:
            assert again.get(b"/kept") == b"value"
            again.work(1)
        until(lambda: server.statistics()["waiting"], lambda count: count == 0)
