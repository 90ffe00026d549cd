"""Any store, seen through a key prefix: `PrefixStore("p", store)` calls `p/key` what it calls `key` itself.

Prefixes nest, and are the same on the wire as those of PyTorch's PrefixStore. `num_keys` and `list_keys` see only what
is under the prefix.
"""

from __future__ import annotations

from rallypoint.store.base import Store

__all__ = ["PrefixStore"]


class PrefixStore(Store):
    """A view of a store whose keys all start with `prefix/`. Closing it closes the store beneath."""

    def __init__(self, prefix: str, store: Store) -> None:
        if store is None:
            raise ValueError(f"the store of PrefixStore {prefix!r} cannot be None")
        if not isinstance(store, Store):
            raise TypeError(f"PrefixStore needs a rallypoint store, not {type(store).__name__}")
        super().__init__(store._backend, store._name(prefix + "/"), store._timeout_s)
        self._underlying = store
        self._own_prefix = prefix

    def clone(self) -> PrefixStore:
        """Return the same view of a clone of the store beneath."""
        copy = PrefixStore(self._own_prefix, self._underlying.clone())
        copy.set_timeout(self._timeout_s)
        return copy

    def close(self) -> None:
        """Close the store beneath."""
        self._underlying.close()

    @property
    def underlying_store(self) -> Store:
        """The store beneath this view."""
        return self._underlying

    @property
    def _underlying_non_prefix_store(self) -> Store:
        """The first store beneath this view that is not itself a PrefixStore; PyTorch's name."""
        store = self._underlying
        while isinstance(store, PrefixStore):
            store = store._underlying
        return store
