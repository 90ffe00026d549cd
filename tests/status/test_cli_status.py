"""`rallypoint status` and `rallypoint top`, as real processes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.raw_peer import AMPLE_S, RawPeer, read_line
from tests.replicated.servers import Servers
from tests.status.models import report

import rallypoint
from rallypoint.core.run_report import RankReport
from rallypoint.readiness import wait_readable
from rallypoint.security.credentials import OPEN, Credentials

COMMAND = [sys.executable, "-m", "rallypoint"]


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RALLYPOINT_")}
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=AMPLE_S, env={**environment, **variables}
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def server() -> Iterator[rallypoint.Server]:
    with rallypoint.Server(credentials=OPEN) as serving, rallypoint.connect(serving.url) as store:
        ranks = [RankReport(rank=number, local_rank=number, pid=number, step=120) for number in range(63)]
        ranks.append(RankReport(rank=63, local_rank=63, pid=99, state="hung", reason="\x1b[31mno progress"))
        store.lease("run:demo/node:n0", report("demo", "n0", *ranks))
        yield serving


def test_status_is_text_that_fits_80_columns(server: rallypoint.Server) -> None:
    done = run("status", server.url)
    assert done.returncode == 0 and done.stderr == ""
    assert "  ranks 0-62 running, step 120\n" in done.stdout
    assert r"rank 63 hung: \x1b[31mno progress (pid 99)" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert run("status", RALLYPOINT_URL=server.url).stdout.startswith("rallypoint ")


def test_status_as_json_is_the_model(server: rallypoint.Server) -> None:
    done = run("status", "--json", server.url)
    model = json.loads(done.stdout)
    assert (model["role"], model["runs"][0]["ranks"]) == ("server", 64)


def test_status_of_what_is_no_server(server: rallypoint.Server) -> None:
    assert run("status", "tcp://127.0.0.1:1", "--timeout", "1").returncode == 4
    done = run("status", "file:///tmp/x")
    assert done.returncode == 2 and "give tcp://HOST:PORT" in done.stderr


def test_a_protected_server_shows_its_status_to_those_with_the_token(tmp_path: Path) -> None:
    with rallypoint.Server(credentials=Credentials(token="a-token-of-some-length")) as protected:
        denied = run("status", protected.url)
        assert denied.returncode in (1, 4) and denied.stdout == ""
        assert run("status", protected.url, RALLYPOINT_TOKEN="a-token-of-some-length").returncode == 0


@pytest.mark.needs("etcd")
def test_the_status_of_a_store_in_etcd_is_that_of_its_leader(etcd_url: str, tmp_path: Path) -> None:
    done = run("status", etcd_url, "--timeout", "60")
    assert done.returncode == 4 and "no server leads this store" in done.stderr
    with Servers(etcd_url, tmp_path, 2) as servers:
        model = json.loads(run("status", "--json", etcd_url).stdout)
        assert (model["role"], model["pid"]) == ("leader", servers[servers.leader()].child.pid)


@pytest.mark.needs("etcd")
def test_the_status_of_a_standby_is_that_of_its_leader(etcd_url: str, tmp_path: Path) -> None:
    with Servers(etcd_url, tmp_path, 2) as servers:
        (standby,) = servers.standbys()
        done = run("status", "--json", servers[standby].url)
        assert json.loads(done.stdout)["role"] == "leader"


def test_watch_prints_again_and_says_when_the_server_is_gone(tmp_path: Path) -> None:
    with rallypoint.Server(credentials=OPEN) as serving:
        command = [*COMMAND, "status", "--watch", "--json", "--interval", "0.1", serving.url]
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
        try:
            assert [json.loads(read_line(watching))["role"] for _ in range(2)] == ["server"] * 2
            serving.close()
            while "error" not in (last := json.loads(read_line(watching))):
                pass
            assert serving.url.removeprefix("tcp://") in last["error"]
        finally:
            watching.send_signal(signal.SIGINT)
            assert watching.wait(AMPLE_S) == 130
            assert watching.stdout is not None
            watching.stdout.close()


def test_top_draws_in_place_on_a_terminal_and_leaves_it_as_it_was(server: rallypoint.Server) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "top", "--interval", "0.1", server.url]
    drawing = subprocess.Popen(command, stdout=theirs, stdin=theirs, start_new_session=True)
    os.close(theirs)
    seen = b""
    try:
        while seen.count(b"\x1b[H") < 2 or b"ranks 0-62 running" not in seen:
            assert wait_readable(ours, timeout_s=AMPLE_S), seen
            seen += os.read(ours, 65536)
        drawing.send_signal(signal.SIGINT)
        assert drawing.wait(AMPLE_S) == 130
        while b"\x1b[?1049l" not in seen:
            assert wait_readable(ours, timeout_s=AMPLE_S), seen
            seen += os.read(ours, 65536)
        assert seen.startswith(b"\x1b[?1049h")
    finally:
        drawing.kill()
        drawing.wait()
        os.close(ours)


def test_the_log_of_a_server_may_be_json(tmp_path: Path) -> None:
    url_file = tmp_path / "url"
    command = [*COMMAND, "serve", "--port", "0", "--log-format", "json", "--url-file", str(url_file)]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        address = read_line(serving).rpartition("tcp://")[2].rpartition(":")
        with RawPeer((address[0], int(address[2])), greet=False) as peer:
            peer.send(b"\xff bad\n")
            peer.rest()
    finally:
        serving.terminate()
        _, errors = serving.communicate(timeout=AMPLE_S)
    facts = [json.loads(line) for line in errors.splitlines()]
    (dropped,) = [one for one in facts if "unrecognized protocol" in one["message"]]
    assert (dropped["level"], dropped["logger"], dropped["pid"]) == ("warning", "rallypoint.server", serving.pid)
    assert dropped["time"].endswith("Z")
