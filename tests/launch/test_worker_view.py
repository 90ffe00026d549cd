"""What a worker learns of its job beside its ranks: the addresses of nodes, and a port that all ranks agree on."""

from __future__ import annotations

import errno
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.hosts import hosts
from tests.launch.runs import PRELUDE, Node, Place
from tests.raw_peer import AMPLE_S

import rallypoint
from rallypoint.launch.held_ports import HeldPorts
from rallypoint.launch.worker_context import Worker

PORTS = """
import errno, socket, rallypoint
me = rallypoint.worker()
ports = [me.free_port(timeout=60) for _ in range(3)]
def bind(port, reuse, host):
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        sock.bind((host, port))
        sock.listen()
        return socket.create_connection(sock.getsockname(), 60).close()
refused = 0
for port in ports:
    try:
        bind(port, False, "127.0.0.1")
    except OSError as error:
        refused += error.errno == errno.EADDRINUSE
me.barrier(timeout=60)  # binding for a moment would refuse the next one
if rank == 1:
    for port in ports:
        bind(port, True, "127.0.0.1")  # in another process than rank 0's
        bind(port, True, "0.0.0.0")
me.barrier(timeout=60)
own = me.free_port(timeout=60, name="another", hold=False)
if rank == 0:
    bind(own, False, "127.0.0.1")
say("ports", me.address, me.rank0_address, refused, *ports, own)
"""


def test_all_ranks_get_the_same_ports_and_nobody_else_does(place: Place) -> None:
    node = place.run("--nproc-per-node", 3, place.script(PORTS))
    assert node.end() == 0, node.text()
    (told,) = set(re.findall(r"^ports (.*)$", node.out, re.M))
    address, first, refused, *ports = told.split()
    assert (address, first, refused) == ("127.0.0.1", "127.0.0.1", "3"), "held for those who set SO_REUSEADDR"
    assert node.out.count("ports") == 3 and len(set(ports)) == 4


def made(url: str, rank: int) -> Worker:
    names = """RALLYPOINT_RUN RALLYPOINT_SCOPE LOCAL_RANK LOCAL_WORLD_SIZE RALLYPOINT_NODE RALLYPOINT_NODE_ADDR
    RALLYPOINT_ROUND TORCHELASTIC_RESTART_COUNT"""
    mine = {"RALLYPOINT_URL": url, "RANK": str(rank), "WORLD_SIZE": "2", "RALLYPOINT_RANK0_ADDR": "10.0.0.1"}
    return Worker(dict.fromkeys(names.split(), "1") | mine)


def test_a_rank_that_does_not_call_is_named_at_the_timeout() -> None:
    with rallypoint.Server() as server:
        worker = made(server.url, 0)
        with pytest.raises(rallypoint.MembersMissing) as caught:
            worker.free_port(timeout=0.1)
        assert caught.value.missing == ("1",)
        worker.store.close()


def test_all_ranks_learn_that_there_is_no_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: HeldPorts, hold: bool) -> int:
        raise OSError(errno.EADDRINUSE, "no port is left")

    monkeypatch.setattr(HeldPorts, "reserve", none_left)
    with rallypoint.Server() as server, ThreadPoolExecutor(2) as pool:
        workers = [made(server.url, rank) for rank in range(2)]
        for found in [pool.submit(worker.free_port, AMPLE_S) for worker in workers]:
            with pytest.raises(rallypoint.AddressTaken, match=r"rank 0's node \(10.0.0.1\): no port is left"):
                found.result()
        for worker in workers:
            worker.store.close()


def test_the_oldest_of_very_many_ports_is_released() -> None:
    ports = HeldPorts()
    assert len({ports.reserve(True) for _ in range(300)}) > 256


SERVE = """
import socket, rallypoint
me = rallypoint.worker()
port = me.free_port(timeout=60)
if rank == 0:
    server = socket.create_server((me.rank0_address, port))
me.barrier(timeout=60)
with socket.create_connection((me.rank0_address, port), 60) as sock:
    say("at", rank, me.address, me.rank0_address, sock.getsockname()[0])
me.barrier(timeout=60)
"""


@pytest.mark.needs("netns")
@pytest.mark.parametrize("mode", ["rank0", "local"])
def test_on_several_hosts_each_has_its_address_and_the_port_is_rank_0s(tmp_path: Path, mode: str) -> None:
    """The server is on a third host, whose address is not rank 0's."""
    (tmp_path / "script.py").write_text(PRELUDE + SERVE)
    with hosts(3) as (first, second, third):
        server = third.popen([sys.executable, "-m", "rallypoint", "serve", "--host", third.address, "--port", "29400"])
        nodes = []
        for rank, host in enumerate((first, second)):
            words = f"--nnodes=2 --store=tcp://{third.name}:29400 --relay={mode} --node-rank {rank} script.py".split()
            nodes.append(Node(host.command([sys.executable, "-m", "rallypoint", "run", *words]), tmp_path, {}))
        assert [node.end() for node in nodes] == [0, 0], "\n".join(node.text() for node in nodes)
        assert [node.out for node in nodes] == [
            f"at {rank} {host.address} {first.address} {host.address}" for rank, host in enumerate((first, second))
        ]
        server.terminate()
        server.wait(AMPLE_S)
