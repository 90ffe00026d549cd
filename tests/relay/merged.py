"""Clients around one `Merger`, and a server that is the test: it sees what is sent, and answers it."""

from __future__ import annotations

from typing import Any

from rallypoint.core import ops
from rallypoint.relay.merging import Merger
from rallypoint.relay.requests import Request
from rallypoint.relay.torch_client import TorchClient

__all__ = ["Merged", "shown"]

K, Q, N = b"/k", b"/q", b"/n"


def shown(op: Any) -> Any:
    """Return an operation without its number and its limits, as tests write it."""
    kind = op.__class__
    if kind is ops.Wait:
        return ("Wait", *op.keys)
    if kind is ops.Await:
        return ("Await", op.key)
    return (kind.__name__, *[getattr(op, name) for name in op.__struct_fields__[1:]])


class Merged:
    """One session's requests, and its clients by name."""

    def __init__(self, names: str = "abc") -> None:
        self.merger = Merger()
        self.clients = {name: TorchClient(self.merger) for name in names}
        self.under_way: dict[int, Request] = {}
        self.number = 0

    def ask(self, name: str, *calls: ops.Op) -> None:
        for op in calls:
            self.clients[name].ask(op, 10)

    def sends(self) -> list[Any]:
        """Send all that is to be sent; return it."""
        sent = []
        while self.merger.released or self.merger:
            released, self.merger.released = self.merger.released, []
            for asker in released:
                asker.go_on()
            request = self.merger.take(self.number + 1)
            if request is not None:
                self.number += 1
                self.under_way[self.number] = request
                sent.append(shown(request.op))
        return sent

    def answer(self, number: int, answer: Any) -> None:
        """Answer the request that was sent as the so-manieth."""
        for call in self.merger.answer(self.under_way.pop(number), answer):
            self.clients_of(call.asker).answered(call)

    def clients_of(self, asker: Any) -> TorchClient:
        assert isinstance(asker, TorchClient)
        return asker

    def hears(self, name: str) -> list[Any]:
        """Return the answers that a client has got by now, in order."""
        client, heard = self.clients[name], []
        while (call := client.next_reply()) is not None:
            heard.append(call.answer)
            client.go_on()
        return heard
