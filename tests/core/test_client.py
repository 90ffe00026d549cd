"""What a client's hello says: the session that it wants, under which id, for the how many-th time, and where.

And what a client learns of its server beside answers: notices, and where the leader is.
"""

from __future__ import annotations

import pytest

from rallypoint.core import ops
from rallypoint.core.records import Status
from rallypoint.errors import ServerRestarted, SessionLost
from rallypoint.protocol import BadMessage, native
from rallypoint.protocol.client import Client, Reply, Round
from rallypoint.protocol.native import VERSION, Hello, Notice, Welcome, decode_hello

CHOSEN = bytes(range(16))
WELCOME = (VERSION, b"server", CHOSEN, 2.0, False)


def said(client: Client) -> Hello:
    return decode_hello(client.greet()[4:])


def test_a_chosen_id_opens_the_session_until_it_is_welcomed() -> None:
    client = Client("relay", session=CHOSEN)
    first, again = said(client), said(client)
    assert (first.session, first.opens) == (again.session, again.opens) == (CHOSEN, True)
    client.welcome(Reply(0, Status.OK, WELCOME), "peer")
    resumed = said(client)
    assert (resumed.session, resumed.opens) == (CHOSEN, False)
    assert [first.attempt, again.attempt, resumed.attempt] == [1, 2, 3]


def test_a_hello_names_the_namespace_of_a_round() -> None:
    hello = said(Client("relay", session=CHOSEN, namespace=Round("job", 7, 3)))
    assert (hello.run, hello.scope, hello.round) == ("job", 7, 3)
    hello = said(Client("relay", session=CHOSEN))
    assert (hello.run, hello.scope, hello.round) == ("", 0, None)


def test_a_client_that_chooses_nothing_says_its_attempt_and_what_version_1_says() -> None:
    client = Client("test", former=[b"old"])
    assert said(client) == Hello(VERSION, "test", former=[b"old"], attempt=1)
    client.welcome(Reply(0, Status.OK, (VERSION, b"server", b"given", 2.0, False)), "peer")
    assert said(client) == Hello(VERSION, "test", b"given", former=[b"old"], attempt=2)


@pytest.mark.parametrize("identity", [b"server", b"other"])
def test_a_session_that_was_never_open_is_refused_and_not_lost(identity: bytes) -> None:
    client = Client("relay", session=CHOSEN)
    client.greet()
    with pytest.raises(BadMessage, match="refused: full"):
        client.welcome(Reply(0, Status.REFUSED, (identity, "full")), "peer")
    client.welcome(Reply(0, Status.OK, Welcome(*WELCOME)), "peer")
    with pytest.raises(SessionLost if identity == b"server" else ServerRestarted):
        client.welcome(Reply(0, Status.REFUSED, (identity, "unknown")), "peer")


# Notices


def test_a_notice_is_taken_in_and_is_no_answer() -> None:
    client, notice = Client("test"), Notice(["tcp://a:1"], "etcd does not answer")
    client.greet()
    welcome = Reply(0, Status.OK, Welcome(*WELCOME, servers=["tcp://b:1"]))
    frames = native.frame((0, Status.OK, notice)) + native.frame(welcome)
    assert [each.number for each in client.receive(frames)] == [0], "it may come before the welcome"
    assert (client.servers, client.trouble) == (notice.servers, notice.trouble)
    client.welcome(welcome, "peer")
    assert (client.servers, client.trouble) == (["tcp://b:1"], notice.trouble)
    known = client.servers
    client.ask(ops.Ping(0))
    assert client.sole(native.frame((0, Status.OK, notice)), 1) is None
    assert client.receive(native.frame((0, Status.OK, Notice(["tcp://b:1"])))) == []
    assert client.trouble == "" and client.servers is not known
    client.receive(native.frame((0, Status.OK, Notice(trouble="why"))))
    assert (client.trouble, client.servers) == ("why", ["tcp://b:1"]), "a relay does not know them"
    client.receive(native.frame((0, Status.OK, notice)))
    client.greet()
    assert client.trouble == "", "another server may answer now"


@pytest.mark.parametrize("garbled", [{"servers": 3}, {"servers": ["x" * 1025]}, {"trouble": ["x"]}])
def test_a_malformed_notice_is_a_malformed_message(garbled: object) -> None:
    with pytest.raises(BadMessage, match="malformed notice"):
        Client("test").receive(native.frame((0, Status.OK, garbled)))


def test_the_answer_of_a_standby_is_read_once_it_is_whole() -> None:
    told = native.Standby("tcp://a:1", ["tcp://a:1", "tcp://b:1"], "another server leads")
    data = native.standby(told)
    for size in range(len(native.STANDBY), len(data)):
        assert native.read_standby(data[:size]) is None
    assert native.read_standby(data) == native.read_standby(data + b"more") == told
    for garbled in (native.frame(["tcp://a:1", "no list"]), native.frame({}), b"\xff\xff\xff\xff"):
        with pytest.raises(BadMessage):
            native.read_standby(native.STANDBY + garbled)
