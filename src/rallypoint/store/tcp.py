"""TCPStore: a client of a store server, and with `is_master` also the one who starts it.

It says hello, and knows by the answer whom it met. With our server it has a session (`store/session.py`). With
PyTorch's own it speaks PyTorch's protocol, through `TorchBackend`, which is the rest of this module:

Every call takes a connection from a small pool, so a thread that waits blocks nobody else. A call ends in one of
three ways: with its answer, and the connection goes back; by the caller's own time-out or Ctrl-C, and at most that
connection is dropped; or with `ConnectionLost`, and the store stays lost, because that protocol cannot tell a server
that came back from one that forgot everything. Writes are confirmed, unlike those of PyTorch's client: a ping follows
each in the same packet, and the server answers in order. An empty value is told from a missing key, which the
protocol does not do (`_present`). What it has no words for (swap, leases, watches, delete_prefix) is `Unsupported`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

from rallypoint import net
from rallypoint.core import ops
from rallypoint.core.records import TimedOut, show
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.errors import ConnectFailed, ConnectionLost, NotAnInteger, StoreClosed, Unsupported, WorkersMissing
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.store.base import Backend, Store
from rallypoint.store.dial import NotOurs
from rallypoint.store.link import PING, Link
from rallypoint.store.route import Route
from rallypoint.store.session import SessionBackend
from rallypoint.store.view import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from rallypoint.spawn import Server

__all__ = ["TCPStore", "reach"]

DEFAULT_PORT = 29500
IDLE_LINKS = 4
LINK_S = 5.0
"""How long to try for a further connection to a server that was there a moment ago."""

_PAUSE_S = (0.001, 0.05)  # between looks at what the protocol cannot wait for: the first pause, and the longest
_INIT = b"init/"  # where clients count themselves; user keys start with a slash and never meet it


class TorchBackend(Backend):
    """A server that speaks PyTorch's protocol, through a pool of connections."""

    root = b"/"

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.name = f"tcp://{net.Endpoint(host, port)}"
        self.host, self.port, self.timeout_s = host, port, timeout_s
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._pid = os.getpid()
        self._closed = False
        self._lost: ConnectionLost | None = None
        self._idle.append(Link(host, port, Deadline(timeout_s)))

    def execute(self, op: ops.Op) -> Any:
        if op.__class__ not in _EXECUTE:
            raise self.unsupported(op.verb)
        return _EXECUTE[op.__class__](self, op, Deadline(getattr(op, "timeout_s", self.timeout_s)))

    def unsupported(self, operation: str) -> Unsupported:
        return Unsupported(operation=operation, store=self.name, why="PyTorch's protocol has no words for it")

    # Operations that are answered at once: `patience` is how long the server may take

    def _add(self, op: ops.Add, patience: Deadline) -> int:
        try:
            return self._integer(op, encode(Opcode.ADD, op.key, op.amount), patience)
        except ConnectionLost as error:
            raise self._why_not_counted(op.key, error) from None

    def _compare_set(self, op: ops.CompareSet, patience: Deadline) -> bytes:
        request = encode(Opcode.COMPARE_SET, op.key, op.expected, op.desired)
        with self._link(op.verb, request, patience) as link:
            return link.string(op.verb, patience)

    def _check(self, op: ops.Check, patience: Deadline) -> bool:
        with self._link("check", encode(Opcode.CHECK, len(op.keys), *op.keys), patience) as link:
            return link.take(1, "check", patience) == b"\0"

    def _list(self, op: ops.List | ops.Count, patience: Deadline) -> list[bytes]:
        with self._link("list_keys", encode(Opcode.LIST_KEYS), patience) as link:
            keys = [link.string("list_keys", patience) for _ in range(link.integer("list_keys", patience))]
        return sorted(key for key in keys if key.startswith(op.prefix))

    def _pop(self, op: ops.Pop, patience: Deadline) -> bytes | None:
        with self._link("queue_pop", encode(Opcode.QUEUE_POP, op.key), patience) as link:
            return self._item(link, patience)

    # Operations that may wait, until the deadline

    def _wait(self, op: ops.Wait | ops.MultiGet, deadline: Deadline) -> TimedOut | None:
        if deadline.expired() or not op.keys:
            return None if self.execute(ops.Check(0, op.keys)) else self._missing(op.keys)
        patience = self._patience(deadline)
        with self._link("wait", encode(Opcode.WAIT, len(op.keys), *op.keys), patience) as link:
            true = link.waited("wait", deadline, patience)
        return None if true else self._missing(op.keys)

    def _multi_get(self, op: ops.MultiGet, deadline: Deadline) -> list[bytes] | TimedOut:
        for _ in self._looks(deadline):
            outcome = self._wait(op, deadline)
            if outcome is not None:
                return outcome
            values = self._values(op.keys)
            empty = [key for key, value in zip(op.keys, values, strict=True) if not value]
            if not empty or self._present(empty):
                return values
        return TimedOut(tuple(empty))

    def _take(self, op: ops.Take, deadline: Deadline) -> bytes | TimedOut:
        for _ in self._looks(deadline):
            item = self._wait_and_pop(op.key, deadline)
            if item is not None:
                return item
        return TimedOut((op.key,))

    def _arrive(self, op: ops.Arrive, deadline: Deadline) -> TimedOut | None:
        patience = self._patience(deadline)
        try:
            with self._link("barrier", encode(Opcode.BARRIER, op.key, op.size), patience) as link:
                return None if link.waited("barrier", deadline, patience) else TimedOut((op.key,))
        except ConnectionLost as error:
            raise self._why_not_counted(op.key, error) from None

    # The connections

    def clone(self) -> TorchBackend:
        return TorchBackend(self.host, self.port, self.timeout_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._hang_up()

    def __del__(self) -> None:
        for link in self.__dict__.get("_idle", ()):
            link.close()

    def _hang_up(self) -> None:
        """Wake the calls under way and let go of the rest; the lock is held."""
        for link in (*self._idle, *self._busy):
            link.shut()
        for link in self._idle:
            link.close()
        self._idle.clear()

    @contextlib.contextmanager
    def _link(self, operation: str, request: bytes, patience: Deadline) -> Iterator[Link]:
        """Send a request on a connection that is this call's own until its answer was read."""
        link = self._borrow(operation)
        try:
            link.send(request, operation, patience)
            yield link
        except ConnectionLost as error:
            self._drop(link)
            self._judge(operation, error)
            raise
        except BaseException:
            self._drop(link)
            raise
        with self._lock:
            self._busy.discard(link)
            if not self._closed and len(self._idle) < IDLE_LINKS:
                self._idle.append(link)
                return
        link.close()

    def _borrow(self, operation: str) -> Link:
        if os.getpid() != self._pid:
            self._after_fork()
        with self._lock:
            self._refuse(operation)
            if self._idle:
                link = self._idle.pop()
                self._busy.add(link)
                return link
        link = Link(self.host, self.port, Deadline(min(self.timeout_s, LINK_S)))
        with self._lock:
            self._busy.add(link)
        with self._lock:
            self._refuse(operation)  # it may have been closed meanwhile, and nobody would wake us
        return link

    def _drop(self, link: Link) -> None:
        with self._lock:
            self._busy.discard(link)
        link.close()

    def _refuse(self, operation: str) -> None:
        """Raise if the store is closed or lost; the lock is held."""
        if self._closed:
            raise StoreClosed(store=self.name)
        if self._lost is not None:
            why = f"it was lost before, during {self._lost.operation}: {self._lost.why}"
            raise ConnectionLost(peer=self._lost.peer, operation=operation, why=why)

    def _judge(self, operation: str, error: ConnectionLost) -> None:
        """A lost connection ends the store. If the store was closed, that was the cause, so raise it instead."""
        with self._lock:
            if self._closed:
                raise StoreClosed(store=self.name) from None
            if operation not in ("add", "barrier"):  # which a server may refuse in this way: see _why_not_counted
                self._lost = error
                self._hang_up()

    def _after_fork(self) -> None:
        """In a forked child: leave the parent's connections to the parent, and open others when needed."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        for link in (*self._idle, *self._busy):
            link.close()
        self._idle, self._busy = [], set()

    # Requests

    def _patience(self, deadline: Deadline) -> Deadline:
        """How long the server may take to answer, waiting included."""
        return Deadline(deadline.remaining() + self.timeout_s)

    def _confirmed(self, op: ops.Op, request: bytes, patience: Deadline) -> None:
        with self._link(op.verb, request + PING, patience) as link:
            link.pong(op.verb, patience)

    def _integer(self, op: ops.Op, request: bytes, patience: Deadline) -> int:
        with self._link(op.verb, request, patience) as link:
            return link.integer(op.verb, patience)

    def _values(self, keys: Sequence[bytes]) -> list[bytes]:
        patience = Deadline(self.timeout_s)
        if len(keys) == 1:
            with self._link("get", encode(Opcode.GET, *keys), patience) as link:
                return [link.string("get", patience)]
        with self._link("multi_get", encode(Opcode.MULTI_GET, len(keys), *keys), patience) as link:
            return [link.string("multi_get", patience) for _ in keys]

    def _item(self, link: Link, patience: Deadline) -> bytes | None:
        return link.string("queue_pop", patience) if link.integer("queue_pop", patience) > 0 else None

    def _wait_and_pop(self, key: bytes, deadline: Deadline) -> bytes | None:
        """Wait for a queue and pop, on one connection: our server keeps the item for the one it told."""
        if deadline.expired():
            item: bytes | None = self.execute(ops.Pop(0, key))
            return item
        patience = self._patience(deadline)
        with self._link("queue_pop", encode(Opcode.WAIT, 1, key), patience) as link:
            if not link.waited("queue_pop", deadline, patience):
                return None
            link.send(encode(Opcode.QUEUE_POP, key), "queue_pop", patience)
            return self._item(link, patience)

    def _present(self, keys: Sequence[bytes]) -> bool:
        """Say whether all of these are keys: the server shows a missing key, or one of a queue only, as empty."""
        return not set(keys).difference(self.execute(ops.List(0, b"")))

    def _missing(self, keys: Sequence[bytes]) -> TimedOut:
        return TimedOut(tuple(key for key in dict.fromkeys(keys) if not self.execute(ops.Check(0, [key]))))

    def _looks(self, deadline: Deadline) -> Iterator[None]:
        """Look once, and again after growing pauses until the deadline."""
        pause_s, longest_s = _PAUSE_S
        yield
        while not deadline.expired():
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, longest_s)
            yield

    def _why_not_counted(self, key: bytes, error: ConnectionLost) -> Exception:
        """Find out whether the server hung up because the key is no number, for it does not say."""
        try:
            value = self._values([key])[0] if self.execute(ops.Check(0, [key])) else b"0"
            if not -(2**63) <= int(value) < 2**63:
                raise ValueError
        except ValueError:
            return NotAnInteger(key=show(key[1:]), value=value)
        except Exception:
            return error
        with self._lock:
            self._lost = error
            self._hang_up()
        return error


_EXECUTE: dict[type[ops.Op], Callable[[TorchBackend, Any, Deadline], Any]] = {
    ops.Set: lambda self, op, by: self._confirmed(op, encode(Opcode.SET, op.key, op.value), by),
    ops.Get: lambda self, op, by: self._multi_get(ops.MultiGet(0, [op.key], op.timeout_s), by),
    ops.Add: TorchBackend._add,
    ops.Check: TorchBackend._check,
    ops.Wait: TorchBackend._wait,
    ops.MultiGet: TorchBackend._multi_get,
    ops.MultiSet: lambda self, op, by: self._confirmed(
        op, encode(Opcode.MULTI_SET, len(op.pairs), *chain.from_iterable(op.pairs)), by
    ),
    ops.Append: lambda self, op, by: self._confirmed(op, encode(Opcode.APPEND, op.key, op.value), by),
    ops.CompareSet: TorchBackend._compare_set,
    ops.Delete: lambda self, op, by: bool(self._integer(op, encode(Opcode.DELETE_KEY, op.key), by)),
    ops.Count: lambda self, op, by: (
        len(self._list(op, by)) if op.prefix else self._integer(op, encode(Opcode.GETNUMKEYS), by)
    ),
    ops.List: TorchBackend._list,
    ops.Push: lambda self, op, by: self._confirmed(op, encode(Opcode.QUEUE_PUSH, op.key, op.value), by),
    ops.Pop: TorchBackend._pop,
    ops.Take: TorchBackend._take,
    ops.QueueLen: lambda self, op, by: self._integer(op, encode(Opcode.QUEUE_LEN, op.key), by),
    ops.Arrive: TorchBackend._arrive,
}


def _backend(route: Route, timeout_s: float) -> TorchBackend | SessionBackend:
    """Open a session with our server; PyTorch's, if it is the only one, is spoken to in its own protocol."""
    try:
        return SessionBackend(route, timeout_s)
    except NotOurs as answer:
        answer.socket.close()
        return TorchBackend(*route.endpoints[0], timeout_s)


def reach(endpoints: net.Endpoints, timeout_s: float) -> TCPStore:
    """Return a client of a store that has several servers; of one, the same as TCPStore itself."""
    store = TCPStore.__new__(TCPStore)
    backend = _backend(Route.of(endpoints), timeout_s)
    Store.__init__(store, backend, backend.root, timeout_s)
    return store


class TCPStore(Store):
    """A store on a server: a client, and with `is_master` also the server, in a child process of its own.

    Takes PyTorch's arguments. The master's server listens on `host_name` alone, on `port` (0: a free one, see `port`)
    or on the bound socket `master_listen_fd`, and ends with `close` or with this process. With `multi_tenant`, where a
    rallypoint server has the port already, the master is a plain client of that one. With a `world_size` and
    `wait_for_workers` the master returns once all have come, else raises WorkersMissing. Raises ConnectFailed when
    nobody answers within `timeout`, AddressTaken, which says who has it, when the port is not free.

    A launcher that serves the store itself says so with TORCHELASTIC_USE_AGENT_STORE and MASTER_PORT. As in PyTorch, a
    master that cannot listen on that very port is then a plain client of the launcher's store; on any other port it
    starts a server of its own. `use_libuv` is accepted and kept as `libuvBackend`; there is only one kind of server.
    """

    _libuv = True
    _server: Server | None = None

    def __init__(
        self,
        host_name: str,
        port: int = DEFAULT_PORT,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = timedelta(seconds=DEFAULT_TIMEOUT_S),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        if world_size == 0:
            raise ValueError("the world size of a TCPStore cannot be 0; leave it out where it is not known")
        deadline = Deadline(timeout)
        self._libuv = bool(use_libuv)
        if is_master:
            from rallypoint.store import master  # clients need none of it

            is_master, self._server = master.become(host_name, port, multi_tenant, master_listen_fd, deadline)
            port = port if self._server is None else self._server.port
        if port == 0:
            why = {f"{host_name}:0": "no server has port 0; a client needs the number that its server has taken"}
            raise ConnectFailed(peer=f"{host_name}:0", timeout_s=0.0, tried=why)
        endpoints = net.Endpoints((net.Endpoint(host_name, port),))
        backend = _backend(Route(endpoints) if self._server else Route.of(endpoints), seconds(timeout))
        super().__init__(backend, backend.root, timeout)
        if world_size is not None and world_size > 0 and wait_for_workers:
            self._meet(backend, world_size, is_master, deadline)

    @property
    def libuvBackend(self) -> bool:
        """The value of `use_libuv`, for programs that ask; the server is the same either way."""
        return self._libuv

    @property
    def host(self) -> str:
        """The host that this client was given; of several, the one that it is connected to."""
        return self._torch.host

    @property
    def port(self) -> int:
        """That server's port."""
        return self._torch.port

    def close(self) -> None:
        """End this client; a master's server ends with the last handle (clone, or tenant) that shares it."""
        super().close()
        self._server = None

    @property
    def _torch(self) -> TorchBackend | SessionBackend:
        assert isinstance(self._backend, (TorchBackend, SessionBackend))
        return self._backend

    def _meet(
        self, backend: TorchBackend | SessionBackend, world_size: int, is_master: bool, deadline: Deadline
    ) -> None:
        """Count this client; the master, whose server is ours, waits until the count is full."""
        arrival = ops.Arrive(0, _INIT, world_size, min(deadline.remaining(), ops.MAX_WAIT_S))
        if not is_master:
            backend.execute(ops.Add(0, _INIT, 1))
        elif backend.execute(arrival) is not None:
            joined = backend.execute(ops.Add(0, _INIT, 1))
            self.close()
            raise WorkersMissing(store=backend.name, joined=joined, world_size=world_size, timeout_s=deadline.timeout_s)
