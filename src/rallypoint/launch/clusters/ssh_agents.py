"""The variables with which `rallypoint run --hosts` tells an agent that it started over ssh which node it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.launch.clusters.evidence import Evidence, number

__all__ = ["HOSTS_OPTION", "SSH_VARIABLES", "is_started_by_ssh", "read_ssh", "ssh_variables"]

HOSTS_OPTION = "--hosts"
"""What started the agent, in messages."""

HOSTS, RANK, RUN = "RALLYPOINT_SSH_HOSTS", "RALLYPOINT_SSH_RANK", "RALLYPOINT_SSH_RUN"

SSH_VARIABLES = (HOSTS, RANK, RUN)
"""The variables; an agent removes them, so that its workers do not inherit them."""


def ssh_variables(hosts: Sequence[str], rank: int, run: str) -> dict[str, str]:
    """Return the variables of the agent on one of the hosts."""
    return {HOSTS: ",".join(hosts), RANK: str(rank), RUN: run}


def is_started_by_ssh(environ: Mapping[str, str]) -> bool:
    """Return whether `rallypoint run --hosts` has started this agent."""
    return all(environ.get(name) for name in SSH_VARIABLES)


def read_ssh(environ: Mapping[str, str]) -> Evidence | None:
    """Return the job of an agent that was started over ssh."""
    rank = number(environ, RANK)
    if rank is None or not is_started_by_ssh(environ):
        return None
    hosts = environ[HOSTS].split(",")
    return Evidence(
        what=HOSTS_OPTION,
        nodes=len(hosts),
        nodes_from=f"{len(hosts)} host{'s' * (len(hosts) > 1)}",
        rank=rank,
        rank_from=f"rank {rank} in --hosts",
        head=hosts[0].rpartition("@")[2],
        run_id=environ[RUN],
    )
