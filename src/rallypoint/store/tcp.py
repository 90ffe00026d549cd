"""TCPStore: a client of a store server; with `is_master` it also starts the server.

It sends a greeting and recognizes the server by the reply. On a rallypoint server it opens a session
(`store/native_backend.py`). With PyTorch's server it speaks PyTorch's protocol, through `TorchBackend` below:

Every call takes a connection from a small pool, so a waiting thread blocks no other. A call ends in one of three ways:
with its reply, and the connection returns to the pool; by its timeout or Ctrl-C, and at most that connection is
dropped; or with `ConnectionLost`, and the store stays lost, because the protocol cannot distinguish a server that is
back from one that restarted without its data. Writes are confirmed, unlike those of PyTorch's client: a ping follows
each write in the same packet, and the server replies in order. An empty value is distinguished from a missing key,
which the protocol does not do (`_present`). Operations that it lacks (swap, leases, watches, delete_prefix) raise
`Unsupported`.
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
from rallypoint.client.routing.dial import ForeignServer
from rallypoint.client.routing.route import Route
from rallypoint.client.torch_connection import PING, TorchConnection
from rallypoint.core import ops
from rallypoint.core.records import TimedOut, show
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.errors import ConnectFailed, ConnectionLost, NotAnInteger, StoreClosed, Unsupported, WorkersMissing
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.security.client_security import ClientSecurity
from rallypoint.store.base import Backend, Store
from rallypoint.store.native_backend import NativeBackend
from rallypoint.store.view import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from rallypoint.process.spawn import Server
    from rallypoint.security.credentials import Credentials

__all__ = ["TCPStore", "reach"]

DEFAULT_PORT = 29500
IDLE_CONNECTIONS = 4
CONNECTION_S = 5.0
"""Timeout for a further connection to a server that was reachable a moment ago."""

_PAUSE_S = (0.001, 0.05)  # between polls of conditions that the protocol cannot wait for: first and longest pause
_INIT = b"init/"  # the key where clients count themselves; user keys start with a slash and never collide with it


class TorchBackend(Backend):
    """A server that speaks PyTorch's protocol, through a pool of connections."""

    root = b"/"

    def __init__(self, host: str, port: int, timeout_s: float, security: ClientSecurity) -> None:
        self.name = f"tcp://{net.Endpoint(host, port)}"
        self.host, self.port, self.timeout_s = host, port, timeout_s
        self._security = security
        self._lock = threading.Lock()
        self._idle: list[TorchConnection] = []
        self._busy: set[TorchConnection] = set()
        self._pid = os.getpid()
        self._closed = False
        self._lost: ConnectionLost | None = None
        self._idle.append(TorchConnection(host, port, Deadline(timeout_s), security))

    def execute(self, op: ops.Op) -> Any:
        if op.__class__ not in _EXECUTE:
            raise self.unsupported(op.verb)
        return _EXECUTE[op.__class__](self, op, Deadline(getattr(op, "timeout_s", self.timeout_s)))

    def unsupported(self, operation: str) -> Unsupported:
        return Unsupported(operation=operation, store=self.name, why="PyTorch's protocol does not have it")

    # Operations that do not wait: `patience` is how long the server may take to reply

    def _add(self, op: ops.Add, patience: Deadline) -> int:
        try:
            return self._integer(op, encode(Opcode.ADD, op.key, op.amount), patience)
        except ConnectionLost as error:
            raise self._why_not_counted(op.key, error) from None

    def _compare_set(self, op: ops.CompareSet, patience: Deadline) -> bytes:
        request = encode(Opcode.COMPARE_SET, op.key, op.expected, op.desired)
        with self._connection(op.verb, request, patience) as connection:
            return connection.read_string(op.verb, patience)

    def _check(self, op: ops.Check, patience: Deadline) -> bool:
        with self._connection("check", encode(Opcode.CHECK, len(op.keys), *op.keys), patience) as connection:
            return connection.read_exactly(1, "check", patience) == b"\0"

    def _list(self, op: ops.List | ops.Count, patience: Deadline) -> list[bytes]:
        with self._connection("list_keys", encode(Opcode.LIST_KEYS), patience) as connection:
            keys = [
                connection.read_string("list_keys", patience)
                for _ in range(connection.read_integer("list_keys", patience))
            ]
        return sorted(key for key in keys if key.startswith(op.prefix))

    def _pop(self, op: ops.Pop, patience: Deadline) -> bytes | None:
        with self._connection("queue_pop", encode(Opcode.QUEUE_POP, op.key), patience) as connection:
            return self._item(connection, patience)

    # Operations that may wait, until the deadline

    def _wait(self, op: ops.Wait | ops.MultiGet, deadline: Deadline) -> TimedOut | None:
        if deadline.expired() or not op.keys:
            return None if self.execute(ops.Check(0, op.keys)) else self._missing(op.keys)
        patience = self._patience(deadline)
        with self._connection("wait", encode(Opcode.WAIT, len(op.keys), *op.keys), patience) as connection:
            true = connection.read_wait_result("wait", deadline, patience)
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

    def _take(self, op: ops.BlockingPop, deadline: Deadline) -> bytes | TimedOut:
        for _ in self._looks(deadline):
            item = self._wait_and_pop(op.key, deadline)
            if item is not None:
                return item
        return TimedOut((op.key,))

    def _arrive(self, op: ops.Arrive, deadline: Deadline) -> TimedOut | None:
        patience = self._patience(deadline)
        try:
            with self._connection("barrier", encode(Opcode.BARRIER, op.key, op.size), patience) as connection:
                return None if connection.read_wait_result("barrier", deadline, patience) else TimedOut((op.key,))
        except ConnectionLost as error:
            raise self._why_not_counted(op.key, error) from None

    # The connections

    def clone(self) -> TorchBackend:
        return TorchBackend(self.host, self.port, self.timeout_s, self._security)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._close_connections()

    def __del__(self) -> None:
        for connection in self.__dict__.get("_idle", ()):
            connection.close()

    def _close_connections(self) -> None:
        """Wake the calls in progress and close the idle connections; the lock is held."""
        for connection in (*self._idle, *self._busy):
            connection.shutdown()
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    @contextlib.contextmanager
    def _connection(self, operation: str, request: bytes, patience: Deadline) -> Iterator[TorchConnection]:
        """Send a request on a connection that belongs to this call until its reply has been read."""
        connection = self._borrow(operation)
        try:
            connection.send(request, operation, patience)
            yield connection
        except ConnectionLost as error:
            self._drop(connection)
            self._judge(operation, error)
            raise
        except BaseException:
            self._drop(connection)
            raise
        with self._lock:
            self._busy.discard(connection)
            if not self._closed and len(self._idle) < IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()

    def _borrow(self, operation: str) -> TorchConnection:
        if os.getpid() != self._pid:
            self._after_fork()
        with self._lock:
            self._refuse(operation)
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection)
                return connection
        moment = Deadline(min(self.timeout_s, CONNECTION_S))
        connection = TorchConnection(self.host, self.port, moment, self._security)
        with self._lock:
            self._busy.add(connection)
        with self._lock:
            self._refuse(operation)  # it may have been closed meanwhile, and nothing would wake us
        return connection

    def _drop(self, connection: TorchConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def _refuse(self, operation: str) -> None:
        """Raise if the store is closed or lost; the lock is held."""
        if self._closed:
            raise StoreClosed(store=self.name)
        if self._lost is not None:
            why = f"already lost during {self._lost.operation}: {self._lost.why}"
            raise ConnectionLost(peer=self._lost.peer, operation=operation, why=why)

    def _judge(self, operation: str, error: ConnectionLost) -> None:
        """Mark the store as lost. If it was closed, that was the cause, so raise StoreClosed instead."""
        with self._lock:
            if self._closed:
                raise StoreClosed(store=self.name) from None
            if operation not in ("add", "barrier"):  # a server may refuse these in this way: see _why_not_counted
                self._lost = error
                self._close_connections()

    def _after_fork(self) -> None:
        """In a forked child: leave the connections to the parent, and open new ones when needed."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle, self._busy = [], set()

    # Requests

    def _patience(self, deadline: Deadline) -> Deadline:
        """Return the deadline for the server's reply, waiting included."""
        return Deadline(deadline.remaining() + self.timeout_s)

    def _confirmed(self, op: ops.Op, request: bytes, patience: Deadline) -> None:
        with self._connection(op.verb, request + PING, patience) as connection:
            connection.read_pong(op.verb, patience)

    def _integer(self, op: ops.Op, request: bytes, patience: Deadline) -> int:
        with self._connection(op.verb, request, patience) as connection:
            return connection.read_integer(op.verb, patience)

    def _values(self, keys: Sequence[bytes]) -> list[bytes]:
        patience = Deadline(self.timeout_s)
        if len(keys) == 1:
            with self._connection("get", encode(Opcode.GET, *keys), patience) as connection:
                return [connection.read_string("get", patience)]
        with self._connection("multi_get", encode(Opcode.MULTI_GET, len(keys), *keys), patience) as connection:
            return [connection.read_string("multi_get", patience) for _ in keys]

    def _item(self, connection: TorchConnection, patience: Deadline) -> bytes | None:
        return (
            connection.read_string("queue_pop", patience)
            if connection.read_integer("queue_pop", patience) > 0
            else None
        )

    def _wait_and_pop(self, key: bytes, deadline: Deadline) -> bytes | None:
        """Wait for a queue and pop, on one connection: our server reserves the item for the connection it woke."""
        if deadline.expired():
            item: bytes | None = self.execute(ops.Pop(0, key))
            return item
        patience = self._patience(deadline)
        with self._connection("queue_pop", encode(Opcode.WAIT, 1, key), patience) as connection:
            if not connection.read_wait_result("queue_pop", deadline, patience):
                return None
            connection.send(encode(Opcode.QUEUE_POP, key), "queue_pop", patience)
            return self._item(connection, patience)

    def _present(self, keys: Sequence[bytes]) -> bool:
        """Return whether all of these keys exist: the server returns empty for a missing key or a mere queue."""
        return not set(keys).difference(self.execute(ops.List(0, b"")))

    def _missing(self, keys: Sequence[bytes]) -> TimedOut:
        return TimedOut(tuple(key for key in dict.fromkeys(keys) if not self.execute(ops.Check(0, [key]))))

    def _looks(self, deadline: Deadline) -> Iterator[None]:
        """Yield once, and again after growing pauses until the deadline."""
        pause_s, longest_s = _PAUSE_S
        yield
        while not deadline.expired():
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, longest_s)
            yield

    def _why_not_counted(self, key: bytes, error: ConnectionLost) -> Exception:
        """Return NotAnInteger if the key is not a number: the server hangs up then without a reason; else `error`."""
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
            self._close_connections()
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
    ops.BlockingPop: TorchBackend._take,
    ops.QueueLen: lambda self, op, by: self._integer(op, encode(Opcode.QUEUE_LEN, op.key), by),
    ops.Arrive: TorchBackend._arrive,
}


