"""Group: who is in a job now, and who comes and goes.

A member is in while its process lives: it leaves, or its session ends and it is lost, and every other member is told.
On our server it leaves nothing behind. On another store it keeps one key, `roster:NAME`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from rallypoint.core import roster
from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machine import Done
from rallypoint.deadline import Deadline, Timeout
from rallypoint.errors import LimitExceeded, MembersMissing
from rallypoint.recipes.hosting import PROGRESS_S, Object, Recipe
from rallypoint.recipes.members import device_maps_of, devices_of, name_of, names_of

__all__ = ["Group", "Member", "Membership", "MembershipEvent", "View"]

_FOREVER_S = 1e9

DeviceMaps = Mapping[str, Mapping[str, str]]


class Member(NamedTuple):
    """One member: an id that nobody else ever has, where it runs, what it told, and its devices.

    `device_maps` has, by peer, where each of its devices goes there; `reverse_maps`, by peer, the way back: for each
    of this member's devices that the peer uses, the peer's own device that answers go to.
    """

    name: str
    id: int
    where: str
    info: bytes
    devices: tuple[str, ...]
    device_maps: DeviceMaps
    reverse_maps: DeviceMaps


class View(NamedTuple):
    """Everybody who is in, as of one moment; the epoch grows with every change."""

    epoch: int
    members: Mapping[str, Member]


class MembershipEvent(NamedTuple):
    """A member `joined`, `left` or was `lost`, and why."""

    what: str
    member: str
    id: int
    epoch: int
    reason: str


class Group(Recipe):
    """A set of named members that the processes of a job share."""

    def __init__(self, store: Any, name: str) -> None:
        self._object = Object("group", store, name)

    def members(self) -> View:
        """Return who is in now; one need not be a member to ask.

        Nobody is in it who has been dead for longer than the grace. On a store that only has bytes, who has not asked
        lately therefore waits until all have shown a sign of life, half a second at most, or for a dead one the grace.
        """
        self._object.make_sure(roster.Roster)
        return self._look()

    def _look(self) -> View:
        outcome = self._object.act("", self._object.next_call(), roster.Look(), 0.0)
        assert isinstance(outcome, Done)
        return _view(outcome.answer)

    def join(
        self,
        member: str,
        info: bytes = b"",
        devices: Sequence[str] = (),
        device_maps: DeviceMaps | None = None,
    ) -> Membership:
        """Become a member; leave by the membership's `leave`, or its `with` block.

        `device_maps` says, for peers by name, to which of its devices each of ours goes. It must be one-to-one, and
        name devices that both sides have; peers that come later are held to it. Where the name belongs to a process
        that may be dead, this waits until its session ends or it returns. Raises NameTaken, BadDeviceMap; and
        TypeError, ValueError or LimitExceeded, before anything is sent, for what no member could be.
        """
        member = name_of(member)
        if not isinstance(info, bytes):
            raise TypeError(f"the info of a member must be bytes, not {info!r}")
        if len(info) > MAX_VALUE_BYTES:
            raise LimitExceeded(what="the info of member", key=member, size=len(info), limit=MAX_VALUE_BYTES)
        command = roster.Join(info, devices_of(devices), device_maps_of(device_maps or {}))
        call, view = self._object.perform(member, command, roster.Leave, self._object.deadline(None))
        return Membership(self, self._object, member, call, _view(view))


class Membership:
    """One member's place in a group: what it sees of the others, until it leaves."""

    def __init__(self, group: Group, shared: Object, member: str, call: int, view: View) -> None:
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
        """Everybody who is in now: asks the store."""
        return self.group.members()

    def events(self, timeout: Timeout | None = None) -> Iterator[MembershipEvent]:
        """Yield who comes and goes after this member joined, as it happens; end when nothing does for `timeout`.

        What happened faster than it was read is told as well. Only after hundreds of changes in between are the
        changes found by comparison, and those that cancelled each other out left out.
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
        """Return the view in which all of these are members. Raises MembersMissing, which names those who are not."""
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
        """Leave the group, and say whether this member was still in it."""
        outcome = self._object.act(self.member, self._object.next_call(), roster.Leave(self._call), 0.0)
        return bool(outcome[0])

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _change(self, epoch: int, deadline: Deadline) -> Any:
        """Wait until the epoch is another, and return what is then; None at the deadline."""
        call = self._object.next_call()
        try:
            while True:
                wait_s = min(deadline.remaining(), PROGRESS_S)
                outcome = self._object.act(self.member, call, roster.Watch(epoch), wait_s)
                if isinstance(outcome, Done):
                    call = 0
                    return outcome.answer
                if deadline.expired():
                    return None
        finally:
            if call:
                self._object.act(self.member, self._object.next_call(), roster.Leave(call), 0.0)


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
    """Say who is gone and who is new."""
    old = {member.id: member for member in before.members.values()}
    new = {member.id: member for member in after.members.values()}
    why = "seen by comparison: it was too long ago to be told apart"
    for number in old.keys() - new.keys():
        yield MembershipEvent("left", old[number].name, number, after.epoch, why)
    for number in sorted(new.keys() - old.keys()):
        yield MembershipEvent("joined", new[number].name, number, after.epoch, why)
