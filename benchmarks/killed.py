"""Killed: how long what a process held outlives it, when that is killed; there is no peer for it.

A lease must go, a lock must go to the next, and those who wait at a barrier must hear who was lost. Each victim is a
process of its own, as are the members at the barrier: eight, and an onlooker that comes and goes until it has seen all
of them there. One more, who never comes, keeps the barrier shut.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import subprocess
import sys
import time
from collections.abc import Callable

import rallypoint
from benchmarks.rig import PLACEMENTS, in_turn, say
from benchmarks.servers import Running, child
from benchmarks.table import Line, Target

PATIENCE_S = 60.0
TARGET = Target(at_most=2500, unit="ms")
"""The server's usual grace, and half a second."""

MEMBERS = [*"01234567", "onlooker", "nobody"]
VICTIM = 3
MEMBER = """
import sys, rallypoint
url, what, name, member, *members = sys.argv[1:]
store = rallypoint.connect(url, timeout=60)
if what == "lease":
    store.lease(name, "held")
elif what == "lock":
    rallypoint.Lock(store, name, member).acquire()
    print("holds", flush=True)
elif what == "barrier":
    try:
        rallypoint.Barrier(store, name, members).wait(member)
    except rallypoint.MembersLost as error:
        print(*error.lost, flush=True)
sys.stdin.read()
"""
_names = (f"bench/killed/{number}" for number in itertools.count())


def run(server: Running, rounds: int) -> list[Line]:
    """Measure, on our server with its usual grace."""
    url = f"tcp://127.0.0.1:{server.port}"
    with rallypoint.connect(url, timeout=PATIENCE_S) as store:
        return [
            _measured("killed client, lease gone", rounds, functools.partial(_lease_ms, store, url)),
            _measured("killed lock holder", rounds, functools.partial(_lock_ms, store, url)),
            _measured("killed barrier member", rounds, functools.partial(_barrier_ms, store, url)),
        ]


def _measured(what: str, rounds: int, outlived_ms: Callable[[str], float]) -> Line:
    say(f"  {what}")
    figures = in_turn(["rallypoint"], rounds, lambda _: outlived_ms(next(_names)))
    return Line(what, PLACEMENTS[-1].name, "ms", figures["rallypoint"], target=TARGET)


def _lease_ms(store: rallypoint.Store, url: str, name: str) -> float:
    """Have a process take a lease and kill it; return how long the lease stayed."""
    with store.watch(name) as changes, _member(url, "lease", name, "holder") as holder:
        if changes.next().value != b"held":
            raise RuntimeError("the lease went before its holder was killed")
        killed_at = _kill(holder)
        if changes.next().value is not None:
            raise RuntimeError("the lease was written once more, and not deleted")
        return (time.monotonic() - killed_at) * 1000


def _lock_ms(store: rallypoint.Store, url: str, name: str) -> float:
    """Have a process take a lock and kill it; return how long it was until the next one held the lock."""
    with _member(url, "lock", name, "holder") as holder:
        if _line(holder) != "holds":
            raise RuntimeError("the holder of the lock ended before it was killed")
        killed_at = _kill(holder)
        with rallypoint.Lock(store, name):
            return (time.monotonic() - killed_at) * 1000


def _barrier_ms(store: rallypoint.Store, url: str, name: str) -> float:
    """Have processes wait at a barrier and kill one; return how long it was until the last of the others knew who."""
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(_member(url, "barrier", name, member, *MEMBERS)) for member in MEMBERS[:8]]
        _see_all(rallypoint.Barrier(store, name, MEMBERS))
        victim = members.pop(VICTIM)
        killed_at = _kill(victim)
        told = [_line(member) for member in members]
        took_ms = (time.monotonic() - killed_at) * 1000
    if any(not said.startswith(f"{VICTIM} (") or str(victim.pid) not in said for said in told):
        raise RuntimeError(f"member {VICTIM} was killed, process {victim.pid}, and the others were told: {told}")
    return took_ms


def _see_all(barrier: rallypoint.Barrier) -> None:
    """Come and go until all are there but the one who never comes."""
    while True:
        try:
            barrier.wait("onlooker", 0.05)
        except rallypoint.MembersMissing as error:
            if error.missing == ("nobody",):
                return


def _kill(process: subprocess.Popen[str]) -> float:
    killed_at = time.monotonic()
    process.kill()
    return killed_at


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _member(*arguments: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return child([sys.executable, "-c", MEMBER, *arguments])
