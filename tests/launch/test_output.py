"""What workers print: whole lines, all of them, where they were asked for, and the end of it when a worker ends."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.raw_peer import AMPLE_S, until

from rallypoint.launch.output import console, pump, stream
from rallypoint.launch.output.pump import (
    OutputPump,
    OutputRoute,
    Std,
    WorkerStreams,
    parse_ranks,
    parse_std,
    route,
    worker_dir,
)

SHOWN = OutputRoute(True)


class Screen:
    """A console: two pipes, or one for both streams, that a thread reads to the end; or a pump with nobody reading."""

    def __init__(self, together: bool = False, read: bool = True, **more: bool) -> None:
        pipes = [os.pipe()] if together else [os.pipe(), os.pipe()]
        self.readers = [reader for reader, _ in pipes]
        self._writers = [writer for _, writer in pipes]
        self.pump = OutputPump(self._writers[0], self._writers[-1], **more)
        self._seen = [bytearray() for _ in pipes]
        self._news = threading.Condition()
        self._threads: list[threading.Thread] = []
        if read:
            self.read()

    def read(self) -> None:
        """Begin to read."""
        numbers = range(len(self.readers))
        self._threads = [threading.Thread(target=self._read, args=(n,), daemon=True) for n in numbers]
        for thread in self._threads:
            thread.start()

    def _read(self, which: int) -> None:
        while data := os.read(self.readers[which], 1 << 20):
            with self._news:
                self._seen[which] += data
                self._news.notify_all()

    def until(self, text: bytes, which: int = 0) -> None:
        """Wait until this is shown."""
        with self._news:
            assert self._news.wait_for(lambda: text in self._seen[which], AMPLE_S), self._seen

    def close(self) -> list[bytes]:
        """End the pump; return all that was shown."""
        assert self.pump.close(AMPLE_S)
        for writer in self._writers:
            os.close(writer)
        for thread in self._threads:
            thread.join(AMPLE_S)
        for reader in self.readers:
            os.close(reader)
        return [bytes(seen) for seen in self._seen]


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    if not made.pump._closing:
        made.close()


def run(feed: WorkerStreams, code: str) -> None:
    """Run a worker that prints, to its end."""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=feed.stdout, stderr=feed.stderr)
    feed.started()
    assert worker.wait(AMPLE_S) == 0
    assert feed.finish(AMPLE_S)


# Lines


def test_lines_are_shown_with_who_said_them(screen: Screen) -> None:
    feed = screen.pump.open("a:3", SHOWN, SHOWN)
    run(feed, "import sys; print('one\\n\\ntwo'); print('bad', file=sys.stderr)")
    assert screen.close() == [b"[a:3] one\n[a:3] \n[a:3] two\n", b"[a:3] bad\n"]


def test_one_worker_without_a_prefix_is_passed_on_byte_for_byte(screen: Screen) -> None:
    feed = screen.pump.open("a:0", SHOWN, SHOWN, prefix=False)
    run(feed, "import os\nfor n in range(300): os.write(1, bytes(range(256)) * n)")
    assert screen.close()[0] == b"".join(bytes(range(256)) * n for n in range(300))


def test_bytes_that_are_no_text_pass_untouched(screen: Screen) -> None:
    run(screen.pump.open("a:0", SHOWN, SHOWN), r"import os; os.write(1, b'\xff\xfe\0\r\x1b\n')")
    assert screen.close()[0] == b"[a:0] \xff\xfe\0\r\x1b\n"


def test_a_last_line_without_an_end_is_shown_and_ended(screen: Screen) -> None:
    run(screen.pump.open("a:0", SHOWN, SHOWN), "print('no end', end='')")
    assert screen.close()[0] == b"[a:0] no end\n"


def test_a_line_that_is_not_finished_is_shown_after_a_moment_and_goes_on(screen: Screen) -> None:
    feed = screen.pump.open("a:0", SHOWN, SHOWN)
    os.write(feed.stdout, b"50%")
    screen.until(b"[a:0] 50%")
    os.write(feed.stdout, b" 100%\nnext\n")
    assert feed.finish(AMPLE_S)
    assert screen.close()[0] == b"[a:0] 50% 100%\n[a:0] next\n"


def test_somebody_else_does_not_write_into_an_unfinished_line(screen: Screen) -> None:
    one, two = (screen.pump.open(label, SHOWN, SHOWN) for label in ("a:0", "a:1"))
    os.write(one.stdout, b"half")
    screen.until(b"half")
    os.write(two.stdout, b"whole\n")
    screen.until(b"whole")
    os.write(one.stdout, b" a line\n")
    assert one.finish(AMPLE_S) and two.finish(AMPLE_S)
    assert screen.close()[0] == b"[a:0] half\n[a:1] whole\n[a:0]  a line\n"


def test_where_both_streams_are_one_console_its_lines_are_whole() -> None:
    screen = Screen(together=True)
    feed = screen.pump.open("a:0", SHOWN, SHOWN)
    os.write(feed.stdout, b"half")
    screen.until(b"half")
    os.write(feed.stderr, b"bad\n")
    screen.until(b"bad")
    assert feed.finish(AMPLE_S)
    assert screen.close() == [b"[a:0] half\n[a:0] bad\n"]


def test_lines_of_many_workers_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HOLD_S", AMPLE_S)  # a busy machine may stop a worker in the middle of a line
    screen = Screen(together=True)
    code = "import sys\nfor n in range(2000): print('line', sys.argv[1], n, 'x' * (n % 200), flush=n % 7 == 0)"
    workers = []
    for rank in range(4):
        feed = screen.pump.open(f"a:{rank}", SHOWN, SHOWN)
        command = [sys.executable, "-c", code, str(rank)]
        workers.append((feed, subprocess.Popen(command, stdout=feed.stdout, stderr=feed.stderr)))
        feed.started()
    for feed, worker in workers:
        assert worker.wait(AMPLE_S) == 0 and feed.finish(AMPLE_S)
    lines = screen.close()[0].decode().splitlines()
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[a:{rank}] ")]
        assert mine == [f"[a:{rank}] line {rank} {n} {'x' * (n % 200)}" for n in range(2000)]
    assert len(lines) == 8000


def test_into_a_pipe_no_write_cuts_a_line_that_others_could_cut_into(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    def write(descriptor: int, data: bytes) -> bool:
        written.append(data)
        return True

    monkeypatch.setattr(console, "write_all", write)
    reader, writer = os.pipe()
    lines = [b"%d " % n + b"x" * (n % 6000) + b"\n" for n in range(0, 30_000, 97)]
    shown = console.Console(writer, None)
    shown.write(object(), b"", b"".join(lines))
    shown.flush(0.0)
    os.close(reader)
    os.close(writer)
    assert b"".join(written) == b"".join(lines)
    assert all(data.endswith(b"\n") for data in written)
    assert all(len(data) <= select.PIPE_BUF or data.count(b"\n") == 1 for data in written)
    assert len(written) < len(lines)


def test_a_line_without_end_is_passed_on_in_pieces_and_not_kept(screen: Screen) -> None:
    size = 32 << 20
    feed = screen.pump.open("a:0", SHOWN, SHOWN)
    sizes = []
    seen = stream.Stream._show

    def show(self: stream.Stream, data: bytes, now: float) -> None:
        seen(self, data, now)
        sizes.append(len(self.held))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream.Stream, "_show", show)
        run(feed, f"import os\nfor _ in range({size >> 20}): os.write(1, b'x' * (1 << 20))")
    assert screen.close()[0] == b"[a:0] " + b"x" * size + b"\n"
    assert max(sizes) < stream.PIECE_BYTES


def test_only_teed_output_begins_with_the_header(screen: Screen, tmp_path: Path) -> None:
    teed, shown = OutputRoute(True, tmp_path / "out"), OutputRoute(True)
    run(
        screen.pump.open("n:0", teed, shown, prefix=False, header="<0>:"),
        "import sys; print('a\\nb'); print('c', file=sys.stderr)",
    )
    assert screen.close() == [b"<0>:a\n<0>:b\n", b"c\n"]
    assert (tmp_path / "out").read_text() == "a\nb\n"


def test_a_rank_has_its_colour_where_colours_are_wanted() -> None:
    screen = Screen(colour=True)
    for rank in (0, 1):
        run(screen.pump.open(f"a:{rank}", SHOWN, SHOWN, rank=rank), "print('x')")
    one, two = re.findall(rb"(\x1b\[\d+m)\[a:\d\]\x1b\[0m x\n", screen.close()[0])
    assert one != two


def test_colours_are_wanted_where_there_is_a_terminal() -> None:
    terminal, pipe = os.openpty(), os.pipe()
    assert [console.Console(descriptor, None).colour for descriptor in (terminal[1], pipe[1])] == [True, False]
    for descriptor in (*terminal, *pipe):
        os.close(descriptor)


def test_the_agent_speaks_between_the_lines(screen: Screen) -> None:
    feed = screen.pump.open("a:0", SHOWN, SHOWN)
    os.write(feed.stderr, b"half")
    screen.until(b"half", 1)
    screen.pump.say("rallypoint: \udcff")
    screen.until(b"rallypoint", 1)
    assert feed.finish(AMPLE_S)
    assert screen.close()[1] == b"[a:0] half\nrallypoint: ?\n"


# Files


def test_redirected_goes_to_the_file_and_nowhere_else(screen: Screen, tmp_path: Path) -> None:
    path = tmp_path / "new" / "stdout.log"
    feed = screen.pump.open("a:0", OutputRoute(False, path), SHOWN)
    assert os.path.samestat(os.fstat(feed.stdout), path.stat()), "the worker writes it itself"
    run(feed, "import sys; print('out'); print('err', file=sys.stderr)")
    assert screen.close() == [b"", b"[a:0] err\n"]
    assert path.read_bytes() == b"out\n"


def test_teed_goes_to_both_and_the_file_has_what_was_written(screen: Screen, tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"from before\n")
    run(screen.pump.open("a:0", OutputRoute(True, path), SHOWN), r"import os; os.write(1, b'out\n\xff')")
    assert screen.close()[0] == b"[a:0] out\n[a:0] \xff\n"
    assert path.read_bytes() == b"from before\nout\n\xff"


def test_what_is_not_shown_and_not_kept_does_not_block(screen: Screen) -> None:
    run(screen.pump.open("a:0", OutputRoute(False), OutputRoute(False)), "print('x' * 5_000_000)")
    assert screen.close() == [b"", b""]


def test_a_file_that_cannot_be_made_is_an_error_and_leaves_nothing_open(screen: Screen, tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(IsADirectoryError):
        screen.pump.open("a:0", SHOWN, OutputRoute(True, tmp_path))
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_disk_that_is_full_does_not_stop_the_worker(screen: Screen) -> None:
    feed = screen.pump.open("a:0", OutputRoute(True, Path("/dev/full")), SHOWN)
    run(feed, "print('one', flush=True)\nfor n in range(100_000): print(n)\nprint('last')")
    shown = screen.close()[0]
    assert b"cannot write /dev/full" in shown
    assert shown.endswith(b"[a:0] last\n")


def test_a_file_whose_close_fails_ends_no_output(
    screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may report only then that its disk is full."""
    path, close, failed = tmp_path / "stdout.log", os.close, list[int]()

    def closing(descriptor: int) -> None:
        is_file = os.path.realpath(f"/proc/self/fd/{descriptor}") == str(path)
        close(descriptor)
        if is_file and threading.current_thread().name == "output pump":
            failed.append(descriptor)
            raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", closing)
    run(screen.pump.open("a:0", OutputRoute(True, path), SHOWN), "print('first')")
    run(screen.pump.open("a:1", SHOWN, SHOWN), "print('second')")
    assert screen.close()[0] == b"[a:0] first\n[a:1] second\n" and failed


