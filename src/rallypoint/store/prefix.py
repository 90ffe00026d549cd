"""A view of any store under a key prefix: the key `key` of `PrefixStore("p", store)` is `p/key` in `store`.

Prefixes nest, and are the same on the wire as those of PyTorch's PrefixStore. `num_keys` and `list_keys` cover only the
keys under the prefix.
"""

from __future__ import annotations

import sys
from typing import Any

from rallypoint.store.base import Store

__all__ = ["PrefixStore", "with_prefix"]


class PrefixStore(Store):
    """A view of a store whose keys all start with `prefix/`. Closing it closes the underlying store."""

    def __init__(self, prefix: str, store: Store) -> None:
        if store is None:
            raise ValueError(f"the store of PrefixStore {prefix!r} cannot be None")
        if not isinstance(store, Store):
            raise TypeError(f"PrefixStore needs a rallypoint store, not {type(store).__name__}")
        super().__init__(store._backend, store._name(prefix + "/"), store._timeout_s)
        self._underlying = store
        self._own_prefix = prefix

    def clone(self) -> PrefixStore:
        """Return the same view of a clone of the underlying store."""
        copy = PrefixStore(self._own_prefix, self._underlying.clone())
        copy.set_timeout(self._timeout_s)
        return copy

    def close(self) -> None:
        """Close the underlying store."""
        self._underlying.close()

    @property
    def underlying_store(self) -> Store:
        """The store under this view."""
        return self._underlying

    @property
    def _underlying_non_prefix_store(self) -> Store:
        """The first store under this view that is not a PrefixStore; PyTorch's name."""
        store = self._underlying
        while isinstance(store, PrefixStore):
            store = store._underlying
        return store


def with_prefix(prefix: str, store: Any) -> Any:
    """Return a view of a store, ours or PyTorch's, under a key prefix."""
    if isinstance(store, Store):
        return PrefixStore(prefix, store)
    return sys.modules["torch"].distributed.PrefixStore(prefix, store)
