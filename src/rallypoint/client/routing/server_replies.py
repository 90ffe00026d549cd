"""What a server replies to the greeting of a client: that it accepts it, that it is a standby, or neither."""

from __future__ import annotations

from rallypoint.client.routing.relay_address import RelayAddress
from rallypoint.client.routing.route import Address, Route
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import ACCEPTED, PREFACE, Standby

__all__ = ["NOT_OF_SEVERAL", "IsStandby", "SessionRefused", "accepts"]

NOT_OF_SEVERAL = "a PyTorch server, which cannot be one of several servers"
"""The reason for an address in a list that is a PyTorch server's."""


class SessionRefused(ConnectionError):
    """The preface was accepted, but the connection was closed before the welcome."""


class IsStandby(ConnectionError):
    """The server is a standby; its answer names the leader."""

    def __init__(self, answer: Standby) -> None:
        super().__init__(f"standby: {answer.why or 'another server leads'}")
        self.answer = answer


def accepts(answer: bytes, route: Route, address: Address) -> bool:
    """Return whether a server accepted the preface; False if it is PyTorch's, and the only server of the store.

    Raises BadMessage if it is no server of the store.
    """
    if answer == ACCEPTED:
        return True
    if answer != PREFACE[-len(ACCEPTED) :]:
        raise BadMessage(f"not a store: it replied {answer!r}")
    if isinstance(address, RelayAddress):
        raise BadMessage("a PyTorch server, not a relay")
    if route.several:
        raise BadMessage(NOT_OF_SEVERAL)
    return False
