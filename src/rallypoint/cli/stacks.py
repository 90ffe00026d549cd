"""`rallypoint stacks`: print the stacks of the workers of a run, equal stacks folded."""

from __future__ import annotations

import click
import msgspec

from rallypoint.cli.local_runs import agents_of_run, chosen_run
from rallypoint.cli.store_command import print_value, store_command
from rallypoint.core.stacks import RankStack, decode_stacks, describe_groups, fold, rank_list
from rallypoint.errors import RallypointError
from rallypoint.launch.monitoring.agent_requests import STACKS, AgentRequest, ask_agents, runs_of
from rallypoint.launch.monitoring.native_stacks import NATIVE_S, add_native
from rallypoint.launch.monitoring.stack_dump import dump_stacks
from rallypoint.store.base import Store
from rallypoint.text import printable

__all__ = ["command"]

ANSWER_S = 10.0
"""How long the agents of all nodes may take to answer."""


def _of_this_machine(run: str | None, ranks: list[int] | None, native: bool) -> list[RankStack]:
    found = [
        stack
        for agent in agents_of_run(run)
        for stack in dump_stacks([one for one in agent.workers if ranks is None or one.rank in ranks], agent.node)
    ]
    return add_native(found, every=ranks is not None) if native else found


def _of_a_store(store: Store, run: str | None, ranks: list[int] | None, native: bool) -> list[RankStack]:
    chosen = chosen_run(runs_of(store), run, "in this store")
    limit_s = ANSWER_S + native * NATIVE_S
    answers, missing = ask_agents(store, chosen, AgentRequest(kind=STACKS, ranks=ranks, native=native), limit_s)
    if missing:
        late = ", ".join(map(printable, missing))
        click.echo(f"no answer within {limit_s:g} s from the agents of: {late}", err=True)
    return [stack for data in answers.values() for stack in decode_stacks(data)]


@store_command("stacks", optional=True)
@click.argument("run", required=False)
@click.option("--rank", "ranks", type=int, multiple=True, help="Only this rank, with all of its threads; repeatable.")
@click.option("--native", is_flag=True, help="Add native frames, by py-spy; it pauses a worker for a moment.")
@click.option("--json", "as_json", is_flag=True, help="Print the stacks of all ranks as JSON.")
def command(store: Store | None, run: str | None, ranks: tuple[int, ...], native: bool, as_json: bool) -> None:
    """Print the Python stacks of the workers of RUN, the rarest first.

    Without a store: of the runs of this user on this machine (for root, of all users). RUN may be omitted if there is
    only one. The workers go on: Python itself writes the stacks, on a signal.
    """
    wanted = list(ranks) or None
    given = (run, wanted, native)
    found = _of_this_machine(*given) if store is None else _of_a_store(store, *given)
    if as_json:
        print_value(msgspec.json.encode(found).decode())
    elif not found:
        raise RallypointError(f"no such worker{f': rank {wanted[0]}' if wanted else ''}; is the run waiting for nodes?")
    elif wanted:
        for one in sorted(found, key=lambda one: one.rank):
            print_value(f"rank {one.rank} on {printable(one.node)} (pid {one.pid}): {printable(one.place)}")
            print_value(printable(one.text.rstrip(), keep="\n"))
            if one.native:
                print_value(printable(f"\nWith native frames (py-spy):\n{one.native}", keep="\n"))
    else:
        _print_folded(found)
    _print_notes(found)


def _print_folded(found: list[RankStack]) -> None:
    groups = fold(found)
    print_value(printable(describe_groups(groups)))
    for group in groups:
        if group.stack:
            print_value("")
            print_value(printable(group))
            print_value("\n".join(f"    {printable(frame)}" for frame in group.stack))
        if group.native:
            print_value("  with native frames (py-spy):")
            print_value("\n".join(f"    {printable(frame)}" for frame in group.native))


def _print_notes(found: list[RankStack]) -> None:
    """Print why there are no native frames of some ranks."""
    notes: dict[str, list[int]] = {}
    for one in found:
        if one.native_note:
            notes.setdefault(one.native_note, []).append(one.rank)
    for note, ranks in notes.items():
        click.echo(f"no native frames of {rank_list(ranks)}: {printable(note)}", err=True)
