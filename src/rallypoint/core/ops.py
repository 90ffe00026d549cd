"""Every operation of a store, once, as a typed record.

An operation is data: an engine, a session and every backend `execute` it, the codecs of `protocol/` read it from bytes
and write its answer, and a log keeps it. Its encoding (a msgpack array: tag, number, arguments) is the native
protocol's request and the log's entry, so a change of a field is a change of both.

`number` identifies a request within its session; it is 0 where nobody needs to refer to it. `changes` says whether
the operation can change the state: one that cannot needs no log entry, and may run again after a cut.
Durations are in seconds; `timeout_s` 0 means do not wait.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from rallypoint.core import barrier, exchange, lock, rendezvous, roster
from rallypoint.core.limits import MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES
from rallypoint.core.machine import Name

__all__ = ["MAX_OPEN", "MAX_WAIT_S", "Op", "Operation"]

MAX_OPEN = 65_536
"""How many requests of a session may be open at once."""

MAX_WAIT_S = 1e9
"""The longest wait that can be asked for."""

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
    """The public method behind it, as errors name it."""


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
    """As PyTorch has it: an empty expectation may create; on a missing key any other is the answer."""

    key: Key
    expected: Value
    desired: Value

    verb = "compare_set"


class Swap(Op, tag=10):
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


class Take(Op, tag=17):
    """Wait in line for an item of a queue."""

    key: Key
    timeout_s: Seconds

    verb = "queue_pop"


class QueueLen(Op, tag=18):
    key: Key

    changes = False
    verb = "queue_len"


class Arrive(Op, tag=19):
    """Count an arrival on a key, and wait until there are `size`; one that gives up is taken back."""

    key: Key
    size: Int64
    timeout_s: Seconds = MAX_WAIT_S

    verb = "barrier"


class Lease(Op, tag=20):
    """Bind a key to the session, and if `ttl_s` is not 0, to its heartbeat too."""

    key: Key
    value: Value
    ttl_s: Seconds

    verb = "lease"


class Unlease(Op, tag=21):
    key: Key

    verb = "lease"


class Watch(Op, tag=22):
    """Answered by nil; what changes from then on comes as pushes."""

    prefix: Key

    verb = "watch"


class Drop(Op, tag=23):
    """Give up an earlier request of this session: a wait, which then stays unanswered, a watch, or a turn."""

    target: int


class Confirm(Op, tag=24):
    """Not numbered or answered: all requests up to `last` but the open ones were answered, all pushes seen."""

    last: int
    open: Annotated[list[int], Meta(max_length=MAX_OPEN)]
    pushes: int


class Ping(Op, tag=25):
    changes = False


class Bye(Op, tag=26):
    """End the session now, without grace."""


class Beat(Op, tag=27):
    """Not numbered or answered: keep the leases that have a time to live for another one."""

    changes = False


Commands = (
    barrier.Arrive | barrier.Withdraw | barrier.Leave | barrier.Stay
    | exchange.Give | exchange.TakeBack
    | lock.Acquire | lock.Look | lock.Release
    | roster.Join | roster.Leave | roster.Watch | roster.Look
    | rendezvous.Join | rendezvous.Withdraw | rendezvous.Leave | rendezvous.Watch
    | rendezvous.Close | rendezvous.Open | rendezvous.Look
)  # fmt: skip
"""What can be asked of a shared object."""


class Act(Op, tag=28):
    """A command to a shared object. `call` identifies it among the session's calls, and is the same again when its
    caller has heard why it waits, and waits on."""

    name: Key
    member: Name
    call: int
    command: Commands
    timeout_s: Seconds


class Await(Op, tag=29):
    """Wait until a key exists (nil), or in line for the turn to draw an item of that queue (a `Turn`).

    For PyTorch's clients, which pop in two steps. The turn ends with `Draw` or `Drop`. With a `limit`, answered by the
    value of the key where that is no longer: a client that waits for a key mostly gets it next."""

    key: Key
    limit: Annotated[int, Meta(ge=0, le=MAX_VALUE_BYTES)] = 0

    verb = "wait"


class Draw(Op, tag=30):
    """Take the first item of a queue, by right of the turn of an earlier `Await` if there was one (else 0).

    Answered by the queue's length before, and the item, or nil where there is none."""

    key: Key
    turn: int = 0

    verb = "queue_pop"


class Peek(Op, tag=31):
    """Answered by the value of a key as it is now, nil where it is missing."""

    key: Key

    changes = False
    verb = "get"


class MultiPeek(Op, tag=32):
    """Answered by the values of keys as they are now, nil for each that is missing."""

    keys: Keys

    changes = False
    verb = "multi_get"


Operation = (
    Set | Get | Add | Check | Wait | MultiGet | MultiSet | Append | CompareSet | Swap | Delete | DeletePrefix | Count
    | List | Push | Pop | Take | QueueLen | Arrive | Lease | Unlease | Watch | Drop | Confirm | Ping | Bye | Beat |
    Act | Await | Draw | Peek | MultiPeek
)  # fmt: skip
"""Every operation: what a request or a log entry may hold."""
