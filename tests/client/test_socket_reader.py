"""How a client reads its socket: what a read returns, and when a call spins before it blocks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from rallypoint.client.blocking.socket_reader import MAX_SPIN_SKIP, MORE_ROOM, PREEMPTED_S, ROOM, SPIN_S, SocketReader


@pytest.fixture
def ends() -> Iterator[tuple[SocketReader, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield SocketReader(here), there


@pytest.mark.parametrize("read", [SocketReader.read, SocketReader.read_soon])
def test_a_read_returns_received_data_and_then_the_end(
    ends: tuple[SocketReader, socket.socket], read: Callable[[SocketReader], bytes | None]
) -> None:
    reader, there = ends
    there.send(b"hello")
    assert read(reader) == b"hello"
    there.close()
    assert read(reader) == b""


@pytest.mark.parametrize("read", [SocketReader.read, SocketReader.read_soon])
def test_a_read_without_data_returns_none_after_its_slice(
    ends: tuple[SocketReader, socket.socket], read: Callable[[SocketReader], bytes | None]
) -> None:
    reader, _ = ends
    reader.socket.setblocking(False)  # so that its slice is over at once
    assert read(reader) is None


def test_a_timeout_of_zero_does_not_wait_for_a_slice(ends: tuple[SocketReader, socket.socket]) -> None:
    reader, _ = ends
    assert reader.read(0.0) is None


@pytest.mark.parametrize("read", [SocketReader.read, SocketReader.read_soon])
def test_a_closed_socket_reads_as_the_end(
    ends: tuple[SocketReader, socket.socket], read: Callable[[SocketReader], bytes | None]
) -> None:
    reader, _ = ends
    reader.socket.close()
    assert read(reader) == b""


def test_a_full_read_enlarges_the_next_buffer(ends: tuple[SocketReader, socket.socket]) -> None:
    reader, there = ends
    there.sendall(b"x" * (ROOM + 100_000))
    assert len(reader.read_soon() or b"") == ROOM
    assert ROOM < len(reader.read() or b"") <= MORE_ROOM


class FakePoll:
    """A poll that succeeds at the nth attempt, and a clock that advances with each attempt."""

    def __init__(self, reader: SocketReader, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.polls, self.arrives_at, self.each_s = 100.0, 0, 1, 1e-6
        self.preempted_at = 0
        self.reader = reader
        reader._poll = self.poll  # type: ignore[assignment]
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        self.polls += 1
        self.now += 2 * PREEMPTED_S if self.polls == self.preempted_at else self.each_s
        return [(0, 1)] if self.polls >= self.arrives_at else []

    def call(self, arrives_at: int, preempted_at: int = 0) -> int:
        """Make one call; return how often it polled."""
        self.polls, self.arrives_at, self.preempted_at = 0, arrives_at, preempted_at
        self.reader._spin() if not self.reader._skip else self.skip()
        return self.polls

    def skip(self) -> None:
        self.reader._skip -= 1


@pytest.fixture
def poll(ends: tuple[SocketReader, socket.socket], monkeypatch: pytest.MonkeyPatch) -> FakePoll:
    return FakePoll(ends[0], monkeypatch)


def test_calls_keep_spinning_while_it_helps(poll: FakePoll) -> None:
    assert [poll.call(arrives_at=10) for _ in range(5)] == [10] * 5


def test_a_spin_has_a_limit(poll: FakePoll) -> None:
    assert poll.call(arrives_at=10**9) <= SPIN_S / poll.each_s + 2


@pytest.mark.parametrize(("arrives_at", "preempted_at"), [(10**9, 0), (1, 0), (10, 10)])
def test_failed_spins_double_the_number_of_calls_that_do_not_spin(
    poll: FakePoll, arrives_at: int, preempted_at: int
) -> None:
    """A spin fails if nothing arrives, if data is there at the first poll, or if it arrives while we are preempted."""
    spun = [bool(poll.call(arrives_at, preempted_at)) for _ in range(5000)]
    assert 10 <= sum(spun) <= 20
    skips = [len(skip) for skip in "".join("x" if each else "." for each in spun).split("x")[1:-1]]
    assert skips[:MAX_SPIN_SKIP] == [2**power for power in range(1, MAX_SPIN_SKIP + 1)]
    assert set(skips[MAX_SPIN_SKIP:]) <= {2**MAX_SPIN_SKIP}


def test_a_successful_spin_resets_the_number(poll: FakePoll) -> None:
    while poll.reader._failed_spins < 4:
        poll.call(arrives_at=10**9)
    while not poll.call(arrives_at=10):
        pass
    assert [poll.call(arrives_at=10) for _ in range(3)] == [10] * 3
