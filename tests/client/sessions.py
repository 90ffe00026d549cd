"""Internals of the blocking client that tests of cuts and interrupts inspect."""

from __future__ import annotations

import rallypoint
from rallypoint.client.blocking.session import ClientSession
from rallypoint.client.blocking.shared_connection import SharedConnection
from rallypoint.store.internal import backend_of
from rallypoint.store.native_backend import NativeBackend


def native_backend(store: rallypoint.Store) -> NativeBackend:
    """Return the backend of a store that is on a rallypoint server."""
    backend = backend_of(store)
    assert isinstance(backend, NativeBackend)
    return backend


def session_of(store: rallypoint.Store) -> ClientSession:
    return native_backend(store)._session


def connection_of(store: rallypoint.Store) -> SharedConnection:
    return session_of(store)._connection
