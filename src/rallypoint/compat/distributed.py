"""Making a TCP store as `torch.distributed.elastic.utils.distributed` does, and free ports.

Members of one store meet at these keys, of which the first two are PyTorch's own, so that its processes may be among
them:

    _tcp_store/num_members/num_members    how many have come
    _tcp_store/num_members/last_member    written by the one who completes the number, which releases everyone
    _tcp_store/num_members/who            one line for each arrival (`+`) and each departure (`-`) of ours

The count decides, and the lines only tell who is missing: RANK may well be inherited by several processes of a worker
that makes a store of its own, and PyTorch's processes write no lines. Whoever gives up takes its count back, so a later
attempt does not start one ahead; if the number was complete at that moment, it has not given up but arrived.
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
    """Connect to the store at an address, where `is_server` starts its server there first.

    With `wait_for_workers`, returns once `world_size` members have come, or raises WorkersMissing (a TimeoutError)
    that says how many did and which did not. Port -1 is a free one, for a server that is alone; its number is the
    store's `port`. Where that is taken at another address of the host, it is tried `retries` times; a port that was
    asked for and is taken raises AddressTaken at once. Raises ConnectFailed where no server answers within `timeout`.
    """
    if use_libuv is not None:
        warnings.warn("use_libuv has no meaning here: rallypoint has one server", stacklevel=2)
    if server_port == -1 and (world_size > 1 or not is_server):
        whom = f"{world_size} members" if world_size > 1 else "a client"
        raise ValueError(f"server_port -1 is a free port that only its server knows; {whom} must be told the number")
    deadline = Deadline(timeout)
    port, tries = (0, max(1, retries)) if server_port == -1 else (server_port, 1)
    store = _open(tries, server_addr, port, None if is_server else world_size, is_server, timeout, wait_for_workers)
    if wait_for_workers:
        try:
            _meet(store, world_size, deadline)
        except BaseException:
            store.close()
            raise
    return store


def get_free_port() -> int:
    """Return a port of localhost that was free a moment ago; `get_socket_with_port` keeps it."""
    return net.free_port()


def get_socket_with_port() -> socket.socket:
    """Return a socket that listens on a free port of localhost; hand over its descriptor, and nobody can take it."""
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
    """One who came: the rank that it was given, if any, and its process."""

    rank: str
    process: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})" if self.rank else self.process


def _myself() -> _Member:
    rank = os.environ.get("RANK", "")
    return _Member(rank if rank.isdecimal() else "", f"{socket.gethostname()}:{os.getpid()}")


def _meet(store: TCPStore, world_size: int, deadline: Deadline) -> None:
    """Count this member, and wait until the number is complete."""
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
    """Take this member's count back; return what it was, this member included."""
    count = store.add(_COUNT, -1) + 1
    store.append(_WHO, f"-{me.rank} {me.process}\n")
    return count


def _roll_call(who: str, count: int, world_size: int) -> tuple[int, list[str], list[str]]:
    """Return how many have come, who they are, and who is missing where that can be known.

    Those who came and gave up count: all members give up within moments of each other, and each is to tell the same.
    """
    here = {_Member(rank, process): sign == "+" for sign, rank, process in re.findall(r"([+-])(\d*) (\S+)\n", who)}
    silent = max(0, count - sum(here.values()))
    names = [str(member) if present else f"{member} gave up" for member, present in here.items()]
    if silent:
        names.append(f"{silent} that did not say who, as PyTorch's do not")
    ranks = {int(member.rank) for member in here if member.rank}
    known = not silent and len(ranks) == len(here) and ranks <= set(range(world_size))
    missing = [f"rank {rank}" for rank in range(world_size) if rank not in ranks] if known else []
    return len(here) + silent, names, missing
