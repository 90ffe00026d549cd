"""The greeting of a connection: the preface, a challenge if the store has a token, and the server's answer. No I/O.

    client  PREFACE                       (of the native protocol, or of channels)
    server  ACCEPTED                      no token is needed; or
            CHALLENGE, 32 random bytes
    client  32 random bytes, its proof
    server  ACCEPTED or STANDBY, its own proof (and the frame of STANDBY); or DENIED

A proof is an HMAC-SHA256, keyed with the token, of the side's name, the preface and both random numbers. So neither
side reveals the token, a recorded greeting cannot be replayed, a proof of one side is useless to the other, and a
client learns that the server knows the token before it sends a request. A client with a token refuses a server that
does not ask for it: otherwise anybody could pose as the server by not asking. The answer of another kind of server,
such as PyTorch's, is returned unchanged: such a server cannot ask for a token, and the caller decides whether to trust
it.

The proofs protect the greeting only. Without TLS, an attacker who can modify packets can take over a connection after
its greeting, and one who can read packets sees everything (docs/security.md).

Rejected: SCRAM. Its thousands of hash rounds protect passwords that people choose; our tokens are random.
"""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.protocol import BadMessage, c10d
from rallypoint.protocol.native import STANDBY, Standby, read_standby

__all__ = [
    "ANSWER_BYTES", "CHALLENGE", "DENIED", "NONCE_BYTES", "PROOF_BYTES",
    "ClientGreeting", "Denied", "ServerChallenge",
]  # fmt: skip

CHALLENGE = b"RLYA"
"""The server's answer to a preface if the client must prove that it knows the token; a random number follows."""

HTTP_PREFACE = c10d.hello(0x50545448)
"""The first bytes of an HTTP connection of our own clients: they prove the token instead of sending it."""

NEEDS_TLS = b"RLYT"
"""The server's answer to a preface without TLS, if it requires TLS; then it closes the connection."""

NO_TLS = b"RLYP\n"
"""The answer of a server without TLS to a client with it; five bytes, because TLS gives up only after reading five."""

NO_CHANNELS = b"RLYN"
"""The answer of a server or relay without channels to the preface of channels, after a challenge."""

DENIED = b"RLYD"
"""The server's answer to a wrong proof; then it closes the connection."""

OURS = b"RLY"
"""The first bytes of every answer of a rallypoint server."""

CODE_BYTES, NONCE_BYTES, PROOF_BYTES = 4, 32, 32
"""The lengths of an answer's code, of a random number and of a proof."""

ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
"""The length of a client's answer to a challenge."""

NO_TOKEN = "the server requires a token, and this client has none"
TLS_REQUIRED = "the server requires TLS from other machines, and from other users"
"""Why a client without TLS is denied."""

WRONG_TOKEN = "the server has another token"
REFUSED = "the server refuses this client"
NOT_ASKED = "the server does not ask for the token that this client has: it is unprotected, or not the server you meant"
NOT_PROVED = "the server could not prove that it knows the token: it is not the server you meant"


class Denied(Exception):
    """The greeting failed because one side does not know the token of the other; the text says which."""


def _proof(token: bytes, side: bytes, preface: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    import hmac  # clients without a token do not need it, and it takes milliseconds

    return hmac.digest(token, b"rallypoint 1 " + side + b"\0" + preface + server_nonce + client_nonce, "sha256")


def _equal(proof: bytes, expected: bytes) -> bool:
    from hmac import compare_digest

    return compare_digest(proof, expected)


class ServerChallenge:
    """The server's part, after it has received a preface."""

    __slots__ = ("_nonce", "_preface", "_received", "_token")

    def __init__(self, token: bytes, preface: bytes, nonce: bytes) -> None:
        self._token, self._preface, self._nonce = token, preface, nonce
        self._received = b""

    @property
    def question(self) -> bytes:
        """The server's challenge: its code and random number."""
        return CHALLENGE + self._nonce

    def feed(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Take received bytes; return the server's proof and the bytes after the client's, or None if some are missing.

        Raises Denied if the client does not know the token.
        """
        self._received += data
        if len(self._received) < ANSWER_BYTES:
            return None
        nonce, proof = self._received[:NONCE_BYTES], self._received[NONCE_BYTES:ANSWER_BYTES]
        if not _equal(proof, _proof(self._token, b"client", self._preface, self._nonce, nonce)):
            raise Denied("wrong token")
        ours = _proof(self._token, b"server", self._preface, self._nonce, nonce)
        return ours, self._received[ANSWER_BYTES:]


class ClientGreeting:
    """The client's part: send `preface`, then feed received bytes until `answer` is set.

    `answer` is four bytes: ACCEPTED, STANDBY (which also sets `standby`), or the first four of another kind of server.
    """

    def __init__(self, preface: bytes, token: bytes, nonce: Callable[[int], bytes], demands: bool = True) -> None:
        """Greet with a token, or b""; with `demands`, refuse a rallypoint server that does not ask for it."""
        self.preface = preface
        self.answer = b""
        self.rest = b""
        """Bytes received after the answer."""

        self.standby: Standby | None = None
        self._token, self._demands, self._make_nonce = token, demands, nonce
        self._received = self._expected = b""

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; return those to send. Raises Denied and BadMessage."""
        self._received += data
        code = self._received[:CODE_BYTES]
        if len(code) < CODE_BYTES:
            return b""
        if code == DENIED:
            raise Denied(WRONG_TOKEN if self._expected else REFUSED)
        if self._expected:
            return self._conclude(code)
        if code == CHALLENGE:
            return self._prove()
        if code == NEEDS_TLS:
            raise Denied(TLS_REQUIRED)
        if self._token and self._demands and code.startswith(OURS):
            raise Denied(NOT_ASKED)
        self._settle(code, CODE_BYTES)
        return b""

    def _prove(self) -> bytes:
        if not self._token:
            raise Denied(NO_TOKEN)
        if len(self._received) < CODE_BYTES + NONCE_BYTES:
            return b""
        theirs, ours = self._received[CODE_BYTES : CODE_BYTES + NONCE_BYTES], self._make_nonce(NONCE_BYTES)
        self._received = self._received[CODE_BYTES + NONCE_BYTES :]
        self._expected = _proof(self._token, b"server", self.preface, theirs, ours)
        return ours + _proof(self._token, b"client", self.preface, theirs, ours) + self.feed(b"")

    def _conclude(self, code: bytes) -> bytes:
        """Read the answer to our proof, and the server's proof."""
        if len(self._received) >= CODE_BYTES + PROOF_BYTES:
            proof = self._received[CODE_BYTES : CODE_BYTES + PROOF_BYTES]
            if not _equal(proof, self._expected):
                raise Denied(NOT_PROVED)
            self._settle(code, CODE_BYTES + PROOF_BYTES)
        return b""

    def _settle(self, code: bytes, end: int) -> None:
        self.rest = self._received[end:]
        if code == STANDBY:
            self.standby = read_standby(STANDBY + self.rest)
            if self.standby is None:
                return
        self.answer = code

    def require(self, accepted: bytes) -> None:
        """Raise BadMessage unless the answer is `accepted`."""
        if self.answer != accepted:
            raise BadMessage(f"not a store: it replied {self.answer!r}")
