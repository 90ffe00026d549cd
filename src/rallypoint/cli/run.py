"""`rallypoint run`: start, monitor and restart the workers of a job on this node."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping
from typing import Any

import click

from rallypoint import net
from rallypoint.cli import COMMANDS
from rallypoint.cli.cluster_options import place_in_cluster
from rallypoint.cli.completion import complete_files
from rallypoint.cli.credential_options import FILES, read_credentials
from rallypoint.cli.health_options import health_rules
from rallypoint.cli.hosts_command import run_on_hosts
from rallypoint.cli.option_prefixes import PrefixCommand
from rallypoint.cli.rdzv_conf import CONF, HOST, NOTES, note
from rallypoint.cli.run_options import IGNORED, STORE_VARIABLE, RunOptions, read_store_url, run_options
from rallypoint.core.policy.restart_policy import RestartRules
from rallypoint.launch.job import LOCAL, RANK0, UNNAMED, Job, WorkerCommand
from rallypoint.launch.output.output_settings import OutputSettings
from rallypoint.launch.round_spec import virtual_local_rank
from rallypoint.launch.workers.numa import cpus_of_workers
from rallypoint.process import standard_streams
from rallypoint.security.credentials import Credentials
from rallypoint.security.tls import check_files
from rallypoint.store.url import parse_url

__all__ = ["command"]

LINE_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""torchrun's variable for the prefix of teed lines."""

TORCH_PORT = 29500
"""torchrun's default rendezvous port."""

DEFAULT_GRACE_S = 30.0
LEAST_AGENT_TIMEOUT_S = 1.0


@click.command(
    cls=PrefixCommand,
    short_help=COMMANDS["run"],
    context_settings={"allow_interspersed_args": False, "auto_envvar_prefix": None},
)
@run_options
@click.argument("script", shell_complete=complete_files)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
def command(script: str, arguments: tuple[str, ...], **given: Any) -> None:
    """Run SCRIPT in several processes, on this node and others.

    Options of torchrun that are not listed here are accepted and ignored, with a note.
    """
    standard_streams.fill()
    if given["hosts"]:
        sys.exit(run_on_hosts(given, _grace_s(given["grace"], given["shutdown_timeout"])))
    from rallypoint.launch.agent import NodeAgent

    for name, why in IGNORED.items():
        if given.pop(name) not in (None, False):
            note(f"--{name.replace('_', '-')}", why)
    given["store"] = _store_url(given["store"], given["rdzv_endpoint"])
    detected = place_in_cluster(given)
    if detected:
        click.get_current_context().meta.setdefault(NOTES, []).insert(0, detected)
    for name in ("cluster", "hosts", "forward_env"):
        del given[name]
    given["rdzv_conf"] = given["rdzv_conf"] or dict(CONF)
    given["final_codes"] = given["final_codes"] or ()
    options = RunOptions(**given)
    _check(options)
    sys.exit(NodeAgent(_job(WorkerCommand(_kind(options), script, arguments), options)).run(exits=True))


def _store_url(url: str | None, endpoint: str) -> str | None:
    """Return the URL of --store, else of the variable; remove the variable, so that workers do not inherit it."""
    variable = os.environ.pop(STORE_VARIABLE, "")
    if url or endpoint or not variable:
        return url
    try:
        return read_store_url(variable)
    except ValueError as error:
        raise click.UsageError(f"{STORE_VARIABLE}: {error}") from None


def _check(options: RunOptions) -> None:
    """Raise UsageError for options that contradict each other."""
    least, most = options.nnodes
    if options.standalone and least > 1:
        raise click.UsageError(f"--standalone runs on one node, but --nnodes={least}: remove one of them")
    if most > 1 and not options.standalone and not _endpoint(options) and not options.store:
        nodes = most if least == most else f"{least}:{most}"
        raise click.UsageError(
            f"--nnodes={nodes} needs a server: set --rdzv-endpoint=HOST:PORT or --store=tcp://HOST:PORT"
        )
    if 0 < options.agent_timeout < LEAST_AGENT_TIMEOUT_S:
        raise click.UsageError(f"--agent-timeout must be at least {LEAST_AGENT_TIMEOUT_S:g} s, or 0 to wait for ever")
    if options.module and options.no_python:
        raise click.UsageError("--module and --no-python are mutually exclusive: SCRIPT is a module or a command")
    if options.logs_specs:
        _check_logs_specs(options.logs_specs)
    if options.virtual_local_rank:
        _check_devices(options.nproc_per_node, {**os.environ, **(options.env_file or {})})
    if _store(options) and options.data_dir:
        raise click.UsageError(
            "--data-dir is for a server that this node starts; the server of --store is already running"
        )


def _check_logs_specs(name: str) -> None:
    from rallypoint.launch.output.torch_logs_specs import known_logs_specs

    try:
        known_logs_specs(name)
    except ValueError as error:
        raise click.UsageError(f"--logs-specs: {error}") from None


def _kind(options: RunOptions) -> str:
    return "module" if options.module else "command" if options.no_python else "script"


def _store(options: RunOptions) -> str | None:
    """Return the URL of the running store, or None."""
    return None if options.standalone else options.store


