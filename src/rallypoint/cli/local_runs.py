"""The runs on this machine, for commands that are given no store: `stacks`, `runs`, `status`."""

from __future__ import annotations

import os

from rallypoint.errors import RallypointError
from rallypoint.launch.monitoring.local_agents import agents_here, credentials_of
from rallypoint.launch.monitoring.worker_records import AgentEntry
from rallypoint.security.credentials import Credentials
from rallypoint.text import printable

__all__ = ["agents_of_run", "chosen_run", "runs_here", "store_here"]


def chosen_run(runs: list[str], wanted: str | None, where: str) -> str:
    """Return the wanted run if it is there, or the only one; raise an error that lists the runs otherwise."""
    if wanted in runs:
        return wanted
    if wanted is None and len(runs) == 1:
        return runs[0]
    listed = f" (runs there: {', '.join(map(printable, runs))})" if runs else ""  # a run may be named `none`
    problem = f"no run {wanted!r}" if wanted is not None else "no run" if not runs else "several runs: name one"
    raise RallypointError(f"{problem} {where}{listed}")


def runs_here() -> list[str]:
    """Return the ids of the runs on this machine."""
    return sorted({agent.run for agent in agents_here()})


def agents_of_run(wanted: str | None) -> list[AgentEntry]:
    """Return the agents of a run on this machine; of the only one, if no run is named."""
    agents = list(agents_here())
    where = f"{'of this user ' * (os.geteuid() != 0)}on this machine"
    chosen = chosen_run(sorted({agent.run for agent in agents}), wanted, where)
    return [agent for agent in agents if agent.run == chosen]


def store_here(wanted: str | None, given: Credentials) -> tuple[str, Credentials]:
    """Return the URL of the store of a run on this machine, and the credentials for it."""
    found = {agent.url: agent for agent in agents_of_run(wanted)}
    (url, agent), *others = found.items()
    if others:
        agents = ", ".join(str(one.pid) for one in found.values())
        raise RallypointError(f"several runs on this machine are named {agent.run!r}; signal the agent (pids {agents})")
    if not url:
        raise RallypointError(f"the store of run {agent.run!r} is not known here: give its URL")
    return url, credentials_of(agent, given)
