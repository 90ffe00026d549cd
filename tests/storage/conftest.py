"""Fixtures of the storage tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
from tests.storage import logs
from tests.storage.kernels import FdatasyncKernel

from rallypoint.storage.file import log_writer
from rallypoint.storage.file.kernel_sync import KernelSync


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip syncs, for tests that open a log a thousand times and lose no power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that logs are attached to; it runs while a test waits for a commit."""
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(logs, "LOOP", loop)
    yield loop
    loop.close()


def attached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    if request.param == "kernel":
        request.getfixturevalue("loop")
        monkeypatch.setattr(log_writer, "KernelSync", kernel)


@pytest.fixture(params=["thread", pytest.param("kernel", marks=pytest.mark.needs("aio"))])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test twice: with syncs by a thread, and by the kernel where it can."""
    attached(request, monkeypatch, KernelSync)


@pytest.fixture(params=["thread", "kernel"])
def both_ways_faked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, but the kernel's syncs call `os.fdatasync`, which the test replaces."""
    attached(request, monkeypatch, FdatasyncKernel)
