"""Changing the members of an RPC group, as PyTorch's RPC does it, without its two traps.

`group_membership` is the critical section in which one worker joins or leaves: one at a time, under a token in the
store. PyTorch's token stays taken for ever when its holder dies or raises; this one is a `Lock`, which is released on
any exit and falls with the holder's session. `update_group_membership` tells the agent of this process that a worker
came or went: its view of the others, with their devices and the way back for answers.

The agent is whatever was given to `set_current_agent`: an `Agent`, which may follow a `rallypoint.Group` by itself.
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
    """A worker's name and id; PyTorch's own object of that name does as well."""

    name: str
    id: int


class Peer(NamedTuple):
    """What an agent knows of another worker.

    `reverse_device_map` has, for each device of ours that the peer sends to, its own device that the answers go to.
    """

    info: WorkerInfo
    devices: tuple[str, ...]
    reverse_device_map: Mapping[str, str]


class Agent:
    """The view that one worker has of the others."""

    def __init__(self, name: str, devices: Sequence[str] = ()) -> None:
        self.name = name
        self.devices = tuple(map(str, devices))
        self.peers: dict[str, Peer] = {}

    def update(self, info: Any, devices: Sequence[Any], reverse_device_map: Mapping[Any, Any], is_join: bool) -> None:
        """Add a worker that came, in place of an earlier one of its name, or take out one that went.

        Raises BadDeviceMap, and changes nothing, when the map is not one-to-one or names a device that is not there.
        """
        worker = WorkerInfo(str(info.name), int(info.id))
        if not is_join:
            known = self.peers.get(worker.name)
            if known is not None and known.info.id == worker.id:  # else it has come back meanwhile, under a new id
                del self.peers[worker.name]
            return
        theirs = tuple(map(str, devices))
        back = {str(ours): str(device) for ours, device in reverse_device_map.items()}
        self._check(worker.name, theirs, back)
        self.peers[worker.name] = Peer(worker, theirs, back)

    def follow(self, view: View) -> None:
        """Take over a group's view: everybody who is in it, and nobody else."""
        back = view.members[self.name].reverse_maps
        self.peers = {
            member.name: Peer(WorkerInfo(member.name, member.id), member.devices, back.get(member.name, {}))
            for member in view.members.values()
            if member.name != self.name
        }

    def _check(self, worker: str, theirs: tuple[str, ...], back: Mapping[str, str]) -> None:
        thing = f"the view of worker {self.name!r}"
        seen: set[str] = set()
        for ours, device in back.items():
            why = ""
            if device not in theirs:
                why = f"{worker} has no device {device}"
            elif self.devices and ours not in self.devices:
                why = f"{self.name} has no device {ours}"
            elif device in seen:
                why = f"two devices of {self.name} go back to {device}"
            if why:
                raise BadDeviceMap(thing=thing, member=worker, peer=self.name, device=device, why=why)
            seen.add(device)


_current: Agent | None = None


def set_current_agent(agent: Agent | None) -> None:
    """Say which agent this process is."""
    global _current
    _current = agent


def current_agent() -> Agent:
    """Return the agent of this process."""
    if _current is None:
        raise RuntimeError("this process has no RPC agent; make one, and give it to set_current_agent")
    return _current


@contextlib.contextmanager
def group_membership(store: Any, name: str, is_join: bool) -> Iterator[None]:
    """Hold the token of the group in this block: nobody else joins or leaves meanwhile.

    Waits as long as the store's timeout, and then raises MembersMissing, which names the holder.
    """
    with Lock(store, TOKEN, member=f"{name}, which {'joins' if is_join else 'leaves'}"):
        yield


def update_group_membership(
    worker_info: Any, my_devices: Sequence[Any], reverse_device_map: Mapping[Any, Any], is_join: bool
) -> None:
    """Tell the current agent that a worker joined or left: its info, its devices, and the way back from ours to its."""
    current_agent().update(worker_info, my_devices, reverse_device_map, is_join)
