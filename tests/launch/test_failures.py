"""What is known of a failure: from an error file, from a traceback in standard error, or from the exit alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rallypoint.launch import failures
from rallypoint.launch.failure_report import RULE, report
from rallypoint.launch.failures import Failure, failure_of

AT = datetime(2026, 2, 3, 4, 5, 6, 789000, timezone(timedelta(hours=2)))
CHAINED = """
def inner():
    {}["key"]
try:
    inner()
except KeyError as error:
    raise RuntimeError("outer") from error
"""


def made(code: int | None = 1, stderr: bytes = b"", **more: Any) -> Failure:
    known: dict[str, Any] = {"node": "a", "host": "h1", "rank": 3, "local_rank": 1, "pid": 77, "at": AT}
    return failure_of(**{**known, **more}, code=code, stderr=stderr)


def ran(code: str, *options: str) -> bytes:
    """Return what Python prints about a script that fails."""
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True)
    assert done.returncode
    return done.stderr


def test_it_says_who_how_and_when() -> None:
    found = made(-9)
    assert (found.node, found.host, found.rank, found.local_rank, found.pid) == ("a", "h1", 3, 1, 77)
    assert (found.code, found.how, found.message) == (-9, "killed by SIGKILL (9)", "killed by SIGKILL (9)")
    assert found.at == "2026-02-03T02:05:06.789+00:00"
    assert found.summary() == "rank 3 on a (pid 77) failed: killed by SIGKILL (9)"


def test_it_is_json_both_ways() -> None:
    found = made(stderr=ran("raise ValueError('bäd')") + b"\xff\n")
    assert Failure.decode(found.encode()) == Failure.decode(found.encode().encode()) == found
    assert msgspec.convert(found.facts(), Failure) == found
    with pytest.raises(msgspec.DecodeError):
        Failure.decode(b"{}")


# From standard error


def test_a_traceback_is_found() -> None:
    found = made(stderr=b"some noise\n" + ran("def f():\n    raise ValueError('boom')\nf()"))
    assert found.message == "ValueError: boom"
    assert found.traceback.startswith("Traceback (most recent call last):\n")
    assert found.traceback.endswith("ValueError: boom")
    assert "in f" in found.traceback and "noise" not in found.traceback
    assert found.summary().endswith("exit code 1: ValueError: boom")


def test_the_last_of_several_counts_and_what_follows_it_does_not() -> None:
    first, second = ran("raise KeyError('handled')"), ran("raise ValueError('the one')")
    found = made(stderr=first + b"retrying\n" + second + b"\nsome noise at exit\n")
    assert found.message == "ValueError: the one"
    assert "handled" not in found.traceback and "noise" not in found.traceback


def test_the_exceptions_that_led_to_it_are_kept() -> None:
    found = made(stderr=ran("raise OSError('other')") + b"\n" + ran(CHAINED))
    assert found.message == "RuntimeError: outer"
    assert found.traceback.count("Traceback (most recent call last):") == 2
    assert "KeyError: 'key'" in found.traceback and "direct cause" in found.traceback
    assert "other" not in found.traceback


def test_a_message_of_several_lines_is_kept_whole_in_the_traceback() -> None:
    found = made(stderr=ran("raise ValueError('one\\ntwo\\nthree')"))
    assert found.message == "ValueError: one"
    assert found.traceback.endswith("ValueError: one\ntwo\nthree")


def test_a_prefix_before_every_line_is_taken_off() -> None:
    plain = ran(CHAINED)
    prefixed = b"".join(b"[rank3]: " + line for line in plain.splitlines(keepends=True))
    assert made(stderr=prefixed).traceback == made(stderr=plain).traceback
    assert made(stderr=prefixed).message == "RuntimeError: outer"


def test_a_syntax_error_in_the_script_has_no_header() -> None:
    found = made(stderr=b"noise\n" + ran("x = (\n"))
    assert found.message.startswith("SyntaxError: ")
    assert found.traceback.startswith('  File "<string>", line 1\n')


def test_what_python_says_of_a_crash_is_kept() -> None:
    found = made(-11, ran("import faulthandler; faulthandler._sigsegv()", "-X", "faulthandler"))
    assert found.message == "killed by SIGSEGV (11)"
    assert found.traceback.startswith("Fatal Python error: Segmentation fault")


def test_a_worker_that_was_killed_did_not_die_of_what_it_had_handled() -> None:
    found = made(-9, ran("raise ValueError('handled')"))
    assert found.message == "killed by SIGKILL (9)"
    assert "ValueError: handled" in found.traceback


def test_a_traceback_that_is_cut_off_is_none() -> None:
    found = made(stderr=b'Traceback (most recent call last):\n  File "x.py", line 1, in f\n')
    assert found.traceback == ""


@pytest.mark.parametrize(
    ("stderr", "message"),
    [(b"usage: x\nx: error: no\n\n", "x: error: no"), (b"", "exit code 2"), (b"\n", "exit code 2")],
)
def test_without_a_traceback_the_last_line_speaks(stderr: bytes, message: str) -> None:
    assert (made(2, stderr).message, made(2, stderr).traceback) == (message, "")


def test_the_last_lines_are_kept_whatever_bytes_they_are() -> None:
    found = made(stderr=b"".join(b"line %d \xff\n" % n for n in range(100)))
    assert found.stderr == tuple(f"line {n} \ufffd" for n in range(80, 100))


def test_nothing_is_kept_without_a_limit() -> None:
    found = made(stderr=b"x" * 1_000_000)
    assert len(found.encode()) < 4 * failures.MAX_TEXT


# From the error file

RECORD = """
import sys
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("boom\\nline two")
main()
"""


@pytest.mark.needs("torch")
def test_the_error_file_of_torch_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    done = subprocess.run([sys.executable, "-c", RECORD], env={**os.environ, failures.ERROR_FILE: str(path)})
    found = made(done.returncode, b"other words\n", error_file=path)
    assert found.message == "ValueError: boom\nline two"
    assert found.traceback.startswith("Traceback") and "in main" in found.traceback
    assert found.stderr == ("other words",)
    assert found.summary().endswith(": ValueError: boom")


@pytest.mark.needs("torch")
def test_what_a_script_with_an_error_file_printed_beside_its_traceback_is_shown_whole(tmp_path: Path) -> None:
    """Python prints it from other frames, and so from other lines, than PyTorch writes it."""
    deep = "    def f(n): return f(n - 1) + 1 if n else 1 / 0\n    print('before', file=sys.stderr)\n    f(2)"
    code = RECORD.replace('    raise ValueError("boom\\nline two")', deep)
    path = tmp_path / "error.json"
    env = {**os.environ, failures.ERROR_FILE: str(path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE)
    found = made(1, done.stderr + b"\nafter\n", error_file=path)
    assert found.message == "ZeroDivisionError: division by zero" and found.stderr == ("before", "", "after")
    assert "  end of its stderr:\n  | before\n  | \n  | after\n" in report(found)


@pytest.mark.parametrize(
    ("text", "message", "traceback"),
    [
        ('{"message": "plain"}', "plain", ""),
        ('{"message": {"message": "m", "extraInfo": {"py_callstack": "Traceback"}}}', "m", "Traceback"),
        ('{"message": {"message": "m", "extraInfo": 3}}', "m", ""),
        ('{"message": {"message": "m", "extraInfo": {"py_callstack": 3}}}', "m", ""),
        ('{"message": {"message": "m", "extraInfo": {"timestamp": "nan"}}}', "m", ""),
        (
            r'{"message": "\ud800 \u001b[31mred\u001b[0m \u0007\u001b]0;title\u009b"}',
            r"\ud800 red \x07\x1b]0;title\x9b",
            "",
        ),
    ],
)
def test_shapes_of_an_error_file(tmp_path: Path, text: str, message: str, traceback: str) -> None:
    (tmp_path / "error.json").write_text(text)
    found = made(stderr=ran("raise OSError"), error_file=tmp_path / "error.json")
    assert (found.message, found.traceback) == (message, traceback)


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "3", "{}", '{"message": {}}', '{"message": null}', "[" * 100_000, "\udcff"]
)
def test_an_error_file_that_says_nothing_is_passed_over(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "error.json").write_text(text, errors="surrogateescape")
    found = made(stderr=ran("raise ValueError('boom')"), error_file=tmp_path / "error.json")
    assert found.message == "ValueError: boom"


def test_an_error_file_that_is_no_file_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "error.json")
    assert made(3, error_file=tmp_path / "error.json").message == "exit code 3"


def test_what_a_terminal_would_obey_is_shown_and_colours_are_not() -> None:
    found = made(stderr=b"\x1b[31mred\x1b[0m\x1b[2J\x07\n" + ran("raise ValueError('\x1b[2Jboom')"))
    assert found.stderr[0] == r"red\x1b[2J\x07" and found.message == r"ValueError: \x1b[2Jboom"
    assert report(found).replace("\n", "").isprintable() and "\x1b" not in found.encode()


# Who was first


def recorded(
    tmp_path: Path, name: str, second: object = None, written_at: float = 0.0, code: int | None = 1
) -> Failure:
    """Return the failure of one that wrote an error file then."""
    path = tmp_path / name
    more = {} if second is None else {"timestamp": second}
    path.write_text(json.dumps({"message": {"message": name, "extraInfo": more}}))
    os.utime(path, (written_at, written_at))
    return made(code, error_file=path)


def test_an_error_file_says_when(tmp_path: Path) -> None:
    for second, written_at, when in (
        (None, 7.5, 7.5),
        ("7", 7.5, 7.5),
        (7, 99.0, 8.0),
        ("7", 3.0, 7.0),
        ("x", 7.5, 7.5),
    ):
        assert recorded(tmp_path, "a", second, written_at).recorded_at == when
    assert made().recorded_at == 0


def test_who_recorded_an_error_first_was_first_even_if_slow_to_end(tmp_path: Path) -> None:
    slow, quick = recorded(tmp_path, "slow", "7", 7.25, None), recorded(tmp_path, "quick", "7", 7.5, 6)
    assert (slow.code, slow.how) == (1, "error recorded, not exited yet")
    assert failures.earliest(quick, [slow]) is slow is failures.earliest(slow, [quick])
    killed = made(-9)
    assert failures.earliest(killed, [slow, quick]) is killed, (
        "who was killed recorded nothing, and was nobody's victim"
    )
    assert failures.earliest(quick, [killed]) is quick


# The report


def test_the_first_comes_first_and_the_others_are_folded() -> None:
    first = made(stderr=b"before\n" + ran("raise ValueError('boom')"))
    others = [made(-15, b"secret words\n", node="b", rank=rank) for rank in range(4, 6)]
    lines = report(first, others).splitlines()
    assert lines[0] == lines[-1] == RULE
    assert lines[1] == "FAILED FIRST: ValueError: boom"
    assert "  how   exit code 1" in lines
    assert "  rank  3 (local rank 1)" in lines
    assert "  node  a (host h1, pid 77)" in lines
    assert "  time  2026-02-03T02:05:06.789+00:00" in lines
    assert lines.count("Traceback (most recent call last):") == 1, "it is not shown again as standard error"
    assert "  | before" in lines
    assert lines[-4:-1] == [
        "  2 more failed after it:",
        "  - rank 4 on b (pid 77) failed: killed by SIGTERM (15)",
        "  - rank 5 on b (pid 77) failed: killed by SIGTERM (15)",
    ]
    assert "secret" not in "\n".join(lines)


def test_one_failure_without_words_is_a_short_report() -> None:
    assert len(report(made(-9)).splitlines()) == 7


def test_a_crowd_is_counted() -> None:
    text = report(made(), [made(rank=rank) for rank in range(100)])
    assert "  - and 80 more" in text and "100 more failed after it" in text
    assert len(text.splitlines()) < 40


def test_failure_json_is_written_whole_and_read_back(tmp_path: Path) -> None:
    first, others = made(stderr=b"x\n"), (made(-9), made(-15))
    for written in ((first, ()), (first, others)):
        path = failures.write(tmp_path / "logs", *written)
        assert failures.read(tmp_path / "logs") == failures.Failures(*written)
    assert os.listdir(tmp_path / "logs") == [path.name] == ["failure.json"]
    assert path.stat().st_mode & 0o777 == 0o644
