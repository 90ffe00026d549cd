"""The error tree. An error says what failed, where, after how long, and what to do about it.

Every error carries its facts as fields, builds its own sentence from them, and survives pickling, so a launcher
may send it to another process. The classes are grouped by cause, for `except` clauses:

    RallypointError (a RuntimeError)
    ├── StoreError         the store replied, and refused
    │   ├── StoreTimeout       also a TimeoutError: the timeout expired
    │   ├── WorkersMissing     also a TimeoutError: not all clients of a job connected
    │   ├── QueueEmpty         a non-blocking pop found no item
    │   ├── NotAnInteger       also a ValueError: `add` on a value that is not a number
    │   ├── LimitExceeded      also a ValueError: a key, a value or a list is larger than the limit
    │   ├── StoreFull          the store has reached its memory limit
    │   ├── Unsupported        also a NotImplementedError: this kind of store cannot do it
    │   ├── StoreClosed        the store was closed by this process
    │   ├── CorruptFile        a file that no FileStore wrote
    │   ├── DiskFull           also an OSError: the file of a store cannot grow
    │   ├── EtcdRefused        etcd refused a request: its quota, its limits, a user's permissions
    │   └── MeetingError       the members of a barrier, an exchange, a lock or a group cannot proceed together
    │       ├── MembersMissing     also a TimeoutError: not all members arrived in time
    │       ├── MembersLost        a member died after it had arrived
    │       ├── NotAMember         also a ValueError: no member of that name is expected
    │       ├── Disagreement       also a ValueError: two members use different settings
    │       ├── NameTaken          another process is that member
    │       ├── BadDeviceMap       also a ValueError: an impossible device map
    │       ├── RankTaken          also a ValueError: another node has requested that rank
    │       ├── ItemLost           an item of a work queue is no longer its taker's
    │       ├── RunFull            the run has all of its nodes, and takes no spares
    │       └── RunClosed          the run has its result
    └── NetworkError       the store could not be reached; also a ConnectionError
        ├── ConnectFailed      no server could be reached; also a TimeoutError
        ├── ConnectionLost     an established connection broke
        ├── SessionLost        the connection was cut for longer than the grace period; leases are gone
        ├── ServerRestarted    a different server replies: the stored data is gone
        ├── AddressTaken       the address to listen on is not available
        ├── ServerFailed       a server child process did not start
        ├── AuthenticationFailed   one side does not accept the token or the certificate of the other
        └── NoQuorum           no majority of an etcd cluster replies; also a TimeoutError

The sentence of every TimeoutError contains the word "timeout", which users of PyTorch search for in error texts.
Misuse (a wrong type, a bad port number) is a plain `TypeError` or `ValueError`. Names of PyTorch's errors are in
`rallypoint.compat`.

A subclass of `WithFields` annotates each field once, and its constructor takes them by keyword. Rejected: error codes;
people would match on them as they now match on strings. Rejected: dataclasses; every client would import them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.text import printable

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_options):
        return lambda decorator: decorator


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
    "ItemLost",
    "RunFull",
    "RunClosed",
    "NetworkError",
    "ConnectFailed",
    "ConnectionLost",
    "SessionLost",
    "ServerRestarted",
    "AddressTaken",
    "ServerFailed",
    "AuthenticationFailed",
    "NoQuorum",
    "EtcdRefused",
]

_NAMES_SHOWN = 8
_REQUIRED = object()
"""Marks a field without a default."""

_defaults: dict[type, dict[str, Any]] = {}
_IMMUTABLE = frozenset({str, bytes, int, float, bool, tuple, type(None)})


class RallypointError(RuntimeError):
    """Base of all errors that rallypoint reports, except misuse of its functions."""

    def __init__(self, sentence: str, **fields: Any) -> None:
        super().__init__(printable(sentence))  # a field may be a peer's text, and stays raw
        self.__dict__.update(fields)

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), self.args[0], self.__dict__)


def _revive(cls: type[RallypointError], sentence: str, fields: dict[str, Any]) -> RallypointError:
    # A subclass of OSError must be created by OSError.__new__, which knows its layout.
    maker: type[Exception] = OSError if issubclass(cls, OSError) else RuntimeError
    error = maker.__new__(cls, sentence)
    assert isinstance(error, RallypointError)
    error.args = (sentence,)
    error.__dict__.update(fields)
    if isinstance(error, WithFields):
        error.__post_init__()
    return error


@dataclass_transform(kw_only_default=True, eq_default=False)
class WithFields(RallypointError):
    """First base of an error whose constructor takes the fields that the class and its bases annotate.

    Lists become tuples and mappings are copied, so an error does not change after it is raised.
    """

    def __init__(self, /, **given: Any) -> None:
        defaults = _defaults.get(type(self)) or _collect(type(self))
        fields = {**defaults, **given}
        if len(fields) != len(defaults):
            unknown = [name for name in given if name not in defaults]
            raise TypeError(f"{type(self).__name__} has no field {_listed(unknown, repr)}")
        for name, value in fields.items():
            if type(value) not in _IMMUTABLE:
                if value is _REQUIRED:
                    raise TypeError(f"{type(self).__name__} needs the field {name!r}")
                if isinstance(value, list):
                    fields[name] = tuple(value)
                elif isinstance(value, (dict, Mapping)):  # the common case first: Mapping is slow to check
                    fields[name] = dict(value)
        self.__dict__.update(fields)
        self.__post_init__()
        self.args = (printable(self._sentence()),)

    def __post_init__(self) -> None:
        """Adjust the fields before the sentence is built; called again for a copy."""

    def _sentence(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} has no sentence")


def _collect(cls: type[WithFields]) -> dict[str, Any]:
    """Collect the fields of a class and their defaults, at its first error, so that the import stays cheap."""
    defaults: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        body = vars(base)
        if issubclass(base, WithFields) and "__init__" not in body:  # such a class sets its fields itself
            for name in base.__annotations__:
                defaults[name] = body.get(name, _REQUIRED)
    _defaults[cls] = defaults  # only when complete: another thread may read it
    return defaults


def _listed(names: Sequence[str], show: Callable[[str], str] = str) -> str:
    """Join the first few names and count the rest, to keep a sentence short."""
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(map(show, names[:_NAMES_SHOWN])) + (f" and {rest} more" if rest > 0 else "")


def _quoted(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")


def _outcomes(tried: Mapping[str, str]) -> str:
    return "; ".join(f"{address}: {why}" for address, why in tried.items())


class StoreError(RallypointError):
    """The store was reached, and refused or could not execute the request."""


class StoreTimeout(WithFields, StoreError, TimeoutError):
    """The condition was not met in time; `missing` names the missing keys, unless `what` describes the condition.

    `down` says how long the server had been down when the timeout expired; then `missing` names all keys.
    """

    operation: str
    keys: Sequence[str]
    missing: Sequence[str]
    timeout_s: float
    store: str
    what: str | None = None
    down: str = ""

    def _sentence(self) -> str:
        count = f", {len(self.missing)} of {len(self.keys)} keys" if len(self.keys) > 1 else ""
        why = f"{self.what or f'still missing {_listed(self.missing, _quoted)}{count}'} in {self.store}"
        advice = "Is the process that writes it alive? Does it use the same store and prefix?"
        if self.down:
            why = f"{self.down}. It is not known which keys are missing in {self.store}"
            advice = "Is the server being restarted?"
        return f"{self.operation} timed out after {self.timeout_s:g} s: {why}. {advice} Is the timeout long enough?"


class WorkersMissing(WithFields, StoreError, TimeoutError):
    """Fewer clients than the world size joined a store; `missing` names the others, if known."""

    store: str
    joined: int
    world_size: int
    timeout_s: float
    members: Sequence[str] = ()
    missing: Sequence[str] = ()

    def _sentence(self) -> str:
        missing = f"; missing: {_listed(self.missing)}" if self.missing else ""
        connected = f"; connected: {_listed(self.members)}" if self.members else ""
        return (
            f"timed out: {self.joined} of {self.world_size} clients joined {self.store} within {self.timeout_s:g} s"
            f"{missing}{connected}. Were all of them started, with this address, port and world size? "
            f"Is the timeout long enough?"
        )


class QueueEmpty(WithFields, StoreError):
    """A non-blocking pop found no item."""

    key: str
    store: str

    def _sentence(self) -> str:
        return f"queue {_quoted(self.key)} in {self.store} is empty; pop with block=True to wait for an item"


class NotAnInteger(WithFields, StoreError, ValueError):
    """The key of a counter holds something other than a 64-bit decimal number; it is unchanged."""

    key: str
    value: bytes

    def __post_init__(self) -> None:
        self.value = self.value[:1024]

    def _sentence(self) -> str:
        return (
            f"key {_quoted(self.key)} holds {self.value[:40]!r}, which is not a 64-bit decimal integer; "
            f"add works only on keys that add wrote or that were set to such a number"
        )


class LimitExceeded(WithFields, StoreError, ValueError):
    """A key, a value, a list or a number of watches is over the store's limit; nothing was sent or changed."""

    what: str
    key: str
    size: int
    limit: int

    def _sentence(self) -> str:
        if self.what == "keys":
            excess = f"{self.size:,} keys in one call, starting with {_quoted(self.key)}"
        elif self.what.startswith("watches"):
            excess = f"{self.size:,} {self.what}, counting the one on {_quoted(self.key)}"
        else:
            excess = f"{self.what} {_quoted(self.key)} has {self.size:,} bytes"
        return f"{excess}; the limit is {self.limit:,}"


