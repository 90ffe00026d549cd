"""Validate members, names and counts of shared objects before anything is sent; errors name the wrong argument.

The limits are those of the state machines (`core/machines/machine.py`), so they are the same for every host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rallypoint.core.machines.machine import MAX_MEMBERS, MAX_NAME
from rallypoint.core.machines.membership import MAX_DEVICES

__all__ = ["count_of", "device_maps_of", "devices_of", "members_of", "name_of", "names_of"]

SHOWN = 40


def name_of(member: object) -> str:
    """Return a member's name; a number is converted."""
    if isinstance(member, bool) or not isinstance(member, (int, str)):
        raise TypeError(f"a member must be a number or a name, not {member!r}")
    return _short(str(member), "member")


def _short(name: str, what: str) -> str:
    if len(name) > MAX_NAME:
        shown = f"{name[:SHOWN]!r}..."
        raise ValueError(f"the name of a {what} may have at most {MAX_NAME} characters, but {shown} has {len(name):,}")
    return name


def names_of(members: Iterable[str]) -> list[str]:
    """Return the members' names as a list."""
    if isinstance(members, (str, bytes)) or not isinstance(members, Iterable):
        raise TypeError(f"members must be a list of names, not {members!r}")
    names = list(members)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"members must be a list of names, but {name!r} is not a name")
    return [name_of(name) for name in names]


def count_of(number: object, what: str) -> int:
    """Return the number if it is a valid count; `what` names what it counts."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"the number of {what} must be a whole number, not {number!r}")
    if not 1 <= number <= MAX_MEMBERS:
        raise ValueError(f"the number of {what} must be 1 to {MAX_MEMBERS:,}, not {number:,}")
    return number


def members_of(members: int | Sequence[str]) -> int | list[str]:
    """Return the number of members, or the list of their names, which must be unique."""
    if isinstance(members, int):
        return count_of(members, "members")
    if isinstance(members, (set, frozenset)):
        raise TypeError(f"members must have the same order in all processes; a set has none: {_shown(members)}")
    names = names_of(members)
    count_of(len(names), "members")
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(f"members must be unique, but {twice[0]!r} occurs more than once")
    return names


def devices_of(devices: Iterable[str]) -> list[str]:
    """Return the devices' names as a list."""
    if isinstance(devices, (str, bytes, Mapping)) or not isinstance(devices, Iterable):
        raise TypeError(f"devices must be a list of names, not {_shown(devices)}")
    names = [_device(device, "devices must be a list of names") for device in devices]
    _check_device_count(len(names), "a member")
    return names


def device_maps_of(maps: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return for each peer, by name, the map from our devices to the peer's."""
    if not isinstance(maps, Mapping):
        raise TypeError(f"device_maps must map each peer's name to a device map, not {_shown(maps)}")
    if maps:
        count_of(len(maps), "device maps")
    return {name_of(peer): _device_map(peer, way) for peer, way in maps.items()}


def _device_map(peer: object, way: object) -> dict[str, str]:
    rule = f"the device map for {peer!r} must map device names to device names"
    if not isinstance(way, Mapping):
        raise TypeError(f"{rule}, not {_shown(way)}")
    named = {_device(mine, rule): _device(theirs, rule) for mine, theirs in way.items()}
    _check_device_count(len(named), f"the device map for {peer!r}")
    return named


def _device(device: object, rule: str) -> str:
    if not isinstance(device, str):
        raise TypeError(f"{rule}, but {_shown(device)} is not a name")
    return _short(device, "device")


def _check_device_count(number: int, what: str) -> None:
    if number > MAX_DEVICES:
        raise ValueError(f"{what} may have at most {MAX_DEVICES:,} devices, not {number:,}")


def _shown(what: object) -> str:
    text = repr(what)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
