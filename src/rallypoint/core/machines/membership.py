"""The membership machine: the current members of a group, and the changes since an epoch.

A `MembershipJoin` call makes its caller a member, until the call is taken back or its session ends. Each member has a
unique id: a name that joins again gets a new id. The epoch is the stamp of the last membership change, so it only
grows; but a group that nobody has used for a while is forgotten and starts again at epoch 0. So `MembershipWatch` waits
while the epoch equals the given one, not until it is larger.

A device map assigns, for a peer, each of my devices to one of the peer's. It is one-to-one, so that it can be inverted:
`reverse` holds the inverse maps of every peer named in a map. A map may name a peer that joins later; devices are
compared once both are members; on a mismatch, the member that joins later is refused.

Rejected: sending only changes. A view assembled from changes is wrong for ever after one missed change; a whole view is
built once per epoch, and the events only explain it.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machines.machine import (
    MAX_MEMBERS,
    WAIT,
    Call,
    Command,
    Done,
    Machine,
    Name,
    Refused,
    Step,
    Undo,
    Waiting,
    list_names,
)

__all__ = [
    "MAX_DEVICES",
    "MembershipJoin",
    "MembershipLeave",
    "MembershipQuery",
    "MembershipMachine",
    "MembershipWatch",
]

MAX_EVENTS = 256
"""The number of events that are kept."""

MAX_DEVICES = 1024
"""The most devices of one member."""

DeviceMap = Annotated[dict[Name, Name], Meta(max_length=MAX_DEVICES)]


class MembershipJoin(Command, tag="roster.join"):
    """Become a member; answered by the view. `device_maps` maps, per peer, my devices to the peer's."""

    info: Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)] = b""
    devices: Annotated[list[Name], Meta(max_length=MAX_DEVICES)] = field(default_factory=list)
    device_maps: Annotated[dict[Name, DeviceMap], Meta(max_length=MAX_MEMBERS)] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        """The bytes of its info, its devices, and its maps in both directions."""
        maps = sum(
            len(peer) + sum(len(mine) + len(theirs) for mine, theirs in way.items())
            for peer, way in self.device_maps.items()
        )
        return len(self.info) + sum(map(len, self.devices)) + 2 * maps


class MembershipLeave(Undo, tag="roster.leave"):
    """Take back a join or a watch; answered by whether it was the join of a current member."""


class MembershipWatch(Command, tag="roster.watch"):
    """Wait while the epoch is the given one; answered by `[view, events since, whether complete]`."""

    epoch: Annotated[int, Meta(ge=0)]


class MembershipQuery(Command, tag="roster.look"):
    """Answer the view at once; the caller need not be a member."""


class MemberRecord(Struct, frozen=True, array_like=True):
    """One member."""

    id: int
    call: Call
    info: bytes
    devices: list[str]
    device_maps: dict[str, dict[str, str]]


class MembershipChange(Struct, frozen=True, array_like=True):
    """One member's change: `joined`, `left` or `lost`."""

    what: str
    member: str
    id: int
    epoch: int
    reason: str


