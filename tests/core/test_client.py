"""What a client's hello says: the session that it wants, under which id, for the how many-th time, and where."""

from __future__ import annotations

import pytest

from rallypoint.core.records import Status
from rallypoint.errors import ServerRestarted, SessionLost
from rallypoint.protocol import BadMessage
from rallypoint.protocol.client import Client, Reply, Round
from rallypoint.protocol.native import VERSION, Hello, Welcome, decode_hello

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
