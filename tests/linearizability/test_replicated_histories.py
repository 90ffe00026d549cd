"""Histories on a replicated store, while its servers and etcd's members fail, are linearizable.

Each has native clients with the addresses of all servers, and clients of both protocols at relays. During it one fault
begins: a server or a member of etcd is killed, stopped or cut off. The fault ends before or after the last reply. Every
operation must return: the log is in etcd, so a fault is only a pause. Faults that take seconds to be noticed are rarer.
`make soak` runs more histories; REPLICATED_HISTORIES says how many.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.raw_peer import RelayProcess
from tests.replicated.servers import Servers

from rallypoint.testing import HANGS_UP, REFUSES, SILENT, CuttingProxy

from .history_run import FIRST_SEED, HistoryRun, check_complete_history

pytestmark = pytest.mark.needs("etcd")

HISTORIES = int(os.environ.get("REPLICATED_HISTORIES", "44"))
OPERATIONS = 15
GRACE_S = 120.0
"""Longer than any session is disconnected."""

PLACES = ("direct", "direct", "torch 0", "torch 1", "relay 0", "relay 1")
"""The clients: of ours at the servers, or of PyTorch's protocol or ours at a numbered relay."""

QUICK = (
    "kill leader", "kill leader", "kill leader", "kill standby", "stop standby",
    "stop etcd follower", "kill etcd follower", "cut etcd follower",
)  # fmt: skip
SLOW = ("stop leader", "kill etcd leader", "cut leader", "stop etcd leader", "cut etcd leader")
EVERY = 5
"""Every how many histories the fault is a slow one."""


class Store:
    """Servers and their etcd, with a proxy between each server and each member, and their faults."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        self.etcd = stack.enter_context(Cluster(cuttable=True))
        self.servers = stack.enter_context(Servers(etcd_space(self.etcd), place, 0, grace_s=GRACE_S))
        self._proxies: dict[int, list[CuttingProxy]] = {}  # by the port of the server
        self.numbers = [self._start(stack) for _ in range(3)]

    def _start(self, stack: ExitStack) -> int:
        proxies = [stack.enter_context(CuttingProxy(one.client_port)) for one in self.etcd]
        number = self.servers.start(storage=self._by(proxies))
        self._proxies[self.servers[number].address[1]] = proxies
        return number

    def _by(self, proxies: list[CuttingProxy]) -> str:
        ends = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
        return self.servers.store.replace(",".join(self.etcd.endpoints), ends)

    def proxies(self, number: int) -> list[CuttingProxy]:
        return self._proxies[self.servers[number].address[1]]

    def restart(self, number: int) -> None:
        again = self.servers.restart(number, storage=self._by(self.proxies(number)))
        self.numbers[self.numbers.index(number)] = again

    def begin(self, fault: str, chance: random.Random) -> Callable[[], Any]:
        """Begin a fault; return the function that ends it."""
        how, _, who = fault.partition(" ")
        if who in ("leader", "standby"):
            number = self.servers.leader()
            if who == "standby":
                number = chance.choice([one for one in self.servers.running if one != number])
            return self._fail_server(how, number, chance)
        index = self.etcd.leader()
        if who == "etcd follower":
            index = (index + chance.choice((1, 2))) % 3
        return self._fail_member(how, index)

    def _fail_server(self, how: str, number: int, chance: random.Random) -> Callable[[], Any]:
        if how == "kill":
            self.servers.kill(number)
            return lambda: self.restart(number)
        if how == "stop":
            self.servers.stop(number)
            return lambda: self.servers.cont(number)
        down = chance.choice((REFUSES, HANGS_UP, SILENT))
        for proxy in self.proxies(number):
            proxy.go_down(down)

        def come_back() -> None:
            for proxy in self.proxies(number):
                proxy.come_back()

        return come_back

    def _fail_member(self, how: str, index: int) -> Callable[[], Any]:
        if how == "kill":
            self.etcd.kill(index)
            return lambda: self.etcd.restart(index)
        if how == "stop":
            self.etcd.stop(index)
            return lambda: self.etcd.cont(index)
        self.etcd.partition(index)
        return self.etcd.heal


class ReplicatedHistoryRun(HistoryRun):
    """Workers at the servers and at two relays."""

    def __init__(self, store: Store, place: Path, stack: ExitStack) -> None:
        self.faults: Counter[str] = Counter()
        self.began_at = 0.0
        self._store = store
        self._failed: list[BaseException] = []
        upstream = store.servers.url()
        self._relays = [stack.enter_context(RelayProcess(place, upstream=upstream, grace_s=GRACE_S)) for _ in range(2)]
        super().__init__([self._url(who) for who in PLACES], [], stack, OPERATIONS)

    def _url(self, who: str) -> str:
        kind, _, number = who.partition(" ")
        if kind == "direct":
            return self._store.servers.url()
        url = self._relays[int(number)].url
        return url.replace("tcp:", "torch:") if kind == "torch" else url

    def plan(self, number: int, chance: random.Random) -> str:
        """Return the fault of a history."""
        return SLOW[number // EVERY % len(SLOW)] if number % EVERY == 0 else chance.choice(QUICK)

    def _cut(self, chance: random.Random, done: threading.Event) -> None:
        """Begin a fault at a random moment; end it at another, or after the history."""
        try:
            done.wait(chance.choice((0.0, 0.003, chance.uniform(0.0, 0.03))))
            fault = self.plan(sum(self.faults.values()) + 1, chance)
            self.faults[fault] += 1
            self.began_at = time.monotonic()
            end = self._store.begin(fault, chance)
            done.wait(chance.choice((0.0, chance.uniform(0.0, 0.2), 120.0)))
            end()
            self._store.etcd.settle()
        except BaseException as error:
            self._failed.append(error)

    def settled(self) -> None:
        """Raise the error of a failed fault, if any, and wait until a server leads."""
        assert not self._failed, self._failed
        self._store.servers.leader()


@pytest.mark.timeout(0)
def test_histories_are_linearizable(tmp_path: Path) -> None:
    with ExitStack() as stack:
        store = Store(tmp_path, stack)
        history_run, struck = ReplicatedHistoryRun(store, tmp_path, stack), 0
        for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES):
            history = history_run.history(seed)
            check_complete_history(history, seed)
            struck += min(one.called for one in history) < history_run.began_at < max(one.returned for one in history)
            history_run.settled()
        assert struck > HISTORIES / 2, "most faults came too early or too late"
        assert "Traceback" not in "".join(one.log() for one in store.servers.all)
        print(f"{HISTORIES} histories, {struck} with a fault in their midst: {dict(history_run.faults)}")
