"""Every operation of a store, once, as a typed record.

An operation is data: an engine, a session and every backend `execute` it, the codecs of `protocol/` decode it and
encode its answer, and a log stores it. Its encoding (a msgpack array: tag, number, arguments) is both the native
protocol's request and the log's entry, so changing a field changes both.

`number` identifies a request within its session; it is 0 if nothing refers to it. `changes` says whether the operation
can change the state: if not, it needs no log entry, and may run again after a lost connection. Durations are in
seconds; `timeout_s` 0 means do not wait.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from rallypoint.core.limits import MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES
from rallypoint.core.machines import barrier, exchange, lock, membership, rendezvous, work_queue
from rallypoint.core.machines.machine import Name

__all__ = ["MAX_OPEN", "MAX_WAIT_S", "Op", "Operation"]

MAX_OPEN = 65_536
"""How many requests of a session may be open at once."""

MAX_WAIT_S = 1e9
"""The longest timeout that a request may have."""

Key = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES + 1)]
Value = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]
Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Op(Struct, array_like=True, gc=False):
    """One operation."""

    number: int

    changes: ClassVar[bool] = True
    verb: ClassVar[str] = ""
    """The public method behind it, as named in errors."""


class Set(Op, tag=1):
    key: Key
    value: Value

    verb = "set"


class Get(Op, tag=2):
    """Answered by a list of one value, as MultiGet is by a list of all."""

    key: Key
    timeout_s: Seconds

    changes = False
    verb = "get"


class Add(Op, tag=3):
    key: Key
    amount: Int64

    verb = "add"


class Check(Op, tag=4):
    keys: Keys

    changes = False
    verb = "check"


class Wait(Op, tag=5):
    keys: Keys
    timeout_s: Seconds

    changes = False
    verb = "wait"


class MultiGet(Op, tag=6):
    keys: Keys
    timeout_s: Seconds

    changes = False
    verb = "multi_get"


class MultiSet(Op, tag=7):
    pairs: Annotated[list[tuple[Key, Value]], Meta(max_length=MAX_KEYS)]

    verb = "multi_set"


class Append(Op, tag=8):
    key: Key
    value: Value

    verb = "append"


class CompareSet(Op, tag=9):
    """PyTorch's semantics: an empty `expected` may create the key; if it is missing, any other is the answer."""

    key: Key
    expected: Value
    desired: Value

    verb = "compare_set"


class CompareSwap(Op, tag=10):
    key: Key
    expected: Value | None
    desired: Value

    verb = "swap"


class Delete(Op, tag=11):
    key: Key

    verb = "delete_key"


class DeletePrefix(Op, tag=12):
    prefix: Key

    verb = "delete_prefix"


class Count(Op, tag=13):
    prefix: Key

    changes = False
    verb = "num_keys"


class List(Op, tag=14):
    prefix: Key

    changes = False
    verb = "list_keys"


class Push(Op, tag=15):
    key: Key
    value: Value

    verb = "queue_push"


class Pop(Op, tag=16):
    key: Key

    verb = "queue_pop"


class BlockingPop(Op, tag=17):
    """Wait in line for an item of a queue."""

    key: Key
    timeout_s: Seconds

    verb = "queue_pop"


class QueueLen(Op, tag=18):
    key: Key

    changes = False
    verb = "queue_len"


class Arrive(Op, tag=19):
    """Count an arrival on a key, and wait until there are `size`; an arrival that gives up is taken back."""

    key: Key
    size: Int64
    timeout_s: Seconds = MAX_WAIT_S

    verb = "barrier"


class SetLease(Op, tag=20):
    """Bind a key to the session and, if `ttl_s` is not 0, to its heartbeat too."""

    key: Key
    value: Value
    ttl_s: Seconds

    verb = "lease"


class ReleaseLease(Op, tag=21):
    key: Key

    verb = "lease"


class WatchPrefix(Op, tag=22):
    """Answered by nil; later changes arrive as pushes."""

    prefix: Key

    verb = "watch"


class Drop(Op, tag=23):
    """Drop an earlier request of this session: a wait, which then stays unanswered, a watch, or a turn."""

    target: int


class Confirm(Op, tag=24):
    """Not numbered or answered: all requests up to `last` except `open` were answered, and `pushes` were seen."""

    last: int
    open: Annotated[list[int], Meta(max_length=MAX_OPEN)]
    pushes: int


class Ping(Op, tag=25):
    changes = False


class Bye(Op, tag=26):
    """End the session now, without a grace period."""


class SessionHeartbeat(Op, tag=27):
    """Not numbered or answered: renew the leases that have a time to live."""

    changes = False


Commands = (
    barrier.BarrierArrive | barrier.BarrierWithdraw | barrier.BarrierLeave | barrier.BarrierUndoLeave
    | exchange.ExchangeGive | exchange.ExchangeWithdraw
    | lock.LockAcquire | lock.LockQuery | lock.LockRelease
    | membership.MembershipJoin | membership.MembershipLeave | membership.MembershipWatch | membership.MembershipQuery
    | rendezvous.RendezvousJoin | rendezvous.RendezvousWithdraw | rendezvous.RendezvousLeave
    | rendezvous.RendezvousWatch | rendezvous.RendezvousClose | rendezvous.RendezvousReopen | rendezvous.RendezvousQuery
    | rendezvous.RendezvousEvict
    | work_queue.WorkPut | work_queue.WorkTake | work_queue.WorkWithdraw | work_queue.WorkAbandon
    | work_queue.WorkDone | work_queue.WorkRelease | work_queue.WorkJoin | work_queue.WorkQuery
    | work_queue.WorkDead | work_queue.WorkRemoveDead
)  # fmt: skip
"""All commands to shared objects."""


class Act(Op, tag=28):
    """A command to a shared object. `call` identifies it among the session's calls; a caller that has received the
    reason for its wait and continues to wait repeats it."""

    name: Key
    member: Name
    call: int
    command: Commands
    timeout_s: Seconds


class WaitOrTurn(Op, tag=29):
    """Wait until a key exists (nil), or in line for the turn to pop an item of that queue (a `Turn`).

    For PyTorch's clients, which pop in two steps. The turn ends with `TurnPop` or `Drop`. With a `limit`, answered by
    the key's value if it is not longer: a client that waits for a key usually gets it next."""

    key: Key
    limit: Annotated[int, Meta(ge=0, le=MAX_VALUE_BYTES)] = 0

    verb = "wait"


class TurnPop(Op, tag=30):
    """Take the first item of a queue, using the turn of an earlier `WaitOrTurn` if there was one (else 0).

    Answered by the queue's length before the pop, and the item, or nil if there is none."""

    key: Key
    turn: int = 0

    verb = "queue_pop"


class Peek(Op, tag=31):
    """Answered by the current value of a key, nil if it is missing."""

    key: Key

    changes = False
    verb = "get"


class MultiPeek(Op, tag=32):
    """Answered by the current values of keys, nil for each missing one."""

    keys: Keys

    changes = False
    verb = "multi_get"


Operation = (
    Set | Get | Add | Check | Wait | MultiGet | MultiSet | Append | CompareSet | CompareSwap | Delete | DeletePrefix
    | Count | List | Push | Pop | BlockingPop | QueueLen | Arrive | SetLease | ReleaseLease | WatchPrefix | Drop
    | Confirm | Ping | Bye | SessionHeartbeat | Act | WaitOrTurn | TurnPop | Peek | MultiPeek
)  # fmt: skip
"""Every operation: the possible content of a request or a log entry."""
