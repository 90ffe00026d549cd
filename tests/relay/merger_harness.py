"""Clients of one `Merger`; the test plays the server: it sees each request, and answers it."""

from __future__ import annotations

from typing import Any

from rallypoint.core import ops
from rallypoint.relay.torch.client import TorchClient
from rallypoint.relay.torch.merging import Merger
from rallypoint.relay.torch.requests import MergedRequest

__all__ = ["MergerHarness", "shown"]

K, Q, N = b"/k", b"/q", b"/n"


def shown(op: Any) -> Any:
    """Return an operation as a tuple, without its number and limits."""
    kind = op.__class__
    if kind is ops.Wait:
        return ("Wait", *op.keys)
    if kind is ops.WaitOrTurn:
        return ("WaitOrTurn", op.key)
    return (kind.__name__, *[getattr(op, name) for name in op.__struct_fields__[1:]])


class MergerHarness:
    """One session's requests, and its clients by name."""

    def __init__(self, names: str = "abc") -> None:
        self.merger = Merger()
        self.clients = {name: TorchClient(self.merger) for name in names}
        self.under_way: dict[int, MergedRequest] = {}
        self.number = 0

    def ask(self, name: str, *calls: ops.Op) -> None:
        for op in calls:
            self.clients[name].ask(op, 10)

    def sends(self) -> list[Any]:
        """Send all queued requests; return them."""
        sent = []
        while self.merger.released or self.merger:
            released, self.merger.released = self.merger.released, []
            for owner in released:
                owner.issue_held()
            request = self.merger.take(self.number + 1)
            if request is not None:
                self.number += 1
                self.under_way[self.number] = request
                sent.append(shown(request.op))
        return sent

    def end(self, name: str) -> list[Any]:
        """Disconnect a client; return the requests that are sent then."""
        self.clients[name].end()
        return self.sends()

    def answer(self, number: int, answer: Any) -> None:
        """Answer the `number`-th request."""
        for call in self.merger.answer(self.under_way.pop(number), answer):
            self.clients_of(call.owner).answered(call)

    def clients_of(self, owner: Any) -> TorchClient:
        assert isinstance(owner, TorchClient)
        return owner

    def hears(self, name: str) -> list[Any]:
        """Return the replies that a client has received, in order."""
        client, heard = self.clients[name], []
        while (call := client.next_reply()) is not None:
            heard.append(call.answer)
            client.issue_held()
        return heard