class StoreFull(WithFields, StoreError):
    """The write would exceed the store's memory limit; nothing was changed."""

    key: str
    size: int
    limit: int

    def _sentence(self) -> str:
        return (
            f"writing {_quoted(self.key)} would bring the store to {self.size:,} bytes; the limit is {self.limit:,}. "
            f"Delete keys that are no longer needed, or raise the limit (serve --max-memory)"
        )


class Unsupported(WithFields, StoreError, NotImplementedError):
    """This kind of store, or its server, does not support the operation."""

    operation: str
    store: str
    why: str

    def _sentence(self) -> str:
        return f"{self.operation} is not available on {self.store}: {self.why}"


class StoreClosed(WithFields, StoreError):
    """The store was closed by this process, before the call or while it waited."""

    store: str

    def _sentence(self) -> str:
        return f"{self.store} was closed; open a new one to continue"


class CorruptFile(WithFields, StoreError):
    """The file of a FileStore holds something that no FileStore wrote."""

    path: str
    offset: int
    why: str

    def _sentence(self) -> str:
        return (
            f"{self.path} is not a usable FileStore file: {self.why} at byte {self.offset}. "
            f"Choose another path, or remove the file if no job uses it"
        )


class DiskFull(WithFields, StoreError, OSError):
    """The file of a store cannot grow: no space, a quota, a limit (`number` is the errno). The store is unchanged."""

    path: str
    why: str
    number: int

    def __post_init__(self) -> None:
        self.errno, self.filename, self.strerror = self.number, self.path, self.why

    def _sentence(self) -> str:
        return (
            f"{self.path} cannot grow: {self.why}. Nothing was changed. Free space on its file system, raise the "
            f"user's quota or file size limit (ulimit -f), or put the store elsewhere"
        )


