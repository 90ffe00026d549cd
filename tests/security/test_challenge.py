"""The greeting: both ends against each other, cut at every byte, and everything that a stranger may try at either."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.protocol import BadMessage, c10d, channels
from rallypoint.protocol.challenge import (
    ANSWER_BYTES,
    CHALLENGE,
    DENIED,
    NONCE_BYTES,
    PROOF_BYTES,
    ClientGreeting,
    Denied,
    ServerChallenge,
)
from rallypoint.protocol.native import ACCEPTED, PREFACE, STANDBY, Standby, frame, standby

TOKEN, OTHER = b"the-token-of-the-store", b"the-token-of-another"
SERVER_NONCE, CLIENT_NONCE = bytes(range(32)), bytes(range(32, 64))
TORCH = PREFACE[-4:]
"""What PyTorch's server answers: the number of the ping in our preface."""


def client(token: bytes = TOKEN, preface: bytes = PREFACE, nonce: bytes = CLIENT_NONCE) -> ClientGreeting:
    def make(size: int) -> bytes:
        assert size == NONCE_BYTES
        return nonce

    return ClientGreeting(preface, token, make)


class ServerEnd:
    """A server's part of the greeting: takes bytes, and answers as a server does that has, or has not, a token."""

    def __init__(self, token: bytes = TOKEN, answer: bytes = ACCEPTED, more: bytes = b"", nonce: bytes = SERVER_NONCE):
        self.received = self.rest = b""
        self.denied = False
        self._token, self._answer, self._more, self._nonce = token, answer, more, nonce
        self._challenge: ServerChallenge | None = None

    def feed(self, data: bytes) -> bytes:
        if self._challenge is None:
            self.received += data
            if len(self.received) < len(PREFACE):
                return b""
            preface, data = self.received[: len(PREFACE)], self.received[len(PREFACE) :]
            if not self._token:
                self.rest = data
                return self._answer + self._more
            self._challenge = ServerChallenge(self._token, preface, self._nonce)
            return self._challenge.question + self._feed(data)
        return self._feed(data)

    def _feed(self, data: bytes) -> bytes:
        assert self._challenge is not None
        try:
            proved = self._challenge.feed(data)
        except Denied:
            self.denied = True
            return DENIED
        if proved is None:
            return b""
        proof, self.rest = proved
        return self._answer + proof + self._more


def talk(one: ClientGreeting, server: ServerEnd, cut: int = 1 << 20) -> None:
    """Let them talk, in pieces of at most so many bytes, until the client has its answer."""
    to_server = one.preface
    for _ in range(1000):
        to_client = b"".join(server.feed(piece) for piece in pieces(to_server, cut))
        to_server = b"".join(one.feed(piece) for piece in pieces(to_client, cut))
        if one.answer or not to_server:
            return
    raise AssertionError("they go on for ever")


def pieces(data: bytes, most: int) -> Iterator[bytes]:
    return (data[start : start + most] for start in range(0, len(data), most))


def proof(side: bytes, token: bytes = TOKEN, preface: bytes = PREFACE) -> bytes:
    """Compute a proof as the module says it is, by other means."""
    text = b"rallypoint 1 " + side + b"\0" + preface + SERVER_NONCE + CLIENT_NONCE
    return hmac.new(token, text, hashlib.sha256).digest()


# They get on


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 7, 31, 32, 33, 64, 1 << 20])
@pytest.mark.parametrize("preface", [PREFACE, channels.PREFACE])
@pytest.mark.parametrize("answer", [ACCEPTED, channels.ACCEPTED])
@pytest.mark.parametrize("more", [b"", b"\x05\0\0\0hello"])
def test_both_ends_agree_whatever_the_pieces(cut: int, preface: bytes, answer: bytes, more: bytes) -> None:
    for token in (TOKEN, b""):
        one, server = client(token, preface), ServerEnd(token, answer, more)
        talk(one, server, cut)
        one.require(answer)
        assert one.answer == answer and one.standby is None and more.startswith(one.rest)
        assert cut < 1 << 20 or one.rest == more


