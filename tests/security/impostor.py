"""A server that says what a test tells it, and keeps every byte that it receives."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from tests.raw_peer import AMPLE_S

from rallypoint.protocol import challenge, native
from rallypoint.protocol.challenge import ANSWER_BYTES, CHALLENGE, NONCE_BYTES, PROOF_BYTES

__all__ = ["GREETINGS", "Impostor", "Victim"]

NONCE = b"\x5a" * NONCE_BYTES


class Victim:
    """One connection of a client to an impostor."""

    def __init__(self, sock: socket.socket, sent: bytearray) -> None:
        self.socket, self._sent = sock, sent

    def read(self, size: int) -> bytes:
        """Read so many bytes; raise ConnectionError at the end."""
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            self._sent += piece
            if not piece:
                raise ConnectionError("the client closed it")
            data += piece
        return data

    def say(self, data: bytes) -> None:
        self.socket.sendall(data)

    def listen(self) -> None:
        """Read until the client closes the connection."""
        while piece := self.socket.recv(65536):
            self._sent += piece


Act = Callable[[Victim], object]


class Impostor:
    """Listens, does `act` with every connection, and then reads whatever comes; `sent` is what each client sent."""

    def __init__(self, act: Act, host: str = "127.0.0.1", port: int = 0) -> None:
        self.act = act
        self.sent: list[bytearray] = []
        self._listener = socket.create_server((host, port))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.settimeout(AMPLE_S)
                self.sent.append(bytearray())
                self._threads.append(threading.Thread(target=self._talk, args=(sock, self.sent[-1])))
                self._threads[-1].start()

    def _talk(self, sock: socket.socket, sent: bytearray) -> None:
        with sock, contextlib.suppress(ConnectionError):
            victim = Victim(sock, sent)
            self.act(victim)
            victim.listen()

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(AMPLE_S)


def _accepts(victim: Victim) -> None:
    victim.read(len(native.PREFACE))
    victim.say(native.ACCEPTED)


def _asked(victim: Victim) -> bytes:
    """Ask for the token, and return what the client answers: a random number and its proof."""
    victim.read(len(native.PREFACE))
    victim.say(CHALLENGE + NONCE)
    return victim.read(ANSWER_BYTES)


def _guesses(victim: Victim) -> None:
    _asked(victim)
    victim.say(native.ACCEPTED + bytes(PROOF_BYTES))


def _reflects(victim: Victim) -> None:
    victim.say(native.ACCEPTED + _asked(victim)[NONCE_BYTES:])


def _knows_another(victim: Victim) -> None:
    answer = _asked(victim)
    server = challenge.ServerChallenge(b"another token of a fake", native.PREFACE, NONCE)
    with contextlib.suppress(challenge.Denied):
        server.feed(answer)
    victim.say(challenge.DENIED)


def _proves_the_other_preface(victim: Victim) -> None:
    """Say that channels were accepted, with a made-up proof, where a session was asked for."""
    _asked(victim)
    victim.say(b"RLY2" + bytes(PROOF_BYTES))


def _wants_tls(victim: Victim) -> None:
    victim.read(len(native.PREFACE))
    victim.say(challenge.NEEDS_TLS)


GREETINGS: dict[str, tuple[Act, str]] = {
    "does not ask": (_accepts, "does not ask for the token"),
    "guesses a proof": (_guesses, "could not prove that it knows the token"),
    "reflects our proof": (_reflects, "could not prove that it knows the token"),
    "answers another preface": (_proves_the_other_preface, "could not prove that it knows the token"),
    "has another token": (_knows_another, "has another token"),
    "wants TLS": (_wants_tls, "requires TLS"),
}
"""How impostors greet, and what a client with a token says about each."""
