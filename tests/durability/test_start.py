"""A server that cannot start on its directory reports why; one that is still reading its log can be terminated."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.storage.small_disk import take_all, tmpfs

import rallypoint
from rallypoint.errors import ServerFailed

from .durable import AMPLE_S

SERVE = [sys.executable, "-m", "rallypoint", "serve", "--port", "0"]

ENDLESS = """
import sys
from rallypoint.__main__ import main
from rallypoint.core import entries
from rallypoint.storage.file.storage import FileStorage

def log():
    print("reading", flush=True)
    while True:
        yield entries.encode(entries.EndSession(1))

FileStorage.recover = lambda self: (None, log())
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_reads_a_long_log_can_be_terminated(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", ENDLESS, *SERVE[3:], "--data-dir", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stdout.readline() == "reading\n"
        server.send_signal(number)
        _, said = server.communicate(timeout=AMPLE_S)
    finally:
        server.kill()
        server.wait()
    assert (server.returncode, said) == (0, "")


@pytest.mark.parametrize(
    ("directory", "words"),
    [("file", "Not a directory"), ("file/below", "Not a directory"), ("/proc/nowhere/data", "No such file")],
)
def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path, directory: str, words: str) -> None:
    (tmp_path / "file").write_text("not a directory")
    path = str(tmp_path / directory)
    done = subprocess.run([*SERVE, "--data-dir", path], capture_output=True, text=True, timeout=AMPLE_S)
    assert done.returncode != 0 and path in done.stderr and "--data-dir" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(ServerFailed, match="data directory") as caught:
        rallypoint.Server(data_dir=path)
    assert path in str(caught.value) and words in str(caught.value)
    assert "standard error" not in str(caught.value), "the message is complete"


def test_an_empty_data_directory_option_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([*SERVE, "--data-dir", ""], capture_output=True, text=True, timeout=AMPLE_S)
    assert done.returncode == 2 and "--data-dir is empty" in done.stderr
    with pytest.raises(ValueError, match="data_dir is empty"):
        rallypoint.Server(data_dir="")
    assert not list(tmp_path.iterdir())


@pytest.mark.needs("tmpfs")
def test_a_new_directory_on_a_full_disk(tmp_path: Path) -> None:
    point = tmp_path / "disk"
    with tmpfs(point, 1 << 20):
        others = take_all(point)
        with pytest.raises(ServerFailed, match="No space left"):
            rallypoint.Server(data_dir=point / "data")
        others.unlink()
        with rallypoint.Server(data_dir=point / "data") as server, rallypoint.connect(server.url) as store:
            store.set("room", "again")