def test_an_answer_cut_at_every_byte_is_the_same() -> None:
    server = ServerEnd(more=b"rest")
    question = server.feed(PREFACE)
    answer = ACCEPTED + proof(b"server") + b"rest"
    for first in range(len(question) + 1):
        for second in range(len(answer) + 1):
            one = client()
            sent = one.feed(question[:first]) + one.feed(question[first:])
            assert sent == CLIENT_NONCE + proof(b"client")
            assert one.feed(answer[:second]) + one.feed(answer[second:]) == b""
            assert (one.answer, one.rest) == (ACCEPTED, b"rest")


def test_a_proof_cut_at_every_byte_is_the_same() -> None:
    sent = CLIENT_NONCE + proof(b"client") + b"request"
    for cut in range(len(sent) + 1):
        end = ServerChallenge(TOKEN, PREFACE, SERVER_NONCE)
        assert end.question == CHALLENGE + SERVER_NONCE
        answers = [end.feed(sent[:cut])]
        if answers == [None]:
            answers.append(end.feed(sent[cut:]))
        *incomplete, complete = answers
        assert incomplete in ([], [None]) and complete is not None
        assert complete[0] == proof(b"server")
        assert complete[1] == (sent[ANSWER_BYTES:cut] if len(answers) == 1 else b"request")


def test_the_token_itself_is_not_sent() -> None:
    one, server = client(), ServerEnd()
    question = server.feed(PREFACE)
    sent = one.feed(question)
    said = PREFACE + question + sent + server.feed(sent)
    assert TOKEN not in said and hashlib.sha256(TOKEN).digest() not in said


# A client that does not know the token


def test_a_wrong_token_is_denied_and_both_know() -> None:
    one, server = client(OTHER), ServerEnd()
    with pytest.raises(Denied, match="the server has another token"):
        talk(one, server)
    assert server.denied and not one.answer


def test_a_client_without_a_token_sends_nothing_to_a_server_that_asks() -> None:
    one = client(b"")
    with pytest.raises(Denied, match="requires a token, and this client has none"):
        one.feed(ServerEnd().feed(PREFACE))
    assert not one.answer


def test_a_recorded_proof_is_useless_for_another_connection() -> None:
    first, server = client(), ServerEnd()
    recorded = first.feed(server.feed(PREFACE))
    assert server.feed(recorded).startswith(ACCEPTED)
    again = ServerEnd(nonce=os.urandom(NONCE_BYTES))
    again.feed(PREFACE)
    assert again.feed(recorded) == DENIED


def test_a_proof_is_useless_under_another_preface() -> None:
    end = ServerChallenge(TOKEN, channels.PREFACE, SERVER_NONCE)
    with pytest.raises(Denied):
        end.feed(CLIENT_NONCE + proof(b"client"))
    assert ServerChallenge(TOKEN, PREFACE, SERVER_NONCE).feed(CLIENT_NONCE + proof(b"client")) is not None


def test_what_the_server_says_cannot_be_sent_back_to_it() -> None:
    end = ServerChallenge(TOKEN, PREFACE, SERVER_NONCE)
    proved = end.feed(CLIENT_NONCE + proof(b"client"))
    assert proved is not None
    for nonce in (CLIENT_NONCE, SERVER_NONCE):
        with pytest.raises(Denied):
            ServerChallenge(TOKEN, PREFACE, SERVER_NONCE).feed(nonce + proved[0])


def test_a_server_is_not_proved_to_by_another_client_of_the_attacker() -> None:
    """A proof that was made for one server's number does not do for another's, whatever the client's own number."""
    victim = client()
    made = victim.feed(CHALLENGE + bytes(32))
    with pytest.raises(Denied):
        ServerChallenge(TOKEN, PREFACE, SERVER_NONCE).feed(made)


