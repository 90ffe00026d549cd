"""A client's hello: its session, the session's id, the number of the attempt, and the namespace.

Also what a client learns from a server besides answers: notices, and the address of the leader.
"""

from __future__ import annotations

import pytest

from rallypoint.core import ops
from rallypoint.core.records import ReplyStatus
from rallypoint.errors import ServerRestarted, SessionLost
from rallypoint.protocol import BadMessage, native
from rallypoint.protocol.native import VERSION, Hello, Notice, Welcome, decode_hello
from rallypoint.protocol.native_client import ClientProtocol, Reply, RoundRef

CHOSEN = bytes(range(16))
WELCOME = (VERSION, b"server", CHOSEN, 2.0, False)


def hello_of(client: ClientProtocol) -> Hello:
    return decode_hello(client.greet()[4:])


def test_a_chosen_id_opens_the_session_until_it_is_welcomed() -> None:
    client = ClientProtocol("relay", session=CHOSEN)
    first, again = hello_of(client), hello_of(client)
    assert (first.session, first.opens) == (again.session, again.opens) == (CHOSEN, True)
    client.welcome(Reply(0, ReplyStatus.OK, WELCOME), "peer")
    resumed = hello_of(client)
    assert (resumed.session, resumed.opens) == (CHOSEN, False)
    assert [first.attempt, again.attempt, resumed.attempt] == [1, 2, 3]


def test_a_hello_names_the_namespace_of_a_round() -> None:
    hello = hello_of(ClientProtocol("relay", session=CHOSEN, namespace=RoundRef("job", 7, 3)))
    assert (hello.run, hello.scope, hello.round) == ("job", 7, 3)
    hello = hello_of(ClientProtocol("relay", session=CHOSEN))
    assert (hello.run, hello.scope, hello.round) == ("", 0, None)


def test_a_hello_without_options_has_only_the_fields_of_version_1_and_the_attempt() -> None:
    client = ClientProtocol("test", former=[b"old"])
    assert hello_of(client) == Hello(VERSION, "test", former=[b"old"], attempt=1)
    client.welcome(Reply(0, ReplyStatus.OK, (VERSION, b"server", b"given", 2.0, False)), "peer")
    assert hello_of(client) == Hello(VERSION, "test", b"given", former=[b"old"], attempt=2)


@pytest.mark.parametrize("identity", [b"server", b"other"])
def test_a_refusal_before_the_first_welcome_is_not_a_lost_session(identity: bytes) -> None:
    client = ClientProtocol("relay", session=CHOSEN)
    client.greet()
    with pytest.raises(BadMessage, match="refused: full"):
        client.welcome(Reply(0, ReplyStatus.REFUSED, (identity, "full")), "peer")
    client.welcome(Reply(0, ReplyStatus.OK, Welcome(*WELCOME)), "peer")
    with pytest.raises(SessionLost if identity == b"server" else ServerRestarted):
        client.welcome(Reply(0, ReplyStatus.REFUSED, (identity, "unknown")), "peer")


# Notices


def test_a_notice_updates_the_client_and_is_no_answer() -> None:
    client, notice = ClientProtocol("test"), Notice(["tcp://a:1"], "etcd does not answer")
    client.greet()
    welcome = Reply(0, ReplyStatus.OK, Welcome(*WELCOME, servers=["tcp://b:1"]))
    frames = native.frame((0, ReplyStatus.OK, notice)) + native.frame(welcome)
    assert [each.number for each in client.receive(frames)] == [0], "a notice may precede the welcome"
    assert (client.servers, client.trouble) == (notice.servers, notice.trouble)
    client.welcome(welcome, "peer")
    assert (client.servers, client.trouble) == (["tcp://b:1"], notice.trouble)
    known = client.servers
    client.ask(ops.Ping(0))
    assert client.sole(native.frame((0, ReplyStatus.OK, notice)), 1) is None
    assert client.receive(native.frame((0, ReplyStatus.OK, Notice(["tcp://b:1"])))) == []
    assert client.trouble == "" and client.servers is not known
    client.receive(native.frame((0, ReplyStatus.OK, Notice(trouble="why"))))
    assert (client.trouble, client.servers) == ("why", ["tcp://b:1"]), "a notice without servers keeps the known ones"
    client.receive(native.frame((0, ReplyStatus.OK, notice)))
    client.greet()
    assert client.trouble == "", "the next connection may reach another server"


@pytest.mark.parametrize("garbled", [{"servers": 3}, {"servers": ["x" * 1025]}, {"trouble": ["x"]}])
def test_a_malformed_notice_is_refused(garbled: object) -> None:
    with pytest.raises(BadMessage, match="malformed notice"):
        ClientProtocol("test").receive(native.frame((0, ReplyStatus.OK, garbled)))


def test_the_answer_of_a_standby_is_read_when_complete() -> None:
    standby = native.Standby("tcp://a:1", ["tcp://a:1", "tcp://b:1"], "another server leads")
    data = native.standby(standby)
    for size in range(len(native.STANDBY), len(data)):
        assert native.read_standby(data[:size]) is None
    assert native.read_standby(data) == native.read_standby(data + b"more") == standby
    for garbled in (native.frame(["tcp://a:1", "no list"]), native.frame({}), b"\xff\xff\xff\xff"):
        with pytest.raises(BadMessage):
            native.read_standby(native.STANDBY + garbled)
