"""Unix sockets: an abandoned socket file is replaced; a socket in use and any other file are left alone."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from tests.raw_peer import AMPLE_S

from rallypoint import unix_socket
from rallypoint.deadline import Deadline
from rallypoint.errors import AddressTaken, ConnectFailed


def leave(path: Path) -> None:
    """Leave a socket file behind, as a killed process does."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()


def meet(listener: socket.socket, path: Path) -> None:
    with unix_socket.connect(str(path), Deadline(AMPLE_S)) as here, listener.accept()[0] as there:
        here.sendall(b"hello")
        assert there.recv(5) == b"hello"


def test_it_listens_on_new_and_abandoned_paths(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for _ in range(2):
        with unix_socket.listen(str(path)) as listener:
            meet(listener, path)
        assert path.is_socket(), "its file is left"
    leave(tmp_path / "other")
    with unix_socket.listen(str(tmp_path / "other")) as listener:
        meet(listener, tmp_path / "other")


def test_a_path_in_use_is_an_error_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with unix_socket.listen(str(path)) as listener:
        with pytest.raises(AddressTaken, match=f"unix://{path}: another process is listening there"):
            unix_socket.listen(str(path))
        listener.accept()[0].close()  # the probe of the other listen
        meet(listener, path)


def test_a_listener_whose_queue_is_full_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as queued:
        listener.bind(str(path))
        listener.listen(0)
        queued.connect(str(path))
        with pytest.raises(AddressTaken, match="another process is listening there"):
            unix_socket.listen(str(path))


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("dear data")
    with pytest.raises(AddressTaken, match="the file exists and is not a socket"):
        unix_socket.listen(str(path))
    assert path.read_text() == "dear data"
    with pytest.raises(AddressTaken, match="no/where/s: No such file or directory"):
        unix_socket.listen(str(tmp_path / "no" / "where" / "s"))


@pytest.mark.parametrize("path", ["", "a\0b", "/" + "x" * unix_socket.MAX_PATH_BYTES])
def test_an_invalid_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="Unix socket"):
        unix_socket.checked(path)


def test_a_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert unix_socket.checked("s") == str(tmp_path / "s")
    longest = "/" + "x" * (unix_socket.MAX_PATH_BYTES - 1)
    assert unix_socket.checked(longest) == longest


def test_of_many_that_replace_an_abandoned_socket_one_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for _ in range(20):
        leave(path)
        won: list[socket.socket] = []
        refused: list[AddressTaken] = []
        start = threading.Barrier(8)

        def take(won: list[socket.socket], refused: list[AddressTaken], start: threading.Barrier) -> None:
            start.wait(AMPLE_S)
            try:
                won.append(unix_socket.listen(str(path)))
            except AddressTaken as error:
                refused.append(error)

        threads = [threading.Thread(target=take, args=(won, refused, start)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(AMPLE_S)
        assert (len(won), len(refused)) == (1, 7)
        found = os.stat(path)
        unix_socket.remove(str(path), (found.st_dev, found.st_ino))
        won[0].close()


def test_a_successors_file_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    leave(path)
    mine = unix_socket.where(str(path))
    assert mine
    os.rename(path, tmp_path / "kept")  # so that its inode is not reused
    leave(path)
    unix_socket.remove(str(path), mine)
    assert path.is_socket()
    other = unix_socket.where(str(path))
    assert other
    unix_socket.remove(str(path), other)
    assert not path.exists() and unix_socket.where(str(path)) is None


def test_connecting_to_an_abandoned_or_missing_path_names_the_reason(tmp_path: Path) -> None:
    leave(tmp_path / "s")
    for name, why in (("s", "Connection refused"), ("t", "No such file or directory")):
        with pytest.raises(ConnectFailed) as caught:
            unix_socket.connect(str(tmp_path / name), Deadline(AMPLE_S))
        assert caught.value.tried == {f"unix://{tmp_path}/{name}": why}
