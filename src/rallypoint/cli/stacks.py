"""`rallypoint stacks`: print the Python stacks of the workers of a run, equal stacks folded."""

from __future__ import annotations

import click
import msgspec

from rallypoint.cli.store_command import print_value, store_command
from rallypoint.core.stacks import RankStack, decode_stacks, describe_groups, fold
from rallypoint.errors import RallypointError
from rallypoint.launch.monitoring.agent_requests import STACKS, AgentRequest, ask_agents, runs_of
from rallypoint.launch.monitoring.stack_dump import dump_stacks
from rallypoint.launch.monitoring.worker_records import agents_here
from rallypoint.store.base import Store
from rallypoint.text import printable

__all__ = ["chosen_run", "command"]

ANSWER_S = 10.0
"""How long the agents of all nodes may take to answer."""


def chosen_run(runs: list[str], wanted: str | None, where: str) -> str:
    """Return the wanted run if it is there, or the only one; raise an error that lists the runs otherwise."""
    if wanted in runs:
        return wanted
    if wanted is None and len(runs) == 1:
        return runs[0]
    listed = ", ".join(map(printable, runs)) or "none"
    problem = f"no run {wanted!r}" if wanted is not None else "no run" if not runs else "several runs: name one"
    raise RallypointError(f"{problem} {where} (runs there: {listed})")


def _of_this_machine(run: str | None, ranks: list[int] | None) -> list[RankStack]:
    agents = list(agents_here())
    chosen = chosen_run(sorted({agent.run for agent in agents}), run, "of this user on this machine")
    return [
        stack
        for agent in agents
        if agent.run == chosen
        for stack in dump_stacks([one for one in agent.workers if ranks is None or one.rank in ranks], agent.node)
    ]


def _of_a_store(store: Store, run: str | None, ranks: list[int] | None) -> list[RankStack]:
    chosen = chosen_run(runs_of(store), run, "in this store")
    answers, missing = ask_agents(store, chosen, AgentRequest(kind=STACKS, ranks=ranks), ANSWER_S)
    if missing:
        late = ", ".join(map(printable, missing))
        click.echo(f"no answer within {ANSWER_S:g} s from the agents of: {late}", err=True)
    return [stack for data in answers.values() for stack in decode_stacks(data)]


@store_command("stacks", optional=True)
@click.argument("run", required=False)
@click.option("--rank", "ranks", type=int, multiple=True, help="Only this rank, with all of its threads; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print the stacks of all ranks as JSON.")
def command(store: Store | None, run: str | None, ranks: tuple[int, ...], as_json: bool) -> None:
    """Print the Python stacks of the workers of RUN, the rarest first.

    Without a store: of the runs of this user on this machine. RUN may be omitted if there is only one. The workers go
    on: Python itself writes the stacks, on a signal.
    """
    wanted = list(ranks) or None
    found = _of_this_machine(run, wanted) if store is None else _of_a_store(store, run, wanted)
    if as_json:
        print_value(msgspec.json.encode(found).decode())
    elif not found:
        raise RallypointError(f"no such worker{f': rank {wanted[0]}' if wanted else ''}; is the run waiting for nodes?")
    elif wanted:
        for one in sorted(found, key=lambda one: one.rank):
            print_value(f"rank {one.rank} on {printable(one.node)} (pid {one.pid}): {printable(one.place)}")
            print_value(printable(one.text.rstrip(), keep="\n"))
    else:
        _print_folded(found)


def _print_folded(found: list[RankStack]) -> None:
    groups = fold(found)
    print_value(printable(describe_groups(groups)))
    for group in groups:
        if group.stack:
            print_value("")
            more = f" (and {group.threads - 1} more threads: --rank {group.ranks[0]})" if group.threads > 1 else ""
            print_value(printable(f"{group}{more}"))
            print_value("\n".join(f"    {printable(frame)}" for frame in group.stack))
