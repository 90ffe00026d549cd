"""Histories of clients at two relays and of direct clients are linearizable, despite cuts and kills of the server.

Each has clients of PyTorch's protocol, whose requests a relay merges, native clients of a relay, and a client of the
server itself. The connections of the relays are cut. The server has a data directory, so every operation must return.
`make soak` runs more histories; HISTORIES says how many.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.durability.durable import DurableServer, durable_server
from tests.relay.relays import relay_process

from rallypoint.testing import DOWN, UP, CuttingProxy

from .history_run import FIRST_SEED, HistoryRun, check_complete_history

HISTORIES = int(os.environ.get("HISTORIES", "60"))
OPERATIONS = 10
KILLED = 0.1
"""The share of histories in which the server is killed."""

GRACE_S = "120"
"""Longer than any session is disconnected."""

PLACES = ("torch 0", "torch 0", "torch 1", "torch 1", "relay 0", "relay 1", "direct")
"""The clients: of PyTorch's protocol or of ours at a numbered relay, or of ours at the server."""


class RelayedHistoryRun(HistoryRun):
    """A server, two relays behind proxies that cut them, and workers at all of them."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.server: DurableServer = stack.enter_context(durable_server(directory, "--grace", GRACE_S))
        cutters = [stack.enter_context(CuttingProxy(self.server.port)) for _ in range(2)]
        self._relays = [stack.enter_context(relay_process(cutter.port))[0] for cutter in cutters]
        super().__init__([self._url(place) for place in PLACES], cutters, stack, OPERATIONS)

    def _url(self, place: str) -> str:
        kind, _, number = place.partition(" ")
        port = self._relays[int(number)] if number else self.server.port
        return f"{'torch' if kind == 'torch' else 'tcp'}://127.0.0.1:{port}"

    def _cut(self, chance: random.Random, done: threading.Event) -> None:
        """Cut the relays off now and then, at random bytes, and sometimes kill the server, too."""
        kill = chance.random() < KILLED
        while not done.wait(chance.uniform(0.0, 0.02)):
            self._cut_one(chance)
            if kill:
                self.server.restart()
            kill = False

    def _cut_one(self, chance: random.Random) -> None:
        """Cut a connection, usually after its greeting: otherwise no request would get through."""
        chance.choice(self.cutters).cut_after(
            chance.choice((UP, DOWN)), chance.randrange(1, chance.choice((100, 1000, 3000)))
        )


@pytest.mark.timeout(0)
def test_histories_are_linearizable(tmp_path: Path) -> None:
    with ExitStack() as stack:
        history_run = RelayedHistoryRun(tmp_path / "data", stack)
        for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES):
            check_complete_history(history_run.history(seed), seed)
        connections = sum(cutter.connections for cutter in history_run.cutters)
        assert connections > HISTORIES / 2, f"only {connections} connections: the relays were hardly cut"
        print(f"{HISTORIES} histories, {connections} connections of relays, {history_run.server.kills} kills")