def _backend(route: Route, timeout_s: float) -> TorchBackend | NativeBackend:
    """Open a session with a rallypoint server; a single address may also be PyTorch's server, with its protocol."""
    try:
        return NativeBackend(route, timeout_s)
    except ForeignServer as answer:
        answer.socket.close()
        return TorchBackend(*route.endpoints[0], timeout_s, route.security)


def reach(endpoints: net.Endpoints, timeout_s: float, security: ClientSecurity | None = None) -> TCPStore:
    """Return a client of a store that has one or several servers."""
    store = TCPStore.__new__(TCPStore)
    backend = _backend(Route.of(endpoints, security), timeout_s)
    Store.__init__(store, backend, backend.root, timeout_s)
    return store


class TCPStore(Store):
    """A store on a server: a client, and with `is_master` also the server, in a child process.

    Takes PyTorch's arguments. The master's server listens only on `host_name`, on `port` (0: a free one, see `port`)
    or on the bound socket `master_listen_fd`, and ends with `close` or with this process. With `multi_tenant`, if a
    rallypoint server already has the port, the master is a plain client of it. With a `world_size` and
    `wait_for_workers` the master returns once all clients have joined, or raises WorkersMissing. Raises ConnectFailed
    if no server replies within `timeout`, and AddressTaken, which names the owner, if the port is not free.

    A launcher that serves the store itself announces it with TORCHELASTIC_USE_AGENT_STORE and MASTER_PORT. As in
    PyTorch, a master that cannot listen on that port is then a plain client of the launcher's store; on any other port
    it starts its own server. `use_libuv` is accepted and kept as `libuvBackend`; there is only one kind of server.

    `credentials` are the token and the files for TLS of both ends, by default those of the environment. Raises
    AuthenticationFailed if one end does not accept those of the other.
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
        *,
        credentials: Credentials | None = None,
    ) -> None:
        if world_size == 0:
            raise ValueError("the world size of a TCPStore cannot be 0; omit it if it is not known")
        deadline, security = Deadline(timeout), ClientSecurity(credentials)
        self._libuv = bool(use_libuv)
        if is_master:
            from rallypoint.store import master  # clients do not need it

            is_master, self._server = master.become(host_name, port, multi_tenant, master_listen_fd, deadline, security)
            port = port if self._server is None else self._server.port
        if port == 0:
            why = {f"{host_name}:0": "port 0 is not an address; pass the actual port of the server"}
            raise ConnectFailed(peer=f"{host_name}:0", timeout_s=0.0, tried=why)
        endpoints = net.Endpoints((net.Endpoint(host_name, port),))
        route = Route(endpoints, security=security) if self._server else Route.of(endpoints, security)
        backend = _backend(route, seconds(timeout))
        super().__init__(backend, backend.root, timeout)
        if world_size is not None and world_size > 0 and wait_for_workers:
            self._meet(backend, world_size, is_master, deadline)

    @property
    def libuvBackend(self) -> bool:
        """The value of `use_libuv`, for programs that read it; the server is the same either way."""
        return self._libuv

    @property
    def host(self) -> str:
        """The host that this client was given; of several, the one it is connected to."""
        return self._torch.host

    @property
    def port(self) -> int:
        """The port of that server."""
        return self._torch.port

    def close(self) -> None:
        """Close this client; a master's server ends with the last handle (clone or tenant) that shares it."""
        super().close()
        self._server = None

    @property
    def _torch(self) -> TorchBackend | NativeBackend:
        assert isinstance(self._backend, (TorchBackend, NativeBackend))
        return self._backend

    def _meet(
        self, backend: TorchBackend | NativeBackend, world_size: int, is_master: bool, deadline: Deadline
    ) -> None:
        """Count this client; the master, whose server is always a rallypoint server, waits for all clients."""
        arrival = ops.Arrive(0, _INIT, world_size, min(deadline.remaining(), ops.MAX_WAIT_S))
        if not is_master:
            backend.execute(ops.Add(0, _INIT, 1))
        elif backend.execute(arrival) is not None:
            joined = backend.execute(ops.Add(0, _INIT, 1))
            self.close()
            raise WorkersMissing(store=backend.name, joined=joined, world_size=world_size, timeout_s=deadline.timeout_s)
