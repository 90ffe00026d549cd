"""Storage of the rendezvous state, as in `torch.distributed.elastic.rendezvous.c10d_rendezvous_backend`.

The state is one opaque value, in base64, under one key of any store, ours or PyTorch's. Nodes with PyTorch's backend
and with this one share it:

    torch.rendezvous.RUN_ID     "Y2FuaW1hZGFt" while there is no state, else base64 of the state

A token is the key's value. Differences from PyTorch: an empty state can be replaced; a missing key means no state, and
the next `set_state` writes it; a value that is not valid base64 is corrupt, where PyTorch skips the invalid characters
and returns the rest.

`create_backend` also creates the store. The process with the endpoint's address hosts it; of several such processes,
the one that binds the port hosts it, and the others connect.
"""

from __future__ import annotations

import abc
import os
import tempfile
from base64 import b64decode, b64encode
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rallypoint import net
from rallypoint.compat.rendezvous.api import RendezvousParameters
from rallypoint.compat.rendezvous.endpoint import _matches_machine_hostname, parse_rendezvous_endpoint
from rallypoint.compat.rendezvous.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError
from rallypoint.errors import AddressTaken, RallypointError
from rallypoint.store.base import Store
from rallypoint.store.file import FileStore
from rallypoint.store.tcp import TCPStore

__all__ = ["C10dRendezvousBackend", "RendezvousBackend", "Token", "create_backend", "DEFAULT_PORT", "READ_TIMEOUT_S"]

DEFAULT_PORT = 29400
"""The port of an endpoint without one."""

READ_TIMEOUT_S = 60
"""The default timeout to reach the store, and of each operation on it."""

_NO_STATE = "Y2FuaW1hZGFt"

Token = Any
"""An opaque value that a backend returns with a state, and needs to replace it."""


class RendezvousBackend(abc.ABC):
    """Stores the state of one rendezvous for all its nodes."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the backend."""

    @abc.abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is no state.

        Raises RendezvousConnectionError, or RendezvousStateError if the state is corrupt.
        """

    @abc.abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state of that token, or without a token write the first state.

        Return the present state, its token, and whether it was replaced. Raises RendezvousConnectionError, or
        RendezvousStateError if the present state is corrupt.
        """


class C10dRendezvousBackend(RendezvousBackend):
    """The state of a rendezvous in a store: any object with `get` and `compare_set`."""

    def __init__(self, store: Any, run_id: str) -> None:
        if not run_id:
            raise ValueError("the run id must not be empty")
        self._store = store
        self._key = f"torch.rendezvous.{run_id}"
        self._call("compare_set", "", _NO_STATE)

    @property
    def name(self) -> str:
        """The name of the backend: c10d."""
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is no state."""
        return self._decode(self._call("get"))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state of that token, or write the first; return the present state, its token, and success."""
        wanted = b64encode(state).decode()
        if token is None:
            expected = _NO_STATE
        elif isinstance(token, bytes) and token.isascii():
            expected = token.decode()
        else:
            present = self.get_state()
            return None if present is None else (*present, False)
        data = self._call("compare_set", expected, wanted)
        if data == expected.encode() != wanted.encode():  # stores reply this if the key is gone
            if token is not None:
                return None
            data = self._call("compare_set", "", wanted)
        present = self._decode(data)
        return None if present is None else (*present, data == wanted.encode())

    def _call(self, operation: str, *arguments: str) -> bytes:
        try:
            value: bytes = getattr(self._store, operation)(self._key, *arguments)
        except RendezvousError:
            raise
        except (ValueError, RuntimeError, OSError) as error:
            raise RendezvousConnectionError(
                f"cannot access the rendezvous state: {operation} of {self._key!r} "
                f"in {self._store!r} raised {_brief(error)}"
            ) from error
        return value

    def _decode(self, data: bytes) -> tuple[bytes, Token] | None:
        if data == _NO_STATE.encode():
            return None
        try:
            return b64decode(data, validate=True), data
        except ValueError as error:
            raise RendezvousStateError(
                f"the rendezvous state is corrupt: {self._key!r} in {self._store!r} holds {data[:40]!r}, "
                f"which is not base64 ({error})"
            ) from error


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """Create the store at an endpoint, as its host or as a client, and the backend on it.

    The endpoint is `host[:port]`, or with the option `store_type=file` a path (empty: a temporary file). Options:
    `read_timeout` in seconds (60), `is_host` (default: detected). Raises RendezvousConnectionError.
    """
    kind = str(params.get("store_type", "tcp")).strip().lower()
    if kind not in ("tcp", "file"):
        raise ValueError(f"the rendezvous option 'store_type' must be tcp or file, not {params.get('store_type')!r}")
    timeout_s = params.get_as_int("read_timeout", READ_TIMEOUT_S)
    if timeout_s is None or timeout_s <= 0:
        raise ValueError(f"the rendezvous option 'read_timeout' must be positive, not {timeout_s}")
    timeout = timedelta(seconds=timeout_s)
    store = _create_file_store(params, timeout) if kind == "file" else _create_tcp_store(params, timeout)
    try:
        return C10dRendezvousBackend(store, params.run_id), store
    except BaseException:
        store.close()
        raise


def _create_file_store(params: RendezvousParameters, timeout: timedelta) -> FileStore:
    path = params.endpoint
    try:
        if not path:
            descriptor, path = tempfile.mkstemp()
            os.close(descriptor)
        return FileStore(path, timeout=timeout)
    except (RallypointError, OSError) as error:
        raise RendezvousConnectionError(
            f"cannot open the rendezvous store in the file {path!r}: {_brief(error)}"
        ) from error


def _create_tcp_store(params: RendezvousParameters, timeout: timedelta) -> TCPStore:
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    told = params.get_as_bool("is_host")
    is_host = _matches_machine_hostname(host) if told is None else told
    by = "by its address" if told is None else "by the option 'is_host'"
    role = f"{by}, this process is {'its host' if is_host else 'a client'}"
    try:
        return _host_or_join(host, port, timeout) if is_host else _join(host, port, timeout)
    except RallypointError as error:
        raise RendezvousConnectionError(
            f"cannot connect to the rendezvous store at {net.Endpoint(host, port)} ({role}): {_brief(error)}"
        ) from error


def _host_or_join(host: str, port: int, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    except AddressTaken as taken:
        if taken.ours is None:  # no server answers there, or it is not an address of this machine
            raise
        with suppress(RallypointError):  # it may be PyTorch's server, which works too
            return _join(host, port, timeout)
        raise taken


def _join(host: str, port: int, timeout: timedelta) -> TCPStore:
    return TCPStore(host, port, timeout=timeout, wait_for_workers=False)


def _brief(error: Exception) -> str:
    """Return the first line of an error: PyTorch's messages contain a C++ stack trace."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
