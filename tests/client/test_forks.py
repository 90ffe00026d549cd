"""A forked child has its own session, which all its threads share; a closed store stays closed in the child."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rallypoint

DEADLINE_S = 60
CHILDREN, THREADS, ADDS = 4, 6, 5

FORKS = """
import os, signal, sys, threading, rallypoint
children, threads, adds = map(int, sys.argv[2:])
store = rallypoint.connect(sys.argv[1], timeout=30)
busy = threading.Event()
ended = threading.Event()

def load():  # so that the fork may find the parent's connection, and its locks, in use
    while not ended.is_set():
        store.add("parent", 1)
        busy.set()

def use(name, start, wrong):
    start.wait()
    try:
        totals = [store.add(name, 1) for _ in range(adds)]
        if totals != list(range(1, adds + 1)):
            wrong.append(totals)
    except BaseException as error:
        wrong.append(error)

def child(number):
    signal.alarm(30)  # ends a child that hangs
    sys.setswitchinterval(1e-6)
    start, wrong = threading.Barrier(threads), []
    users = [threading.Thread(target=use, args=[f"{number} {user}", start, wrong]) for user in range(threads)]
    [user.start() for user in users]
    [user.join() for user in users]
    sys.stderr.write("".join(f"child {number}: {one!r}\\n" for one in wrong))
    store.close()
    return len(wrong)

loader = threading.Thread(target=load)
loader.start()
busy.wait()
ends = []
for number in range(children):
    process = os.fork()
    if process == 0:
        status = 99
        try:
            status = child(number)
        finally:
            os._exit(status)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
ended.set()
loader.join()
print(ends, flush=True)
"""


def test_threads_that_start_together_in_a_forked_child_share_one_session() -> None:
    with rallypoint.Server() as server, rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        done = subprocess.run(
            [sys.executable, "-c", FORKS, server.url, str(CHILDREN), str(THREADS), str(ADDS)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.stdout == f"{[0] * CHILDREN}\n", done.stderr
        counters = [f"{number} {user}" for number in range(CHILDREN) for user in range(THREADS)]
        assert store.multi_get(counters) == [b"%d" % ADDS] * len(counters)


CLOSED = """
import os, sys, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=30)
if sys.argv[2] == "parent":
    store.close()
process = os.fork()
if process == 0:
    if sys.argv[2] == "child":
        store.close()
    try:
        store.add("n", 1)
    except rallypoint.StoreClosed:
        print("closed", flush=True)
    os._exit(0)
os.waitpid(process, 0)
"""


@pytest.mark.parametrize("where", ["parent", "child"])
def test_a_closed_store_is_not_reopened_in_a_forked_child(where: str) -> None:
    with rallypoint.Server() as server:
        command = [sys.executable, "-c", CLOSED, server.url, where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == "closed\n", done.stderr
