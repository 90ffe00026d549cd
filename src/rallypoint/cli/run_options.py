"""The options of `rallypoint run`: their names, help texts and parsers.

`run_options` declares them in the groups that `--help` shows; `RunOptions` holds their typed values. Options of
torchrun accept both of its spellings (`--rdzv-id`, `--rdzv_id`) and its environment variable (`PET_RDZV_ID`).
"""

from __future__ import annotations

from typing import Any

import click
import msgspec

from rallypoint import net
from rallypoint.cli.cluster_options import cluster_group
from rallypoint.cli.credential_options import FILES
from rallypoint.cli.health_options import health_group
from rallypoint.cli.option_groups import OptionGroup, checked, parsed
from rallypoint.cli.output_options import output_options
from rallypoint.cli.rdzv_conf import read_conf
from rallypoint.core.machines.machine import MAX_MEMBERS
from rallypoint.launch.job import (
    RELAYS,
    directory,
    env_file,
    exit_codes,
    node_range,
    printable_name,
    run_name,
)
from rallypoint.launch.job import workers_here as read_workers
from rallypoint.launch.signal_names import ENDING_SIGNALS, preempt_signals, signal_names
from rallypoint.launch.workers.numa import MODES
from rallypoint.security.credentials import VARIABLES
from rallypoint.server.settings import DEFAULT_PORT
from rallypoint.store.url import parse_url

__all__ = ["IGNORED", "STORE_VARIABLE", "RunOptions", "read_store_url", "run_options"]

IGNORED = {
    "monitor_interval": "workers are monitored without polling",
    "rdzv_backend": "there is only one backend",
    "start_method": "workers are always started as new processes",
    "run_path": "the script is run directly",
}
"""Options of torchrun that are accepted and ignored, with a note that gives this reason."""

IGNORED_FLAGS = ("run_path",)
IGNORED_TYPES = {"monitor_interval": click.FLOAT, "start_method": click.Choice(["spawn", "fork", "forkserver"])}
"""The ignored options whose values are checked, as by torchrun."""

