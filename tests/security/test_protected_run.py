"""`rallypoint run` on one node, without any option: its processes have the token, and nobody else on the machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.launch.runs import Node, Place
from tests.raw_peer import AMPLE_S, until
from tests.security import strangers
from tests.security.other_user import NOBODY, connections_of
from tests.security.strangers import attack, loopback_sources

import rallypoint
from rallypoint import net
from rallypoint.security.credentials import RUN_TOKEN, Credentials, new_token

WORKER = """
    import rallypoint
    store = rallypoint.connect(os.environ["RALLYPOINT_URL"])
    of_round = rallypoint.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    store.set(f"worker {rank}", "a value of the run")
    of_round.set(f"worker {rank}", "a value of the round")
    assert of_round.get(f"worker {1 - rank}") == b"a value of the round"
    names = ("MASTER_PORT", "RALLYPOINT_URL", "RALLYPOINT_RELAY")
    say("knows", json.dumps({name: os.environ[name] for name in names}))
    stay()
"""

TORCH_WORKER = """
    import datetime
    from torch.distributed import TCPStore
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*place, is_master=False, timeout=datetime.timedelta(seconds=60))
    store.set(f"worker {rank}", "a value")
    say(store.get(f"worker {1 - rank}").decode(), store.add("count", 1) > 0)
"""


class Job(NamedTuple):
    """A run of two workers, and what they know."""

    node: Node
    pids: dict[int, int]
    token: str
    ports: dict[str, int]
    """Those of the server, of the relay, and of the round."""

    @property
    def credentials(self) -> Credentials:
        return Credentials(token=self.token)

    def processes(self) -> dict[int, str]:
        """Return the command lines of the agent and of all that it started."""
        return {pid: read(pid, "cmdline") for pid in [self.node.child.pid, *descendants(self.node.child.pid)]}


def descendants(pid: int) -> list[int]:
    children = [
        int(word) for task in os.listdir(f"/proc/{pid}/task") for word in read(pid, f"task/{task}/children").split()
    ]
    return [one for child in children for one in (child, *descendants(child))]


def read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace")


@pytest.fixture(scope="module", params=["its own token", "a token file"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Place(tmp_path_factory.mktemp("job")) as place:
        options: list[str] = []
        if request.param == "a token file":
            path = place.where / "token"
            path.write_text(new_token())
            path.chmod(0o600)
            options = ["--token-file", str(path)]
        node = place.run("--nproc-per-node", 2, *options, place.script(WORKER))
        known = json.loads(node.until("^knows (.*)", 2)[0][1])
        pids = node.up(0, 1, world=2)
        token = re.findall(rf"{RUN_TOKEN}=(\S+)", read(pids[0], "environ"))[0]
        relay = re.match(r"tcp://127\.0\.0\.1:(\d+)\?", known["RALLYPOINT_RELAY"])
        assert relay is not None
        server = net.parse_endpoint(known["RALLYPOINT_URL"].removeprefix("tcp://"), 0).port
        yield Job(node, pids, token, {"server": server, "relay": int(relay[1]), "round": int(known["MASTER_PORT"])})
        for pid in pids.values():
            os.kill(pid, signal.SIGUSR1)
        assert node.end() == 0, node.text()
        assert token not in node.text(), "said at the end"


def test_whoever_is_denied_is_named_to_the_user(job: Job) -> None:
    with pytest.raises(rallypoint.AuthenticationFailed, match="the server has another token") as caught:
        rallypoint.connect(f"tcp://127.0.0.1:{job.ports['server']}", credentials=Credentials(token=new_token()))
    assert job.token not in repr(caught.value)
    until(lambda: job.node.err, lambda text: "denied access to 127.0.0.1 (wrong token)" in text)


@pytest.mark.needs("root")
@pytest.mark.parametrize("port", ["server", "relay", "round"])
def test_another_user_gets_nothing(port: str, job: Job) -> None:
    address = ("127.0.0.1", job.ports[port])

    def connect(count: int) -> list[socket.socket]:
        return connections_of(NOBODY, [(address, source) for source in loopback_sources(count)])

    replies = attack(connect, ("native", "own http", "torch", "http"))
    assert replies["native"] == replies["own http"] == {strangers.CHALLENGED, strangers.REFUSED}
    assert replies["torch"] == {strangers.NOTHING}
    page = strangers.NEEDS_TOKEN
    errors = {strangers.BAD_LINK, strangers.BAD_REQUEST, strangers.TOO_LONG, strangers.NOTHING}
    assert replies["http"] == {page, strangers.head_of(page), strangers.to_older(page), strangers.HEALTHY, *errors}
    told = f"tcp://127.0.0.1:{job.ports[port]}"
    expected = b"a value of the round" if port == "round" else b"a value of the run"
    with rallypoint.connect(told, credentials=job.credentials) as store:
        assert store.get("worker 0") == store.get("worker 1") == expected
        assert strangers.KEY not in store.list_keys()


def test_the_token_is_in_no_command_line_and_in_no_output(job: Job) -> None:
    lines = job.processes()
    assert len(lines) >= 5 and all(line for line in lines.values()), "the agent, two workers, a server and a relay"
    assert not [line for line in lines.values() if job.token in line]
    assert job.token not in job.node.text()


def test_the_token_is_in_the_environment_of_workers_alone(job: Job) -> None:
    holders = [pid for pid in job.processes() if job.token in read(pid, "environ")]
    assert sorted(holders) == sorted(job.pids.values())
    assert {"server.process", "relay.process"} == {
        found[0] for line in job.processes().values() if (found := re.search(r"(server|relay)\.process", line))
    }


def test_the_token_is_on_no_page(job: Job) -> None:
    for port in job.ports.values():
        for path in ("/", "/about", "/statistics", "/healthz"):
            headers = {"Authorization": f"Bearer {job.token}"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
            with urllib.request.urlopen(request, timeout=AMPLE_S) as page:
                text = page.read().decode()
            assert text and job.token not in text


def test_the_token_is_in_no_file_that_others_can_read(job: Job) -> None:
    """Of the run's own directory, where its output may be kept: but for the file that was given, it is only where
    `rallypoint runs` of the same user finds a token that the agent made, and goes with the agent."""
    where = Path(os.readlink(f"/proc/{job.node.child.pid}/cwd"))
    found = [path for path in where.rglob("*") if path.is_file() and job.token in path.read_text(errors="replace")]
    made = list(where.glob(f"rallypoint-{os.getuid()}/*/token"))
    assert found in ([], [where / "token"], made)
    for path in made:
        assert not path.stat().st_mode & 0o077 and not path.parent.stat().st_mode & 0o077


@pytest.mark.needs("torch")
def test_unmodified_pytorch_workers_use_their_store(tmp_path: Path) -> None:
    with Place(tmp_path) as place:
        node = place.run("--nproc-per-node", 2, place.script(TORCH_WORKER))
        assert node.end() == 0, node.text()
        assert node.out.splitlines() == 2 * ["a value True"]
