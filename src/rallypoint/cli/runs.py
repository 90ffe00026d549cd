"""`rallypoint runs`: an operator ends, restarts or drains a run, or one of its nodes, through its store.

Without --store it is the store of a run on this machine, also a private one.
"""

from __future__ import annotations

import getpass
import os
import socket
from typing import Any

import click

from rallypoint.cli import COMMANDS
from rallypoint.cli.local_runs import runs_here, store_here
from rallypoint.cli.store_command import print_value, store_command
from rallypoint.errors import RallypointError
from rallypoint.launch.monitoring.agent_requests import (
    DRAIN,
    KILL,
    RESTART,
    AgentRequest,
    agents_of,
    ask_agents,
    runs_of,
)
from rallypoint.launch.run_end import end_run
from rallypoint.security.credentials import Credentials
from rallypoint.store.base import Store
from rallypoint.text import printable

__all__ = ["command"]

ANSWER_S = 10.0
"""How long the agents may take to confirm a request."""

HELP = {
    KILL: """End RUN as failed on all nodes, or only NODE, at once.

    The workers of a run get SIGTERM, and SIGKILL after their grace period; those of a node get SIGKILL. The other nodes
    of the run continue if they are enough.""",
    RESTART: """Restart all workers of RUN in a new round, without using a restart of its budget.

    With NODE and --restart node or worker: only the workers of that node.""",
    DRAIN: """Let NODE leave RUN gracefully; without NODE, all nodes leave.

    Workers that call should_stop() stop at a step that all ranks agree on; others get SIGTERM and their grace period.
    The other nodes form a round without it, if they are enough; else the run is closed as preempted. The exit code of
    agents that leave is 75.""",
}


@click.group(short_help=COMMANDS["runs"])
def command() -> None:
    """Kill, restart or drain a run, or one of its nodes. Who did it, and why, is shown by the agents."""


def _store_here(options: dict[str, Any], given: Credentials) -> tuple[str, Credentials]:
    """Find the store of the run on this machine that the target names, with or without a node."""
    target: str = options["target"]
    runs = [run for run in runs_here() if target == run or target.startswith(f"{run}/")]
    return store_here(max(runs, key=len, default=target), given)


def _target(store: Store, text: str) -> tuple[str, str]:
    """Return the run and the node that a text names; a run's id may contain a slash."""
    runs = runs_of(store)
    if text in runs:
        return text, ""
    for run in sorted(runs, key=len, reverse=True):
        node = text.removeprefix(f"{run}/")
        if node != text and node in agents_of(store, run):
            return run, node
    listed = ", ".join(f"{run}/{node}" for run in runs for node in agents_of(store, run))
    raise RallypointError(f"no run or node {text!r} in this store; there are: {printable(listed) or 'none'}")


def _carry_out(store: Store, request: AgentRequest, run: str) -> None:
    """Send a request to the agents, and print who confirmed it."""
    what = f"{request.kind} of {run}{'/' * bool(request.node)}{request.node}"
    if request.kind == KILL and not request.node:
        end_run(store, run, request.who, f"run killed, {request.origin}")
        print_value(printable(f"{what}: the run has ended"))
        return
    answers, missing = ask_agents(store, run, request, ANSWER_S)
    if answers:
        print_value(printable(f"{what}: confirmed by {', '.join(sorted(answers))}"))
    if missing:
        raise RallypointError(f"{what}: no answer within {ANSWER_S:g} s from {', '.join(missing)}")


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.geteuid())
    return f"{user}@{socket.gethostname()}"


def _made(kind: str) -> click.Command:
    @store_command(kind, otherwise=_store_here)
    @click.argument("target", metavar="RUN[/NODE]")
    @click.option("--why", default="", metavar="TEXT", help="The reason, shown to the users of the run.")
    def function(store: Store, target: str, why: str) -> None:
        run, node = _target(store, target)
        _carry_out(store, AgentRequest(kind=kind, node=node, who=_who(), why=why[:500]), run)

    function.help = HELP[kind]
    return function


for _kind in (KILL, RESTART, DRAIN):
    command.add_command(_made(_kind))
