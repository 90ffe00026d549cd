"""`Servers`: the servers of a store in etcd as processes, which can be killed, stopped and restarted.

Servers are numbered from 0 in the order of their start; a killed server keeps its number. The leader is found by each
server's own statistics, not by etcd's record.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.raw_peer import AMPLE_S, ServerProcess

from rallypoint.deadline import Deadline

LOOK_S = 2.0
"""How long a request for statistics may take before it is repeated."""


class Servers:
    """Servers of one store, started at the same moment; a context manager that ends them all.

    `settings` are those of `rallypoint.server.settings.Settings`, for all of them.
    """

    def __init__(self, url: str, place: Path, count: int = 3, **settings: Any) -> None:
        self.store = url
        self.all: list[ServerProcess] = []
        self._place, self._settings = place, settings
        self._killed: set[int] = set()
        self._stopped: set[int] = set()
        with ThreadPoolExecutor(max(count, 1)) as pool:
            started = [pool.submit(self._serve) for _ in range(count)]
        self.all = [one.result() for one in started if one.exception() is None]
        for one in started:
            if one.exception() is not None:
                self.__exit__()
                one.result()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill every server."""
        for index in range(len(self.all)):
            self.kill(index)

    def __getitem__(self, index: int) -> ServerProcess:
        return self.all[index]

    @property
    def running(self) -> list[int]:
        """The servers that were neither killed nor stopped."""
        return [index for index in range(len(self.all)) if index not in self._killed | self._stopped]

    def url(self, indices: Iterable[int] | None = None) -> str:
        """Return the URL by which clients reach these servers, or all that were ever started."""
        some = range(len(self.all)) if indices is None else indices
        return "tcp://" + ",".join(self.all[index].url.removeprefix("tcp://") for index in some)

    def start(self, **settings: Any) -> int:
        """Start another server, and return its number once there is a leader."""
        self.all.append(self._serve(**settings))
        return len(self.all) - 1

    def restart(self, index: int, **settings: Any) -> int:
        """Start a server at the address of one that was killed; return its number, which is a new one."""
        assert index in self._killed, f"server {index} was not killed"
        return self.start(port=self.all[index].address[1], **settings)

    def kill(self, index: int, number: int = signal.SIGKILL) -> int:
        """End a server by SIGKILL or another signal; return its exit code."""
        server = self.all[index]
        self._killed.add(index)
        self._stopped.discard(index)
        with contextlib.suppress(ProcessLookupError):
            server.child.send_signal(number)
            server.child.send_signal(signal.SIGCONT)
        code = server.child.wait(AMPLE_S)
        assert server.child.stdout is not None
        server.child.stdout.close()
        return code

    def stop(self, index: int) -> None:
        """Stop a server by SIGSTOP: its connections stay, and nothing answers; wait until all threads are stopped."""
        self._stopped.add(index)
        pid = self.all[index].child.pid
        os.kill(pid, signal.SIGSTOP)
        threads, deadline = Path(f"/proc/{pid}/task"), Deadline(AMPLE_S)
        while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads.iterdir()):
            assert not deadline.expired(), f"server {index} does not stop"

    def cont(self, index: int) -> None:
        """Continue a stopped server."""
        self._stopped.discard(index)
        os.kill(self.all[index].child.pid, signal.SIGCONT)

    def statistics(self, index: int) -> dict[str, Any]:
        """Return the statistics of a server; empty if it does not answer."""
        link = http.client.HTTPConnection(*self.all[index].address, timeout=LOOK_S)
        try:
            link.request("GET", "/statistics", headers={"connection": "close"})
            facts: dict[str, Any] = json.loads(link.getresponse().read())
            return facts
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            link.close()

    def leader(self, other_than: int | None = None) -> int:
        """Return the running server that leads in the latest epoch, once there is one (other than the given server)."""
        deadline, pause = Deadline(AMPLE_S), threading.Event()
        while True:
            storages = {index: self.statistics(index).get("storage") for index in self.running}
            epochs = {int(found["epoch"]): index for index, found in storages.items() if found}
            if epochs and epochs[max(epochs)] != other_than:
                return epochs[max(epochs)]
            assert not deadline.expired(), f"no server leads: {storages}"
            pause.wait(0.02)

    def standbys(self) -> list[int]:
        """Return the running servers that do not lead, once one does."""
        leader = self.leader()
        return [index for index in self.running if index != leader]

    def _serve(self, **settings: Any) -> ServerProcess:
        return ServerProcess(self._place, **{"storage": self.store, **self._settings, **settings})
