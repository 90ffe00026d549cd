"""Create a TCP store as `torch.distributed.elastic.utils.distributed` does, and find free ports.

Members are counted in these keys. The first two are PyTorch's own, so its processes can take part:

    _tcp_store/num_members/num_members    how many members have arrived
    _tcp_store/num_members/last_member    written by the last member to arrive; releases all
    _tcp_store/num_members/who            one line for each arrival (`+`) and departure (`-`) of our members

The count decides; the lines only identify the missing members. They cannot decide: several processes of one worker may
inherit the same RANK, and PyTorch's processes write no lines. A member that gives up decrements the count, so that a
later attempt does not start one ahead; if the count was complete at that moment, the member has arrived after all.
"""

from __future__ import annotations

import os
import re
import socket
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import AddressTaken, RallypointError, StoreTimeout, WorkersMissing
from rallypoint.store.tcp import TCPStore

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]

_COUNT = "_tcp_store/num_members/num_members"
_LAST = "_tcp_store/num_members/last_member"
_WHO = "_tcp_store/num_members/who"


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 600,
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> TCPStore:
    """Return a store connected to the address; with `is_server`, start its server there first.

    With `wait_for_workers`, return when `world_size` members have arrived, or raise WorkersMissing (a TimeoutError)
    with the number that arrived and the missing ones. Port -1 picks a free port, for a server without other members;
    the store's `port` is its number. If the picked port is taken at another address of the host, retry up to `retries`
    times in all; if a requested port is taken, raise AddressTaken at once. Raises ConnectFailed if no server answers
    within `timeout`.
    """
    if use_libuv is not None:
        warnings.warn("use_libuv is ignored: rallypoint has only one kind of server", stacklevel=2)
    if server_port == -1 and (world_size > 1 or not is_server):
        other = f"{world_size} members" if world_size > 1 else "a client"
        raise ValueError(f"server_port -1 is a free port that only its server knows; {other} must be told the number")
    deadline = Deadline(timeout)
    port, tries = (0, max(1, retries)) if server_port == -1 else (server_port, 1)
    store = _open(tries, server_addr, port, None if is_server else world_size, is_server, timeout, wait_for_workers)
    if wait_for_workers:
        try:
            _await_members(store, world_size, deadline)
        except BaseException:
            store.close()
            raise
    return store


def get_free_port() -> int:
    """Return a localhost port that was free just now; use `get_socket_with_port` to reserve one."""
    return net.free_port()


def get_socket_with_port() -> socket.socket:
    """Return a socket that listens on a free localhost port; pass on its descriptor to keep the port reserved."""
    return net.bound_socket()


def _open(tries: int, *arguments: Any) -> TCPStore:
    while True:
        tries -= 1
        try:
            return TCPStore(*arguments)
        except AddressTaken:
            if not tries:
                raise


class _Member(NamedTuple):
    """A member that arrived: its rank, if it has one, and its process."""

    rank: str
    process: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})" if self.rank else self.process


def _myself() -> _Member:
    rank = os.environ.get("RANK", "")
    return _Member(rank if rank.isdecimal() else "", f"{socket.gethostname()}:{os.getpid()}")


def _await_members(store: TCPStore, world_size: int, deadline: Deadline) -> None:
    """Count this member, and wait until the count is complete."""
    me = _myself()
    store.append(_WHO, f"+{me.rank} {me.process}\n")
    count = store.add(_COUNT, 1)
    try:
        if count >= world_size:
            store.set(_LAST, "1")
        store.wait([_LAST], deadline.remaining())
    except StoreTimeout:
        who = store.get(_WHO)
        count = _leave(store, me)
        if count < world_size:
            joined, members, missing = _roll_call(who.decode(errors="replace"), count, world_size)
            raise WorkersMissing(
                store=f"tcp://{net.Endpoint(store.host, store.port)}",
                joined=joined,
                world_size=world_size,
                timeout_s=deadline.timeout_s,
                members=members,
                missing=missing,
            ) from None
        store.add(_COUNT, 1)
        store.set(_LAST, "1")
    except BaseException:
        with suppress(RallypointError):
            _leave(store, me)
        raise


def _leave(store: TCPStore, me: _Member) -> int:
    """Decrement the count; return the count before, with this member."""
    count = store.add(_COUNT, -1) + 1
    store.append(_WHO, f"-{me.rank} {me.process}\n")
    return count


def _roll_call(who: str, count: int, world_size: int) -> tuple[int, list[str], list[str]]:
    """Return how many members arrived, their names, and the missing ranks if they can be known.

    Members that gave up are included: all give up at nearly the same time, and all should report the same.
    """
    here = {_Member(rank, process): sign == "+" for sign, rank, process in re.findall(r"([+-])(\d*) (\S+)\n", who)}
    silent = max(0, count - sum(here.values()))
    names = [str(member) if present else f"{member} gave up" for member, present in here.items()]
    if silent:
        names.append(f"{silent} unidentified (PyTorch's processes do not identify themselves)")
    ranks = {int(member.rank) for member in here if member.rank}
    known = not silent and len(ranks) == len(here) and ranks <= set(range(world_size))
    missing = [f"rank {rank}" for rank in range(world_size) if rank not in ranks] if known else []
    return len(here) + silent, names, missing
