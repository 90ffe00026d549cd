"""A client of PyTorch's protocol, with those calls of our client that histories use (`worker.py`).

It sends the bytes that PyTorch's client sends. A read may wait first, as PyTorch's `get` does, and cancels the wait if
the key does not appear; then it reads anyway, so there is always a result. No plan writes an empty value, because the
protocol cannot tell it from a missing key.
"""

from __future__ import annotations

import random

from tests.raw_peer import CANCELLED, RawPeer

from rallypoint.errors import QueueEmpty
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.readiness import wait_readable

__all__ = ["TorchClient"]

PATIENCE_S = 0.01
"""How long a read waits for its key."""


def encoded_key(key: str) -> bytes:
    """Return a key as PyTorch's client sends it."""
    return f"/{key}".encode()


class TorchClient:
    """One connection."""

    def __init__(self, host: str, port: int, seed: str) -> None:
        self._peer = RawPeer((host, port))
        self._chance = random.Random(seed)

    def get(self, key: str, timeout: float) -> bytes | None:
        if self._chance.random() < 0.7:
            self._wait(encoded_key(key))
        return self._peer.get(encoded_key(key)) or None

    def _wait(self, key: bytes) -> None:
        self._peer.wait(key)
        if not wait_readable(self._peer.socket, timeout_s=PATIENCE_S):
            self._peer.send(encode(Opcode.CANCEL_WAIT))
            while self._peer.read(1) != CANCELLED:
                pass  # the answer crossed
        else:
            self._peer.read(1)

    def set(self, key: str, value: bytes) -> None:
        self._peer.set(encoded_key(key), value)

    def append(self, key: str, value: bytes) -> None:
        self._peer.send(encode(Opcode.APPEND, encoded_key(key), value))
        self._peer.ping()

    def add(self, key: str, amount: int) -> int:
        return self._peer.add(encoded_key(key), amount)

    def swap(self, key: str, expected: bytes | None, desired: bytes) -> tuple[bool, bytes | None]:
        """Swap by COMPARE_SET, in which an empty value that is expected stands for none."""
        if expected == b"":
            return False, self.get(key, 0)
        self._peer.send(encode(Opcode.COMPARE_SET, encoded_key(key), expected or b"", desired))
        found = self._peer.string()
        if found == desired:
            return True, desired
        return False, None if found == expected else found

    def delete_key(self, key: str) -> bool:
        self._peer.send(encode(Opcode.DELETE_KEY, encoded_key(key)))
        return self._peer.number() > 0

    def queue_push(self, key: str, item: bytes) -> None:
        self._peer.push(encoded_key(key), item)

    def queue_pop(self, key: str, block: bool) -> bytes:
        item = self._peer.pop(encoded_key(key))
        if item is None:
            raise QueueEmpty(key=key, store="PyTorch's")
        return item

    def queue_len(self, key: str) -> int:
        self._peer.send(encode(Opcode.QUEUE_LEN, encoded_key(key)))
        return self._peer.number()