@pytest.mark.parametrize("place", range(ANSWER_BYTES))
def test_a_proof_with_one_changed_bit_is_denied(place: int) -> None:
    sent = bytearray(CLIENT_NONCE + proof(b"client"))
    sent[place] ^= 1
    with pytest.raises(Denied, match="wrong token"):
        ServerChallenge(TOKEN, PREFACE, SERVER_NONCE).feed(bytes(sent))


@pytest.mark.parametrize("size", range(ANSWER_BYTES))
def test_a_truncated_proof_is_never_accepted(size: int) -> None:
    sent = CLIENT_NONCE + proof(b"client")
    end = ServerChallenge(TOKEN, PREFACE, SERVER_NONCE)
    assert end.feed(sent[:size]) is None
    assert end.feed(b"") is None


def test_a_proof_under_no_token_or_a_part_of_it_is_denied() -> None:
    for token in (b"", TOKEN[:-1], TOKEN + b"x", TOKEN.upper()):
        with pytest.raises(Denied):
            ServerChallenge(TOKEN, PREFACE, SERVER_NONCE).feed(CLIENT_NONCE + proof(b"client", token))


# A server that does not know the token, or pretends


@pytest.mark.parametrize("answer", [ACCEPTED, channels.ACCEPTED, STANDBY, b"RLY9", b"RLYX"])
@pytest.mark.parametrize("more", [b"", bytes(64)])
def test_a_server_that_does_not_ask_is_refused(answer: bytes, more: bytes) -> None:
    one = client()
    with pytest.raises(Denied, match="does not ask for the token that this client has"):
        one.feed(answer + more)
    assert not one.answer and one.standby is None


def test_a_server_that_asks_and_does_not_know_the_token_is_refused() -> None:
    for false in (bytes(PROOF_BYTES), proof(b"client"), proof(b"server", OTHER), proof(b"server", b"")):
        one = client()
        one.feed(CHALLENGE + SERVER_NONCE)
        with pytest.raises(Denied, match="could not prove that it knows the token"):
            one.feed(ACCEPTED + false)
        assert not one.answer


def test_what_a_client_says_cannot_be_sent_back_to_it() -> None:
    """Neither its own proof, nor its own numbers as those of the server."""
    one = client()
    sent = one.feed(CHALLENGE + CLIENT_NONCE)
    with pytest.raises(Denied, match="could not prove"):
        one.feed(ACCEPTED + sent[NONCE_BYTES:])


def test_a_recorded_answer_is_useless_for_another_connection() -> None:
    recorded = CHALLENGE + SERVER_NONCE, ACCEPTED + proof(b"server")
    first = client()
    first.feed(recorded[0])
    first.feed(recorded[1])
    assert first.answer == ACCEPTED
    one = client(nonce=os.urandom(NONCE_BYTES))
    one.feed(recorded[0])
    with pytest.raises(Denied, match="could not prove"):
        one.feed(recorded[1])


def test_an_early_acceptance_is_refused_before_anything_is_proved() -> None:
    """The server sends its question and its answer at once, so it cannot have read the client's number."""
    one = client()
    with pytest.raises(Denied, match="could not prove"):
        one.feed(CHALLENGE + SERVER_NONCE + ACCEPTED + bytes(PROOF_BYTES))


def test_a_second_question_is_not_answered() -> None:
    one = client()
    one.feed(CHALLENGE + SERVER_NONCE)
    with pytest.raises(Denied, match="could not prove"):
        one.feed(CHALLENGE + SERVER_NONCE)


@pytest.mark.parametrize("token", [TOKEN, b""])
def test_a_server_may_refuse_before_it_asks(token: bytes) -> None:
    one = client(token)
    with pytest.raises(Denied, match="the server refuses this client"):
        one.feed(DENIED)


@pytest.mark.parametrize("size", range(4 + PROOF_BYTES))
def test_a_truncated_answer_is_no_answer(size: int) -> None:
    one = client()
    one.feed(CHALLENGE + SERVER_NONCE)
    assert one.feed((ACCEPTED + proof(b"server"))[:size]) == b""
    assert one.answer == one.rest == b"" and one.standby is None


