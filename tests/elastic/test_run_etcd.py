"""`rallypoint run --store etcd://…`: three of the nodes run a server of the store; any node or server may be lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.elastic.runs import PRELUDE, Node, Place, gone
from tests.etcd.access import USER, WORD, guarded
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.interop.etcd_nodes import etcd_nodes
from tests.wire import AMPLE_S, until

import rallypoint
from rallypoint.deadline import Deadline
from rallypoint.storage.etcd_lookup import look_up
from rallypoint.store.url import parse_url

__all__ = ["guarded"]

pytestmark = pytest.mark.needs("etcd")

MEET = """
import rallypoint
me, asked, met = rallypoint.worker(), [], 0
shared = rallypoint.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=60)
on("SIGUSR1", lambda: os._exit(0))
on("SIGUSR2", lambda: asked.append(None))
say("store", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
say("up", rank, world, restarts, os.getpid())
while True:
    while met == len(asked):
        time.sleep(0.01)
    met += 1
    assert sum(map(int, me.all_gather(b"%d" % rank, 60, f"meeting {met}"))) == sum(range(world))
    me.store.add("meetings", 1)
    shared.add(f"came {met}", 1)
    while int(shared.get(f"came {met}")) < world:
        time.sleep(0.01)
    say("met", met)
"""
"""Workers that meet, by the worker's own store and by that of PyTorch's clients, whenever USR2 comes."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as members:
        yield members


def start(place: Place, url: str, names: str, *words: str, code: str = MEET) -> list[Node]:
    """Start nodes, and return when their workers are up."""
    told = ["--store", url, "--rdzv-id=job", *words]
    script = place.script(code)
    nodes = [place.run(*told, "--node", name, script) for name in names]
    for node in nodes:
        node.until(rf"^up \d {len(names)} 0 \d+$")
    return nodes


def meet(nodes: list[Node], times: int) -> None:
    """Have the workers meet, for the so many-th time."""
    ask(nodes)
    for node in nodes:
        node.until(rf"^met {times}$")


def ask(nodes: list[Node]) -> None:
    for node in nodes:
        node.signal("SIGUSR2")


def finish(nodes: list[Node], started: int = 1) -> None:
    """Have the workers succeed; see how often they were started."""
    for node in nodes:
        node.signal("SIGUSR1")
    assert [node.end() for node in nodes] == [0] * len(nodes), "\n".join(node.text() for node in nodes)
    assert {node.out.count("up ") for node in nodes} == {started}


def about(address: str) -> int:
    """Return the pid of the server at an address; 0 where none answers."""
    with contextlib.suppress(OSError), urlopen(f"http://{address}/about", timeout=AMPLE_S) as page:
        return int(json.load(page)["pid"])
    return 0


def parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def servers(url: str) -> dict[int, int]:
    """Return the pids of the store's servers by those of their agents, that of the leader first."""
    found = look_up(parse_url(url).etcd(), Deadline(AMPLE_S)).servers
    pids = [about(server.removeprefix("tcp://")) for server in found]
    return {parent(pid): pid for pid in pids}


def await_servers(url: str, nodes: list[Node], count: int) -> dict[int, int]:
    """Return the same, once there are so many, one of each of so many nodes, and one of them leads."""
    agents = {node.child.pid for node in nodes}

    def enough(found: dict[int, int]) -> bool:
        return len(agents.intersection(found)) == len(found) == count

    found = until(lambda: servers(url), enough)
    until(lambda: look_up(parse_url(url).etcd(), Deadline(AMPLE_S)).leader, bool)
    return dict(found)


def kill_node(node: Node, server: int) -> None:
    """Kill an agent, its server and its relay at the same moment, as when their machine dies."""
    children = Path(f"/proc/{node.child.pid}/task/{node.child.pid}/children").read_text().split()
    pids = {node.child.pid, server, *map(int, children)}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.end()
    gone(*pids - {node.child.pid})


# What is there


def test_three_of_four_nodes_run_a_server_and_nothing_is_left_of_the_run(place: Place, etcd_url: str) -> None:
    nodes = start(place, etcd_url, "abcd", "--nnodes=4")
    assert {node.until(r"^store (\S+) \d+$")[-1][1] for node in nodes} == {"127.0.0.1"}
    assert len({node.until(r"^store \S+ (\d+)$")[-1][1] for node in nodes}) == 4, "every node has its own relay"
    pids = await_servers(etcd_url, nodes, 3)
    meet(nodes, 1)
    with rallypoint.Server(storage=etcd_url) as stays, rallypoint.connect(stays.url) as store:
        assert [key for key in store.list_keys() if key.startswith("round:")]
        finish(nodes)
        gone(*pids.values())
        assert not [key for key in store.list_keys() if not key.startswith("rendezvous:")]
        assert not stays.statistics()["rounds"]
        assert look_up(parse_url(etcd_url).etcd(), Deadline(AMPLE_S)).servers == (stays.url,), "they have handed over"


def test_servers_that_run_are_counted(place: Place, etcd_url: str) -> None:
    with contextlib.ExitStack() as stack:
        theirs = {stack.enter_context(rallypoint.Server(storage=etcd_url)).pid for _ in range(3)}
        nodes = start(place, etcd_url, "ab", "--nnodes=2")
        meet(nodes, 1)
        found = look_up(parse_url(etcd_url).etcd(), Deadline(AMPLE_S)).servers
        assert {about(server.removeprefix("tcp://")) for server in found} == theirs
        finish(nodes)


# What is lost


def test_workers_go_on_when_servers_are_killed_and_others_take_their_place(place: Place, etcd_url: str) -> None:
    nodes = start(place, etcd_url, "ab", "--nnodes=2")
    for times in range(1, 4):
        agent, leader = next(iter(await_servers(etcd_url, nodes, 2).items()))
        os.kill(leader, signal.SIGKILL)
        meet(nodes, times)
        owner = next(node for node in nodes if node.child.pid == agent)
        owner.until(rf"the server of this node \(pid {leader}\) has ended: killed by SIGKILL \(9\)")
    finish(nodes)


def test_workers_go_on_when_the_server_that_leads_hangs(place: Place, etcd_url: str) -> None:
    nodes = start(place, etcd_url, "ab", "--nnodes=2")
    _, leader = next(iter(await_servers(etcd_url, nodes, 2).items()))
    os.kill(leader, signal.SIGSTOP)
    try:
        meet(nodes, 1)
    finally:
        os.kill(leader, signal.SIGCONT)
    meet(nodes, 2)
    finish(nodes)


def test_a_job_of_four_outlives_three_nodes_that_die_one_after_the_other(place: Place, etcd_url: str) -> None:
    nodes = start(place, etcd_url, "abcd", "--nnodes=1:4", "--rdzv-conf=last_call_timeout=1")
    for left in (3, 2, 1):
        agent, leader = next(iter(await_servers(etcd_url, nodes, min(3, left + 1)).items()))
        lost = next(node for node in nodes if node.child.pid == agent)
        kill_node(lost, leader)
        nodes.remove(lost)
        for node in nodes:
            node.until(rf"^up \d {left} 0 \d+$")
    meet(nodes, 1)
    finish(nodes, started=4)


@pytest.mark.needs("netns")
def test_a_job_goes_on_without_the_machine_of_the_leader_when_that_falls_silent(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRELUDE + MEET)
    with etcd_nodes(tmp_path, 3) as places:
        words = ["run", f"--store={places.url}", "--nnodes=2:3", "--rdzv-conf=last_call_timeout=1", "script.py"]
        command = [sys.executable, "-m", "rallypoint", *words]
        nodes = {host.address: Node(host.command(command), tmp_path, {}) for host in places.nodes}
        for node in nodes.values():
            node.until(r"^up \d 3 0 \d+$")
        leader = until(places.servers, lambda found: found.leader and len(found.servers) == 3).leader
        lost = next(host for host in places.nodes if host.address in leader)
        lost.cut()
        left = [node for address, node in nodes.items() if address != lost.address]
        for node in left:
            node.until(r"^up \d 2 0 \d+$")
        meet(left, 1)
        finish(left, started=2)
        nodes[lost.address].child.kill()
        nodes[lost.address].end()


def test_workers_go_on_when_a_member_of_etcd_dies_and_when_quorum_is_lost_and_back(
    place: Place, cluster: Cluster
) -> None:
    nodes = start(place, etcd_space(cluster), "ab", "--nnodes=2")
    first = cluster.leader()
    cluster.kill(first)
    meet(nodes, 1)
    second = cluster.leader(other_than=first)
    cluster.kill(second)
    ask(nodes)
    cluster.restart(first, wait=False)
    cluster.restart(second)
    for node in nodes:
        node.until("^met 2$")
    finish(nodes)


def test_an_etcd_that_nobody_reaches_is_named(place: Place) -> None:
    words = ["--store", "etcd://127.0.0.1:1/x", "--rdzv-conf=join_timeout=2"]
    node = place.run(*words, place.script("stay()"))
    assert node.end() == 1
    assert "etcd://127.0.0.1:1/x" in node.err and "127.0.0.1:1:" in node.err, node.err


# Passwords


def processes_of(agent: int) -> set[int]:
    """Return the pids of a process and of all that it has started, and so on."""
    every = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()}
    parents = {pid: parent(pid) for pid in every}
    found = {agent}
    while more := {pid for pid, above in parents.items() if above in found} - found:
        found |= more
    return found


