"""`rallypoint run --hosts`: check the options here, then start the agents, which parse the same command line."""

from __future__ import annotations

import os
import shutil
import uuid
from typing import Any

import click

from rallypoint import net
from rallypoint.cli.cluster_options import place_in_cluster
from rallypoint.cli.option_prefixes import WORDS
from rallypoint.core.policy.round_policy import list_few
from rallypoint.launch.clusters.ssh_agents import ssh_variables

__all__ = ["run_on_hosts"]


def run_on_hosts(given: dict[str, Any], grace_s: float) -> int:
    """Run one agent on each of the hosts, whose workers have `grace_s` to end; return the exit code."""
    from rallypoint.launch.ssh.remote_hosts import HostsRun, forwarded_variables

    hosts, run_id = given["hosts"], f"ssh-{uuid.uuid4().hex[:12]}"
    if shutil.which("ssh") is None:
        raise click.UsageError("--hosts needs ssh, which is not on the PATH: install OpenSSH's client")
    for name in ("node_rank", "node", "local_addr"):
        if given[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is for one node, and --hosts starts several: remove it")
    options = {**given, "store": given["store"] or os.environ.get("RALLYPOINT_STORE")}
    place_in_cluster(options, ssh_variables(hosts, 0, run_id))
    derived = options["rdzv_endpoint"] != given["rdzv_endpoint"]
    if derived and len(hosts) > 1 and net.is_loopback(hosts[0].rpartition("@")[2]):
        raise click.UsageError(
            f"--hosts: the other hosts cannot reach the first one as {hosts[0]!r}: name it as they know it, or set "
            f"--rdzv-endpoint"
        )
    if not given["quiet"]:
        click.echo(f"rallypoint run: starting agents over ssh on {len(hosts)} hosts: {list_few(hosts)}", err=True)
    try:
        run = HostsRun(
            hosts,
            click.get_current_context().meta[WORDS],
            forwarded_variables(os.environ, given["forward_env"]),
            run_id,
            grace_s,
            given["preempt_signal"],
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return run.run()
