"""Shared objects on any store: thin classes over the state machines of `rallypoint.core`."""
