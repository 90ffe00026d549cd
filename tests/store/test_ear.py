"""How a client reads its socket: what it returns, and when it looks before it sleeps."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from rallypoint.store import ear
from rallypoint.store.ear import LAPSE_S, LOOK_S, MAX_PAUSE, MORE_ROOM, ROOM, Ear


@pytest.fixture
def ends() -> Iterator[tuple[Ear, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield Ear(here), there


@pytest.mark.parametrize("hear", [Ear.hear, Ear.hear_soon])
def test_it_hears_what_came_and_the_end(ends: tuple[Ear, socket.socket], hear: Callable[[Ear], bytes | None]) -> None:
    listener, there = ends
    there.send(b"hello")
    assert hear(listener) == b"hello"
    there.close()
    assert hear(listener) == b""


@pytest.mark.parametrize("hear", [Ear.hear, Ear.hear_soon])
def test_nothing_in_a_slice_of_time_is_none(
    ends: tuple[Ear, socket.socket], hear: Callable[[Ear], bytes | None]
) -> None:
    listener, _ = ends
    listener.socket.setblocking(False)  # so that its slice is over at once
    assert hear(listener) is None


def test_a_short_wait_ends_without_a_slice(ends: tuple[Ear, socket.socket]) -> None:
    listener, _ = ends
    assert listener.hear(0.0) is None


@pytest.mark.parametrize("hear", [Ear.hear, Ear.hear_soon])
def test_a_closed_socket_is_at_its_end(ends: tuple[Ear, socket.socket], hear: Callable[[Ear], bytes | None]) -> None:
    listener, _ = ends
    listener.socket.close()
    assert hear(listener) == b""


def test_a_full_read_makes_room_for_more(ends: tuple[Ear, socket.socket]) -> None:
    listener, there = ends
    there.sendall(b"x" * (ROOM + 100_000))
    assert len(listener.hear_soon() or b"") == ROOM
    assert ROOM < len(listener.hear() or b"") <= MORE_ROOM


class Eyes:
    """A socket that has something at the nth look, each look taking some time of a clock."""

    def __init__(self, listener: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.looks, self.comes_at, self.each_s = 100.0, 0, 1, 1e-6
        self.lapse_at = 0
        self.listener = listener
        listener._poll = self.poll  # type: ignore[assignment]
        monkeypatch.setattr(ear.time, "monotonic", lambda: self.now)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        self.looks += 1
        self.now += 2 * LAPSE_S if self.looks == self.lapse_at else self.each_s
        return [(0, 1)] if self.looks >= self.comes_at else []

    def call(self, comes_at: int, lapse_at: int = 0) -> int:
        """Make one call; return how often it looked."""
        self.looks, self.comes_at, self.lapse_at = 0, comes_at, lapse_at
        self.listener._look() if not self.listener._pause else self.rest()
        return self.looks

    def rest(self) -> None:
        self.listener._pause -= 1


@pytest.fixture
def eyes(ends: tuple[Ear, socket.socket], monkeypatch: pytest.MonkeyPatch) -> Eyes:
    return Eyes(ends[0], monkeypatch)


def test_it_goes_on_looking_where_that_helps(eyes: Eyes) -> None:
    assert [eyes.call(comes_at=10) for _ in range(5)] == [10] * 5


def test_it_looks_no_longer_than_a_moment(eyes: Eyes) -> None:
    assert eyes.call(comes_at=10**9) <= LOOK_S / eyes.each_s + 2


@pytest.mark.parametrize(("comes_at", "lapse_at"), [(10**9, 0), (1, 0), (10, 10)])
def test_after_looks_in_vain_it_rests_longer_and_longer(eyes: Eyes, comes_at: int, lapse_at: int) -> None:
    """In vain: nothing came, or it was there at once, or it came while another had our core."""
    looked = [bool(eyes.call(comes_at, lapse_at)) for _ in range(5000)]
    assert 10 <= sum(looked) <= 20
    rests = [len(rest) for rest in "".join("x" if each else "." for each in looked).split("x")[1:-1]]
    assert rests[:MAX_PAUSE] == [2**power for power in range(1, MAX_PAUSE + 1)]
    assert set(rests[MAX_PAUSE:]) <= {2**MAX_PAUSE}


def test_one_success_ends_the_rest(eyes: Eyes) -> None:
    while eyes.listener._in_vain < 4:
        eyes.call(comes_at=10**9)
    while not eyes.call(comes_at=10):
        pass
    assert [eyes.call(comes_at=10) for _ in range(3)] == [10] * 3
