"""The error tree: what went wrong, where, for how long, and what to do about it.

Every error carries its facts as fields, builds its own sentence from them, and survives pickling, so that a
launcher may send it to another process. `except` clauses choose by whose fault it is:

    RallypointError (a RuntimeError)
    ├── StoreError         the store answered, and the answer is no
    │   ├── StoreTimeout       also a TimeoutError: the time ran out
    │   ├── WorkersMissing     also a TimeoutError: not all clients of a job came
    │   ├── QueueEmpty         a non-blocking pop found nothing
    │   ├── NotAnInteger       also a ValueError: `add` on a value that is no number
    │   ├── LimitExceeded      also a ValueError: a key, a value or a list is larger than the limit
    │   ├── StoreFull          the store's memory is used up
    │   ├── Unsupported        also a NotImplementedError: this kind of store cannot do it
    │   ├── StoreClosed        the store was closed by its own side
    │   ├── CorruptFile        a FileStore's file is not one
    │   ├── DiskFull           also an OSError: a FileStore's file cannot grow
    │   ├── EtcdRefused        etcd would not do it: its quota, its limits, a user's rights
    │   └── MeetingError       the members of a barrier, an exchange, a lock or a group do not come together
    │       ├── MembersMissing     also a TimeoutError: not all came in time
    │       ├── MembersLost        one that had come has died
    │       ├── NotAMember         also a ValueError: nobody of that name is expected
    │       ├── Disagreement       also a ValueError: two members ask for what does not fit together
    │       ├── NameTaken          another process is that member
    │       ├── BadDeviceMap       also a ValueError: a map of devices that cannot be
    │       ├── RankTaken          also a ValueError: another node has asked for that rank
    │       ├── RunFull            the run has all of its nodes, and takes no spares
    │       └── RunClosed          the run has its result
    └── NetworkError       the store could not be asked; also a ConnectionError
        ├── ConnectFailed      nobody could be reached; also a TimeoutError
        ├── ConnectionLost     the link broke after it stood
        ├── SessionLost        a cut outlasted the grace; leases are gone
        ├── ServerRestarted    another server answers: what was stored is gone
        ├── AddressTaken       the address to listen on belongs to someone else
        ├── ServerFailed       a server child did not come up
        └── NoQuorum           no majority of an etcd cluster answers; also a TimeoutError

The sentence of every error that is a TimeoutError has the word "timeout", for which PyTorch's users look in its errors.
Misuse (a wrong type, a bad port number) is a plain `TypeError` or `ValueError`. Names of PyTorch's errors are in
`rallypoint.compat`. Rejected: error codes; people would match on them as they now match on strings.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint.text import printable

__all__ = [
    "RallypointError",
    "StoreError",
    "StoreTimeout",
    "WorkersMissing",
    "QueueEmpty",
    "NotAnInteger",
    "LimitExceeded",
    "StoreFull",
    "Unsupported",
    "StoreClosed",
    "CorruptFile",
    "DiskFull",
    "MeetingError",
    "MembersMissing",
    "MembersLost",
    "NotAMember",
    "Disagreement",
    "NameTaken",
    "BadDeviceMap",
    "RankTaken",
    "RunFull",
    "RunClosed",
    "NetworkError",
    "ConnectFailed",
    "ConnectionLost",
    "SessionLost",
    "ServerRestarted",
    "AddressTaken",
    "ServerFailed",
    "NoQuorum",
    "EtcdRefused",
]

_NAMES_SHOWN = 8


def _revive(cls: type[RallypointError], sentence: str, fields: dict[str, Any]) -> RallypointError:
    # Those that are also an OSError must be made by its constructor: only it knows their layout.
    maker: type[Exception] = OSError if issubclass(cls, OSError) else RuntimeError
    error = maker.__new__(cls, sentence)
    assert isinstance(error, RallypointError)
    error.args = (sentence,)
    error.__dict__.update(fields)
    return error


def _few(names: Sequence[str]) -> str:
    """Name the first few and count the rest, so that a sentence stays a sentence."""
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _some(names: Sequence[str]) -> str:
    """Quote the first few names, in part where they are long, and count the rest."""
    return _few([repr(name if len(name) <= 80 else name[:77] + "...") for name in names])


class RallypointError(RuntimeError):
    """Anything that rallypoint reports about a job, as opposed to misuse of its functions."""

    def __init__(self, sentence: str, **fields: Any) -> None:
        super().__init__(printable(sentence))  # a field may be a peer's text, and stays as it is
        self.__dict__.update(fields)

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), self.args[0], self.__dict__)


class StoreError(RallypointError):
    """The store was reached and refused, or could not do what was asked."""


class StoreTimeout(StoreError, TimeoutError):
    """What was waited for did not come true in time; `missing` says what.

    Where the server was `down` at the end, which says for how long, what is missing is not known: it names all keys.
    """

    operation: str
    keys: tuple[str, ...]
    missing: tuple[str, ...]
    timeout_s: float
    store: str
    down: str

    def __init__(
        self,
        *,
        operation: str,
        keys: Sequence[str],
        missing: Sequence[str],
        timeout_s: float,
        store: str,
        what: str | None = None,
        down: str = "",
    ) -> None:
        of = f", {len(missing)} of {len(keys)} keys" if len(keys) > 1 else ""
        why = f"{what or f'still missing {_some(missing)}{of}'} in {store}"
        advice = "Is the process that writes it alive, does it use the same store and prefix"
        if down:
            why, advice = f"{down}. What is missing in {store} is not known", "Is the server being restarted"
        super().__init__(
            f"{operation} timed out after {timeout_s:g} s: {why}. {advice}, is the timeout long enough?",
            operation=operation,
            keys=tuple(keys),
            missing=tuple(missing),
            timeout_s=timeout_s,
            store=store,
            down=down,
        )


class WorkersMissing(StoreError, TimeoutError):
    """Fewer clients than the world size have come to a store; `missing` names them where they are known."""

    store: str
    joined: int
    world_size: int
    timeout_s: float
    members: tuple[str, ...]
    missing: tuple[str, ...]

    def __init__(
        self,
        *,
        store: str,
        joined: int,
        world_size: int,
        timeout_s: float,
        members: Sequence[str] = (),
        missing: Sequence[str] = (),
    ) -> None:
        who = f"; missing: {_few(missing)}" if missing else ""
        here = f"; here: {_few(members)}" if members else ""
        super().__init__(
            f"timed out: {joined} of {world_size} clients joined {store} within {timeout_s:g} s{who}{here}. "
            f"Were all of them started, with this address, port and world size, is the timeout long enough?",
            store=store,
            joined=joined,
            world_size=world_size,
            timeout_s=timeout_s,
            members=tuple(members),
            missing=tuple(missing),
        )


class QueueEmpty(StoreError):
    """A non-blocking pop found no item."""

    key: str
    store: str

    def __init__(self, *, key: str, store: str) -> None:
        super().__init__(
            f"queue {_some([key])} in {store} is empty; pop with block=True to wait for an item",
            key=key,
            store=store,
        )


class NotAnInteger(StoreError, ValueError):
    """A counter's key holds something that is not a 64-bit decimal number; it was left as it is."""

    key: str
    value: bytes

    def __init__(self, *, key: str, value: bytes) -> None:
        super().__init__(
            f"key {_some([key])} holds {value[:40]!r}, which is not a 64-bit decimal integer; "
            f"only keys written by add, or set to a number, can be counted on",
            key=key,
            value=value[:1024],
        )


