"""Change the members of an RPC group as PyTorch's RPC does, with a token that is never left taken.

`group_membership` is the critical section in which one worker at a time joins or leaves, under a token in the store.
PyTorch's token stays taken if its holder dies or raises. This one is a `Lock`: it is released on any exit, and when the
holder's session ends. `update_group_membership` tells the agent of this process that a worker joined or left, with its
devices and the reverse device map for replies.

The agent is the `Agent` passed to `set_current_agent`; it can also follow a `rallypoint.Group`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rallypoint.errors import BadDeviceMap
from rallypoint.recipes.group import View
from rallypoint.recipes.lock import Lock

__all__ = ["Agent", "Peer", "WorkerInfo", "current_agent", "group_membership", "set_current_agent"]
__all__ += ["update_group_membership"]

TOKEN = "RpcGroupManagementToken"


class WorkerInfo(NamedTuple):
    """A worker's name and id; PyTorch's own WorkerInfo is accepted too."""

    name: str
    id: int


class Peer(NamedTuple):
    """Another worker, as an agent knows it.

    `reverse_device_map` maps each of our devices that the peer sends to, to the peer's device that receives the reply.
    """

    info: WorkerInfo
    devices: tuple[str, ...]
    reverse_device_map: Mapping[str, str]


class Agent:
    """One worker's view of the others."""

    def __init__(self, name: str, devices: Sequence[str] = ()) -> None:
        self.name = name
        self.devices = tuple(map(str, devices))
        self.peers: dict[str, Peer] = {}

    def update(self, info: Any, devices: Sequence[Any], reverse_device_map: Mapping[Any, Any], is_join: bool) -> None:
        """Add a worker that joined, replacing an earlier one of that name, or remove one that left.

        Raises BadDeviceMap, and changes nothing, if the map is not one-to-one or names an unknown device.
        """
        worker = WorkerInfo(str(info.name), int(info.id))
        if not is_join:
            known = self.peers.get(worker.name)
            if known is not None and known.info.id == worker.id:  # else it has rejoined meanwhile with a new id
                del self.peers[worker.name]
            return
        theirs = tuple(map(str, devices))
        reverse_map = {str(ours): str(device) for ours, device in reverse_device_map.items()}
        self._check(worker.name, theirs, reverse_map)
        self.peers[worker.name] = Peer(worker, theirs, reverse_map)

    def follow(self, view: View) -> None:
        """Replace the peers with the members of a group's view."""
        reverse_maps = view.members[self.name].reverse_maps
        self.peers = {
            member.name: Peer(WorkerInfo(member.name, member.id), member.devices, reverse_maps.get(member.name, {}))
            for member in view.members.values()
            if member.name != self.name
        }

    def _check(self, worker: str, theirs: tuple[str, ...], reverse_map: Mapping[str, str]) -> None:
        thing = f"the view of worker {self.name!r}"
        seen: set[str] = set()
        for ours, device in reverse_map.items():
            why = ""
            if device not in theirs:
                why = f"{worker} has no device {device}"
            elif self.devices and ours not in self.devices:
                why = f"{self.name} has no device {ours}"
            elif device in seen:
                why = f"two devices of {self.name} map to {device}"
            if why:
                raise BadDeviceMap(thing=thing, member=worker, peer=self.name, device=device, why=why)
            seen.add(device)


_current: Agent | None = None


def set_current_agent(agent: Agent | None) -> None:
    """Set the agent of this process."""
    global _current
    _current = agent


def current_agent() -> Agent:
    """Return the agent of this process."""
    if _current is None:
        raise RuntimeError("this process has no RPC agent; create one and pass it to set_current_agent")
    return _current


@contextlib.contextmanager
def group_membership(store: Any, name: str, is_join: bool) -> Iterator[None]:
    """Hold the group's token in this block: no other worker joins or leaves meanwhile.

    Raises MembersMissing, which names the holder, after the store's timeout.
    """
    with Lock(store, TOKEN, member=f"{name}, which {'joins' if is_join else 'leaves'}"):
        yield


def update_group_membership(
    worker_info: Any, my_devices: Sequence[Any], reverse_device_map: Mapping[Any, Any], is_join: bool
) -> None:
    """Tell the current agent that a worker joined or left: its info, its devices, and the map for replies to it."""
    current_agent().update(worker_info, my_devices, reverse_device_map, is_join)
