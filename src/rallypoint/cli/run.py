"""`rallypoint run`: start the workers of a job on this node, watch them, and start them again."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from typing import Any

import click

from rallypoint import net
from rallypoint.cli import COMMANDS
from rallypoint.cli.prefixes import PrefixCommand
from rallypoint.cli.run_conf import CONF, HOST, NOTES, note, read_conf, read_seconds
from rallypoint.core.gang import Rules
from rallypoint.core.machine import MAX_MEMBERS
from rallypoint.elastic.job import (
    LOCAL,
    RANK0,
    RELAYS,
    UNNAMED,
    Command,
    Job,
    directory,
    env_file,
    exit_codes,
    node_range,
    printable_name,
    run_name,
    workers_here,
)
from rallypoint.elastic.routes import parse_ranks, parse_std
from rallypoint.server import streams
from rallypoint.server.settings import DEFAULT_PORT
from rallypoint.store.url import parse_url

__all__ = ["command"]

NOTED = {
    "monitor_interval": "workers are watched all the time",
    "rdzv_backend": "there is one back end",
    "start_method": "workers are started as processes of their own",
    "event_log_handler": "see --json",
    "logs_specs": "see --log-dir, --redirects and --tee",
    "numa_binding": "bind workers in the script, or with numactl and --no-python",
    "run_path": "the script is run as it is",
    "virtual_local_rank": "LOCAL_RANK is the rank on this node",
    "duplicate_stdout_filters": "filter the log files instead",
    "duplicate_stderr_filters": "filter the log files instead",
    "signals_to_handle": "TERM, INT, HUP, QUIT, USR1 and USR2 are handled",
}
"""Options of torchrun's that cannot apply: accepted, with a note why."""

KINDS = {"monitor_interval": click.FLOAT, "start_method": click.Choice(["spawn", "fork", "forkserver"])}
"""What of these is checked, as torchrun does."""

LINE_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""The variable that says, as for torchrun, what teed lines begin with."""

STORE_VARIABLE = "RALLYPOINT_STORE"
"""The variable that has the URL of --store, where that holds a password; workers do not get it."""

TORCH_PORT = 29500
"""Where torchrun's nodes meet if nobody says where."""

Decorator = Callable[[Any], Any]


def _option(name: str, *short: str, ours: bool = False, **facts: Any) -> Decorator:
    """Make an option; torchrun's have two spellings, and an environment variable."""
    plain = name.replace("-", "_")
    if ours:
        return click.option(*short, f"--{name}", plain, **facts)
    return click.option(
        *short, *dict.fromkeys([f"--{name}", f"--{plain}"]), plain, envvar=f"PET_{plain.upper()}", **facts
    )