STORE_VARIABLE = "RALLYPOINT_STORE"
"""The variable for a URL of --store that contains a password; workers do not inherit it."""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The values of all options that have an effect; None for an option without value and default."""

    nnodes: tuple[int, int]
    nproc_per_node: int
    standalone: bool
    rdzv_endpoint: str
    rdzv_id: str
    rdzv_conf: dict[str, Any]
    store: str | None
    data_dir: str | None
    relay: str | None
    token_file: str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    tls_client_ca: str | None
    master_addr: str | None
    master_port: int | None
    node: str | None
    node_rank: int | None
    local_addr: str | None
    module: bool
    no_python: bool
    role: str
    env_file: dict[str, str] | None
    numa_binding: str | None
    virtual_local_rank: bool
    restart: str
    restart_budget: int | None
    max_restarts: int
    min_uptime: float
    final_codes: tuple[int, ...]
    hang_timeout: float | None
    agent_timeout: float
    no_progress_limit: int
    grace: float | None
    shutdown_timeout: float | None
    exit_timeout: float
    health_check: str | None
    health_timeout: float
    health_cooldown: float
    signals_to_handle: tuple[str, ...]
    preempt_signal: tuple[str, ...]
    preempt_timeout: float
    log_dir: str | None
    redirects: str
    tee: str
    local_ranks_filter: frozenset[int] | None
    ranks_filter: frozenset[int] | None
    fold: str
    progress_bars: str
    duplicate_stdout_filters: tuple[str, ...] | None
    duplicate_stderr_filters: tuple[str, ...] | None
    logs_specs: str | None
    event_log_handler: str
    quiet: bool
    json: bool
    log_format: str


def _endpoint(text: str) -> net.Endpoint:
    return net.parse_endpoint(text.strip(), DEFAULT_PORT)


def read_store_url(text: str) -> str:
    """Check the URL of a store and return it; raise ValueError with the reason if it is invalid."""
    url = parse_url(text)
    if url.scheme == "etcd":
        url.etcd()
    else:
        url.endpoint()
    return text


def _groups() -> list[OptionGroup]:
    return [
        _size(),
        _place(),
        cluster_group(),
        _security(),
        _identity(),
        _program(),
        _restarts(),
        health_group(),
        output_options(),
    ]


def _size() -> OptionGroup:
    group = OptionGroup("Size of the job")
    group.add("nnodes", metavar="N|MIN:MAX", default="1", default_text="1", callback=parsed(node_range),
              help="Number of nodes, or minimum and maximum number of nodes.")  # fmt: skip
    group.add("nproc-per-node", metavar="N|auto|cpu|gpu", default="1", default_text="1",
              callback=parsed(read_workers, machine=True),
              help="Number of workers on this node; auto: one per GPU, or one per CPU if there is no GPU.")  # fmt: skip
    group.add("standalone", is_flag=True,
              help="Run on this node only, with a private server. The default for one node.")  # fmt: skip
    return group


def _place() -> OptionGroup:
    group = OptionGroup("Rendezvous")
    group.add("rdzv-endpoint", metavar="HOST[:PORT]", default="", callback=checked(_endpoint),
              help=f"Address of the server, the same on all nodes. The node with this address starts the server. "
                   f"Default port: {DEFAULT_PORT}.")  # fmt: skip
    group.add("rdzv-id", metavar="NAME", default="", callback=parsed(run_name),
              help="Name of the run, the same on all nodes.")  # fmt: skip
    group.add("rdzv-conf", metavar="KEY=VALUE,…", default="", callback=parsed(read_conf),
              default_text="join_timeout=600,last_call_timeout=5",
              help="join_timeout: seconds to wait for the minimum number of nodes. last_call_timeout: seconds to wait "
                   "for further nodes after that. is_host: whether this node starts the server.")  # fmt: skip
    group.add("store", ours=True, metavar="URL", callback=checked(read_store_url),
              help="A running server (tcp://HOST:PORT), or a store in etcd (etcd://HOST:PORT,…), whose servers run on "
                   f"the first three nodes. Pass a URL with a password in {STORE_VARIABLE}: other users can read "
                   "command-line arguments.")  # fmt: skip
    group.add("data-dir", ours=True, metavar="DIRECTORY", default_text="in memory",
              callback=parsed(directory, machine=True),
              help="Directory for the state of the server that this node starts, to recover it after a "
                   "crash.")  # fmt: skip
    group.add("relay", ours=True, type=click.Choice(RELAYS), default_text="rank0; local with etcd, a token or TLS",
              help="Relay behind MASTER_ADDR: that of rank 0's node, or each node's own on loopback.")  # fmt: skip
    group.add("master-addr", metavar="HOST", default_text="127.0.0.1",
              help="Host of the server; an alternative to --rdzv-endpoint.")  # fmt: skip
    group.add("master-port", type=click.IntRange(0, 65535), metavar="PORT", default_text="29500",
              help="Port of the server at --master-addr.")  # fmt: skip
    return group


def _security() -> OptionGroup:
    group = OptionGroup("Security")
    for name, words in FILES.items():
        variables = ("token", name) if name == "token_file" else (name,)
        told = " or ".join(VARIABLES[each] for each in variables)
        group.add(name.replace("_", "-"), ours=True, metavar="FILE", default_text=told, help=words)
    return group


def _identity() -> OptionGroup:
    group = OptionGroup("This node")
    group.add("node", ours=True, metavar="NAME", default_text="its host name", callback=parsed(printable_name),
              help="Name of this node. A node that rejoins under the same name gets its rank back.")  # fmt: skip
    group.add("node-rank", type=click.IntRange(0, MAX_MEMBERS - 1), metavar="RANK",
              help="Rank that this node requests.")  # fmt: skip
    group.add("local-addr", metavar="HOST", default_text="its address on the route to the server",
              callback=parsed(printable_name), help="Address at which other nodes reach this one.")  # fmt: skip
    return group


def _program() -> OptionGroup:
    group = OptionGroup("Workers")
    group.add("module", "-m", is_flag=True, help="SCRIPT is the name of a Python module.")
    group.add("no-python", is_flag=True, help="SCRIPT is a command, not a Python script.")
    group.add("role", metavar="NAME", default="default", default_text="default",
              help="Role of the workers, shown in their environment and output.")  # fmt: skip
    group.add("env-file", ours=True, metavar="FILE", callback=parsed(env_file, machine=True),
              help="File of NAME=value lines: additional environment variables for the workers.")  # fmt: skip
    group.add("numa-binding", type=click.Choice(MODES), default_text="none",
              help="Bind workers to CPUs near their GPUs: those of the NUMA node or the socket, an exclusive share of "
                   "the node's cores, or the cores of one cache.")  # fmt: skip
    group.add("virtual-local-rank", is_flag=True,
              help="Set LOCAL_RANK to 0 in all workers, and CUDA_VISIBLE_DEVICES to the worker's own GPU.")  # fmt: skip
    return group


def _restarts() -> OptionGroup:
    group = OptionGroup("Failures, restarts and shutdown")
    group.add("restart", ours=True, type=click.Choice(["group", "node", "worker"]), default="group",
              default_text="group",
              help="What restarts when a worker fails: all workers, the workers of its node, or only "
                   "that worker.")  # fmt: skip
    group.add("restart-budget", ours=True, type=click.IntRange(0), metavar="N", default_text="0",
              help="Maximum number of restarts of the whole job.")  # fmt: skip
    group.add("max-restarts", type=click.IntRange(0), metavar="N", default=0, default_text="0",
              help="torchrun's name for the number of restarts of the whole job. --restart-budget takes "
                   "precedence.")  # fmt: skip
    group.add_seconds("min-uptime", ours=True, default="5",
                      help="After two failures in a row sooner than this after a start, wait before the "
                           "restart.")  # fmt: skip
    group.add("final-codes", ours=True, metavar="CODE,…", default="", callback=parsed(exit_codes),
              help="Exit codes after which the job fails without a restart.")  # fmt: skip
    group.add_seconds("hang-timeout", ours=True, default_text="off",
                      help="Restart a worker that has called progress() and then not for this long, or that is "
                           "stopped.")  # fmt: skip
    group.add_seconds("agent-timeout", ours=True, default="60",
                      help="Time after which the other nodes continue without this one if its agent is stopped; at "
                           "least 1, or 0: they wait for it.")  # fmt: skip
    group.add("no-progress-limit", ours=True, type=click.IntRange(0), metavar="N", default=0, default_text="0: none",
              help="Restarts in a row without a new step of progress() after which the job fails.")  # fmt: skip
    group.add_seconds("grace", ours=True, default_text="30 s",
                      help="Time between SIGTERM and SIGKILL when workers are stopped.")  # fmt: skip
    group.add_seconds("shutdown-timeout", default_text="30 s",
                      help="torchrun's name for the time between SIGTERM and SIGKILL. --grace takes "
                           "precedence.")  # fmt: skip
    group.add_seconds("exit-timeout", ours=True, default="300",
                      help="How long a finished node waits for the other nodes.")  # fmt: skip
    group.add("signals-to-handle", metavar="SIGNAL,…", default=",".join(ENDING_SIGNALS),
              default_text=",".join(ENDING_SIGNALS), callback=parsed(signal_names),
              help="Signals that stop the workers, which get the same signal, and then this node.")  # fmt: skip
    group.add("preempt-signal", ours=True, metavar="SIGNAL,…", default="", default_text="none",
              callback=parsed(preempt_signals),
              help="Signals that announce a preemption: all ranks stop at a step that they agree on "
                   "(should_stop), and the exit code is 75.")  # fmt: skip
    group.add_seconds("preempt-timeout", ours=True, default="300",
                      help="How long ranks may take to reach that step and to end.")  # fmt: skip
    return group


def _ignored() -> OptionGroup:
    group = OptionGroup("")
    for name in IGNORED:
        flag = name in IGNORED_FLAGS
        group.add(name.replace("_", "-"), hidden=True, is_flag=flag, default=None, type=IGNORED_TYPES.get(name))
    return group


def run_options(function: Any) -> Any:
    """Declare the options of `rallypoint run` on its function."""
    for group in reversed([*_groups(), _ignored()]):  # the last decorator is the first that help shows
        for option in reversed(group.options):
            function = option(function)
    return function
