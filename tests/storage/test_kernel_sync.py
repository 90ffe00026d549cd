"""Syncs by the kernel: their results, the commits that are left to the thread, and how both take turns."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.storage.kernels import FakeKernel, FdatasyncKernel
from tests.storage.logs import WAIT_S, commit, files, held, opened, outcome

from rallypoint.errors import StoreClosed
from rallypoint.storage.errors import StorageFailed
from rallypoint.storage.file import log_writer
from rallypoint.storage.file.kernel_sync import KernelSync
from rallypoint.storage.file.segment_writer import SMALL_BYTES
from rallypoint.storage.file.storage import FileStorage

needs_kernel = pytest.mark.needs("aio")
Made = list[Any]
Install = Callable[[Callable[[], Any]], Made]


@pytest.fixture
def install(loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Attach storages to kernels of this kind; return the list of kernels created."""

    def install(kind: Callable[[], Any]) -> Made:
        made: Made = []

        def make() -> Any:
            made.append(kind())
            return made[-1]

        monkeypatch.setattr(log_writer, "KernelSync", make)
        return made

    return install


class Counted(KernelSync):
    """The real kernel, with a count of its syncs."""

    started = 0

    def start(self, fd: int) -> None:
        super().start(fd)
        self.started += 1


def begun(directory: Path, made: Made, **options: Any) -> tuple[FileStorage, Any]:
    """Open a storage in which the thread has reserved space, so that the kernel syncs the next small batch."""
    storage, _ = opened(directory, **options)
    commit(storage, b"zero")
    return storage, made[-1]


# The kernel


@needs_kernel
def test_a_sync_is_reported_once(tmp_path: Path) -> None:
    kernel, fd = KernelSync(), os.open(tmp_path, os.O_RDONLY)
    for _ in range(3):
        kernel.start(fd)
        assert kernel.finish(wait=True) == 0
        assert kernel.finish() is None
    os.close(fd)
    kernel.close()
    kernel.close()


@needs_kernel
def test_a_file_that_cannot_be_synced_is_refused_at_once() -> None:
    kernel, pipe = KernelSync(), os.pipe()
    closed = os.dup(pipe[0])
    os.close(closed)
    for fd, number in ((pipe[0], errno.EINVAL), (closed, errno.EBADF)):
        with pytest.raises(OSError, match=os.strerror(number)):
            kernel.start(fd)
        assert kernel.finish() is None
    for fd in pipe:
        os.close(fd)
    kernel.close()


# Kernel or thread


