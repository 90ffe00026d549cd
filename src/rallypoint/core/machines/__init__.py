"""Shared objects as pure state machines: barrier, exchange, lock, membership and rendezvous."""
