"""One directory, one writer: a second one is refused with the pid of the first, and no child keeps the lock."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.storage.logs import WAIT_S, commit, files, held, opened

from rallypoint.storage.errors import DirectoryInUse
from rallypoint.storage.file.storage import FileStorage

HOLDER = """
import sys
from rallypoint.storage.file.storage import FileStorage
storage = FileStorage(sys.argv[1])
list(storage.recover()[1])
print("open", flush=True)
sys.stdin.read()
"""


def hold(directory: Path) -> subprocess.Popen[bytes]:
    """Start a process that holds the directory until it is killed or its standard input ends."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
    return holder


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        before = files(tmp_path)
        with pytest.raises(DirectoryInUse) as caught:
            FileStorage(tmp_path)
        assert (caught.value.directory, caught.value.pid) == (str(tmp_path), holder.pid)
        assert caught.value.host == socket.gethostname()
        assert str(tmp_path) in str(caught.value) and f"process {holder.pid}" in str(caught.value)
        assert files(tmp_path) == before
        holder.send_signal(signal.SIGKILL)
        holder.wait(WAIT_S)
    assert (tmp_path / "lock").read_text().split()[0] == str(holder.pid), "a killed process leaves its name"
    assert held(tmp_path) == []


def test_a_second_writer_in_the_same_process_is_refused(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    with pytest.raises(DirectoryInUse) as caught:
        FileStorage(tmp_path)
    assert caught.value.pid == os.getpid()
    storage.close()
    storage.close()
    assert held(tmp_path) == []


@pytest.mark.parametrize("text", ["", "garbage\0", "12 a b", "pid host"])
def test_an_invalid_lock_file_names_no_owner(tmp_path: Path, text: str) -> None:
    with closing(FileStorage(tmp_path)):
        (tmp_path / "lock").write_text(text)
        with pytest.raises(DirectoryInUse, match="another process") as caught:
            FileStorage(tmp_path)
        assert caught.value.pid is None


def test_the_text_of_an_earlier_owner_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("1 " + "x" * 200)
    with closing(FileStorage(tmp_path)):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()} {socket.gethostname()}\n"


def test_a_child_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    storage, _ = opened(tmp_path)
    commit(storage, b"one")
    waiting = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        storage.close()
        assert held(tmp_path) == [b"one"]


def test_damage_found_at_the_start_releases_the_lock(tmp_path: Path) -> None:
    (tmp_path / f"log-{2:020d}").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(Exception, match="missing"):
            FileStorage(tmp_path)
