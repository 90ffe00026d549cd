"""What a user sees: folded lines, bars that are redrawn below the lines, and their last state where nothing can be."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.test_output import SHOWN, Screen, run
from tests.raw_peer import AMPLE_S

from rallypoint.launch.output import stream
from rallypoint.launch.output.line_filter import LineFilter, parse_filters
from rallypoint.launch.output.pump import OutputPump, OutputRoute, WorkerStreams
from rallypoint.launch.output.routes import parse_global_ranks

ROWS, COLUMNS = 6, 30


def screen_of(output: bytes) -> list[str]:
    """Return the lines that a terminal has shown in the end, with those that have scrolled away."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|.|\n|\r", output.decode(errors="replace"), re.DOTALL):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.endswith("A") and len(token) > 1:
            row -= int(token[2:-1] or 1)
        elif token.endswith("J") and len(token) > 1:
            lines[row:] = [lines[row][:column]]
        elif len(token) == 1:
            assert column < COLUMNS, f"a bar does not fit: {lines[row]!r}"
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    return lines


class Terminal:
    """A terminal with a pump, and all that was written to it."""

    def __init__(self, folds: bool = False) -> None:
        self._ours, self._theirs = os.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._output = bytearray()
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.pump = OutputPump(self._theirs, self._theirs, colour=False, folds=folds)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the end
            while data := os.read(self._ours, 1 << 16):
                with self._news:
                    self._output += data.replace(b"\r\n", b"\n")
                    self._news.notify_all()

    def until(self, *lines: str) -> None:
        """Wait until these are the last lines."""
        with self._news:
            shown = self._news.wait_for(lambda: screen_of(bytes(self._output))[-len(lines) :] == list(lines), AMPLE_S)
            assert shown, screen_of(bytes(self._output))

    def close(self) -> list[str]:
        assert self.pump.close(AMPLE_S)
        os.close(self._theirs)
        self._thread.join(AMPLE_S)
        os.close(self._ours)
        return screen_of(bytes(self._output))


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    if not made.pump._closing:
        made.close()


def worker(of: Terminal | Screen, rank: int) -> WorkerStreams:
    return of.pump.open(f"a:{rank}", SHOWN, SHOWN, rank=rank, bars=True)


def finish(*feeds: WorkerStreams) -> None:
    for feed in feeds:
        assert feed.finish(AMPLE_S)


# Bars on a terminal


def test_bars_are_redrawn_below_the_lines_one_per_rank(terminal: Terminal) -> None:
    one, two = worker(terminal, 1), worker(terminal, 0)
    os.write(one.stderr, b"\r 10%")
    os.write(two.stderr, b"\r 20%")
    terminal.until("[a:0]  20%", "[a:1]  10%")
    os.write(one.stderr, b"\r 30%")
    terminal.until("[a:0]  20%", "[a:1]  30%")
    os.write(two.stdout, b"a line\n")
    terminal.until("[a:0] a line", "[a:0]  20%", "[a:1]  30%")
    os.write(one.stderr, b"\r100%\n")
    terminal.until("[a:0] a line", "[a:1] 100%", "[a:0]  20%")
    finish(one, two)
    assert terminal.close() == ["[a:0] a line", "[a:1] 100%", "[a:0]  20%", ""]


def test_a_bar_that_is_cleared_leaves_nothing(terminal: Terminal) -> None:
    one = worker(terminal, 0)
    os.write(one.stderr, b"\r 10%")
    terminal.until("[a:0]  10%")
    os.write(one.stderr, b"\r      \r")
    finish(one)
    assert terminal.close() == [""]


def test_bars_fit_the_terminal(terminal: Terminal) -> None:
    feeds = [worker(terminal, rank) for rank in range(ROWS + 2)]
    for feed in feeds:
        os.write(feed.stderr, b"\r" + "█".encode() * 100)
    bars = [f"[a:{rank}] " + "█" * (COLUMNS - 7) for rank in range(ROWS - 1)]
    terminal.until(*bars)
    finish(*feeds)
    terminal.pump.close(AMPLE_S)


def test_an_unfinished_line_is_not_overwritten_by_a_bar(terminal: Terminal) -> None:
    one, two = worker(terminal, 0), worker(terminal, 1)
    os.write(one.stdout, b"half")
    terminal.until("[a:0] half")
    os.write(two.stderr, b"\r 10%")
    terminal.until("[a:0] half", "[a:1]  10%")
    os.write(one.stdout, b" a line\n")
    terminal.until("[a:0]  a line", "[a:1]  10%")
    finish(one, two)
    assert terminal.close() == ["[a:0] half", "[a:0]  a line", "[a:1]  10%", ""]


# Bars elsewhere


def test_elsewhere_a_bar_is_its_last_state(tmp_path: Path) -> None:
    screen = Screen()
    teed = OutputRoute(True, tmp_path / "stderr.log")
    feed = screen.pump.open("a:0", SHOWN, teed, bars=True)
    run(feed, r"import os; [os.write(2, b'\r%d%%' % n) for n in range(101)]; os.write(2, b'\nafter\n\xff')")
    assert screen.close()[1] == b"[a:0] 100%\n[a:0] after\n[a:0] \xff\n"
    assert (tmp_path / "stderr.log").read_bytes() == b"100%\nafter\n\xff"