class MeetingError(StoreError):
    """Members of a shared object (`thing` names it) cannot proceed together."""


class MembersMissing(WithFields, MeetingError, TimeoutError):
    """Not all members arrived in time; `missing` names the others, `withdrawn` those of them that stopped waiting."""

    thing: str
    member: str
    missing: Sequence[str]
    timeout_s: float
    reason: str
    withdrawn: Sequence[str] = ()
    advice: str = ""

    def _sentence(self) -> str:
        advice = self.advice or (
            "Look at the missing members: are they running, and do they use the same store and name?"
        )
        return (
            f"{self.thing} timed out for member {self.member} after a timeout of {self.timeout_s:g} s: "
            f"{self.reason}. {advice}"
        )


class MembersLost(WithFields, MeetingError):
    """A member died or lost its session while others waited with it; `lost` names the lost members."""

    thing: str
    lost: Sequence[str]

    def _sentence(self) -> str:
        return (
            f"{self.thing} is broken: lost {_listed(self.lost)}, dead or disconnected after arriving. "
            f"Start again with all members."
        )


class NotAMember(WithFields, MeetingError, ValueError):
    """No member of that name is expected."""

    thing: str
    member: str
    members: str

    def _sentence(self) -> str:
        return (
            f"{self.thing} does not expect {self.member!r}: it is for {self.members}. Is the number of members right?"
        )


