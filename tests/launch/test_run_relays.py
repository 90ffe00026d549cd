"""The relays of a run: which store workers get, the variables that name it, and the effect of a killed relay."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.hosts import hosts
from tests.launch.runs import OPEN_CLIENT, PRELUDE, Node, Place, gone
from tests.pages import pid_at, read_page
from tests.raw_peer import AMPLE_S, until

from rallypoint import Rendezvous, Server, TCPStore
from rallypoint.client.routing import dial
from rallypoint.launch.stores import liveness_probe, node_relay
from rallypoint.recipes import join_args

UP = """
import rallypoint
host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
say("store", rank, f"{host}:{port}", os.environ["RALLYPOINT_RANK0_ADDR"])
say("relay", rank, os.environ["RALLYPOINT_RELAY"], "token", os.environ["RALLYPOINT_RUN_TOKEN"])
store = rallypoint.TCPStore(host, int(port), timeout=60)
"""
"""Workers print their store and relay, then connect to the store of the round."""

MEET = UP + "store.add('came', 1)\nwhile int(store.get('came')) < world: time.sleep(0.01)\nstay()\n"


class WorkerVariables(NamedTuple):
    """Variables of a worker: the addresses of the round's store, of rank 0 and of its own relay; the run's token."""

    store: str
    rank0: str
    relay: str
    token: str

    def statistics(self) -> Any:
        """Return the statistics of its relay."""
        return read_page(self.relay, "/statistics", self.token)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as place:
        yield place


def variables_of(node: Node, rank: int, times: int = 1) -> WorkerVariables:
    """Return the variables that a worker printed at its start number `times`."""
    _, store, rank0 = node.until(rf"^store {rank} \S+ \S+$", times)[times - 1][0].split(" ")[1:]
    relay = node.until(rf"^relay {rank} (\S+) token (\S*)$", times)[times - 1]
    return WorkerVariables(store, rank0, relay[1], relay[2])


def relay_pid(worker: WorkerVariables) -> int:
    return pid_at(worker.relay, worker.token)


def start(place: Place, *words: str, code: str = MEET) -> tuple[dict[int, Node], dict[int, WorkerVariables]]:
    """Start two nodes; return them, and the variables of their workers, by rank."""
    script = place.script(code)
    nodes = [place.node(name, *words, script) for name in "ab"]
    ranks = {int(node.until(r"^up (\d) 2 ")[-1][1]): node for node in nodes}
    return ranks, {rank: variables_of(node, rank) for rank, node in ranks.items()}


def finish(*nodes: Node) -> None:
    for node in nodes:
        node.signal("SIGUSR1")
    assert [node.end() for node in nodes] == [0] * len(nodes), "\n".join(node.text() for node in nodes)


# Variables of workers


def test_one_node_has_a_relay_and_every_round_a_store_of_its_own(place: Place) -> None:
    code = UP + "say('keys', store.list_keys())\nstore.set(f'of {restarts}', '')\nstay()"
    node = place.run("--max-restarts=1", place.script(code))
    os.kill(node.up(0, world=1)[0], signal.SIGKILL)
    node.up(0, world=1, restarts=1)
    first, second = variables_of(node, 0), variables_of(node, 0, 2)
    assert first.store.startswith("127.0.0.1:") and first.store != second.store and first.rank0 == "127.0.0.1"
    assert first.relay == second.relay, "the relay is the agent's, not the round's"
    assert [match[1] for match in node.until(r"^keys (.*)$", 2)] == ["[]", "[]"]
    finish(node)


def test_all_nodes_use_the_relay_of_rank_0(place: Place) -> None:
    nodes, workers = start(place)
    assert workers[0].store == workers[1].store and workers[0].relay != workers[1].relay
    (port,) = [one["port"] for one in workers[0].statistics()["round_ports"].values()]
    assert workers[0].store == f"127.0.0.1:{port}", "all nodes are on this machine"
    finish(*nodes.values())


def test_every_node_uses_a_relay_of_its_own(place: Place) -> None:
    nodes, workers = start(place, "--relay=local")
    for worker in workers.values():
        (port,) = [one["port"] for one in worker.statistics()["round_ports"].values()]
        assert worker.store == f"127.0.0.1:{port}"
    assert workers[0].store != workers[1].store, "on one machine they cannot have the same port"
    finish(*nodes.values())


def test_clients_of_ours_use_the_relay(place: Place) -> None:
    code = UP + "print(rallypoint.worker().all_gather(str(rank).encode()), flush=True); stay()"
    nodes, workers = start(place, code=code)
    for worker in workers.values():
        assert worker.statistics()["channels"] >= 1
    finish(*nodes.values())


def test_a_node_with_another_relay_mode_is_refused(place: Place) -> None:
    script = place.script("stay()")
    a = place.node("a", "--relay=local", script)
    with TCPStore("localhost", place.port, timeout=AMPLE_S) as store:  # which a starts
        until(Rendezvous(store, "job", 2).status, lambda status: status.waiting == ("a",))
        b = place.node("b", script)
        assert b.end() == 1 and "relay" in b.err and "Traceback" not in b.err
    a.signal("SIGTERM")
    assert a.end() == 143


def test_a_quiet_run_says_nothing_of_its_relay(place: Place) -> None:
    node = place.run("--quiet", "--no-python", "true")
    assert (node.end(), node.err, node.out) == (0, "", "")


def test_the_address_of_a_node_is_the_one_that_reaches_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host name, which torchrun takes, may mean nothing to the others."""
    monkeypatch.setattr(join_args, "is_loopback", lambda host: False)
    monkeypatch.setattr("socket.gethostname", lambda: "only-i-know-this-name")
    with Server() as server, TCPStore("127.0.0.1", server.port) as store:
        assert Rendezvous(store, "run", 1).join(AMPLE_S).first.host == "127.0.0.1"
        named = Rendezvous(store, "named", 1, address="node-7.example")
        assert named.join(AMPLE_S).first.host == "node-7.example"


