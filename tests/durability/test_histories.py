"""Random concurrent histories of real processes, whose server is killed in each of them, are all linearizable.

Every operation must come back: the server has a data directory, so a kill is only a pause. A history counts when the
kill fell between its first call and its last return. `make soak` runs more histories; KILLED_HISTORIES says how many.
"""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.linearizability.history_run import FIRST_SEED, HistoryRun, check_complete_history, proxied

from .durable import DurableServer, durable_server

HISTORIES = int(os.environ.get("KILLED_HISTORIES", "25"))
OPERATIONS = 25


class KilledHistoryRun(HistoryRun):
    """Workers that talk to the server directly, which is killed while they work."""

    def __init__(self, server: DurableServer, stack: ExitStack) -> None:
        super().__init__(*proxied(server.port, stack), stack, operations=OPERATIONS)
        self.killed_at = 0.0
        self._server = server

    def _cut(self, chance: random.Random, done: threading.Event) -> None:
        """Kill the server at a random moment of the history; sometimes cut a connection, too, right before."""
        done.wait(chance.choice((0.0, 0.003, chance.uniform(0.0, 0.04))))
        if chance.random() < 0.3:
            super()._cut_one(chance)
        self.killed_at = time.monotonic()
        self._server.restart()


@pytest.mark.timeout(0)
def test_histories_of_a_server_that_is_killed_are_linearizable(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(durable_server(tmp_path / "data"))
        history_run, killed, seed = KilledHistoryRun(server, stack), 0, FIRST_SEED
        while killed < HISTORIES:
            history = history_run.history(seed)
            check_complete_history(history, seed)
            killed += min(one.called for one in history) < history_run.killed_at < max(one.returned for one in history)
            assert killed > (seed - FIRST_SEED) // 2 - 5, "most kills came too early or too late"
            seed += 1
        print(f"{killed} histories with a kill in their midst, {server.kills} kills")
