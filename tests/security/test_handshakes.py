"""Handshakes that were recorded, cut, changed, mixed up or reflected let nobody in; what follows them is not run."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable, Iterator

import pytest
from tests.raw_peer import AMPLE_S, until
from tests.security.protected import TOKEN
from tests.security.strangers import (
    NOTHING,
    PREFACES,
    REFUSED,
    ask,
    hello_frame,
    http_request,
    loopback_sources,
)
from tests.served import server_fixture

import rallypoint
from rallypoint.core import ops
from rallypoint.protocol import challenge, channels, native
from rallypoint.protocol.challenge import ANSWER_BYTES, NONCE_BYTES, PROOF_BYTES
from rallypoint.protocol.native import frame
from rallypoint.security.credentials import Credentials
from rallypoint.server.denied_peers import PROMPT

KNOWN = Credentials(token=TOKEN)
ANSWERS = {"native": native.ACCEPTED, "channels": channels.ACCEPTED, "own http": native.ACCEPTED}
PATH = b"/written by a stranger"
SET = frame(ops.Set(1, PATH, b"forged"))
REQUESTS = {
    "native": hello_frame() + SET,
    "channels": channels.data_frames(1, hello_frame() + SET),
    "own http": http_request("DELETE", "/rounds/run/1"),
}


server = server_fixture("module", credentials=KNOWN)


@pytest.fixture(scope="module")
def relay(server: rallypoint.Server) -> Iterator[rallypoint.Relay]:
    with rallypoint.Relay(server.url, credentials=KNOWN) as relay:
        until(relay.statistics, lambda facts: facts["upstream_connected"])
        yield relay


@pytest.fixture(params=["server", "relay"])
def target(request: pytest.FixtureRequest, server: rallypoint.Server, relay: rallypoint.Relay) -> Iterator[int]:
    """The port of a server, or of a relay of it; in the end nothing has changed there."""
    before = server.statistics()["revision"]
    yield {"server": server, "relay": relay}[request.param].port
    assert server.statistics()["revision"] == before and not server.statistics()["sessions"]


def proof(preface: bytes, theirs: bytes, ours: bytes, side: bytes = b"client", token: str = TOKEN) -> bytes:
    """Return the proof of a side, as protocol/challenge.py describes it."""
    return hmac.digest(token.encode(), b"rallypoint 1 " + side + b"\0" + preface + theirs + ours, "sha256")


def dial(port: int, protocol: str = "native") -> tuple[socket.socket, bytes]:
    """Connect and send a preface; return the socket and the server's random number."""
    (source,) = loopback_sources(1)
    sock = socket.create_connection(("127.0.0.1", port), AMPLE_S, (source, 0))
    sock.sendall(PREFACES[protocol])
    question = read(sock, 4 + NONCE_BYTES)
    assert question.startswith(challenge.CHALLENGE)
    return sock, question[4:]


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        assert piece, f"hung up after {data!r}"
        data += piece
    return data


def answer(protocol: str, theirs: bytes, ours: bytes = b"\5" * NONCE_BYTES) -> bytes:
    return ours + proof(PREFACES[protocol], theirs, ours)


def is_denied(sock: socket.socket, data: bytes) -> bool:
    return ask(sock, data) == challenge.DENIED


# What is right


@pytest.mark.parametrize("protocol", PREFACES)
def test_whoever_knows_the_token_is_let_in_and_gets_a_proof(protocol: str, server: rallypoint.Server) -> None:
    sock, theirs = dial(server.port, protocol)
    ours = secrets.token_bytes(NONCE_BYTES)
    with sock:
        for byte in ours + proof(PREFACES[protocol], theirs, ours):
            sock.sendall(bytes([byte]))
        expected = ANSWERS[protocol] + proof(PREFACES[protocol], theirs, ours, b"server")
        assert read(sock, 4 + PROOF_BYTES) == expected


def test_random_numbers_are_never_the_same(server: rallypoint.Server) -> None:
    found = set()
    for _ in range(100):
        sock, theirs = dial(server.port)
        sock.close()
        found.add(theirs)
    assert len(found) == 100


