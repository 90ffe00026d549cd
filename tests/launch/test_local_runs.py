"""Runs on this machine that no store was named for: private ones are operated and shown, by their user and by root."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.launch.runs import Node, Place, gone
from tests.ports import reserve_port
from tests.raw_peer import AMPLE_S, until
from tests.security.other_user import NOBODY, running_as

from rallypoint.cli import main, status
from rallypoint.launch import failures
from rallypoint.launch.monitoring import local_agents
from rallypoint.launch.monitoring.local_agents import agents_here, credentials_of
from rallypoint.security.credentials import OPEN, Credentials

WHO = r"asked for by \S+@\S+: it is late"


def command(place: Place, *words: str) -> str:
    """Run a command without a store, as another process of the same user; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RALLYPOINT_")}
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", *words],
        env={**environment, "TMPDIR": str(place.where)},
        capture_output=True,
        text=True,
        timeout=AMPLE_S,
    )
    return done.stdout + done.stderr


def operate(place: Place, *words: str) -> str:
    return command(place, "runs", *words, "--why", "it is late")


def private_run(place: Place, *words: object) -> Node:
    node = place.run("--nproc-per-node", 2, "--rdzv-id", "a/b", "--node", "n0", *words, place.script("stay()"))
    node.up(0, 1, world=2)
    until(lambda: list(place.where.glob("rallypoint-*/*/agent.json")), bool)
    return node


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory in which this process looks for agents."""
    monkeypatch.setattr("tempfile.tempdir", str(place.where))
    monkeypatch.setattr(local_agents, "SYSTEM_TEMPORARY", str(place.where))
    return place.where


def test_a_private_run_is_restarted_and_killed_with_the_reason(place: Place) -> None:
    node = private_run(place, "--log-dir", place.where / "logs")
    assert operate(place, "restart", "a/b") == "restart of a/b: confirmed by n0\n"
    node.until(r"^up \d 2 0 \d+$", 4)
    assert re.search(rf"restart {WHO}; no restart is used", node.err), node.err
    assert operate(place, "kill", "a/b") == "kill of a/b: the run has ended\n"
    assert node.end() == 1
    assert re.fullmatch(rf"run killed, {WHO}", failures.read(place.where / "logs").first.message)
    assert "no run 'a/b'" in operate(place, "kill", "a/b")


@pytest.mark.parametrize(("how", "codes"), [("drain", [75]), ("kill", [130, 143])])
def test_the_node_of_a_private_run_leaves(place: Place, how: str, codes: list[int]) -> None:
    node = private_run(place)
    pids = node.up(0, 1, world=2)
    assert "there are: a/b/n0" in operate(place, how, "a/b/n1")
    assert operate(place, how, "a/b/n0") == f"{how} of a/b/n0: confirmed by n0\n"
    assert node.end() in codes
    assert re.search(rf"this node leaves the run \({how}\), {WHO}", node.err)
    gone(*pids.values())


def test_a_private_run_shows_its_status(place: Place, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = private_run(place)
    shown = until(lambda: command(place, "status", "--run", "a/b"), lambda said: "2 ranks" in said)
    assert re.search(r"^run a/b: running", shown, re.M), shown
    monkeypatch.setattr(status, "DEFAULT_URL", f"tcp://127.0.0.1:{reserve_port()}")
    monkeypatch.delenv("RALLYPOINT_URL", raising=False)
    found = CliRunner().invoke(main, ["status", "--json"], catch_exceptions=False)  # nobody is at the default address
    assert json.loads(found.output)["runs"][0]["run"] == "a/b"
    assert "no run 'other'" in command(place, "status", "--run", "other")
    node.signal("SIGTERM")
    node.end()
    assert not list(here.glob("rallypoint-*/*"))


def test_several_runs_must_be_named(place: Place, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "two"):
        place.run("--rdzv-id", name, place.script("stay()")).up(0, world=1)
    until(lambda: len(list(agents_here())), lambda count: count == 3)
    assert "several runs on this machine are named 'two'; signal the agent" in operate(place, "kill", "two")
    assert re.search(r"no run .three. on this machine \(runs there: .*\bone, two\b", operate(place, "kill", "three"))
    monkeypatch.setattr(status, "DEFAULT_URL", f"tcp://127.0.0.1:{reserve_port()}")
    monkeypatch.delenv("RALLYPOINT_URL", raising=False)
    found = CliRunner().invoke(main, ["status"])
    assert "name a run on this machine with --run: one, two" in str(found.output)
    assert operate(place, "kill", "one") == "kill of one: the run has ended\n"


def test_only_a_token_of_the_agents_own_is_written(place: Place, here: Path) -> None:
    node = private_run(place)
    (agent,) = until(lambda: list(agents_here()), bool)
    made = credentials_of(agent, OPEN)
    assert len(made.token) > 40 and made.token not in Path(agent.directory, "agent.json").read_text()
    for path in (here / f"rallypoint-{os.geteuid()}", *Path(agent.directory).glob("*token*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077
    node.signal("SIGTERM")
    node.end()
    mine = "the-token-of-the-user"
    node = place.run("--rdzv-id", "c", place.script("stay()"), env={"RALLYPOINT_TOKEN": mine})
    node.up(0, world=1)
    (agent,) = until(lambda: list(agents_here()), bool)
    given = Credentials(token=mine)
    assert credentials_of(agent, given) is given and not Path(agent.directory, "token").exists()


# Other users


def reads(user: int, path: Path) -> bool:
    """Return whether a user can read a file."""
    reading, writing = os.pipe()
    with running_as(user, lambda: os.write(writing, b"%d" % os.access(path, os.R_OK))):
        os.close(writing)
        with open(reading) as file:
            return file.read() == "1"


@pytest.mark.needs("root")
def test_other_users_cannot_read_the_token() -> None:
    with tempfile.TemporaryDirectory() as made, Place(Path(made)) as place:
        place.where.chmod(0o755)
        place.run(place.script("stay()")).up(0, world=1)
        (token,) = until(lambda: list(place.where.glob("rallypoint-*/*/token")), bool)
        assert reads(NOBODY, Path(made, "script1.py"))
        assert reads(os.geteuid(), token) and not reads(NOBODY, token)


def described(here: Path, pid: int, url: str = "tcp://127.0.0.1:1") -> Path:
    """Write the directory of an agent of another user; return its agent.json."""
    directory = here / f"rallypoint-{NOBODY}" / "1-a"
    directory.mkdir(parents=True, mode=0o700)
    path = directory / "agent.json"
    workers = [{"rank": 0, "local_rank": 0, "pid": pid, "directory": "/elsewhere"}]
    path.write_text(json.dumps({"run": "theirs", "node": "n0", "pid": pid, "url": url, "workers": workers}))
    (directory / "token").write_text("a-token-of-their-agent")
    for one in (directory.parent, directory, path, directory / "token"):
        os.chown(one, NOBODY, NOBODY)
    return path


@pytest.mark.needs("root")
def test_root_finds_the_runs_of_all_users(here: Path) -> None:
    with running_as(NOBODY, signal.pause) as pid:
        path = described(here, pid)
        (agent,) = until(lambda: list(agents_here()), bool)  # when the process belongs to its user
        assert (agent.run, agent.url, agent.workers[0].directory) == ("theirs", "tcp://127.0.0.1:1", str(path.parent))
        assert credentials_of(agent, OPEN).token == "a-token-of-their-agent"


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "tcp://elsewhere:1", "etcd://127.0.0.1:1/x", "tcps://127.0.0.1:1"]
)
def test_root_uses_no_other_url_of_theirs(here: Path, url: str) -> None:
    with running_as(NOBODY, signal.pause) as pid:
        described(here, pid, url)
        (agent,) = until(lambda: list(agents_here()), bool)
        assert agent.url == ""


def swap(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text(path.read_text().replace('"pid": ', '"pid": 1, "was": ')),
        lambda path: swap(path, os.mkfifo),
        lambda path: swap(path, lambda path: path.symlink_to("token")),
        lambda path: os.chown(path, 0, 0),
        lambda path: os.chown(path.parents[1], 0, 0),
        lambda path: path.parents[1].chmod(0o777),
        lambda path: path.write_text("no JSON"),
        lambda path: path.parents[1].rename(path.parents[2] / "rallypoint-x"),
    ],
)
def test_root_ignores_what_is_not_an_agent_of_its_owner(here: Path, spoil: Callable[[Path], object]) -> None:
    with running_as(NOBODY, signal.pause) as pid:
        path = described(here, pid)
        until(lambda: list(agents_here()), bool)
        spoil(path)
        assert not list(agents_here())
