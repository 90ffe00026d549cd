"""Fakes of `kernel_sync.KernelSync` whose syncs end as a test wants."""

from __future__ import annotations

import contextlib
import os
import threading

from tests.storage.logs import WAIT_S


class FakeKernel:
    """A kernel whose syncs end when the test calls `end`; `started` lists the files of all syncs."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.closed = False
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._result: int | None = None
        self._ended = threading.Event()

    def fileno(self) -> int:
        return self._fd

    def start(self, fd: int) -> None:
        assert self._result is None
        self.started.append(fd)

    def end(self, number: int = 0) -> None:
        self._result = number
        os.eventfd_write(self._fd, 1)
        self._ended.set()  # last: the waiting thread closes the descriptor

    def finish(self, *, wait: bool = False) -> int | None:
        if wait:
            assert self._ended.wait(WAIT_S)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._ended.clear()
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._fd)


class FdatasyncKernel(FakeKernel):
    """A kernel that syncs at once by `os.fdatasync`, which tests replace."""

    def start(self, fd: int) -> None:
        super().start(fd)
        try:
            os.fdatasync(fd)
        except OSError as error:
            self.end(error.errno or 0)
        else:
            self.end()
