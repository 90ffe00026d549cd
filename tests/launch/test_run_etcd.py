"""`rallypoint run --store etcd://…`: three of the nodes run a server of the store; any node or server may be lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.etcd.access import USER, WORD, guarded
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.interop.etcd_nodes import etcd_nodes
from tests.launch.meetings import MEET, ask, finish, meet
from tests.launch.runs import PRELUDE, Node, Place, gone, has_in, parent, processes_of
from tests.pages import pid_at
from tests.raw_peer import AMPLE_S, until
from tests.security.credential_files import CredentialFiles

import rallypoint
from rallypoint.deadline import Deadline
from rallypoint.storage.etcd.lookup import look_up
from rallypoint.store.url import parse_url

__all__ = ["guarded"]

pytestmark = pytest.mark.needs("etcd")


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


def about(address: str, token: str = "") -> int:
    """Return the pid of the server at an address; 0 where none answers."""
    with contextlib.suppress(OSError):
        return pid_at(address, token)
    return 0


def servers(url: str, token: str = "") -> dict[int, int]:
    """Return the pids of the store's servers by those of their agents, that of the leader first."""
    found = look_up(parse_url(url).etcd(), Deadline(AMPLE_S)).servers
    pids = [about(server, token) for server in found]
    return {parent(pid): pid for pid in pids}


def await_servers(url: str, nodes: list[Node], count: int, token: str = "") -> dict[int, int]:
    """Return `servers` once there are `count` of them, each of another of these nodes, and one is the leader."""
    agents = {node.child.pid for node in nodes}

    def enough(found: dict[int, int]) -> bool:
        return len(agents.intersection(found)) == len(found) == count

    found = until(lambda: servers(url, token), enough)
    until(lambda: look_up(parse_url(url).etcd(), Deadline(AMPLE_S)).leader, bool)
    return dict(found)


def kill_node(node: Node, server: int) -> None:
    """Kill an agent, its server and its relay at the same moment, as when their machine dies."""
    agent = node.child.pid
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    others = {server, *map(int, children)}
    for pid in (agent, *others):  # the agent first: it must not see its worker die, and report that as a failure
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.end()
    gone(*others)


# Servers of a run


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


# Failures


def test_workers_go_on_when_servers_are_killed_and_others_take_their_place(place: Place, etcd_url: str) -> None:
    nodes = start(place, etcd_url, "ab", "--nnodes=2")
    for times in range(1, 4):
        agent, leader = next(iter(await_servers(etcd_url, nodes, 2).items()))
        os.kill(leader, signal.SIGKILL)
        meet(nodes, times)
        owner = next(node for node in nodes if node.child.pid == agent)
        owner.until(rf"server of this node \(pid {leader}\) exited: killed by SIGKILL \(9\)")
    finish(nodes)


def test_workers_go_on_when_the_server_that_leads_hangs_and_another_takes_its_place(
    place: Place, etcd_url: str
) -> None:
    nodes = start(place, etcd_url, "ab", "--nnodes=2", "--max-restarts=0")
    agent, leader = next(iter(await_servers(etcd_url, nodes, 2).items()))
    os.kill(leader, signal.SIGSTOP)
    meet(nodes, 1)
    gone(leader)
    owner = next(node for node in nodes if node.child.pid == agent)
    owner.until(rf"killing the server of this node \(pid {leader}\): no answer for 5 s")
    assert await_servers(etcd_url, nodes, 2)[agent] != leader
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
        leader = until(places.servers, lambda found: bool(found.leader) and len(found.servers) == 3).leader
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


# A token


def test_a_protected_job_goes_on_when_the_leader_is_killed(place: Place, etcd_url: str, tmp_path: Path) -> None:
    right, wrong = (CredentialFiles(tmp_path / name, tls=False) for name in ("right", "wrong"))
    nodes = start(place, etcd_url, "ab", "--nnodes=2", "--max-restarts=0", *right.options())
    agent, leader = next(iter(await_servers(etcd_url, nodes, 2, right.token).items()))
    meet(nodes, 1)
    assert has_in("cmdline", right.token, {pid for node in nodes for pid in processes_of(node.child.pid)}) == set()
    stranger = place.run("--store", etcd_url, "--nnodes=2", *wrong.options(), place.script("stay()"))
    assert stranger.end() == 1 and "the server has another token. Set RALLYPOINT_TOKEN" in stranger.err
    for node in nodes:
        node.until(r"denied access to 127\.0\.0\.1 \(wrong token\)")
    assert "lost:" not in "".join(node.err for node in nodes), "one server leads, and the other leaves it alone"
    os.kill(leader, signal.SIGKILL)
    meet(nodes, 2)
    assert await_servers(etcd_url, nodes, 2, right.token)[agent] != leader
    finish(nodes)


# Passwords


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


def test_a_worker_without_the_password_opens_a_store_while_its_relay_is_down(place: Place, guarded: Cluster) -> None:
    url = f"{guarded.url}/hers?user={USER}&password={WORD}"
    script = place.script("""
        import rallypoint
        on("SIGUSR2", lambda: rallypoint.connect(os.environ["RALLYPOINT_URL"], 60).set("opened", "yes"))
        stay()
    """)
    node = place.run("--rdzv-id=job", script, env={"RALLYPOINT_STORE": url})
    (worker,) = node.up(0, world=1).values()
    relay = re.search(r"127.0.0.1:\d+", Path(f"/proc/{worker}/environ").read_text().partition("RALLYPOINT_RELAY=")[2])
    assert relay
    pid = about(relay[0])
    node.signal("SIGSTOP")  # else it would start another relay at once
    try:
        os.kill(pid, signal.SIGKILL)
        os.kill(worker, signal.SIGUSR2)
        with rallypoint.connect(url, AMPLE_S) as store:
            store.wait(["opened"], AMPLE_S)
    finally:
        node.signal("SIGCONT")


def test_a_wrong_password_is_not_shown(place: Place, guarded: Cluster) -> None:
    url = f"{guarded.url}/hers?user={USER}&password=mistaken"
    node = place.run(place.script("stay()"), env={"RALLYPOINT_STORE": url})
    assert node.end() == 1
    assert f"user {USER}" in node.err and "mistaken" not in node.text()
    bad = place.run(place.script("stay()"), env={"RALLYPOINT_STORE": f"{url}&nonsense=1"})
    assert bad.end() == 2 and "nonsense" in bad.err and "mistaken" not in bad.text()
