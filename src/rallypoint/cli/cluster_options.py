"""Options of `rallypoint run` about schedulers and lists of hosts, and the place of this node that follows from them.

The decision is in `launch/clusters/detection.py`; here its inputs are collected, and its result is written over the
options that were not given.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rallypoint.cli.option_groups import ELSEWHERE, OptionGroup, parsed
from rallypoint.cli.rdzv_conf import CONF, HOST
from rallypoint.launch.clusters.detection import (
    AUTO,
    CLUSTERS,
    GivenOptions,
    Impossible,
    Placement,
    place_node,
)
from rallypoint.launch.clusters.evidence import Facts
from rallypoint.launch.clusters.ssh_agents import SSH_VARIABLES, is_started_by_ssh
from rallypoint.launch.ssh.remote_hosts import FORWARDED, parse_hosts
from rallypoint.server.settings import DEFAULT_PORT

__all__ = ["cluster_group", "place_in_cluster"]


def cluster_group() -> OptionGroup:
    """Return the group of these options."""
    group = OptionGroup("Clusters")
    group.add("cluster", ours=True, type=click.Choice(CLUSTERS), default=AUTO, default_text=AUTO,
              help="Scheduler whose variables give the number of nodes, the rank of this node and the server, unless "
                   "options do; auto: any that is found; none: ignore them all.")  # fmt: skip
    group.add("hosts", ours=True, metavar="[USER@]HOST,…", is_eager=True, callback=_hosts,
              help="Start one agent on each of these hosts over ssh, and end them together; ranges: "
                   "node[01-16].")  # fmt: skip
    group.add("forward-env", ours=True, metavar="NAME,…", default="", callback=parsed(_names),
              help="Further variables for the agents of --hosts; NCCL_* is all that begin with "
                   f"NCCL_.  [always: {', '.join(FORWARDED)}]")  # fmt: skip
    return group


def _hosts(context: click.Context, _: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Parse --hosts; on one of the hosts, ignore it."""
    if value is None or is_started_by_ssh(os.environ):
        return ()
    context.meta[ELSEWHERE] = True
    try:
        return parse_hosts(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", name):
            raise ValueError(f"{name!r} is not the name of a variable, nor NAME* for all that begin so")
    return names


def place_in_cluster(given: dict[str, Any], ssh: dict[str, str] | None = None) -> str:
    """Write what the environment says over options that were not given; return what was detected, or nothing.

    `ssh` are the variables of an agent that is started over ssh, if this process is not that agent. Raises UsageError
    if options and environment contradict each other.
    """
    decision = place_node(_facts(ssh or {}), _given(given))
    for name in SSH_VARIABLES:
        os.environ.pop(name, None)
    if isinstance(decision, Impossible):
        raise click.UsageError(decision.reason)
    if not isinstance(decision, Placement):
        return decision.reason if decision.notable else ""
    given["nnodes"], given["node_rank"] = decision.nnodes, decision.node_rank
    given["rdzv_id"] = decision.run_id
    if decision.endpoint:
        given["rdzv_endpoint"] = decision.endpoint
    if decision.is_host is not None:
        given["rdzv_conf"] = {HOST: decision.is_host, **(given["rdzv_conf"] or CONF)}
    return decision.reason


def _given(options: dict[str, Any]) -> GivenOptions:
    port = options["master_port"]
    return GivenOptions(
        cluster=options["cluster"],
        nnodes=options["nnodes"] if _is_given("nnodes") else None,
        standalone=options["standalone"],
        endpoint=bool(options["rdzv_endpoint"].strip() or options["master_addr"] or options["store"]),
        port=DEFAULT_PORT if port is None else port,
        node_rank=options["node_rank"],
        run_id=options["rdzv_id"],
    )


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) in (
        ParameterSource.COMMANDLINE,
        ParameterSource.ENVIRONMENT,
    )


def _facts(more: dict[str, str]) -> Facts:
    hostname = socket.gethostname()
    return Facts({**os.environ, **more}, hostname, _full_name(hostname))


def _full_name(hostname: str) -> str:
    """Return the first name on the line of this host in /etc/hosts, where Kubernetes writes its full name."""
    try:
        lines = Path("/etc/hosts").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        names = line.partition("#")[0].split()[1:]
        if hostname in names[1:]:
            return names[0]
    return ""