def test_a_password_is_seen_by_nobody(place: Place, guarded: Cluster) -> None:
    url = f"{guarded.url}/hers?user={USER}&password={WORD}"
    script = place.script(MEET)
    words = ["--rdzv-id=job", "--nnodes=2", "--node"]
    nodes = [place.run(*words, name, script, env={"RALLYPOINT_STORE": url}) for name in "ab"]
    workers = [int(node.until(r"^up \d 2 0 (\d+)$")[-1][1]) for node in nodes]
    await_servers(url, nodes, 2)
    meet(nodes, 1)
    pids = {pid for node in nodes for pid in processes_of(node.child.pid)}
    assert len(pids) >= 2 * 4, "an agent, a worker, a relay and a server on each node"
    for pid in pids:
        assert WORD.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for pid in workers:
        assert WORD.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    finish(nodes)
    assert WORD not in "".join(node.text() for node in nodes)


def test_a_wrong_password_is_not_shown(place: Place, guarded: Cluster) -> None:
    url = f"{guarded.url}/hers?user={USER}&password=mistaken"
    node = place.run(place.script("stay()"), env={"RALLYPOINT_STORE": url})
    assert node.end() == 1
    assert f"user {USER}" in node.err and "mistaken" not in node.text()
    bad = place.run(place.script("stay()"), env={"RALLYPOINT_STORE": f"{url}&nonsense=1"})
    assert bad.end() == 2 and "nonsense" in bad.err and "mistaken" not in bad.text()