def test_a_bar_that_takes_long_is_shown_now_and_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stream, "BAR_S", 0.01)
    screen = Screen()
    path = tmp_path / "stderr.log"
    feed = screen.pump.open("a:0", SHOWN, OutputRoute(True, path), bars=True)
    for percent in (b"10%", b"20%"):
        os.write(feed.stderr, b"\r" + percent)
        screen.until(b"[a:0] " + percent + b"\n", 1)
    finish(feed)
    screen.close()
    assert path.read_bytes().startswith(b"10%\n20%\n")


def test_a_worker_that_dies_leaves_the_state_of_its_bar() -> None:
    screen = Screen()
    feed = worker(screen, 0)
    run(feed, r"import os; os.write(2, b'\r 7%'); os.write(1, b'no end')")
    assert screen.close() == [b"[a:0] no end\n", b"[a:0]  7%\n"]


# Folded lines


def test_equal_lines_are_shown_once_with_their_ranks() -> None:
    screen = Screen(folds=True)
    feeds = [worker(screen, rank) for rank in range(4)]
    for feed in feeds:
        os.write(feed.stdout, b"same\n")
    screen.until(b"[a:0-3] same\n")
    os.write(feeds[2].stdout, b"mine\n")
    screen.until(b"[a:2] mine\n")
    finish(*feeds)
    assert screen.close()[0] == b"[a:0-3] same\n[a:2] mine\n"


def test_the_last_lines_of_workers_that_end_are_folded(tmp_path: Path) -> None:
    screen = Screen(folds=True)
    files = [tmp_path / str(rank) for rank in range(3)]
    feeds = [screen.pump.open(f"a:{n}", OutputRoute(True, files[n]), SHOWN, rank=n) for n in range(3)]
    for feed in feeds:
        os.write(feed.stdout, b"x\ndone")
    finish(*feeds)
    lines = screen.close()[0].splitlines()
    for rank in range(3):
        own = [line.split(b"] ")[1] for line in lines if str(rank).encode() in expanded(line)]
        assert own == [b"x", b"done"]
    assert [file.read_bytes() for file in files] == [b"x\ndone"] * 3, "files are not folded"


def expanded(line: bytes) -> list[bytes]:
    """Return the ranks of a folded line."""
    ranks: list[bytes] = []
    for part in line[3 : line.index(b"]")].split(b","):
        low, _, high = part.partition(b"-")
        ranks += [b"%d" % rank for rank in range(int(low), int(high or low) + 1)]
    return ranks


def test_the_agent_and_unfinished_lines_come_after_lines_that_waited() -> None:
    screen = Screen(together=True, folds=True)
    one, two = worker(screen, 0), worker(screen, 1)
    os.write(one.stdout, b"first\nhalf")
    screen.until(b"half")
    os.write(one.stdout, b" a line\nsecond\n")
    screen.until(b"a line")
    screen.pump.say("rallypoint run: hello")
    screen.until(b"hello")
    finish(one, two)
    (shown,) = screen.close()
    assert shown == b"[a:0] first\n[a:0] half a line\n[a:0] second\nrallypoint run: hello\n"


def test_teed_lines_with_a_header_are_not_folded(tmp_path: Path) -> None:
    screen = Screen(folds=True)
    for rank in range(2):
        teed = OutputRoute(True, tmp_path / str(rank))
        run(screen.pump.open(f"a:{rank}", teed, SHOWN, rank=rank, header=f"<{rank}>"), "print('same')")
    assert screen.close()[0] == b"<0>same\n<1>same\n"


# Filters


@pytest.mark.parametrize(
    ("text", "texts"),
    [("a", ("a",)), ("a,b c", ("a", "b c")), ("a,,b,c", ("a,b", "c")), ("", ()), (",a,", ("a",)), (" a", (" a",))],
)
def test_texts_of_a_filter(text: str, texts: tuple[str, ...]) -> None:
    assert parse_filters(text) == texts


def test_lines_with_a_text_are_copied_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "filtered.log"
    one, two = LineFilter(path, ["loss", "é"], "[0]:"), LineFilter(path, ["loss"], "[1]:")
    assert path.read_bytes() == b""
    one.feed(b"a lo")
    two.feed(b"loss 2\nother\n")
    one.feed(b"ss 1\nnothing\n\xff\xc3\xa9\r\n")
    one.feed(b"last loss")
    one.finish()
    two.finish()
    assert path.read_bytes() == b"[1]:loss 2\n[0]:a loss 1\n[0]:\xff\xc3\xa9\r\n[0]:last loss"


@pytest.mark.parametrize(
    ("text", "ranks"), [("", None), ("0", {0}), ("0, 8-10", {0, 8, 9, 10}), ("3-3", {3}), ("1,1", {1})]
)
def test_global_ranks(text: str, ranks: set[int] | None) -> None:
    assert parse_global_ranks(text) == ranks


@pytest.mark.parametrize(
    ("text", "says"),
    [("x", "'x' is not a rank"), ("3-1", "'3-1' is not a range"), ("1-", "'' is not a rank"), ("0-9999999", "range")],
)
def test_mistakes_in_global_ranks(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_global_ranks(text)
