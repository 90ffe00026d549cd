"""A checker that decides whether a concurrent history of a store is linearizable, and histories to check."""
