"""Histories of clients at two relays and without one, cut and with kills of the server meanwhile, are linearizable.

In each there are clients of PyTorch's protocol, whose requests a relay merges, clients of ours by a relay, and one of
the server itself. What is cut are the relays' connections. The server has a data directory, so every operation must
come back. `make soak` runs more histories; HISTORIES says how many.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.cutter import DOWN, UP, Cutter
from tests.durability.durable import DurableServer, durable_server
from tests.relay.relays import relay_process

from .checker import FOREVER, check
from .test_histories import FIRST_SEED, Crew

HISTORIES = int(os.environ.get("HISTORIES", "60"))
OPERATIONS = 10
KILLED = 0.1
"""In which share of the histories the server is killed."""

GRACE_S = "120"
"""Longer than a session is away, however often it is cut."""

PLACES = ("torch 0", "torch 0", "torch 1", "torch 1", "relay 0", "relay 1", "direct")
"""Who takes part: a client of PyTorch's protocol or of ours at which relay, or one of ours at the server."""


class RelayedCrew(Crew):
    """A server, two relays behind proxies that cut them, and workers at all of them."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.server: DurableServer = stack.enter_context(durable_server(directory, "--grace", GRACE_S))
        cutters = [stack.enter_context(Cutter(self.server.port)) for _ in range(2)]
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
        """Cut one, but let the greetings through as a rule: else nothing goes on."""
        chance.choice(self.cutters).arm(
            chance.choice((UP, DOWN)), chance.randrange(1, chance.choice((100, 1000, 3000)))
        )


@pytest.mark.timeout(0)
def test_histories_are_linearizable(tmp_path: Path) -> None:
    with ExitStack() as stack:
        crew = RelayedCrew(tmp_path / "data", stack)
        for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES):
            history = crew.history(seed, seed)
            bad = check(history)
            assert bad is None, f"seed {seed}:\n" + "\n".join(map(str, bad))
            lost = [str(operation) for operation in history if operation.returned == FOREVER]
            assert not lost, f"seed {seed}: no answer to\n" + "\n".join(lost)
        connections = sum(cutter.connections for cutter in crew.cutters)
        assert connections > HISTORIES / 2, f"only {connections} connections: the relays were hardly cut"
        print(f"{HISTORIES} histories, {connections} connections of relays, {crew.server.kills} kills")