class Disagreement(WithFields, MeetingError, ValueError):
    """Two members use different settings; `other` arrived first."""

    thing: str
    what: str
    mine: str
    theirs: str
    other: str

    def _sentence(self) -> str:
        return (
            f"{self.thing}: {self.what} is {self.mine} here, but {self.theirs} at {self.other}. "
            f"Give all members the same settings."
        )


class NameTaken(WithFields, MeetingError):
    """Another process is the member of that name; `other` identifies it."""

    thing: str
    member: str
    other: str

    def _sentence(self) -> str:
        return (
            f"{self.thing} already has a member {self.member!r}: {self.other}. "
            f"Use another name, or stop that process first."
        )


class BadDeviceMap(WithFields, MeetingError, ValueError):
    """A map from one member's devices to another's is impossible."""

    thing: str
    member: str
    peer: str
    device: str
    why: str

    def _sentence(self) -> str:
        return (
            f"{self.thing}: the device map of {self.member!r} for {self.peer!r} is invalid at {self.device!r}: "
            f"{self.why}."
        )


class RankTaken(WithFields, MeetingError, ValueError):
    """Two nodes request the same rank; `other` arrived first."""

    thing: str
    rank: int
    member: str
    other: str

    def _sentence(self) -> str:
        return (
            f"{self.thing}: {self.member!r} requests rank {self.rank}, which {self.other} has already requested. "
            f"Give each node its own rank."
        )


class ItemLost(WithFields, MeetingError):
    """A taken item went back to its work queue because its taker's session ended; `holder` has it now, if known."""

    thing: str
    item: str
    holder: str = ""
    why: str = ""

    def _sentence(self) -> str:
        now = f"{self.holder} has it" if self.holder else "another may have it, or has finished it"
        why = f" ({self.why})" if self.why else ""
        return (
            f"{self.thing}: item {self.item} is no longer this process's, whose session ended{why}; {now}. "
            f"Discard the result, and take another item."
        )


class RunFull(WithFields, MeetingError):
    """The round has all of its nodes, which `nodes` names, and this node is not allowed to wait as a spare."""

    thing: str
    member: str
    nodes: Sequence[str]

    def _sentence(self) -> str:
        return (
            f"{self.thing} is full: it has all of its {len(self.nodes)} nodes ({_listed(self.nodes)}), "
            f"so {self.member} cannot join. "
            f"Another job needs a run id of its own; to keep spares, give a range of nodes, MIN:MAX."
        )


class RunClosed(WithFields, MeetingError):
    """The run has ended with `result`; `waited` is True for a node that was waiting for the next round."""

    thing: str
    result: str
    reason: str
    waited: bool = False

    def _sentence(self) -> str:
        return (
            f"{self.thing} was closed with the result {self.result!r}: {self.reason}. "
            f"To start a new run under this name, open it."
        )