def _endpoint(options: RunOptions) -> str:
    """Return the rendezvous endpoint, or "": --rdzv-endpoint, else --master-addr and --master-port."""
    given, address, port = options.rdzv_endpoint.strip(), options.master_addr, options.master_port
    if options.standalone:
        return ""
    if given or (port is None and (not address or options.nnodes[1] == 1)):
        return given
    return str(net.Endpoint(address or "127.0.0.1", TORCH_PORT if port is None else port))


def _restart_rules(options: RunOptions) -> RestartRules:
    return RestartRules(
        restart=options.restart,
        budget=options.max_restarts if options.restart_budget is None else options.restart_budget,
        min_uptime_s=options.min_uptime,
        final_codes=options.final_codes,
        no_progress_limit=options.no_progress_limit,
    )


def _grace_s(*given: float | None) -> float:
    """Return the grace period: the first that was given, else the default."""
    return next((grace_s for grace_s in given if grace_s is not None), DEFAULT_GRACE_S)


def _relay(store: str | None, credentials: Credentials) -> str:
    """Return the default of --relay: the node's own relay if workers could not use that of another node."""
    return LOCAL if credentials.protects or (store and parse_url(store).scheme == "etcd") else RANK0


def _credentials(options: RunOptions) -> Credentials:
    """Return the credentials of the job; raise UsageError if its workers could not use a protected store."""
    found = read_credentials(**{name: getattr(options, name) for name in FILES})
    if options.relay == RANK0 and found.protects and options.nnodes[1] > 1:
        raise click.UsageError(
            "--relay rank0 lets workers of all nodes connect to one relay by PyTorch's protocol, which has no "
            "authentication: with a token or TLS, use --relay local (the default then)"
        )
    return found


def _check_files(credentials: Credentials) -> None:
    """Raise UsageError if a file for TLS is unusable; a run on one node, with a private server, does not use them."""
    try:
        check_files(credentials)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _cpus(options: RunOptions, environment: Mapping[str, str]) -> tuple[frozenset[int], ...] | None:
    """Return the CPUs of the workers, with --numa-binding."""
    if options.numa_binding is None:
        return None
    if not hasattr(os, "sched_setaffinity"):
        raise click.UsageError("--numa-binding needs Linux")
    variables = {**os.environ, **environment}
    try:
        return cpus_of_workers(options.numa_binding, options.nproc_per_node, os.sched_getaffinity(0), variables)
    except ValueError as error:
        raise click.UsageError(f"--numa-binding {options.numa_binding}: {error}") from None


def _check_devices(workers: int, variables: Mapping[str, str]) -> None:
    """Raise UsageError if a worker has no device of its own, with --virtual-local-rank."""
    try:
        virtual_local_rank(workers - 1, variables)
    except ValueError as error:
        raise click.UsageError(f"--virtual-local-rank: {error}") from None


def _output(options: RunOptions) -> OutputSettings:
    return OutputSettings(
        shown_ranks=options.ranks_filter,
        fold=options.fold,
        progress_bars=options.progress_bars,
        stdout_filters=options.duplicate_stdout_filters or (),
        stderr_filters=options.duplicate_stderr_filters or (),
        logs_specs=options.logs_specs or "",
        event_log_handler=options.event_log_handler,
    )


def _signals(options: RunOptions) -> dict[str, Any]:
    """Return the settings of a job for its signals."""
    return {
        "signals": options.signals_to_handle,
        "preempt_signals": options.preempt_signal,
        "preempt_timeout_s": options.preempt_timeout,
    }


def _job(worker: WorkerCommand, options: RunOptions) -> Job:
    credentials = _credentials(options)
    least, most = (1, 1) if options.standalone else options.nnodes
    store, endpoint, conf = _store(options), _endpoint(options), options.rdzv_conf
    if store or endpoint:
        _check_files(credentials)
    if HOST in conf and (store or not endpoint):
        note(
            f"--rdzv-conf {HOST}",
            "the server of --store is already running" if store else "this node has a private server",
        )
    environment = options.env_file or {}
    return Job(
        command=worker,
        min_nodes=least,
        max_nodes=most,
        workers=options.nproc_per_node,
        run_id=options.rdzv_id or (uuid.uuid4().hex if most == 1 else UNNAMED),
        endpoint=endpoint or None,
        is_host=conf.get(HOST),
        store=store,
        data_dir=options.data_dir,
        credentials=credentials,
        relay=options.relay or _relay(store, credentials),
        node=options.node,
        node_rank=options.node_rank,
        local_address=options.local_addr,
        role=options.role,
        rules=_restart_rules(options),
        health=health_rules(options),
        grace_s=_grace_s(options.grace, options.shutdown_timeout),
        hang_timeout_s=options.hang_timeout or 0.0,
        agent_timeout_s=options.agent_timeout,
        exit_timeout_s=options.exit_timeout,
        join_timeout_s=conf["join_timeout"],
        last_call_s=conf["last_call_timeout"],
        log_dir=options.log_dir,
        redirects=options.redirects,
        tee=options.tee,
        shown_ranks=options.local_ranks_filter,
        output=_output(options),
        line_prefix=os.environ.get(LINE_PREFIX, ""),
        environment=environment,
        virtual_local_rank=options.virtual_local_rank,
        cpus=_cpus(options, environment),
        **_signals(options),
        quiet=options.quiet,
        json=options.json or options.log_format == "json",
        notes=tuple(click.get_current_context().meta.get(NOTES, ())),
    )
