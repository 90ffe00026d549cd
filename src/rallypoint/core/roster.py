"""The roster machine: who is in a group now, and what changed since one last looked.

A member is in by its `Join` call, and out when that call is taken back or its session ends. Each has an id that no
other member ever had: a name may come back, and gets a new one. The epoch is the stamp of the last change of the
members, so it only grows; a roster that nobody needed for a while is forgotten and starts again at epoch 0, which is
why `Watch` waits while the epoch is the one it was given, and not until it is larger.

A device map says, for a peer, to which of its devices each of mine goes. It is one-to-one, so that it can be turned
round: `reverse` holds, for everybody who is named in a map, where the way back goes. A map may name a peer that comes
later; devices are compared as soon as both are there, and whoever comes second and does not fit is refused.

Rejected: to send only what changed. A view that a reader puts together from changes is wrong for ever after one miss;
a whole view is made once an epoch, and its events only say why.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machine import (
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
    listed,
)

__all__ = ["MAX_DEVICES", "Join", "Leave", "Look", "Roster", "Watch"]

KEPT = 256
"""How many events are remembered."""

MAX_DEVICES = 1024
"""How many devices a member may have."""

DeviceMap = Annotated[dict[Name, Name], Meta(max_length=MAX_DEVICES)]


class Join(Command, tag="roster.join"):
    """Become a member; answered by the view. `device_maps` has for peers, by name: my device, and theirs."""

    info: Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)] = b""
    devices: Annotated[list[Name], Meta(max_length=MAX_DEVICES)] = field(default_factory=list)
    device_maps: Annotated[dict[Name, DeviceMap], Meta(max_length=MAX_MEMBERS)] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        """The bytes of its info, its devices, and its maps both ways."""
        maps = sum(
            len(peer) + sum(len(mine) + len(theirs) for mine, theirs in way.items())
            for peer, way in self.device_maps.items()
        )
        return len(self.info) + sum(map(len, self.devices)) + 2 * maps


class Leave(Undo, tag="roster.leave"):
    """Take back a join, or a watch; answered by whether it was a join that stood."""


class Watch(Command, tag="roster.watch"):
    """Wait while the epoch is the given one; answered by `[view, events since, whether these are all]`."""

    epoch: Annotated[int, Meta(ge=0)]


class Look(Command, tag="roster.look"):
    """Answer the view at once; no member need ask."""


class Member(Struct, frozen=True, array_like=True):
    """One member."""

    id: int
    call: Call
    info: bytes
    devices: list[str]
    device_maps: dict[str, dict[str, str]]


class Event(Struct, frozen=True, array_like=True):
    """One member's coming or going: `joined`, `left` or `lost`."""

    what: str
    member: str
    id: int
    epoch: int
    reason: str