@needs_kernel
def test_the_kernel_syncs_small_batches_and_the_thread_the_rest(install: Install, tmp_path: Path) -> None:
    storage, kernel = begun(tmp_path, install(Counted), segment_bytes=1 << 20)
    expected, ways = [b"zero"], []
    for size in (10, SMALL_BYTES, 10, SMALL_BYTES // 2, 1 << 20, 10, 10):
        before = kernel.started
        commit(storage, bytes(size))
        expected.append(bytes(size))
        ways.append("kernel" if kernel.started > before else "thread")
    # Threads sync what is too large, and the first commit of a new segment, for which they reserve space.
    assert ways == ["kernel", "thread", "kernel", "kernel", "thread", "thread", "kernel"]
    assert storage.statistics()["segments"] == 2
    assert storage.statistics()["commits"] == storage.statistics()["sequence"] == 8
    storage.close()
    assert held(tmp_path) == expected


@needs_kernel
def test_the_thread_syncs_commits_without_reserved_space(install: Install, tmp_path: Path) -> None:
    storage, kernel = begun(tmp_path, install(Counted), preallocate_bytes=4096)
    ways = []
    for _ in range(12):
        before = kernel.started
        commit(storage, b"x" * 400)
        ways.append(kernel.started > before)
    assert sorted(set(ways)) == [False, True], "both"
    storage.close()
    assert held(tmp_path) == [b"zero", *[b"x" * 400] * 12]


@needs_kernel
def test_the_kernel_syncs_nothing_without_preallocation(install: Install, tmp_path: Path) -> None:
    storage, kernel = begun(tmp_path, install(Counted), preallocate_bytes=0)
    commit(storage, b"one")
    assert kernel.started == 0
    storage.close()
    assert held(tmp_path) == [b"zero", b"one"]


@needs_kernel
@pytest.mark.parametrize("seed", range(4))
def test_commits_by_kernel_and_thread_are_read_back(install: Install, tmp_path: Path, seed: int) -> None:
    chance, made = random.Random(seed), install(Counted)
    storage, _ = opened(tmp_path, segment_bytes=100_000, preallocate_bytes=20_000)
    expected = [chance.randbytes(chance.choice((1, 500, 5000, 90_000))) for _ in range(300)]
    for record in expected:
        commit(storage, record)
    assert 0 < made[-1].started < 300
    storage.close()
    assert held(tmp_path) == expected


@needs_kernel
def test_callbacks_of_kernel_syncs_run_on_the_event_loop(
    install: Install, loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    storage, _ = begun(tmp_path, install(Counted))
    ended = loop.create_future()
    storage.commit([b"one"], lambda error: ended.set_result((error, threading.get_ident())))
    assert not ended.done()
    assert loop.run_until_complete(asyncio.wait_for(ended, WAIT_S)) == (None, threading.get_ident())
    storage.close()


# A kernel that cannot sync


def cannot() -> Any:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_the_thread_syncs_when_the_kernel_cannot(install: Install, tmp_path: Path) -> None:
    install(cannot)
    storage, _ = opened(tmp_path)
    for record in (b"one", b"two"):
        commit(storage, record)
    storage.close()
    assert held(tmp_path) == [b"one", b"two"]


@pytest.mark.parametrize("works", [0, 2])
def test_the_thread_syncs_files_that_the_kernel_refuses(install: Install, tmp_path: Path, works: int) -> None:
    class Refusing(FdatasyncKernel):
        def start(self, fd: int) -> None:
            if len(self.started) == works:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            super().start(fd)

    storage, kernel = begun(tmp_path, install(Refusing))
    records = [b"one", b"two", b"three", b"four"]
    for record in records:
        commit(storage, record)
    assert len(kernel.started) == works and kernel.closed
    storage.close()
    assert held(tmp_path) == [b"zero", *records]


# Failures


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failed_kernel_sync_is_final(install: Install, tmp_path: Path, number: int) -> None:
    storage, kernel = begun(tmp_path, install(FakeKernel))
    errors: list[BaseException | None] = []
    storage.commit([b"one"], errors.append)
    kernel.end(number)
    storage.close()
    (error,) = errors
    assert isinstance(error, StorageFailed) and error.number == number and os.strerror(number) in str(error)
    assert held(tmp_path) in ([b"zero"], [b"zero", b"one"])


def test_nothing_is_written_after_a_failed_sync(install: Install, tmp_path: Path) -> None:
    class Failing(FdatasyncKernel):
        def end(self, number: int = 0) -> None:
            super().end(errno.EIO)

    storage, kernel = begun(tmp_path, install(Failing))
    error = outcome(storage, b"one")
    before = files(tmp_path)
    for record in (b"small", bytes(SMALL_BYTES)):
        assert isinstance(error, StorageFailed) and outcome(storage, record) is error
    with pytest.raises(StorageFailed):
        storage.save([b"zero"])
    assert not storage.compact_if_due() and len(kernel.started) == 1 and files(tmp_path) == before
    storage.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_is_retried_by_the_thread(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """If the thread fails as well, it reports the error; if it succeeds, only its sync counts."""
    storage, kernel = begun(tmp_path, install(FdatasyncKernel))
    real, failures = os.pwrite, [1]

    def write(fd: int, data: Any, at: int) -> int:
        if failures:
            failures.pop()
            real(fd, data[:512], at)
            raise OSError(number, os.strerror(number))
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", write)
    commit(storage, b"one" * 1000)
    assert not failures and not kernel.started
    commit(storage, b"two")
    assert len(kernel.started) == 1
    storage.close()
    assert held(tmp_path) == [b"zero", b"one" * 1000, b"two"]


def test_records_that_cannot_be_written_do_not_block_the_storage(install: Install, tmp_path: Path) -> None:
    storage, _ = begun(tmp_path, install(FdatasyncKernel))
    wrong: Any = ["text"]
    assert isinstance(outcome(storage, *wrong), StorageFailed)
    storage.close()
    assert held(tmp_path) == [b"zero"]


# A sync in flight


def test_a_second_commit_in_flight_is_refused(
    install: Install, loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    storage, kernel = begun(tmp_path, install(FakeKernel))
    ended = loop.create_future()
    storage.commit([b"one"], ended.set_result)
    with pytest.raises(RuntimeError, match="in flight"):
        storage.commit([b"two"], print)
    with pytest.raises(RuntimeError, match="in flight"):
        storage.save([])
    kernel.end()
    assert loop.run_until_complete(asyncio.wait_for(ended, WAIT_S)) is None
    storage.close()
    assert held(tmp_path) == [b"zero", b"one"]


@pytest.mark.parametrize("loop_closed", [False, True])
def test_close_waits_for_the_sync(
    install: Install, loop: asyncio.AbstractEventLoop, tmp_path: Path, loop_closed: bool
) -> None:
    """Even when the event loop that would be notified of its end is closed."""
    storage, kernel = begun(tmp_path, install(FakeKernel))
    order: list[str] = []
    storage.commit([b"one"], lambda error: order.append(f"committed {error}"))
    if loop_closed:
        loop.close()
    waits = threading.Event()
    real = kernel.finish

    def finish(wait: bool = False) -> Any:
        waits.set()
        return real(wait=wait)

    kernel.finish = finish
    ender = threading.Thread(target=lambda: waits.wait(WAIT_S) and kernel.end())
    ender.start()
    storage.close()
    order.append("closed")
    ender.join(WAIT_S)
    assert order == ["committed None", "closed"] and kernel.closed
    with pytest.raises(StoreClosed):
        storage.commit([b"two"], print)
    storage.close()
    assert held(tmp_path) == [b"zero", b"one"]


@needs_kernel
def test_close_waits_for_a_sync_of_the_real_kernel(install: Install, tmp_path: Path) -> None:
    made, expected = install(Counted), [b"zero"]
    order: list[BaseException | None] = []
    for index in range(20):
        storage, _ = opened(tmp_path) if index else begun(tmp_path, made)
        expected.append(b"%d" % index)
        storage.commit([expected[-1]], order.append)
        storage.close()
    assert order == [None] * 20 and sum(kernel.started for kernel in made) > 10
    assert held(tmp_path) == expected


def test_a_commit_callback_may_close_the_storage(
    install: Install, loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    storage, kernel = begun(tmp_path, install(FdatasyncKernel))
    ended = loop.create_future()

    def close(error: BaseException | None) -> None:
        storage.close()
        ended.set_result(error)

    storage.commit([b"one"], close)
    assert loop.run_until_complete(asyncio.wait_for(ended, WAIT_S)) is None
    assert kernel.closed and held(tmp_path) == [b"zero", b"one"]


def test_a_commit_callback_that_raises_is_logged(
    install: Install, loop: asyncio.AbstractEventLoop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage, _ = begun(tmp_path, install(FdatasyncKernel))
    called = loop.create_future()

    def fail(error: BaseException | None) -> None:
        called.set_result(error)
        raise ZeroDivisionError

    storage.commit([b"one"], fail)
    loop.run_until_complete(asyncio.wait_for(called, WAIT_S))
    commit(storage, b"two")
    storage.close()
    assert "ZeroDivisionError" in caplog.text
    assert held(tmp_path) == [b"zero", b"one", b"two"]
