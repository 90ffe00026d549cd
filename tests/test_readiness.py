"""Waiting until a descriptor can be read or written."""

from __future__ import annotations

import contextlib
import fcntl
import resource
import socket
from collections.abc import Iterator

import pytest
from tests.raw_peer import AMPLE_S

from rallypoint.readiness import wait_readable, wait_writable

HIGH = 1500
"""Descriptors from here on `select` does not accept."""


@pytest.fixture(params=["low", "high"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    if request.param == "high":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * HIGH), hard))
        high = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, HIGH)
        ours.close()
        ours = socket.socket(fileno=high)
    with ours, theirs:
        yield ours, theirs
    if request.param == "high":
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_descriptor_is_readable_when_data_arrived(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    assert not wait_readable(ours, timeout_s=0)
    theirs.send(b"!")
    assert wait_readable(ours.fileno(), timeout_s=AMPLE_S)


def test_a_descriptor_is_readable_at_its_end(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    assert wait_readable(ours, timeout_s=AMPLE_S)


def test_one_of_several_is_enough(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.send(b"!")
    assert wait_readable(ours, theirs, timeout_s=AMPLE_S)


def test_a_full_descriptor_is_not_writable(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    assert wait_writable(ours, timeout_s=AMPLE_S)
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(65536))
    assert not wait_writable(ours, timeout_s=0)