# A relay that is killed


@pytest.mark.parametrize("mode", ["rank0", "local"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_relay_that_is_killed_ends_the_round_and_uses_no_restart(place: Place, mode: str, killed: int) -> None:
    nodes, workers = start(place, f"--relay={mode}")
    pid = relay_pid(workers[killed])
    os.kill(pid, signal.SIGKILL)
    if mode == "rank0" and killed:
        until(lambda: relay_pid(workers[1]), lambda now: now != pid)  # nobody needs the round to begin again
        finish(*nodes.values())
        assert all("round 2" not in node.err for node in nodes.values())
        return
    for node in nodes.values():
        node.until(r"^up \d 2 0 ", 2)
    assert f"its relay (pid {pid}) has died; no restart is used" in nodes[killed].err
    assert all("killed" not in node.out for node in nodes.values())
    finish(*nodes.values())


def test_the_relay_of_one_node_that_is_killed(place: Place) -> None:
    node = place.run(place.script(MEET))
    node.up(0, world=1)
    pid = relay_pid(variables_of(node, 0))
    os.kill(pid, signal.SIGKILL)
    node.until(r"^up 0 1 0 ", 2)
    assert f"its relay (pid {pid}) has died; no restart is used" in node.err
    finish(node)


def test_a_relay_that_is_stopped_is_replaced_and_uses_no_restart(place: Place) -> None:
    """Its workers' connections stand, and nobody else would ever say that it is gone."""
    nodes, workers = start(place)
    pid = relay_pid(workers[0])
    os.kill(pid, signal.SIGSTOP)
    for node in nodes.values():
        node.until(r"^up \d 2 0 ", 2)
    gone(pid)
    assert f"killing the relay of this node (pid {pid}): no answer for 5 s" in nodes[0].err
    assert f"its relay (pid {pid}) has died; no restart is used" in nodes[0].err
    finish(*nodes.values())


def test_a_relay_whose_server_hangs_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = threading.Semaphore(0)

    def answers(*where: Any) -> bool:
        alive = dial.answers(*where)
        assert alive
        looks.release()
        return alive

    monkeypatch.setattr(liveness_probe, "answers", answers)
    monkeypatch.setattr(liveness_probe, "LOOK_S", 0.0)
    monkeypatch.setattr(liveness_probe, "SILENT_S", AMPLE_S)
    with Server() as server:
        relay = node_relay.NodeRelay(server.url, OPEN_CLIENT)
        try:
            pid = relay.relay.pid
            os.kill(server.pid, signal.SIGSTOP)
            for _ in range(5):
                assert looks.acquire(timeout=AMPLE_S)
            assert relay.relay.pid == pid and not relay.relay.restarts
        finally:
            os.kill(server.pid, signal.SIGCONT)
            relay.close()


def test_workers_that_fail_of_the_relays_end_before_anybody_says_so_use_no_restart(place: Place) -> None:
    """They end the moment that their connection does, on the node of rank 0 and on the other."""
    code = UP + (
        "import socket\nlistens = socket.create_connection((host, int(port)))\n"
        "on('SIGUSR1', lambda: os._exit(0))\nsay('up', rank, world, restarts, os.getpid())\n"
        "listens.recv(1) and None\nos._exit(7)"
    )
    nodes, workers = start(place, "--max-restarts=0", code=code)
    os.kill(relay_pid(workers[0]), signal.SIGKILL)
    for node in nodes.values():
        node.until(r"^up \d 2 0 ", 2)
    finish(*nodes.values())


# On several hosts

SECOND = """
import rallypoint
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
own = os.environ[os.environ["SECOND"]]
first = rallypoint.TCPStore(*where, timeout=60)
second = rallypoint.TCPStore(own, 29511, world_size=world, is_master=rank == 0, timeout=60)
say("met", rank, where[0], where[1], second.add("came", 1), os.environ["RALLYPOINT_RANK0_ADDR"])
first.add("came", 1)
while int(second.get("came")) < world or int(first.get("came")) < world:
    time.sleep(0.01)
first.add("seen", 1)
while int(first.get("seen")) < world:
    time.sleep(0.01)
"""
"""Rank 0 starts a store of its own at another port of the address where the store of the round is."""


@pytest.mark.needs("netns")
@pytest.mark.parametrize("mode", ["rank0", "local"])
def test_a_script_has_a_store_of_its_own_on_rank_0s_node(tmp_path: Path, mode: str) -> None:
    """The server is on a third host, whose address is not rank 0's."""
    (tmp_path / "script.py").write_text(PRELUDE + SECOND)
    with hosts(3) as (first, second, third):
        serve = [sys.executable, "-m", "rallypoint", "serve", "--host", third.address, "--port", "29400"]
        server = third.popen(serve)
        nodes = []
        for host in (first, second):
            words = ["--nnodes=2", f"--store=tcp://{third.name}:29400", f"--relay={mode}", "--node-rank"]
            rank = str(int(host is second))
            command = [sys.executable, "-m", "rallypoint", "run", *words, rank, "script.py"]
            more = {"SECOND": "MASTER_ADDR" if mode == "rank0" else "RALLYPOINT_RANK0_ADDR"}
            nodes.append(Node(host.command(command), tmp_path, more))
        assert [node.end() for node in nodes] == [0, 0], "\n".join(node.text() for node in nodes)
        met = [re.findall(r"^met (\d) (\S+) (\d+) (\d) (\S+)$", node.out, re.M)[0] for node in nodes]
        assert [one[0] for one in met] == ["0", "1"] and sorted(one[3] for one in met) == ["1", "2"]
        assert {one[4] for one in met} == {first.address}
        assert {one[1] for one in met} == {first.address if mode == "rank0" else "127.0.0.1"}
        assert met[0][2] == met[1][2], "the same port on both"
        server.terminate()
        server.wait(AMPLE_S)