# What is wrong


@pytest.mark.parametrize("protocol", PREFACES)
def test_a_recorded_handshake(protocol: str, server: rallypoint.Server, target: int) -> None:
    """With all that its client sent, and the requests behind it."""
    sock, theirs = dial(target, protocol)
    recorded = PREFACES[protocol] + answer(protocol, theirs)
    with sock:
        sock.sendall(recorded[len(PREFACES[protocol]) :])
        assert read(sock, 4)[:3] == b"RLY"
    for source in loopback_sources(3):
        again = socket.create_connection(("127.0.0.1", target), AMPLE_S, (source, 0))
        assert ask(again, recorded + REQUESTS[protocol]) == REFUSED


def test_a_handshake_that_was_cut(target: int) -> None:
    for size in range(len(native.PREFACE)):
        (source,) = loopback_sources(1)
        sock = socket.create_connection(("127.0.0.1", target), AMPLE_S, (source, 0))
        assert ask(sock, native.PREFACE[:size]) == NOTHING, size
    for size in range(ANSWER_BYTES):
        sock, theirs = dial(target)
        assert ask(sock, answer("native", theirs)[:size]) == NOTHING, size


def test_a_handshake_with_a_changed_bit(target: int) -> None:
    for place in range(ANSWER_BYTES):
        sock, theirs = dial(target)
        changed = bytearray(answer("native", theirs))
        changed[place] ^= 1 << place % 8
        assert is_denied(sock, bytes(changed) + REQUESTS["native"]), place


def test_a_handshake_with_bytes_more_or_in_another_order(target: int) -> None:
    ours = b"\5" * NONCE_BYTES
    for change in (
        lambda theirs, right: b"\0" + ours + right,
        lambda theirs, right: ours + b"\0" + right,
        lambda theirs, right: right + ours,
        lambda theirs, right: theirs + right,
        lambda theirs, right: theirs + theirs,
        lambda theirs, right: right + right,
        lambda theirs, right: ours + bytes(PROOF_BYTES),
        lambda theirs, right: native.PREFACE + ours + right,
        lambda theirs, right: challenge.CHALLENGE + ours + right,
    ):
        sock, theirs = dial(target)
        assert is_denied(sock, change(theirs, proof(native.PREFACE, theirs, ours)) + REQUESTS["native"])


def test_a_proof_of_another_side_token_or_moment(target: int) -> None:
    ours = b"\5" * NONCE_BYTES
    proofs: tuple[Callable[[bytes], bytes], ...] = (
        lambda theirs: proof(native.PREFACE, theirs, ours, b"server"),
        lambda theirs: proof(native.PREFACE, ours, theirs),
        lambda theirs: proof(native.PREFACE, theirs, ours, token=TOKEN[:-1]),
        lambda theirs: proof(native.PREFACE, theirs, ours, token=TOKEN + "x"),
        lambda theirs: proof(native.PREFACE, theirs, ours, token=TOKEN.upper()),
        lambda theirs: proof(native.PREFACE, theirs, ours, token=""),
        lambda theirs: proof(b"", theirs, ours),
        lambda theirs: hmac.digest(TOKEN.encode(), theirs + ours, "sha256"),
    )
    for wrong in proofs:
        sock, theirs = dial(target)
        assert is_denied(sock, ours + wrong(theirs) + REQUESTS["native"])


@pytest.mark.parametrize("proved", PREFACES)
@pytest.mark.parametrize("sent", PREFACES)
def test_a_proof_for_another_preface(sent: str, proved: str, server: rallypoint.Server) -> None:
    sock, theirs = dial(server.port, sent)
    with sock:
        if sent == proved:
            sock.sendall(answer(proved, theirs))
            assert read(sock, 4) == ANSWERS[sent]
        else:
            assert is_denied(sock, answer(proved, theirs) + REQUESTS[sent])