class NetworkError(RallypointError, ConnectionError):
    """The peer could not be reached, or disconnected."""


class ConnectFailed(WithFields, NetworkError, TimeoutError):
    """No address of the peer replied in time; `tried` maps each address to the reason."""

    peer: str
    timeout_s: float
    tried: Mapping[str, str]

    def _sentence(self) -> str:
        return (
            f"connection timed out: no store answered at {self.peer} within the timeout of {self.timeout_s:g} s "
            f"({_outcomes(self.tried) or 'no address was found'}). "
            f"Is the server running, is this the right address, and does a firewall let it through?"
        )


class ConnectionLost(WithFields, NetworkError):
    """The connection broke during `operation`, which may or may not have been applied."""

    peer: str
    operation: str
    why: str

    def _sentence(self) -> str:
        return f"the connection to {self.peer} was lost during {self.operation}: {self.why}"


class SessionLost(WithFields, NetworkError):
    """This client's session has ended: its leases are gone, and the outcome of pending calls is unknown."""

    peer: str
    why: str
    advice: str = "open the store again to continue"

    def _sentence(self) -> str:
        return (
            f"the session with {self.peer} is lost: {self.why}. "
            f"Its locks, memberships and leases are gone; {self.advice}"
        )


class ServerRestarted(WithFields, NetworkError):
    """A different server replies at the address, without the data of the previous one."""

    peer: str
    why: str

    def _sentence(self) -> str:
        return (
            f"the server at {self.peer} is not the one this client was connected to: {self.why}. "
            f"The data stored there is gone; open the store again to start over"
        )


class AddressTaken(WithFields, NetworkError):
    """The address to listen on is in use, is not an address of this machine, or is not permitted.

    If it is in use and its owner was identified, `ours` says whether that is a rallypoint server; `pid` is its process.
    """

    address: str
    why: str
    ours: bool | None = None
    pid: int | None = None

    def _sentence(self) -> str:
        owner = "" if self.pid is None else f" (pid {self.pid})"
        choose = "Share that server with multi_tenant=True, or choose" if self.ours else "Choose"
        return (
            f"cannot listen on {self.address}: {self.why}{owner}. {choose} an address of this machine and a free port "
            f"(0 picks one), or pass a bound socket"
        )


class ServerFailed(WithFields, NetworkError):
    """A server child process ended, or did not report, before it was ready; `pid` is 0 if it was never started."""

    pid: int
    why: str

    def _sentence(self) -> str:
        return f"the server process{f' {self.pid}' if self.pid else ''} did not start: {self.why}"


class AuthenticationFailed(WithFields, NetworkError):
    """One side does not accept the token or the certificate of the other; nothing was sent or changed."""

    peer: str
    why: str
    advice: str = ""

    def _sentence(self) -> str:
        return f"cannot authenticate at {self.peer}: {self.why}" + (f". {self.advice}" if self.advice else "")


class NoQuorum(WithFields, NetworkError, TimeoutError):
    """No majority of an etcd cluster replied in time; `tried` maps each endpoint to the reason."""

    store: str
    timeout_s: float
    tried: Mapping[str, str]

    def _sentence(self) -> str:
        return (
            f"{self.store}: no quorum within the timeout of {self.timeout_s:g} s ({_outcomes(self.tried)}). "
            f"The write may or may not have been applied. etcd needs a majority of its members: check them and "
            f"their network"
        )


class EtcdRefused(WithFields, StoreError):
    """etcd understood the request and refused it; nothing was changed."""

    store: str
    key: str
    why: str

    def _sentence(self) -> str:
        return (
            f"{self.store} refused the request for {_quoted(self.key)}: {self.why}. "
            f"Check its quota, its limits and this user's permissions"
        )