@pytest.mark.parametrize("answer", [TORCH, channels.PREFACE[-4:], b"HTTP", b"SSH-", bytes(4)])
@pytest.mark.parametrize("token", [TOKEN, b""])
def test_the_answer_of_another_kind_of_server_is_passed_on(answer: bytes, token: bytes) -> None:
    one = client(token)
    assert one.feed(answer[:1]) + one.feed(answer[1:] + b"more") == b""
    assert (one.answer, one.rest, one.standby) == (answer, b"more", None)
    with pytest.raises(BadMessage, match="not a store: it replied"):
        one.require(ACCEPTED)


def test_the_preface_is_a_ping_to_pytorch() -> None:
    assert c10d.hello(int.from_bytes(TORCH, "little")) == PREFACE


# A standby, behind a proof


TOLD = Standby(leader="tcp://b:2", servers=["tcp://a:1", "tcp://b:2"])


@pytest.mark.parametrize("token", [TOKEN, b""])
def test_a_standby_is_read_at_every_cut(token: bytes) -> None:
    proved = proof(b"server") if token else b""
    answer = STANDBY + proved + frame(TOLD)
    assert token or answer == standby(TOLD)
    for cut in range(len(answer)):
        one = client(token)
        if token:
            one.feed(CHALLENGE + SERVER_NONCE)
        assert one.feed(answer[:cut]) == b""
        assert one.answer == b"" and one.standby is None
        assert one.feed(answer[cut:]) == b""
        assert one.answer == STANDBY and one.standby == TOLD


def test_a_standby_that_cannot_prove_itself_names_no_leader() -> None:
    one = client()
    one.feed(CHALLENGE + SERVER_NONCE)
    with pytest.raises(Denied, match="could not prove"):
        one.feed(STANDBY + bytes(PROOF_BYTES) + frame(TOLD))
    assert one.standby is None


@pytest.mark.parametrize(
    "body", [frame("not a standby"), frame([1, 2, 3]), b"\xff\xff\xff\xff", b"\3\0\0\0\xc1\xc1\xc1"]
)
@pytest.mark.parametrize("token", [TOKEN, b""])
def test_a_malformed_standby_is_a_bad_message(body: bytes, token: bytes) -> None:
    one = client(token)
    if token:
        one.feed(CHALLENGE + SERVER_NONCE)
    with pytest.raises(BadMessage):
        one.feed(STANDBY + (proof(b"server") if token else b"") + body)
    assert not one.answer and one.standby is None


# Anything at all

LOOKS_LIKE = st.sampled_from(
    [b"", ACCEPTED, CHALLENGE, DENIED, STANDBY, TORCH, SERVER_NONCE, proof(b"server"), proof(b"client"), frame([])]
)
ANYTHING = st.lists(st.one_of(st.binary(max_size=80), LOOKS_LIKE), max_size=8)


@given(ANYTHING, st.sampled_from([TOKEN, b""]), st.sampled_from([PREFACE, channels.PREFACE]))
def test_no_server_makes_a_client_raise_anything_else(parts: list[bytes], token: bytes, preface: bytes) -> None:
    one = client(token, preface)
    sent = b""
    try:
        for part in parts:
            sent += one.feed(part)
            if one.answer:
                break
        one.require(ACCEPTED)
    except (Denied, BadMessage):
        pass
    else:
        genuine = CHALLENGE + SERVER_NONCE + ACCEPTED + proof(b"server", preface=preface)
        assert b"".join(parts).startswith(genuine if token else ACCEPTED)
    assert len(sent) in ((0, ANSWER_BYTES) if token else (0,))


@given(ANYTHING)
def test_no_client_makes_a_server_raise_anything_else(parts: list[bytes]) -> None:
    end, received = ServerChallenge(TOKEN, PREFACE, SERVER_NONCE), b""
    for part in parts:
        received += part
        try:
            proved = end.feed(part)
        except Denied:
            assert len(received) >= ANSWER_BYTES
            return
        if proved is not None:
            raise AssertionError("no part of this is a proof for this client's number")
        assert len(received) < ANSWER_BYTES
