"""The part of the model about shared objects: barriers and exchanges, locks, groups, work queues.

`describe_objects` is a generator: between two objects it yields, so that its caller can let the event loop run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rallypoint.core.machines.barrier import BarrierMachine
from rallypoint.core.machines.exchange import ExchangeMachine
from rallypoint.core.machines.lock import LockMachine
from rallypoint.core.machines.machine import Call
from rallypoint.core.machines.membership import MembershipMachine
from rallypoint.core.machines.work_queue import WorkQueueMachine
from rallypoint.core.state import Namespace
from rallypoint.server.status.model import ServerStatus
from rallypoint.server.status.object_model import (
    GroupStatus,
    HeldItemStatus,
    LockStatus,
    MeetingStatus,
    QueuedStatus,
    WorkStatus,
)
from rallypoint.server.status.reports import shown_name
from rallypoint.server.status.wait_times import WaitTimes

__all__ = ["MAX_LISTED", "MAX_NAMES", "describe_objects"]

MAX_LISTED = 200
"""Objects of each kind that are listed."""

MAX_NAMES = 100
"""Members listed for one object."""

MAX_SCANNED = 20_000
"""Objects of one namespace that are looked at."""

MAX_REASON = 1024
"""The longest reason, in characters."""

SLICE_NAMES = 4096
"""Members that are looked at in one step."""


def describe_objects(status: ServerStatus, namespace: Namespace, times: WaitTimes) -> Iterator[None]:
    """Add the shared objects of a namespace to the model."""
    machines = namespace.objects.machines
    for kind, name in list(islice(machines, MAX_SCANNED)):
        machine = machines.get((kind, name))
        if isinstance(machine, (BarrierMachine, ExchangeMachine)):
            if machine.idle:
                continue
            if len(status.meetings) >= MAX_LISTED:
                status.more_meetings += 1
                continue
            yield from _meeting(status, namespace, name, machine, times)
        elif isinstance(machine, LockMachine) and machine.line:
            if len(status.locks) >= MAX_LISTED:
                status.more_locks += 1
                continue
            status.locks.append(_lock(namespace, name, machine, times))
        elif isinstance(machine, MembershipMachine) and machine.members:
            if len(status.groups) >= MAX_LISTED:
                status.more_groups += 1
                continue
            status.groups.append(_group(namespace, name, machine))
        elif isinstance(machine, WorkQueueMachine) and not machine.idle:
            if len(status.work_queues) >= MAX_LISTED:
                status.more_work_queues += 1
                continue
            status.work_queues.append(_work_queue(namespace, name, machine, times))
        yield


def _meeting(
    status: ServerStatus, namespace: Namespace, name: bytes, machine: BarrierMachine | ExchangeMachine, times: WaitTimes
) -> Iterator[None]:
    """Add a barrier or an exchange, with the members that it waits for."""
    calls, arrived, size = _calls(machine)
    if not calls:
        return
    missing: list[str] = []
    for at, member in enumerate(_members(machine), 1):
        if member not in arrived:
            missing.append(member)
            if len(missing) >= MAX_NAMES:
                break
        if not at % SLICE_NAMES:
            yield
    waited = [times.since(namespace.id, type(machine), name, call) for call in (calls[0], calls[-1])]
    status.meetings.append(
        MeetingStatus(
            kind=machine.kind,
            name=shown_name(name),
            run=namespace.name,
            size=size,
            arrived=len(arrived),
            missing=missing,
            more_missing=max(0, size - len(arrived) - len(missing)),
            withdrawn=list(islice(machine.withdrawn, MAX_NAMES)),
            waited_s=round(waited[0], 3),
            last_arrival_s=round(waited[1], 3),
            reason="" if missing else machine.explain(calls[0]).reason[:MAX_REASON],
        )
    )


def _calls(machine: BarrierMachine | ExchangeMachine) -> tuple[list[Call], set[str], int]:
    """Return the calls of a round in the order of arrival, the members that arrived, and how many there are.

    Of a barrier that has opened, the last out may wait for the others to leave: those are missing then.
    """
    if isinstance(machine, ExchangeMachine):
        size = 0 if machine.wanted is None else machine.wanted.size
        return [call for _, call in machine.calls.values()], set(map(str, machine.data)), size
    if machine.calls or not machine.leaving:
        return list(machine.calls.values()), set(machine.arrived), machine.size
    opened = {call.member for call in machine.opened.values()}
    return list(machine.leaving.values()), opened - {call.member for call in machine.inside.values()}, len(opened)


def _members(machine: BarrierMachine | ExchangeMachine) -> Iterator[str]:
    """Yield the names of all members, each once, in order."""
    if isinstance(machine, ExchangeMachine):
        return map(str, range(0 if machine.wanted is None else machine.wanted.size))
    members = machine.members
    return map(str, range(members)) if isinstance(members, int) else iter(list(dict.fromkeys(members)))


def _lock(namespace: Namespace, name: bytes, machine: LockMachine, times: WaitTimes) -> LockStatus:
    holder, *queue = islice(machine.line.values(), MAX_NAMES + 1)
    return LockStatus(
        name=shown_name(name),
        run=namespace.name,
        holder=str(holder),
        held_s=round(times.held_s(namespace.id, name, machine), 3),
        fence=machine.fence,
        queue=[
            QueuedStatus(name=str(call), waited_s=round(times.since(namespace.id, LockMachine, name, call), 3))
            for call in queue
        ],
        more_queued=max(0, len(machine.line) - 1 - MAX_NAMES),
    )


def _group(namespace: Namespace, name: bytes, machine: MembershipMachine) -> GroupStatus:
    return GroupStatus(
        name=shown_name(name),
        run=namespace.name,
        size=len(machine.members),
        epoch=machine.epoch,
        members=[str(member.call) for member in islice(machine.members.values(), MAX_NAMES)],
        more_members=max(0, len(machine.members) - MAX_NAMES),
    )


def _work_queue(namespace: Namespace, name: bytes, machine: WorkQueueMachine, times: WaitTimes) -> WorkStatus:
    return WorkStatus(
        name=shown_name(name),
        run=namespace.name,
        ready=len(machine.ready),
        taken=len(machine.taken),
        dead=len(machine.dead),
        done=machine.done,
        waiting=len(machine.waiting),
        held=[
            HeldItemStatus(
                holder=str(taken.call),
                item=taken.item.id,
                held_s=round(times.since(namespace.id, WorkQueueMachine, name, taken.call), 3),
            )
            for taken in islice(machine.taken.values(), MAX_NAMES)
        ],
    )
