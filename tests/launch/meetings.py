"""Workers that meet on demand: `meet` shows that both stores of a job work, in the processes first started."""

from __future__ import annotations

from collections.abc import Sequence

from tests.launch.runs import Node

__all__ = ["MEET", "ask", "finish", "meet"]

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
"""A script: workers meet, by the worker's own store and by that of PyTorch's clients, whenever USR2 comes."""


def meet(nodes: Sequence[Node], times: int, rounds: int = 1) -> None:
    """Have the workers hold meeting number `times` of their round, and wait until `rounds` rounds have held it."""
    ask(nodes)
    for node in nodes:
        node.until(rf"^met {times}$", rounds)


def ask(nodes: Sequence[Node]) -> None:
    """Tell the workers to meet."""
    for node in nodes:
        node.signal("SIGUSR2")


def finish(nodes: Sequence[Node], started: int = 1) -> None:
    """Have the workers succeed; check how often they were started."""
    for node in nodes:
        node.signal("SIGUSR1")
    assert [node.end() for node in nodes] == [0] * len(nodes), "\n".join(node.text() for node in nodes)
    assert {node.out.count("up ") for node in nodes} == {started}