def _read(reader: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Let a function that raises ValueError read an option."""

    def callback(_: click.Context, __: click.Parameter, value: str | None) -> Any:
        if value is None:
            return None
        try:
            return reader(value)
        except (ValueError, OSError) as error:
            raise click.BadParameter(str(error)) from None

    return callback


def _time(name: str, ours: bool = True, **facts: Any) -> Decorator:
    """Make an option that is a number of seconds."""
    return _option(name, ours=ours, callback=_read(lambda value: read_seconds(name, value)), **facts)


def _checked(reader: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Let a function refuse what it cannot read, and keep the text."""

    def check(text: str) -> str:
        if text:
            reader(text)
        return text

    return _read(check)


def _endpoint(text: str) -> net.Endpoint:
    return net.parse_endpoint(text.strip(), DEFAULT_PORT)


def _url(text: str) -> str:
    url = parse_url(text)
    if url.scheme == "etcd":
        url.etcd()
    else:
        url.endpoint()
    return text


def _noted(function: Any) -> Any:
    for name in NOTED:
        flag = name in ("run_path", "virtual_local_rank")
        function = _option(name.replace("_", "-"), hidden=True, is_flag=flag, default=None, type=KINDS.get(name))(
            function
        )
    return function


@click.command(
    cls=PrefixCommand,
    short_help=COMMANDS["run"],
    context_settings={"allow_interspersed_args": False, "auto_envvar_prefix": None},
)
@_option("nnodes", default="1", callback=_read(node_range), help="Nodes, N or MIN:MAX.  [1]")
@_option("nproc-per-node", default="1", callback=_read(workers_here), help="Workers here: a number, auto, cpu or gpu.")
@_option("standalone", is_flag=True, help="One node, with a server of its own; the default with one node.")
@_option(
    "rdzv-endpoint",
    default="",
    callback=_checked(_endpoint),
    help="host:port of the server; whoever has that address starts it.",
)
@_option("rdzv-id", default="", callback=_read(run_name), help="The name of the run, the same on all nodes.")
@_option("rdzv-conf", default="", callback=_read(read_conf), help="join_timeout=…, last_call_timeout=…, is_host=…")
@_option("max-restarts", default=0, type=click.IntRange(0), help="As --restart-budget.")
@_option("role", default="default", help="What the workers are called.")
@_option("log-dir", callback=_read(directory), help="Where output and failure.json go.")
@_option(
    "redirects",
    "-r",
    default="0",
    callback=_checked(parse_std),
    help="Output to files only: 0 none, 1 out, 2 err, 3 both, or 0:1,1:3.",
)
@_option("tee", "-t", default="0", callback=_checked(parse_std), help="Output to files and here: as --redirects.")
@_option("local-ranks-filter", callback=_read(parse_ranks), help="Show only these local ranks here, as 0,1.")
@_option("node-rank", type=click.IntRange(0, MAX_MEMBERS - 1), help="The rank that this node asks for.")
@_option("master-addr", help="As --rdzv-endpoint, with --master-port.  [127.0.0.1]")
@_option("master-port", type=click.IntRange(0, 65535), help="As --rdzv-endpoint, with --master-addr.  [29500]")
@_option("local-addr", callback=_read(printable_name), help="Where others reach this node.")
@_option("module", "-m", is_flag=True, help="SCRIPT is a module.")
@_option("no-python", is_flag=True, help="SCRIPT is any command.")
@_time("shutdown-timeout", ours=False, help="As --grace.")
@_option(
    "store",
    ours=True,
    callback=_checked(_url),
    help="URL of a server that runs (tcp://…), or of a store in etcd (etcd://…), of which three nodes run servers. Give"
    f" one with a password by {STORE_VARIABLE}, for everybody on the machine can read arguments.",
)
@_option(
    "data-dir",
    ours=True,
    callback=_read(directory),
    help="Where the server that this node starts keeps its state, to go on when it dies.  [in memory]",
)
@_option(
    "relay",
    ours=True,
    type=click.Choice(RELAYS),
    help="MASTER_ADDR: rank 0's node, or every node's own relay on loopback.  [rank0; with etcd, local]",
)
@_option(
    "node",
    ours=True,
    callback=_read(printable_name),
    help="The name of this node, by which it gets its rank back.  [its host name]",
)
@_option("restart", ours=True, type=click.Choice(["group", "node", "worker"]), default="group", show_default=True,
         help="Who starts again when a worker fails.")  # fmt: skip
@_option("restart-budget", ours=True, type=click.IntRange(0), help="Restarts of the whole job.  [0]")
@_time("grace", help="Seconds between the signal and KILL.  [30]")
@_time("exit-timeout", default="300", show_default=True,
         help="Seconds that a node that is done waits for the others.")  # fmt: skip
@_time("min-uptime", default="5", show_default=True,
         help="A worker that dies younger, twice in a row, is started after a pause.")  # fmt: skip
@_option("final-codes", ours=True, default="", callback=_read(exit_codes), help="Exit codes that mean: do not restart.")
@_option("env-file", ours=True, callback=_read(env_file), help="A file of NAME=value for the workers.")
@_option("quiet", "-q", ours=True, is_flag=True, help="Say nothing but what workers and failures say.")
@_option("json", ours=True, is_flag=True, help="Say what happens as one JSON object a line, on standard error.")
@_noted
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(script: str, arguments: tuple[str, ...], **told: Any) -> None:
    """Run SCRIPT in several processes, on this node and others; the options of torchrun are understood."""
    streams.fill()
    from rallypoint.elastic.agent import Agent

    _take_variable(told)
    for name, why in NOTED.items():
        if told[name] is not None and told[name] is not False:
            note(f"--{name.replace('_', '-')}", why)
    sys.exit(Agent(_job(script, arguments, told)).run())


def _take_variable(told: dict[str, Any]) -> None:
    """Take the store from the environment, where it is not given otherwise, and out of it: it is not the workers'."""
    url = os.environ.pop(STORE_VARIABLE, "")
    if url and not told["store"] and not told["rdzv_endpoint"]:
        try:
            told["store"] = _url(url)
        except ValueError as error:
            raise click.UsageError(f"{STORE_VARIABLE}: {error}") from None


def _of_master(address: str | None, port: int | None, nodes: int) -> str:
    """Return where torchrun's nodes meet by --master-addr and --master-port; one node needs no such place."""
    if port is None and (not address or nodes == 1):
        return ""
    return str(net.Endpoint(address or "127.0.0.1", TORCH_PORT if port is None else port))


def _rules(told: dict[str, Any]) -> Rules:
    return Rules(
        restart=told["restart"],
        budget=told["max_restarts"] if told["restart_budget"] is None else told["restart_budget"],
        min_uptime_s=told["min_uptime"],
        final_codes=told["final_codes"] or (),
    )


def _store(told: dict[str, Any]) -> str | None:
    """Return the URL of the store that runs already, if there is one."""
    store: str | None = None if told["standalone"] else told["store"]
    if store and told["data_dir"]:
        raise click.UsageError("--data-dir is for a server that this node starts, and that of --store runs already")
    return store


def _job(script: str, arguments: tuple[str, ...], told: dict[str, Any]) -> Job:
    least, most = told["nnodes"]
    if told["standalone"] and least > 1:
        raise click.UsageError(f"--standalone is one node, and --nnodes={least} is more: leave one of them out")
    endpoint = told["rdzv_endpoint"].strip() or _of_master(told["master_addr"], told["master_port"], most)
    if told["standalone"]:
        least, most, endpoint = 1, 1, ""
    if most > 1 and not endpoint and not told["store"]:
        nodes = most if least == most else f"{least}:{most}"
        raise click.UsageError(
            f"--nnodes={nodes} needs a place to meet: --rdzv-endpoint=HOST:PORT, or --store=tcp://HOST:PORT"
        )
    if told["module"] and told["no_python"]:
        raise click.UsageError("--module and --no-python exclude each other: SCRIPT is a module, or any command")
    conf: dict[str, Any] = told["rdzv_conf"] or dict(CONF)
    store = _store(told)
    if HOST in conf and (store or not endpoint):
        note(f"--rdzv-conf {HOST}", "the server of --store runs already" if store else "the server is this node's own")
    kind = "module" if told["module"] else "command" if told["no_python"] else "script"
    grace = next(value for value in (told["grace"], told["shutdown_timeout"], 30.0) if value is not None)
    return Job(
        command=Command(kind, script, arguments),
        min_nodes=least,
        max_nodes=most,
        workers=told["nproc_per_node"],
        run_id=told["rdzv_id"] or (uuid.uuid4().hex if most == 1 else UNNAMED),
        endpoint=endpoint or None,
        is_host=conf.get(HOST),
        store=store,
        data_dir=told["data_dir"],
        relay=told["relay"] or (LOCAL if store and parse_url(store).scheme == "etcd" else RANK0),
        node=told["node"],
        node_rank=told["node_rank"],
        local_address=told["local_addr"],
        role=told["role"],
        rules=_rules(told),
        grace_s=grace,
        exit_timeout_s=told["exit_timeout"],
        join_timeout_s=conf["join_timeout"],
        last_call_s=conf["last_call_timeout"],
        log_dir=told["log_dir"],
        redirects=told["redirects"],
        tee=told["tee"],
        shown_ranks=told["local_ranks_filter"],
        line_prefix=os.environ.get(LINE_PREFIX, ""),
        environment=told["env_file"] or {},
        quiet=told["quiet"],
        json=told["json"],
        notes=tuple(click.get_current_context().meta.get(NOTES, ())),
    )