class LimitExceeded(StoreError, ValueError):
    """A key, a value or a list is larger than the store takes, or watches are more; nothing was sent or changed."""

    what: str
    key: str
    size: int
    limit: int

    def __init__(self, *, what: str, key: str, size: int, limit: int) -> None:
        if what == "keys":
            sentence = f"{size:,} keys in one call, starting with {_some([key])}; the limit is {limit:,}"
        elif what.startswith("watches"):
            sentence = f"{size:,} {what}, with that of {_some([key])}; the limit is {limit:,}"
        else:
            sentence = f"{what} {_some([key])} has {size:,} bytes and the limit is {limit:,}"
        super().__init__(sentence, what=what, key=key, size=size, limit=limit)


class StoreFull(StoreError):
    """The write would take the store past its memory limit; nothing was changed."""

    key: str
    size: int
    limit: int

    def __init__(self, *, key: str, size: int, limit: int) -> None:
        super().__init__(
            f"writing {_some([key])} would bring the store to {size:,} bytes and the limit is {limit:,}; "
            f"delete what is no longer needed, or raise the limit (serve --max-memory)",
            key=key,
            size=size,
            limit=limit,
        )


class Unsupported(StoreError, NotImplementedError):
    """This kind of store, or the server behind it, cannot do the operation."""

    operation: str
    store: str
    why: str

    def __init__(self, *, operation: str, store: str, why: str) -> None:
        super().__init__(f"{operation} is not available on {store}: {why}", operation=operation, store=store, why=why)


class StoreClosed(StoreError):
    """The store was closed on this side, before the call or while it waited."""

    store: str

    def __init__(self, *, store: str) -> None:
        super().__init__(f"{store} was closed; open a new one to go on", store=store)


class CorruptFile(StoreError):
    """A FileStore's file holds something that no FileStore wrote."""

    path: str
    offset: int
    why: str

    def __init__(self, *, path: str, offset: int, why: str) -> None:
        super().__init__(
            f"{path} is not a usable FileStore file: {why} at byte {offset}. "
            f"Choose another path, or remove the file if no job uses it",
            path=path,
            offset=offset,
            why=why,
        )


