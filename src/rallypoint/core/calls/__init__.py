"""Calls on shared objects: call records, late calls, contested refusals and shared answers."""
