"""Native frames of workers: py-spy as it is, py-spys that fail, and an agent that goes on listening meanwhile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.launch.runs import Place
from tests.raw_peer import AMPLE_S, until

import rallypoint
from rallypoint.core.stacks import RankStack, decode_stacks
from rallypoint.launch.monitoring.agent_requests import BUSY, KILL, STACKS, AgentRequest, RequestListener, ask_agents
from rallypoint.launch.monitoring.native_stacks import NOT_INSTALLED, REFUSED, add_native, find_py_spy

IN_C = """
import ctypes
def asleep():
    say("up", rank, world, restarts, os.getpid())
    while True:
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter lock
if rank == 1:
    asleep()
stay()
"""
THREADS = """[
    {"os_thread_id": 7, "thread_name": "other\\nthread", "frames": [{"name": "poll", "filename": "/lib/libc.so.6",
     "module": "/lib/libc.so.6", "line": 0}]},
    {"os_thread_id": %d, "thread_name": null, "frames": [
        {"name": "all\\u001breduce", "filename": "/src/gloo.cc", "module": "/lib/libtorch.so", "line": 9},
        {"name": "step", "filename": "/job/train.py", "module": null, "line": 41}]}
]"""


def stacks(place: Place, *words: object) -> str:
    """Run `rallypoint stacks` as another process of the same user; return its output."""
    command = [sys.executable, "-m", "rallypoint", "stacks", *map(str, words)]
    environment = {**os.environ, "TMPDIR": str(place.where)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=AMPLE_S)
    return done.stdout + done.stderr


@pytest.mark.needs("pyspy")
@pytest.mark.parametrize("through", ["this machine", "the store"])
def test_native_frames_stand_below_the_python_stack(place: Place, through: str) -> None:
    script = place.script(IN_C)
    if through == "the store":
        node = place.node("n0", "--nproc-per-node", 2, script, nodes="1", run="mine")
        where = ["--store", f"tcp://localhost:{place.port}"]
    else:
        node, where = place.run("--nproc-per-node", 2, "--rdzv-id", "mine", script), []
    pids = node.up(0, 1, world=2)
    native = r"(?s)rank 1 in asleep .*\n    asleep \(.*\n  with native frames \(py-spy\):\n    \S*nanosleep \(libc"
    said = until(lambda: stacks(place, "mine", "--native", *where), lambda said: re.search(native, said) is not None)
    assert re.search(r"^    PyCFuncPtr_call \(|^    ffi_call \(", said, re.M), said
    one = stacks(place, "mine", "--native", "--rank", 1, *where)
    assert re.search(rf"With native frames \(py-spy\):\nThread {pids[1]}\b.*:\n  \S*nanosleep \(libc", one), one
    assert "native frames" not in stacks(place, "mine", *where)
    node.signal("SIGTERM")
    assert node.end() == 143  # the workers were let go


def py_spy(where: Path, monkeypatch: pytest.MonkeyPatch, body: str | None) -> None:
    """Put a py-spy of ours, or none, beside this Python and on the path."""
    monkeypatch.setattr(sys, "executable", str(where / "python"))
    monkeypatch.setenv("PATH", str(where))
    if body is not None:
        (where / "py-spy").write_text(f"#!/bin/sh\n{body}\n")
        (where / "py-spy").chmod(0o755)


FAILS = "echo 'Error: Failed to get stack traces\n\nCaused by:\n    0: Failed to suspend\n    1: %s' >&2; exit 1"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (None, NOT_INSTALLED),
        (FAILS % "EPERM: Operation not permitted", REFUSED),
        ("echo 'Permission Denied: Try sudo' >&2; exit 1", REFUSED),
        (FAILS % "No such process", "py-spy failed: No such process"),
        ("echo 'Error: Failed to find python version' >&2; exit 1", "py-spy failed: Failed to find python version"),
        ("exit 3", "py-spy failed: without a word"),
        ("echo '[{}]'", "malformed output of py-spy: Object missing required field `frames` - at `$[0]`"),
        ("exec /bin/sleep 600", "py-spy took longer than 0.1 s"),
    ],
)
def test_a_py_spy_that_fails_leaves_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str | None, why: str
) -> None:
    py_spy(tmp_path, monkeypatch, body)
    patience_s = 0.1 if "sleep" in (body or "") else AMPLE_S
    (found,) = add_native([RankStack(rank=0, pid=os.getpid(), text="as it was")], every=True, timeout_s=patience_s)
    assert (found.native, found.native_note, found.text) == ("", why, "as it was")


def test_frames_are_listed_main_thread_first_and_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.getpid()
    py_spy(tmp_path, monkeypatch, f"/bin/cat <<'END'\n{THREADS % pid}\nEND")
    assert find_py_spy() == str(tmp_path / "py-spy")
    (found,) = add_native([RankStack(rank=0, pid=pid)], every=True)
    frames = ["all\\x1breduce (gloo.cc:9 in libtorch.so)", "step (/job/train.py:41)"]
    assert (found.native_frames, found.native_note) == (frames, "")
    assert found.native.endswith("Thread 7 (other\\nthread), most recent call first:\n  poll (libc.so.6)")


def test_one_rank_of_each_place_is_traced_and_stopped_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    py_spy(tmp_path, monkeypatch, "echo '[]'; echo $5 >> ${0%/*}/traced")
    here = 'Thread 0x1 (most recent call first):\n  File "/job/train.py", line 41 in step'
    ranks = [RankStack(rank=rank, pid=100 + rank, text=here if rank else "") for rank in range(4)]
    ranks.append(RankStack(rank=4, pid=104, state="stopped", note="stopped (SIGSTOP)"))
    found = add_native(ranks, every=False)
    assert (tmp_path / "traced").read_text().split() == ["100", "101"]
    assert [one.native_note for one in found] == ["", "", "", "", "the process is stopped"]


def test_an_agent_that_traces_answers_other_requests() -> None:
    go_on = threading.Event()
    seen: list[AgentRequest] = []

    def dump(request: AgentRequest) -> list[RankStack]:
        if request.native:
            assert go_on.wait(AMPLE_S)
        return [RankStack(rank=0, text="python", native="native" * request.native)]

    store = rallypoint.HashStore()
    store.set("run:job/node:n0", "")
    listener = RequestListener("job", dump, seen.append)
    listener.attach(store, "n0")
    first: list[bytes] = []
    native = AgentRequest(kind=STACKS, native=True)
    asking = threading.Thread(
        target=lambda: first.append(ask_agents(store.clone(), "job", native, AMPLE_S)[0]["n0"]), daemon=True
    )
    asking.start()
    until(lambda: [key for key in store.list_keys() if "ask:" in key], bool)
    (busy,) = decode_stacks(ask_agents(store, "job", native, AMPLE_S)[0]["n0"])
    assert (busy.text, busy.native, busy.native_note) == ("python", "", BUSY)
    assert ask_agents(store, "job", AgentRequest(kind=KILL), AMPLE_S) == ({"n0": b""}, [])
    go_on.set()
    asking.join(AMPLE_S)
    assert decode_stacks(first[0])[0].native == "native" and [request.kind for request in seen] == [KILL]
    store.close()
