"""`rallypoint run` with a token on several nodes: nodes that may not join, and what a protected job survives.

What a job on one node does without options is in tests/security/test_protected_run.py.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.hosts import Host, hosts
from tests.launch.meetings import MEET, finish, meet
from tests.launch.runs import PRELUDE, Node, Place, has_in, processes_of
from tests.pages import pid_at
from tests.raw_peer import AMPLE_S, until
from tests.security.credential_files import CredentialFiles

from rallypoint import Rendezvous, TCPStore

PORT = 29400
TLS = ("tls_ca", "tls_cert", "tls_key")


# Nodes that may not join


DIRECT = """
import rallypoint
del os.environ["RALLYPOINT_RELAY"]
rallypoint.worker().barrier(60)
stay()
"""
"""Workers that meet without their relays: by TLS, with the files that their URL names, and the token of the run."""


class RefusedNode(NamedTuple):
    """The options of a node, what it says when it ends, and what the others say of it."""

    options: list[str]
    error: str
    reported: str


@pytest.mark.needs("netns")
def test_nodes_that_may_not_join_end_at_once_and_the_others_say_who_they_are(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRELUDE + DIRECT)
    with hosts(7) as (first, *others):
        right, wrong = (CredentialFiles(tmp_path / name, (first, *others)) for name in ("right", "wrong"))
        mutual = f"--tls-client-ca={right.named()['tls_ca']}"
        a = start_on(first, first, tmp_path, [*right.options(), mutual])
        await_waiting(first, right)
        refused = [
            RefusedNode(
                [wrong.options(*TLS)[0], *right.options("token_file")],
                "the server has another token. Set RALLYPOINT_TOKEN",
                "wrong token",
            ),
            RefusedNode(
                right.options("token_file"),
                "the server requires a token, and this client has none. Set RALLYPOINT_TOKEN",
                "no token",
            ),
            RefusedNode(right.options(*TLS), "the server requires TLS from other machines", "requires TLS"),
            RefusedNode(
                [right.options(*TLS)[0], wrong.options("token_file", "tls_cert", "tls_key")[0]],
                "the server's certificate is not valid here",
                "TLS failed: .*unknown ca",
            ),
            RefusedNode(
                right.options("tls_cert", "tls_key"),
                "the server requires a certificate",
                "TLS failed: peer did not return a certificate",
            ),
            RefusedNode([], "the server requires TLS from other machines", "requires TLS"),
        ]
        nodes = [start_on(host, first, tmp_path, one.options) for host, one in zip(others, refused, strict=True)]
        for host, node, one in zip(others, nodes, refused, strict=True):
            assert node.end() == 1 and len(node.err.splitlines()) == 1, node.err
            assert f"cannot authenticate at {first.name}:{PORT}: {one.error}" in node.err
            assert re.search(r"RALLYPOINT_T|--tls-", node.err), f"it says what to do: {node.err}"
            a.until(rf"server at {first.name}:{PORT} denied access to {re.escape(host.address)} \(.*{one.reported}")
        nodes = [a, start_on(others[0], first, tmp_path, right.options())]  # the same host, now with the right token
        for node in nodes:
            node.until(r"^up \d 2 0 ")
        finish(nodes)
        assert right.token not in a.text() and wrong.token not in a.text()


def start_on(host: Host, server: Host, where: Path, options: list[str]) -> Node:
    """Start an agent on a host."""
    words = ["--nnodes=2", f"--rdzv-endpoint={server.name}:{PORT}", "--rdzv-id=job", *options, "script.py"]
    return Node(host.command([sys.executable, "-m", "rallypoint", "run", *words]), where, {})


def await_waiting(server: Host, files: CredentialFiles) -> None:
    """Return when one node waits for the other, with a session of its own."""
    with server.inside():
        security = files.credentials
        with TCPStore(server.address, PORT, timeout=AMPLE_S, credentials=security) as store:
            until(Rendezvous(store, "job", 2).status, lambda status: len(status.waiting) == 1)


def test_a_node_of_the_servers_machine_with_another_token(place: Place, tmp_path: Path) -> None:
    """It finds the port taken, by a server that does not tell it who it is."""
    right, wrong = (CredentialFiles(tmp_path / name, tls=False) for name in ("right", "wrong"))
    place.token = right.token
    script = place.script("stay()")
    a = place.node("a", *right.options(), script)
    with TCPStore("localhost", place.port, timeout=AMPLE_S, credentials=right.credentials) as store:
        until(Rendezvous(store, "job", 2).status, lambda status: status.waiting == ("a",))
    stranger = place.node("b", script)
    assert stranger.end() == 1 and "the server requires a token, and this client has none" in stranger.err
    mistaken = place.node("b", *wrong.options(), script)
    assert mistaken.end() == 1 and "the server has another token" in mistaken.err
    a.until(r"denied access to (127\.0\.0\.1|::1) \(wrong token\)")
    b = place.node("b", *right.options(), script)
    for node in (a, b):
        node.until(r"^up \d 2 0 ")
    finish([a, b])
    assert "no token" not in a.err, "a process of the same machine may look who has the port"


def test_workers_of_several_nodes_cannot_use_one_relay(place: Place, tmp_path: Path) -> None:
    files = CredentialFiles(tmp_path / "files", tls=False)
    node = place.node("a", "--relay=rank0", *files.options(), place.script("stay()"))
    assert node.end() == 2 and "--relay rank0 lets workers of all nodes" in node.err and "--relay local" in node.err


# What a protected job survives


def test_a_protected_job_outlives_its_server_and_its_relays(place: Place, tmp_path: Path) -> None:
    """The server that is started again, and the relay, have the token as well; no worker restart is counted."""
    files = CredentialFiles(tmp_path / "files", tls=False)
    place.token = files.token
    words = [*files.options(), f"--data-dir={tmp_path / 'data'}", "--max-restarts=0", place.script(RELAYED)]
    nodes = [place.node(name, *words) for name in "ab"]
    for node in nodes:
        node.until(r"^up \d 2 0 ")
    meet(nodes, 1)
    server = place.server()
    os.kill(server, signal.SIGKILL)
    meet(nodes, 2)
    again = until(place.server, lambda pid: pid != server)
    pids = {pid for node in nodes for pid in processes_of(node.child.pid)}
    assert again in pids and len(pids) >= 2 * 3 + 2, "agents, workers and relays, the server and its supervisor"
    assert has_in("cmdline", files.token, pids) == set()
    relay = nodes[1].until(r"^relay (\S+)$")[0][1]
    os.kill(pid_at(relay, files.token), signal.SIGKILL)
    for node in nodes:
        node.until(r"^up \d 2 0 ", 2)
    meet(nodes, 1, rounds=2)
    finish(nodes, started=2)
    assert "has died; no restart is used" in nodes[1].err


RELAYED = 'say("relay", os.environ["RALLYPOINT_RELAY"].partition("?")[0])\n' + MEET
