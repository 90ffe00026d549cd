"""Is a concurrent history of a store one that a store could have had? The checker, and histories to check."""