class DiskFull(StoreError, OSError):
    """A FileStore's file cannot grow: no space, a quota, a limit (`number` is the errno). The store is as it was."""

    path: str
    why: str
    number: int

    def __init__(self, *, path: str, why: str, number: int) -> None:
        super().__init__(
            f"{path} cannot grow: {why}. Nothing was changed. Free space on its file system, raise the user's quota or "
            f"limit of file sizes (ulimit -f), or put the store elsewhere",
            path=path,
            why=why,
            number=number,
        )
        self.errno, self.filename, self.strerror = number, path, why

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), path=self.path, why=self.why, number=self.number), (), self.__dict__


class MeetingError(StoreError):
    """Members of a shared object (`thing` names it) do not come together."""


class MembersMissing(MeetingError, TimeoutError):
    """Not everybody came in time; `missing` says who did not, `withdrawn` who of them came and gave up."""

    thing: str
    member: str
    missing: tuple[str, ...]
    withdrawn: tuple[str, ...]
    timeout_s: float
    reason: str

    def __init__(
        self,
        *,
        thing: str,
        member: str,
        missing: Sequence[str],
        timeout_s: float,
        reason: str,
        withdrawn: Sequence[str] = (),
        advice: str = "",
    ) -> None:
        advice = advice or "Look at the missing: are they running, and do they use the same store and name?"
        super().__init__(
            f"{thing} timed out for member {member} after a timeout of {timeout_s:g} s: {reason}. {advice}",
            thing=thing,
            member=member,
            missing=tuple(missing),
            withdrawn=tuple(withdrawn),
            timeout_s=timeout_s,
            reason=reason,
        )


class MembersLost(MeetingError):
    """A member that others waited with has died or lost its session; `lost` says who."""

    thing: str
    lost: tuple[str, ...]

    def __init__(self, *, thing: str, lost: Sequence[str]) -> None:
        super().__init__(
            f"{thing} is broken: lost {_few(lost)}, which died or was cut off after it had come. "
            f"Start it again, and let all members come again.",
            thing=thing,
            lost=tuple(lost),
        )


class NotAMember(MeetingError, ValueError):
    """Nobody of that name is expected."""

    thing: str
    member: str
    members: str

    def __init__(self, *, thing: str, member: str, members: str) -> None:
        super().__init__(
            f"{thing} does not expect {member!r}: it is for {members}. Is the number of members right?",
            thing=thing,
            member=member,
            members=members,
        )


class Disagreement(MeetingError, ValueError):
    """Two members ask for what does not fit together; `other` is who came first."""

    thing: str
    what: str
    mine: str
    theirs: str
    other: str

    def __init__(self, *, thing: str, what: str, mine: str, theirs: str, other: str) -> None:
        super().__init__(
            f"{thing}: the {what} here is {mine}, but {other} came with {theirs}. Give all members the same settings.",
            thing=thing,
            what=what,
            mine=mine,
            theirs=theirs,
            other=other,
        )


class NameTaken(MeetingError):
    """Another process is the member of that name; `other` says which."""

    thing: str
    member: str
    other: str

    def __init__(self, *, thing: str, member: str, other: str) -> None:
        super().__init__(
            f"{thing} has a member {member!r} already: {other}. Use another name, or end that process first.",
            thing=thing,
            member=member,
            other=other,
        )


class BadDeviceMap(MeetingError, ValueError):
    """A map from one member's devices to another's that cannot be."""

    thing: str
    member: str
    peer: str
    device: str
    why: str

    def __init__(self, *, thing: str, member: str, peer: str, device: str, why: str) -> None:
        super().__init__(
            f"{thing}: the device map of {member!r} for {peer!r} is wrong at {device!r}: {why}.",
            thing=thing,
            member=member,
            peer=peer,
            device=device,
            why=why,
        )


class RankTaken(MeetingError, ValueError):
    """Two nodes ask for one rank; `other` is who came first."""

    thing: str
    rank: int
    member: str
    other: str

    def __init__(self, *, thing: str, rank: int, member: str, other: str) -> None:
        super().__init__(
            f"{thing}: {member!r} asks for rank {rank}, which {other} has asked for already. Give each node its own.",
            thing=thing,
            rank=rank,
            member=member,
            other=other,
        )


class RunFull(MeetingError):
    """The round has all of its nodes, and this node was not to wait as a spare; `nodes` names them."""

    thing: str
    member: str
    nodes: tuple[str, ...]

    def __init__(self, *, thing: str, member: str, nodes: Sequence[str]) -> None:
        super().__init__(
            f"{thing} is full: it has all of its {len(nodes)} nodes ({_few(nodes)}), so {member} cannot join. "
            f"Another job needs a run id of its own; to keep spares, give a range of nodes, MIN:MAX.",
            thing=thing,
            member=member,
            nodes=tuple(nodes),
        )