class MembershipMachine(Machine, kw_only=True, dict=True):
    """The members, the watchers, and the latest changes."""

    kind = "roster"

    epoch: int = 0
    members: dict[str, MemberRecord] = field(default_factory=dict)
    joins: dict[str, str] = field(default_factory=dict)
    """The names of the members, by join call."""

    reverse: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    """Inverse device maps: by peer named in a map, member or not, then by the member whose map it is."""

    watchers: dict[str, Call] = field(default_factory=dict)
    events: list[MembershipChange] = field(default_factory=list)
    forgot: bool = False
    """Whether earlier events were discarded."""

    def apply(
        self, call: Call, command: MembershipJoin | MembershipLeave | MembershipWatch | MembershipQuery, stamp: int
    ) -> Step:
        """Join, leave, watch, or query."""
        if isinstance(command, MembershipJoin):
            return self._join(call, command, stamp)
        if isinstance(command, MembershipWatch):
            return self._watch(call, command.epoch)
        if isinstance(command, MembershipQuery):
            return Step(Done(self._view()))
        target = f"{call.session}/{command.call}"
        if target in self.joins:
            return Step(Done(True), True, self._remove([self.joins[target]], "left", "left", stamp))
        return Step(Done(False), self.watchers.pop(target, None) is not None)

    def session_ended(self, session: str, stamp: int) -> Step:
        """Remove a session's members and watches."""
        watches = [name for name, call in self.watchers.items() if call.session == session]
        for name in watches:
            del self.watchers[name]
        names = [name for name, member in self.members.items() if member.call.session == session]
        if not names:
            return Step(Done(), bool(watches))
        return Step(Done(), True, self._remove(names, "lost", "lost: its session ended", stamp))

    def holds(self, call_id: str) -> bool:
        """Return whether a call is a member's join, or a waiting watch."""
        return call_id in self.joins or call_id in self.watchers

    def sessions(self) -> set[str]:
        """Return the sessions of members and watchers."""
        members = {member.call.session for member in self.members.values()}
        return members | {call.session for call in self.watchers.values()}

    def explain(self, call: Call) -> Waiting:
        """Report the epoch and the members."""
        names = list(self.members)
        here = f"{len(names)} members: {list_names(names)}" if names else "no members"
        return Waiting(f"no change since epoch {self.epoch}; {here}")

    @property
    def idle(self) -> bool:
        """Whether there are no members and no watchers."""
        return not self.members and not self.watchers

    def _join(self, call: Call, command: MembershipJoin, stamp: int) -> Step:
        if call.id in self.joins:
            return Step(Done(self._view()))
        refusal = self._refuse(call, command)
        if refusal is not None:
            return Step(refusal)
        name = call.member
        before = self.members.get(name)
        dropped, woken = list[Call](), list[Call]()
        if before is not None:
            dropped, woken = [before.call], self._remove([name], "lost", "lost: its session ended", stamp)
        self.members[name] = MemberRecord(stamp, call, command.info, command.devices, command.device_maps)
        self.joins[call.id] = name
        for peer, way in command.device_maps.items():
            self.reverse.setdefault(peer, {})[name] = {theirs: mine for mine, theirs in way.items()}
        reason = f"joined from {call.where}" if call.where else "joined"
        woken += self._changed([MembershipChange("joined", name, stamp, stamp, reason)], stamp)
        return Step(Done(self._view()), True, woken, dropped=dropped)

    def _refuse(self, call: Call, command: MembershipJoin) -> Refused | None:
        name, devices = call.member, set(command.devices)
        holder = self.members.get(name)
        if holder is not None and (holder.call.session == call.session or not call.owns(holder.call)):
            return Refused("NameTaken", {"member": name, "other": str(holder.call)})
        if len(devices) < len(command.devices):
            twice = next(one for one in command.devices if command.devices.count(one) > 1)
            return _bad_map(name, name, twice, f"{name} lists this device twice")
        for peer, way in command.device_maps.items():
            there = self.members.get(peer)
            theirs = command.devices if peer == name else None if there is None else there.devices
            refusal = _check(name, peer, way, devices, theirs)
            if refusal is not None:
                return refusal
        for other, back in self.reverse.get(name, {}).items():
            for device in back if other != name else ():  # its former map to itself no longer counts
                if device not in devices:
                    return _bad_map(other, name, device, f"{other} maps to this device, but {name} has no such device")
        return None

    def _watch(self, call: Call, epoch: int) -> Step:
        if epoch != self.epoch:
            return Step(Done(self._since(epoch)), self.watchers.pop(call.id, None) is not None)
        changed = call.id not in self.watchers
        self.watchers[call.id] = call
        return Step(WAIT, changed)

    def _remove(self, names: list[str], what: str, reason: str, stamp: int) -> list[Call]:
        """Remove members; return the calls that waited for a change."""
        events = []
        for name in names:
            member = self.members.pop(name)
            del self.joins[member.call.id]
            for peer in member.device_maps:
                del self.reverse[peer][name]
                if not self.reverse[peer]:
                    del self.reverse[peer]
            events.append(MembershipChange(what, name, member.id, stamp, reason))
        return self._changed(events, stamp)

    def _changed(self, events: list[MembershipChange], stamp: int) -> list[Call]:
        self.epoch = stamp
        self.events += events
        self.forgot = self.forgot or len(self.events) > MAX_EVENTS
        del self.events[:-MAX_EVENTS]
        self.__dict__.clear()  # views built for the last epoch
        woken, self.watchers = list(self.watchers.values()), {}
        return woken

    def _view(self) -> dict[str, Any]:
        """Return all members as plain data, read-only; built once per epoch."""
        made: dict[str, Any] | None = self.__dict__.get("view")
        if made is None:
            members = {name: _describe(member, self.reverse.get(name, {})) for name, member in self.members.items()}
            made = self.__dict__["view"] = {"epoch": self.epoch, "members": members}
        return made

    def _since(self, epoch: int) -> list[Any]:
        """Return the view and the events since an epoch; built once for all callers with the same epoch."""
        asked, made = self.__dict__.get("since", (None, []))
        if asked != epoch:
            events = [[e.what, e.member, e.id, e.epoch, e.reason] for e in self.events if e.epoch > epoch]
            all_of_them = bool(self.events) and self.events[0].epoch <= epoch <= self.epoch
            made = [self._view(), events, all_of_them or (epoch == 0 and not self.forgot)]
            self.__dict__["since"] = epoch, made
        answer: list[Any] = made
        return answer


MembershipJoin.machine = MembershipLeave.machine = MembershipWatch.machine = MembershipQuery.machine = MembershipMachine


def _describe(member: MemberRecord, reverse: dict[str, dict[str, str]]) -> dict[str, Any]:
    return {
        "id": member.id,
        "where": member.call.where,
        "info": member.info,
        "devices": member.devices,
        "device_maps": member.device_maps,
        "reverse_maps": dict(reverse),  # the other values are never changed
    }


def _check(name: str, peer: str, way: dict[str, str], mine: set[str], theirs: list[str] | None) -> Refused | None:
    """Refuse a map that is not one-to-one or names an unknown device; `theirs` is None if the peer is not known yet."""
    sources: dict[str, str] = {}
    known = None if theirs is None else set(theirs)
    for device, target in way.items():
        if device not in mine:
            return _bad_map(name, peer, device, f"{name} has no such device")
        if known is not None and target not in known:
            return _bad_map(name, peer, target, f"{peer} has no such device")
        if target in sources:
            return _bad_map(name, peer, target, f"both {sources[target]} and {device} of {name} map to it")
        sources[target] = device
    return None


def _bad_map(member: str, peer: str, device: str, why: str) -> Refused:
    return Refused("BadDeviceMap", {"member": member, "peer": peer, "device": device, "why": why})