# The end


@pytest.mark.parametrize("where", ["pipe", "file"])
def test_the_last_of_standard_error_is_kept(screen: Screen, tmp_path: Path, where: str) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(b"of an earlier run\n")
    feed = screen.pump.open("a:0", SHOWN, OutputRoute(False, path) if where == "file" else OutputRoute(False))
    run(feed, "import sys; print('lost'); sys.stderr.write('short\\n')")
    assert feed.tail() == b"short\n"
    feed = screen.pump.open("a:0", SHOWN, OutputRoute(False, path) if where == "file" else SHOWN)
    run(feed, "import sys\nfor n in range(100_000): print('line', n, file=sys.stderr)")
    assert len(feed.tail()) == stream.KEPT_BYTES
    assert pump.last_lines(feed.tail()) == tuple(f"line {n}" for n in range(99_980, 100_000))


def test_a_child_that_holds_the_pipe_does_not_keep_the_end_waiting(screen: Screen) -> None:
    code = "import subprocess; print('x' * 100_000); print(subprocess.Popen(['sleep', '1000']).pid)"
    feed = screen.pump.open("a:0", SHOWN, SHOWN)
    run(feed, code)
    (shown, _) = screen.close()
    *_, last = shown.splitlines()
    os.kill(int(last.split()[-1]), 9)
    assert len(shown.splitlines()[0]) == 100_000 + len("[a:0] ")


