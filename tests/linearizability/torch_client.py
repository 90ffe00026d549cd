"""A client of PyTorch's protocol with the calls of ours that the plans of histories have (`worker.py`).

It sends what PyTorch's client sends. A read may wait first, as PyTorch's `get` does, and take the wait back when the
key does not come; what it then reads is read within the call, so there is always an answer. No plan writes an empty
value: what the protocol calls empty is missing.
"""

from __future__ import annotations

import random
import select

from tests.wire import CANCELLED, Peer

from rallypoint.errors import QueueEmpty
from rallypoint.protocol.c10d import Opcode, encode

__all__ = ["TorchClient"]

PATIENCE_S = 0.01
"""For how long a read waits for its key."""


def wire(key: str) -> bytes:
    """Return a key as PyTorch's client sends it."""
    return f"/{key}".encode()


class TorchClient:
    """One connection."""

    def __init__(self, host: str, port: int, seed: str) -> None:
        self._peer = Peer((host, port))
        self._chance = random.Random(seed)

    def get(self, key: str, timeout: float) -> bytes | None:
        if self._chance.random() < 0.7:
            self._wait(wire(key))
        return self._peer.get(wire(key)) or None

    def _wait(self, key: bytes) -> None:
        self._peer.wait(key)
        if not select.select([self._peer.socket], [], [], PATIENCE_S)[0]:
            self._peer.send(encode(Opcode.CANCEL_WAIT))
            while self._peer.read(1) != CANCELLED:
                pass  # the answer crossed
        else:
            self._peer.read(1)

    def set(self, key: str, value: bytes) -> None:
        self._peer.set(wire(key), value)

    def append(self, key: str, value: bytes) -> None:
        self._peer.send(encode(Opcode.APPEND, wire(key), value))
        self._peer.ping()

    def add(self, key: str, amount: int) -> int:
        return self._peer.add(wire(key), amount)

    def swap(self, key: str, expected: bytes | None, desired: bytes) -> tuple[bool, bytes | None]:
        """Swap by COMPARE_SET, in which an empty value that is expected stands for none."""
        if expected == b"":
            return False, self.get(key, 0)
        self._peer.send(encode(Opcode.COMPARE_SET, wire(key), expected or b"", desired))
        found = self._peer.string()
        if found == desired:
            return True, desired
        return False, None if found == expected else found

    def delete_key(self, key: str) -> bool:
        self._peer.send(encode(Opcode.DELETE_KEY, wire(key)))
        return self._peer.number() > 0

    def queue_push(self, key: str, item: bytes) -> None:
        self._peer.push(wire(key), item)

    def queue_pop(self, key: str, block: bool) -> bytes:
        item = self._peer.pop(wire(key))
        if item is None:
            raise QueueEmpty(key=key, store="PyTorch's")
        return item

    def queue_len(self, key: str) -> int:
        self._peer.send(encode(Opcode.QUEUE_LEN, wire(key)))
        return self._peer.number()
