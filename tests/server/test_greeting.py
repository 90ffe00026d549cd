"""The greeting of a connection: which protocol its first bytes select, and which handler gets them."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest
from tests.event_loop import in_loop_with
from tests.server.echo_application import EchoApplication, EchoHandler
from tests.server.peers import FakeTransport

from rallypoint.protocol import BadMessage, channels, native
from rallypoint.protocol.c10d import hello
from rallypoint.protocol.challenge import HTTP_PREFACE
from rallypoint.server.connections.greeting import PeerProtocol, Redirect, recognise

NATIVE, CHANNELS, OWN_HTTP, TORCH, HTTP = PeerProtocol


@pytest.mark.parametrize(
    ("data", "protocol"),
    [
        (native.PREFACE, NATIVE),
        (native.PREFACE + b"more", NATIVE),
        (native.PREFACE[:-1], None),
        (b"\0", None),
        (channels.PREFACE, CHANNELS),
        (channels.PREFACE + b"more", CHANNELS),
        (native.PREFACE[:-1] + b"?", TORCH),
        (hello(7), TORCH),
        (b"\0\0", TORCH),
        (HTTP_PREFACE, OWN_HTTP),
        (b"G", HTTP),
        (b"OPTIONS *", HTTP),
    ],
)
def test_the_first_bytes_select_the_protocol(data: bytes, protocol: PeerProtocol | None) -> None:
    assert recognise(data) is protocol


@pytest.mark.parametrize("data", [b"\x16\x03\x01", b"\x01", b"get / HTTP/1.1", b"@", b"[", b"\xff"])
def test_unrecognized_first_bytes_are_an_error_that_quotes_them(data: bytes) -> None:
    with pytest.raises(BadMessage, match="unrecognized protocol; first bytes: ") as caught:
        recognise(data)
    assert repr(data) in str(caught.value)


in_loop = in_loop_with(EchoApplication)


@in_loop
async def test_a_preface_is_answered_and_the_rest_passed_on(application: EchoApplication) -> None:
    for preface, accepted in ((native.PREFACE, native.ACCEPTED), (channels.PREFACE, channels.ACCEPTED)):
        peer = FakeTransport(application)
        peer.says(preface + b"request")
        assert peer.pending == accepted + b"request"
        peer.says(b"next")
        assert peer.pending == accepted + b"requestnext"
    assert application.asked == [NATIVE, CHANNELS]


@in_loop
async def test_a_preface_may_come_byte_by_byte(application: EchoApplication) -> None:
    peer = FakeTransport(application)
    for byte in native.PREFACE:
        assert not peer.pending and not application.asked
        peer.says(bytes([byte]))
    assert peer.pending == native.ACCEPTED and application.asked == [NATIVE]


@in_loop
async def test_the_first_bytes_of_pytorchs_protocol_are_passed_on_whole(application: EchoApplication) -> None:
    peer = FakeTransport(application)
    peer.says(b"\0")
    peer.says(hello(7)[1:])
    assert peer.pending == hello(7) and application.asked == [TORCH]


@in_loop
async def test_without_channels_their_preface_is_a_ping_of_pytorchs_protocol(application: EchoApplication) -> None:
    application.answers[CHANNELS] = None
    peer = FakeTransport(application)
    peer.says(channels.PREFACE)
    assert peer.pending == channels.PREFACE and application.asked == [CHANNELS, TORCH]


@in_loop
async def test_a_redirected_peer_gets_that_reply_alone(application: EchoApplication) -> None:
    application.answers[NATIVE] = Redirect(b"elsewhere")
    peer = FakeTransport(application)
    sent: list[bytes] = []
    with patch.object(peer, "write", sent.append):
        peer.says(native.PREFACE + b"request")
    assert sent == [b"elsewhere"] and peer.closing


def test_a_peer_may_be_refused_by_the_application(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        application = EchoApplication()
        application.answers[TORCH] = BadMessage("not from there")
        peer = FakeTransport(application)
        peer.says(hello(7))
        assert peer.closing and not peer.pending

    asyncio.run(run())
    assert "not from there" in caplog.text


@in_loop
async def test_http_shows_the_site_of_the_application(application: EchoApplication) -> None:
    peer = FakeTransport(application)
    peer.says(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    assert peer.pending.endswith(b"\r\n\r\nwell\n") and not application.asked


@in_loop
async def test_requests_that_come_with_the_preface_are_counted_once(application: EchoApplication) -> None:
    application.answers[NATIVE] = EchoHandler(held=100_000)
    peer = FakeTransport(application)
    peer.says(native.PREFACE + b"request")
    assert application.listener.memory.held == 100_000
    peer.hangs_up()
    await asyncio.sleep(0)
    assert application.listener.memory.held == 0


@in_loop
async def test_the_end_of_a_connection_ends_its_last_handler(application: EchoApplication) -> None:
    handler = application.answers[TORCH] = EchoHandler()
    greeting, peer = FakeTransport(application), FakeTransport(application)
    peer.says(hello(7))
    assert [one.greeted for one in application.listener.handlers()].count(True) == 1
    for one in (greeting, peer):
        one.hangs_up()
    await asyncio.sleep(0)
    assert handler.ended and not application.listener.connections