def test_a_child_that_writes_on_does_not_keep_the_end_waiting(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = screen.pump.open("a:0", OutputRoute(False), SHOWN)
    child, carry = os.dup(feed.stdout), stream.Stream.carry

    def carry_and_write(self: stream.Stream, most: int, now: float) -> int:
        """There is always more when something was read."""
        read = carry(self, most, now)
        os.write(child, b"more\n")
        return read

    monkeypatch.setattr(stream.Stream, "carry", carry_and_write)
    os.write(child, b"first\n")
    assert feed.finish(AMPLE_S)
    with pytest.raises(BrokenPipeError):
        os.write(child, b"nobody reads it any more")
    os.close(child)


def test_finish_does_not_wait_longer_than_it_was_told() -> None:
    screen = Screen(read=False)
    feed = screen.pump.open("a:0", SHOWN, SHOWN)
    worker = subprocess.Popen([sys.executable, "-c", "print('x' * 150_000)"], stdout=feed.stdout)
    assert worker.wait(AMPLE_S) == 0, "what a pipe holds does not stop a worker"
    assert not feed.finish(0)
    assert not screen.pump.close(0)
    screen.read()  # somebody does after all
    assert len(screen.close()[0]) == 150_000 + len("[a:0] \n")
    assert feed.finish(0)


def test_a_console_that_blocks_is_waited_for_once() -> None:
    screen = Screen(read=False)
    feeds = [screen.pump.open(f"a:{rank}", SHOWN, SHOWN) for rank in range(2)]
    for feed in feeds:
        subprocess.run([sys.executable, "-c", "print('x' * 150_000)"], stdout=feed.stdout, check=True, timeout=AMPLE_S)
    assert not feeds[0].finish(0.1) and screen.pump.stuck
    assert not feeds[1].finish(AMPLE_S) and not screen.pump.close(AMPLE_S), "at once"
    screen.read()
    until(lambda: screen.pump.stuck, lambda stuck: not stuck)
    assert len(screen.close()[0]) == 2 * (150_000 + len("[a:0] \n"))


def test_a_console_that_went_away_does_not_stop_the_worker() -> None:
    screen = Screen(read=False)
    os.close(screen.readers[0])
    feed = screen.pump.open("a:0", SHOWN, SHOWN)
    run(feed, "for n in range(100_000): print('line', n)\nimport sys; print('end', file=sys.stderr)")
    assert feed.tail() == b"end\n"
    screen.readers[0] = os.open(os.devnull, os.O_RDONLY)
    screen.close()


def test_a_console_that_does_not_block_gets_everything() -> None:
    screen = Screen()
    os.set_blocking(screen._writers[0], False)
    run(screen.pump.open("a:0", SHOWN, SHOWN, prefix=False), "print('x' * 5_000_000)")
    assert screen.close()[0] == b"x" * 5_000_000 + b"\n"


def test_a_worker_that_could_not_be_started_leaves_nothing(screen: Screen, tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    feed = screen.pump.open("a:0", SHOWN, OutputRoute(False, tmp_path / "stderr.log"))
    feed.started()
    assert feed.finish(AMPLE_S)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_closed_pump_is_closed(screen: Screen) -> None:
    screen.close()
    assert screen.pump.close(0)
    assert not screen.pump._thread.is_alive()
    with pytest.raises(ValueError, match="closed"):
        screen.pump.open("a:0", SHOWN, SHOWN)


# Options

BOTH, NONE = Std.ALL, Std.NONE


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [NONE, NONE, NONE]),
        ("1", [Std.OUT] * 3),
        (" 3 ", [BOTH] * 3),
        ("0:1,1:3", [Std.OUT, BOTH, NONE]),
        ("2:2", [NONE, NONE, Std.ERR]),
        ("0:1, 2:3", [Std.OUT, NONE, BOTH]),
        ("0:1,0:2", [Std.ERR, NONE, NONE]),
    ],
)
def test_which_streams_of_which_ranks(text: str, ranks: list[Std]) -> None:
    chosen = parse_std(text)
    assert [chosen[rank] for rank in range(3)] == ranks