class RunClosed(MeetingError):
    """The run has ended, and this is its `result`; it is also that of a node which `waited` for a round of it."""

    thing: str
    result: str
    reason: str
    waited: bool

    def __init__(self, *, thing: str, result: str, reason: str, waited: bool = False) -> None:
        super().__init__(
            f"{thing} was closed with the result {result!r}: {reason}. To begin a new run under this name, open it.",
            thing=thing,
            result=result,
            reason=reason,
            waited=waited,
        )


class NetworkError(RallypointError, ConnectionError):
    """The other side could not be asked, or went away."""


class ConnectFailed(NetworkError, TimeoutError):
    """No address of the peer answered in time; `tried` says what happened at each."""

    peer: str
    timeout_s: float
    tried: Mapping[str, str]

    def __init__(self, *, peer: str, timeout_s: float, tried: Mapping[str, str]) -> None:
        each = "; ".join(f"{address}: {why}" for address, why in tried.items()) or "no address was found"
        super().__init__(
            f"connection timed out: no store answered at {peer} within {timeout_s:g} s, the timeout ({each}). "
            f"Is the server up, is this the right address, and does a firewall let it through?",
            peer=peer,
            timeout_s=timeout_s,
            tried=dict(tried),
        )


class ConnectionLost(NetworkError):
    """The link broke while `operation` was under way; whether it was carried out is not known."""

    peer: str
    operation: str
    why: str

    def __init__(self, *, peer: str, operation: str, why: str) -> None:
        super().__init__(
            f"the connection to {peer} was lost during {operation}: {why}",
            peer=peer,
            operation=operation,
            why=why,
        )


class SessionLost(NetworkError):
    """This client's session was ended: what hung on it is gone, and what was under way is unknown."""

    peer: str
    why: str
    advice: str

    def __init__(self, *, peer: str, why: str, advice: str = "open the store again to go on") -> None:
        super().__init__(
            f"the session with {peer} is lost: {why}. Its locks, places and leases are gone; {advice}",
            peer=peer,
            why=why,
            advice=advice,
        )


class ServerRestarted(NetworkError):
    """Another server answers at the address: it has forgotten everything that was stored."""

    peer: str
    why: str

    def __init__(self, *, peer: str, why: str) -> None:
        super().__init__(
            f"the server at {peer} is not the one this client knew: {why}. What was stored there is gone; "
            f"open the store again to begin anew",
            peer=peer,
            why=why,
        )


class AddressTaken(NetworkError):
    """The address to listen on is in use, is not one of this machine's, or is not allowed.

    Where somebody has it and was asked who: `ours` says whether that is a rallypoint server, and `pid` which process.
    """

    address: str
    why: str
    ours: bool | None
    pid: int | None

    def __init__(self, *, address: str, why: str, ours: bool | None = None, pid: int | None = None) -> None:
        share = "Share that server with multi_tenant=True, or choose" if ours else "Choose"
        super().__init__(
            f"cannot listen on {address}: {why}{'' if pid is None else f' (pid {pid})'}. {share} an address of this "
            f"machine and a free port (0 takes any), or hand over a bound socket",
            address=address,
            why=why,
            ours=ours,
            pid=pid,
        )


class ServerFailed(NetworkError):
    """A server child ended, or stayed silent, before it was ready."""

    pid: int
    why: str

    def __init__(self, *, pid: int, why: str) -> None:
        super().__init__(f"the server process {pid} did not come up: {why}", pid=pid, why=why)


class NoQuorum(NetworkError, TimeoutError):
    """No majority of an etcd cluster answered in time; `tried` says what each endpoint did."""

    store: str
    timeout_s: float
    tried: Mapping[str, str]

    def __init__(self, *, store: str, timeout_s: float, tried: Mapping[str, str]) -> None:
        each = "; ".join(f"{address}: {why}" for address, why in tried.items())
        super().__init__(
            f"{store} did not answer within the timeout of {timeout_s:g} s ({each}). "
            f"Whether a change was made is not known. etcd answers while more than half of its members are up and "
            f"reach each other: see to those",
            store=store,
            timeout_s=timeout_s,
            tried=dict(tried),
        )


class EtcdRefused(StoreError):
    """etcd understood the request and would not carry it out; nothing was changed."""

    store: str
    key: str
    why: str

    def __init__(self, *, store: str, key: str, why: str) -> None:
        super().__init__(
            f"{store} refused to work on {_some([key])}: {why}. Look at its quota, its limits and this user's rights",
            store=store,
            key=key,
            why=why,
        )
