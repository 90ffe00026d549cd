"""Shared objects over any store: thin classes over the machines of `rallypoint.core`."""
