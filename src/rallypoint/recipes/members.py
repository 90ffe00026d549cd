"""Who takes part, checked before anything is sent: a name or a number that no host would take is refused, and said.

The limits are the machines' own (`core/machine.py`), so they are the same wherever an object lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rallypoint.core.machine import MAX_MEMBERS, MAX_NAME
from rallypoint.core.roster import MAX_DEVICES

__all__ = ["count_of", "device_maps_of", "devices_of", "members_of", "name_of", "names_of"]

SHOWN = 40


def name_of(member: object) -> str:
    """Return what a member goes by; a number is as good as a name."""
    if isinstance(member, bool) or not isinstance(member, (int, str)):
        raise TypeError(f"a member must be a number or a name, not {member!r}")
    return _short(str(member), "member")


def _short(name: str, what: str) -> str:
    if len(name) > MAX_NAME:
        shown = f"{name[:SHOWN]!r}..."
        raise ValueError(f"the name of a {what} may have {MAX_NAME} characters, and {shown} has {len(name):,}")
    return name


def names_of(members: Iterable[str]) -> list[str]:
    """Return a list of names."""
    if isinstance(members, (str, bytes)) or not isinstance(members, Iterable):
        raise TypeError(f"members must be a list of names, not {members!r}")
    names = list(members)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"members must be a list of names, and {name!r} is no name")
    return [name_of(name) for name in names]


def count_of(number: object, what: str) -> int:
    """Return how many there are of something, if there can be so many."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"the number of {what} must be a whole number, not {number!r}")
    if not 1 <= number <= MAX_MEMBERS:
        raise ValueError(f"the number of {what} must be 1 to {MAX_MEMBERS:,}, not {number:,}")
    return number


def members_of(members: int | Sequence[str]) -> int | list[str]:
    """Return how many members there are, or all their names, each of which is there once."""
    if isinstance(members, int):
        return count_of(members, "members")
    if isinstance(members, (set, frozenset)):
        raise TypeError(f"members must be in the same order everywhere, and a set has none: {_shown(members)}")
    names = names_of(members)
    count_of(len(names), "members")
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(f"every member must be named once, but {twice[0]!r} is named twice")
    return names


def devices_of(devices: Iterable[str]) -> list[str]:
    """Return a list of devices' names."""
    if isinstance(devices, (str, bytes, Mapping)) or not isinstance(devices, Iterable):
        raise TypeError(f"devices must be a list of names, not {_shown(devices)}")
    names = [_device(device, "devices must be a list of names") for device in devices]
    _not_too_many(len(names), "a member's devices")
    return names


def device_maps_of(maps: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return, for peers by name, to which of its devices each of ours goes."""
    if not isinstance(maps, Mapping):
        raise TypeError(f"device_maps must have a map for each peer, by name, and it is {_shown(maps)}")
    if maps:
        count_of(len(maps), "device maps")
    return {name_of(peer): _device_map(peer, way) for peer, way in maps.items()}


def _device_map(peer: object, way: object) -> dict[str, str]:
    rule = f"the device map for {peer!r} must go from names to names of devices"
    if not isinstance(way, Mapping):
        raise TypeError(f"{rule}, and it is {_shown(way)}")
    named = {_device(mine, rule): _device(theirs, rule) for mine, theirs in way.items()}
    _not_too_many(len(named), f"the devices in the map for {peer!r}")
    return named


def _device(device: object, rule: str) -> str:
    if not isinstance(device, str):
        raise TypeError(f"{rule}, and {_shown(device)} is no name")
    return _short(device, "device")


def _not_too_many(number: int, what: str) -> None:
    if number > MAX_DEVICES:
        raise ValueError(f"{what} may be {MAX_DEVICES:,} at most, not {number:,}")


def _shown(what: object) -> str:
    text = repr(what)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
