"""Blocking calls in threads and child processes, and ways to see that one is blocked or over."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

LONG_ENOUGH_S = 100.0
"""A deadline for events that must happen: reached only if the test fails."""


class Call:
    """A call in a thread; `result` returns or raises what the call did."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._future: Future[Any] = Future()
        self._work = function, arguments
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        function, arguments = self._work
        try:
            self._future.set_result(function(*arguments))
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Any:
        return self._future.result(LONG_ENOUGH_S)

    def error(self) -> BaseException | None:
        return self._future.exception(LONG_ENOUGH_S)

    def blocked(self, inside: str = "/rallypoint/store/") -> Call:
        """Return once the call appears to block, or is over. The test must hold even if it does not block yet."""
        seen: list[tuple[FrameType, int] | None] = [None]
        while self._thread.is_alive():
            frame = sys._current_frames().get(self._thread.ident or 0)
            seen.append((frame, frame.f_lasti) if frame is not None and _within(frame, inside) else None)
            if seen[-1] is not None and seen[-3:] == [seen[-1]] * 3:
                break
            self._thread.join(0.001)
        return self


def blocking_calls(store: Any, watch: Any) -> list[Callable[[], Any]]:
    """Return one call of each kind that blocks: on a store without the key "key", and on a watch of it."""
    return [
        lambda: store.get("key"),
        lambda: store.wait(["key"]),
        lambda: store.queue_pop("queue"),
        lambda: store.barrier("gate", 99),
        watch.next,
    ]


def _within(frame: FrameType | None, path: str) -> bool:
    while frame is not None and path not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def results(calls: Sequence[Call]) -> list[Any]:
    return [call.result() for call in calls]


def together(count: int, function: Callable[[int], Any]) -> list[Any]:
    """Run the function in `count` threads that start at the same moment; return all results."""
    start = threading.Barrier(count)

    def run(number: int) -> Any:
        start.wait(LONG_ENOUGH_S)
        return function(number)

    return results([Call(run, number) for number in range(count)])


class Child:
    """A process that runs one task of child.py."""

    def __init__(self, url: str, task: str, *arguments: object) -> None:
        script = str(Path(__file__).with_name("child.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, url, task, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def next_result(self) -> Any:
        """Wait for the next result that the process reports."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended: {self.process.communicate()[1]}"
        return json.loads(line)

    def asleep(self) -> None:
        """Return once the process sleeps, as it does in a blocking call; the test must hold even if it does not yet."""
        status = Path(f"/proc/{self.process.pid}/stat")
        while self.process.poll() is None and status.read_text().rpartition(")")[2].split()[0] != "S":
            pass

    def ended(self, code: int = 0) -> str:
        """Wait for the process to exit with this code; return its standard error."""
        _, stderr = self.process.communicate(timeout=LONG_ENOUGH_S)
        assert self.process.returncode == code, stderr
        return stderr


def until(true: Callable[[], bool]) -> None:
    """Poll until the condition holds: there is no event for the end of another session."""
    give_up_at = time.monotonic() + LONG_ENOUGH_S
    while not true():
        assert time.monotonic() < give_up_at, "the condition never held"
