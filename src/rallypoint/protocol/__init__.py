"""The wire protocols as pure codecs: bytes to operations, answers to bytes. They do no I/O and call no engine."""

from __future__ import annotations

__all__ = ["BadMessage"]


class BadMessage(Exception):
    """The peer violated the protocol; its connection must be closed."""
