"""Group: the current members of a job, and an event when one joins, leaves or is lost.

A member stays in the group while its process lives. When it leaves, or is lost because its session ended, all other
members receive an event. On our server it leaves nothing behind. On any other store it keeps one key, `roster:NAME`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machines import membership
from rallypoint.core.machines.machine import Done
from rallypoint.deadline import Deadline, Timeout
from rallypoint.errors import LimitExceeded, MembersMissing
from rallypoint.recipes.arguments import device_maps_of, devices_of, name_of, names_of
from rallypoint.recipes.hosting.shared_object import PROGRESS_S, Recipe, SharedObject

__all__ = ["Group", "Member", "Membership", "MembershipEvent", "View"]

_FOREVER_S = 1e9

DeviceMaps = Mapping[str, Mapping[str, str]]


class Member(NamedTuple):
    """One member: its unique id, the host and process where it runs, the info it gave, and its devices.

    `device_maps` maps, for each peer, this member's devices to the peer's. `reverse_maps` is the way back: for each
    peer, it maps those of this member's devices that the peer uses to the peer's device that receives the replies.
    """

    name: str
    id: int
    where: str
    info: bytes
    devices: tuple[str, ...]
    device_maps: DeviceMaps
    reverse_maps: DeviceMaps


class View(NamedTuple):
    """All members at one moment; the epoch grows with every change."""

    epoch: int
    members: Mapping[str, Member]


class MembershipEvent(NamedTuple):
    """A member `joined`, `left` or was `lost` (`what`), and the reason."""

    what: str
    member: str
    id: int
    epoch: int
    reason: str


class Group(Recipe):
    """A set of named members that the processes of a job share."""

    def __init__(self, store: Any, name: str) -> None:
        self._object = SharedObject("group", store, name)

    def members(self) -> View:
        """Return the current members; the caller need not be one.

        The view contains no member that has been dead for longer than the grace period. On a store other than our
        server, a caller that has not asked lately therefore waits for a heartbeat of every member: half a second at
        most if all are alive, the grace period if one is dead.
        """
        self._object.evict_dead(membership.MembershipMachine)
        return self._look()

    def _look(self) -> View:
        outcome = self._object.act("", self._object.next_call(), membership.MembershipQuery(), 0.0)
        assert isinstance(outcome, Done)
        return _view(outcome.answer)

    def join(
        self,
        member: str,
        info: bytes = b"",
        devices: Sequence[str] = (),
        device_maps: DeviceMaps | None = None,
    ) -> Membership:
        """Become a member; leave with the membership's `leave`, or its `with` block.

        `device_maps` maps, for each peer by name, our devices to the peer's. Each map must be one-to-one and name only
        devices that exist; it is checked against peers that join later, too. If the name belongs to a process that may
        be dead, wait until its session ends or it reconnects. Raises NameTaken and BadDeviceMap; for invalid arguments
        TypeError, ValueError or LimitExceeded, before anything is sent.
        """
        member = name_of(member)
        if not isinstance(info, bytes):
            raise TypeError(f"the info of a member must be bytes, not {info!r}")
        if len(info) > MAX_VALUE_BYTES:
            raise LimitExceeded(what="the info of member", key=member, size=len(info), limit=MAX_VALUE_BYTES)
        command = membership.MembershipJoin(info, devices_of(devices), device_maps_of(device_maps or {}))
        call, view = self._object.perform(member, command, membership.MembershipLeave, self._object.deadline(None))
        return Membership(self, self._object, member, call, _view(view))


class Membership:
    """One member's membership in a group, until it leaves."""

    def __init__(self, group: Group, shared: SharedObject, member: str, call: int, view: View) -> None:
        self.group = group
        self.member = member
        self.id = view.members[member].id
        self._object = shared
        self._call = call
        self._joined = view

    def __repr__(self) -> str:
        return f"<membership of {self.member!r} in {self._object!r}>"

    @property
    def view(self) -> View:
        """The current members; each access asks the store."""
        return self.group.members()

    def events(self, timeout: Timeout | None = None) -> Iterator[MembershipEvent]:
        """Yield the changes since this member joined, as they happen; stop after `timeout` without a change.

        A slow reader misses no event. Only if hundreds of changes happen between two reads are the events derived by
        comparing the two views; changes that cancel out are then omitted.
        """
        known = self._joined
        while True:
            answer = self._change(known.epoch, Deadline(_FOREVER_S if timeout is None else timeout))
            if answer is None:
                return
            view, events = _view(answer[0]), [MembershipEvent(*event) for event in answer[1]]
            yield from events if answer[2] else _difference(known, view)
            known = view

    def wait_for(self, names: Sequence[str], timeout: Timeout | None = None) -> View:
        """Return the first view that contains all these members. Raises MembersMissing, which names the missing."""
        names = names_of(names)
        deadline = self._object.deadline(timeout)
        view = self.group._look()
        while missing := [name for name in names if name not in view.members]:
            answer = self._change(view.epoch, deadline)
            if answer is None:
                reason = f"{len(view.members)} members are in; missing: {', '.join(missing)}"
                raise MembersMissing(
                    thing=repr(self._object),
                    member=self.member,
                    missing=missing,
                    timeout_s=deadline.timeout_s,
                    reason=reason,
                )
            view = _view(answer[0])
        return view

    def leave(self) -> bool:
        """Leave the group; return whether this member was still in it."""
        outcome = self._object.act(self.member, self._object.next_call(), membership.MembershipLeave(self._call), 0.0)
        return bool(outcome[0])

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _change(self, epoch: int, deadline: Deadline) -> Any:
        """Wait until the epoch changes, and return the new view and its events; None at the deadline."""
        call = self._object.next_call()
        try:
            while True:
                wait_s = min(deadline.remaining(), PROGRESS_S)
                outcome = self._object.act(self.member, call, membership.MembershipWatch(epoch), wait_s)
                if isinstance(outcome, Done):
                    call = 0
                    return outcome.answer
                if deadline.expired():
                    return None
        finally:
            if call:
                self._object.act(self.member, self._object.next_call(), membership.MembershipLeave(call), 0.0)


def _view(told: Any) -> View:
    members = {
        name: Member(
            name=name,
            id=one["id"],
            where=one["where"],
            info=one["info"],
            devices=tuple(one["devices"]),
            device_maps=one["device_maps"],
            reverse_maps=one["reverse_maps"],
        )
        for name, one in told["members"].items()
    }
    return View(told["epoch"], MappingProxyType(members))


def _difference(before: View, after: View) -> Iterator[MembershipEvent]:
    """Yield the events that lead from one view to the other."""
    old = {member.id: member for member in before.members.values()}
    new = {member.id: member for member in after.members.values()}
    why = "derived by comparison: the event log no longer reaches back this far"
    for number in old.keys() - new.keys():
        yield MembershipEvent("left", old[number].name, number, after.epoch, why)
    for number in sorted(new.keys() - old.keys()):
        yield MembershipEvent("joined", new[number].name, number, after.epoch, why)