def test_ranks_have_as_many_digits_as_they_like() -> None:
    assert parse_std("12:3")[12] == BOTH


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4", "'4' is none of 0"),
        ("", "'' is none of 0"),
        ("x", "'x' is none of 0"),
        ("0:1,3", "'3' is not RANK:VALUE"),
        ("0:1,", "'' is not RANK:VALUE"),
        ("a:1", "'a' is not a local rank"),
        ("-1:1", "'-1' is not a local rank"),
        ("²:1", "'²' is not a local rank"),
        ("0:9", "'9' is none of 0"),
        ("0:1:2", "'1:2' is none of 0"),
    ],
)
def test_a_mistake_is_quoted(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        parse_std(text)
    assert repr(text) in str(caught.value)


def test_a_filter_of_ranks() -> None:
    assert parse_ranks("") is None
    assert parse_ranks("0, 2") == frozenset({0, 2})
    with pytest.raises(ValueError, match="'x' is not a local rank"):
        parse_ranks("0,x")


def test_the_layout_of_files() -> None:
    assert worker_dir(Path("logs"), 2, 5) == Path("logs/attempt_2/5")


@pytest.mark.parametrize(
    ("redirects", "tee", "shown", "console", "file"),
    [
        ("0", "0", None, True, False),
        ("1", "0", None, False, True),
        ("0", "1", None, True, True),
        ("1", "1", None, True, True),
        ("2", "2", None, True, False),
        ("0", "0", {1}, False, False),
        ("0", "1", {1}, False, True),
        ("1", "0", {0}, False, True),
    ],
)
def test_where_standard_output_goes(
    redirects: str, tee: str, shown: set[int] | None, console: bool, file: bool
) -> None:
    found = route(Std.OUT, 0, parse_std(redirects), parse_std(tee), shown, Path("logs"))
    assert found == OutputRoute(console, Path("logs/stdout.log") if file else None)


def test_files_need_a_directory() -> None:
    with pytest.raises(ValueError, match="directory for logs"):
        route(Std.OUT, 0, parse_std("0"), parse_std("1"), None, None)


PRINTS = (
    "import os; [os.write(n, f'{what} {os.environ[\"RANK\"]}\\n'.encode()) for n, what in ((1, 'out'), (2, 'err'))]"
)
CASES = [
    ("0", "0", ""),
    ("1", "0", ""),
    ("3", "1", ""),
    ("0:1", "0:2", ""),
    ("0", "3", "1"),
    ("3", "0", "1"),
    ("0", "0", "0,2"),
    ("0:3,1:1", "1:3,2:2", "0,1"),
]


def places(redirects: str, tee: str, shown: str, logs: Path) -> tuple[set[str], dict[str, str]]:
    """Send the output of three workers where we think it goes; return what was on the console, and the files."""
    screen = Screen(together=True)
    for rank in range(3):
        options = (rank, parse_std(redirects), parse_std(tee), parse_ranks(shown), worker_dir(logs, 0, rank))
        feed = screen.pump.open("x", route(Std.OUT, *options), route(Std.ERR, *options), prefix=False)
        run(feed, f"import os; os.environ['RANK'] = '{rank}'; {PRINTS}")
    return set(screen.close()[0].decode().splitlines()), contents(logs)


def contents(logs: Path) -> dict[str, str]:
    files = [path for path in logs.rglob("*.log") if path.stat().st_size]
    return {path.as_posix()[path.as_posix().index("attempt_") :]: path.read_text() for path in files}


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("redirects", "tee", "shown"), CASES)
def test_output_goes_where_torchrun_sends_it(tmp_path: Path, redirects: str, tee: str, shown: str) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    options = ["--nproc-per-node=3", f"--log-dir={tmp_path / 'theirs'}", f"--redirects={redirects}", f"--tee={tee}"]
    options += [f"--local-ranks-filter={shown}"] if shown else []
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(tmp_path / "prints.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    console = set(re.findall(r"(?:out|err) \d", done.stdout))
    assert places(redirects, tee, shown, tmp_path / "ours") == (console, contents(tmp_path / "theirs"))
    assert console or shown
