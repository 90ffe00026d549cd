"""The internal interface of a store, for the other packages of rallypoint.

It is not for users, and may change in any release. Only store/ may use the attributes of a store that start with an
underscore; a test enforces that.

Rejected: public properties of `Store`. They would be part of the interface that users see and may implement.
"""

from __future__ import annotations

from typing import TypeVar

from rallypoint.store.base import Backend, Store, StoreDependent

__all__ = ["backend_of", "encoded_key", "end_before_close", "same_session_view", "view_with_backend"]

_S = TypeVar("_S", bound=Store)


def backend_of(store: Store) -> Backend:
    """Return the backend that executes the operations of a store; views of the same handle share it."""
    return store._backend


def encoded_key(store: Store, key: str) -> bytes:
    """Return a key as a store's backend has it, with all prefixes; raise TypeError, ValueError or LimitExceeded."""
    return store._name(key)


def end_before_close(store: Store, dependent: StoreDependent) -> None:
    """Call `dependent.end` before this handle, or a view of it, is closed; only a weak reference is kept."""
    store._add_dependent(dependent)


def same_session_view(store: _S) -> _S:
    """Return another view of the same handle, which does not keep the given one alive."""
    return store._same_session_view()


def view_with_backend(store: _S, backend: Backend) -> _S:
    """Return the same view of a store, whose operations another backend executes."""
    view = store._same_session_view()
    view._backend = backend
    return view