def test_answers_on_each_others_connection(target: int) -> None:
    """Two handshakes at the same time, each with the other's random number, and a third one in between."""
    (one, of_one), (right, of_right), (other, of_other) = (dial(target) for _ in range(3))
    assert is_denied(one, answer("native", of_other))
    with right:
        right.sendall(answer("native", of_right))
        assert read(right, 4) == native.ACCEPTED
    assert is_denied(other, answer("native", of_one))


def test_what_was_sent_before_the_question_was_read(target: int) -> None:
    """A preface, an answer to a question of an earlier connection, and requests, in one packet."""
    sock, theirs = dial(target)
    sock.close()
    for protocol in PREFACES:
        (source,) = loopback_sources(1)
        again = socket.create_connection(("127.0.0.1", target), AMPLE_S, (source, 0))
        guess = PREFACES[protocol] + answer(protocol, theirs) + 100 * REQUESTS[protocol]
        assert ask(again, guess) == REFUSED


def test_a_denied_peer_is_not_heard_again(target: int) -> None:
    """Not even with the right proof, which comes after the wrong one on the same connection."""
    sock, theirs = dial(target)
    right = answer("native", theirs)
    assert is_denied(sock, bytes(ANSWER_BYTES) + right + REQUESTS["native"])
    sock, theirs = dial(target)
    with sock, contextlib.suppress(ConnectionError):
        sock.sendall(bytes(ANSWER_BYTES))
        assert read(sock, 4) == challenge.DENIED
        assert ask(sock, answer("native", theirs) + REQUESTS["native"]) == NOTHING


def test_a_peer_whose_answer_is_delayed_is_not_heard_meanwhile(server: rallypoint.Server) -> None:
    (source,) = loopback_sources(1)
    before, earlier = server.statistics()["denied_connections"], PROMPT + 4
    with contextlib.ExitStack() as undo:
        socks = [socket.create_connection(("127.0.0.1", server.port), AMPLE_S, (source, 0)) for _ in range(earlier + 1)]
        for sock in socks:
            undo.enter_context(sock).sendall(native.PREFACE)
            theirs = read(sock, 4 + NONCE_BYTES)[4:]
            sock.sendall(bytes(ANSWER_BYTES))
        until(server.statistics, lambda facts: facts["denied_connections"] == before + earlier + 1)
        with contextlib.suppress(ConnectionError):
            for byte in answer("native", theirs):
                sock.sendall(bytes([byte]))
        assert ask(sock, b"") == challenge.DENIED
    assert server.statistics()["denied_connections"] == before + earlier + 1, "one failure for each connection"


def test_a_relay_has_no_channels_for_those_who_know_the_token_either(relay: rallypoint.Relay) -> None:
    sock, theirs = dial(relay.port, "channels")
    reply = ask(sock, answer("channels", theirs) + REQUESTS["channels"])
    assert reply == challenge.NO_CHANNELS + proof(channels.PREFACE, theirs, b"\5" * NONCE_BYTES, b"server")


@pytest.mark.needs("etcd")
def test_a_standby_tells_strangers_nothing_of_its_leader(etcd_url: str) -> None:
    with (
        rallypoint.Server(storage=etcd_url, credentials=KNOWN) as leader,
        rallypoint.Server(storage=etcd_url, credentials=KNOWN) as standby,
    ):
        sock, theirs = dial(standby.port)
        right = ask(sock, answer("native", theirs))
        assert right.startswith(native.STANDBY + proof(native.PREFACE, theirs, b"\5" * NONCE_BYTES, b"server"))
        found = native.read_standby(native.STANDBY + right[4 + PROOF_BYTES :])
        assert found is not None and found.leader == leader.url and set(found.servers) == {leader.url, standby.url}
        for protocol in PREFACES:
            for server in (leader, standby):
                sock, theirs = dial(server.port, protocol)
                assert is_denied(sock, bytes(ANSWER_BYTES) + REQUESTS[protocol])
                sock, theirs = dial(server.port, protocol)
                assert ask(sock, b"") == NOTHING
        with rallypoint.connect(standby.url, credentials=KNOWN) as store:
            assert store.num_keys() == 0