class Roster(Machine, kw_only=True, dict=True):
    """The members, who waits for a change, and the last changes."""

    kind = "roster"

    epoch: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    joins: dict[str, str] = field(default_factory=dict)
    """The calls by which members are in, and their names."""

    reverse: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    """By whoever is named in a member's map, here or not, and by that member: the way back."""

    watchers: dict[str, Call] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    forgot: bool = False
    """Whether there were more events than are kept."""

    def apply(self, call: Call, command: Join | Leave | Watch | Look, stamp: int) -> Step:
        """Join, leave, watch, or look."""
        if isinstance(command, Join):
            return self._join(call, command, stamp)
        if isinstance(command, Watch):
            return self._watch(call, command.epoch)
        if isinstance(command, Look):
            return Step(Done(self._view()))
        target = f"{call.session}/{command.call}"
        if target in self.joins:
            return Step(Done(True), True, self._out([self.joins[target]], "left", "left by itself", stamp))
        return Step(Done(False), self.watchers.pop(target, None) is not None)

    def lost(self, session: str, stamp: int) -> Step:
        """Take out a session's members and watches."""
        watches = [name for name, call in self.watchers.items() if call.session == session]
        for name in watches:
            del self.watchers[name]
        names = [name for name, member in self.members.items() if member.call.session == session]
        if not names:
            return Step(Done(), bool(watches))
        return Step(Done(), True, self._out(names, "lost", "lost: its session ended", stamp))

    def keeps(self, call_id: str) -> bool:
        """Say whether a call made a member that is here, or watches."""
        return call_id in self.joins or call_id in self.watchers

    def sessions(self) -> set[str]:
        """Return the sessions of members and watchers."""
        members = {member.call.session for member in self.members.values()}
        return members | {call.session for call in self.watchers.values()}

    def why(self, call: Call) -> Waiting:
        """Say that nothing has changed, and who is here."""
        names = list(self.members)
        here = f"{len(names)} members: {listed(names)}" if names else "no members"
        return Waiting(f"nobody came or went since epoch {self.epoch}; {here}")

    @property
    def idle(self) -> bool:
        """Whether there are no members, and nobody watches."""
        return not self.members and not self.watchers

    def _join(self, call: Call, command: Join, stamp: int) -> Step:
        if call.id in self.joins:
            return Step(Done(self._view()))
        refusal = self._refuse(call, command)
        if refusal is not None:
            return Step(refusal)
        name = call.member
        before = self.members.get(name)
        dropped, woken = list[Call](), list[Call]()
        if before is not None:
            dropped, woken = [before.call], self._out([name], "lost", "lost: its session ended", stamp)
        self.members[name] = Member(stamp, call, command.info, command.devices, command.device_maps)
        self.joins[call.id] = name
        for peer, way in command.device_maps.items():
            self.reverse.setdefault(peer, {})[name] = {theirs: mine for mine, theirs in way.items()}
        reason = f"joined from {call.where}" if call.where else "joined"
        woken += self._changed([Event("joined", name, stamp, stamp, reason)], stamp)
        return Step(Done(self._view()), True, woken, dropped=dropped)

    def _refuse(self, call: Call, command: Join) -> Refused | None:
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
            for device in back if other != name else ():  # what it mapped to itself before counts no more
                if device not in devices:
                    return _bad_map(other, name, device, f"{other} maps to this device, and {name} has none such")
        return None

    def _watch(self, call: Call, epoch: int) -> Step:
        if epoch != self.epoch:
            return Step(Done(self._since(epoch)), self.watchers.pop(call.id, None) is not None)
        changed = call.id not in self.watchers
        self.watchers[call.id] = call
        return Step(WAIT, changed)

    def _out(self, names: list[str], what: str, reason: str, stamp: int) -> list[Call]:
        """Take out members; return those who waited for a change."""
        events = []
        for name in names:
            member = self.members.pop(name)
            del self.joins[member.call.id]
            for peer in member.device_maps:
                del self.reverse[peer][name]
                if not self.reverse[peer]:
                    del self.reverse[peer]
            events.append(Event(what, name, member.id, stamp, reason))
        return self._changed(events, stamp)

    def _changed(self, events: list[Event], stamp: int) -> list[Call]:
        self.epoch = stamp
        self.events += events
        self.forgot = self.forgot or len(self.events) > KEPT
        del self.events[:-KEPT]
        self.__dict__.clear()  # what was made for the last epoch
        woken, self.watchers = list(self.watchers.values()), {}
        return woken

    def _view(self) -> dict[str, Any]:
        """Return everybody, as plain data, to be read only; made once an epoch."""
        made: dict[str, Any] | None = self.__dict__.get("view")
        if made is None:
            members = {name: _told(member, self.reverse.get(name, {})) for name, member in self.members.items()}
            made = self.__dict__["view"] = {"epoch": self.epoch, "members": members}
        return made

    def _since(self, epoch: int) -> list[Any]:
        """Return the view and the events since an epoch; made once for all who ask the same."""
        asked, made = self.__dict__.get("since", (None, []))
        if asked != epoch:
            events = [[e.what, e.member, e.id, e.epoch, e.reason] for e in self.events if e.epoch > epoch]
            all_of_them = bool(self.events) and self.events[0].epoch <= epoch <= self.epoch
            made = [self._view(), events, all_of_them or (epoch == 0 and not self.forgot)]
            self.__dict__["since"] = epoch, made
        answer: list[Any] = made
        return answer


Join.machine = Leave.machine = Watch.machine = Look.machine = Roster


def _told(member: Member, reverse: dict[str, dict[str, str]]) -> dict[str, Any]:
    return {
        "id": member.id,
        "where": member.call.where,
        "info": member.info,
        "devices": member.devices,
        "device_maps": member.device_maps,
        "reverse_maps": dict(reverse),  # all else is never changed
    }


def _check(name: str, peer: str, way: dict[str, str], mine: set[str], theirs: list[str] | None) -> Refused | None:
    """Refuse a map that is not one-to-one, or names a device that is not there; `theirs` is None: not known yet."""
    sources: dict[str, str] = {}
    known = None if theirs is None else set(theirs)
    for device, target in way.items():
        if device not in mine:
            return _bad_map(name, peer, device, f"{name} has no such device")
        if known is not None and target not in known:
            return _bad_map(name, peer, target, f"{peer} has no such device")
        if target in sources:
            return _bad_map(name, peer, target, f"both {sources[target]} and {device} of {name} go to it")
        sources[target] = device
    return None


def _bad_map(member: str, peer: str, device: str, why: str) -> Refused:
    return Refused("BadDeviceMap", {"member": member, "peer": peer, "device": device, "why": why})
