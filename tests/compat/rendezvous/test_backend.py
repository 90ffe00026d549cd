"""The rendezvous state in one of our stores, and the creation of that store, also by two processes at once."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.ports import reserve_port

import rallypoint
from rallypoint import net
from rallypoint.compat.rendezvous import (
    DEFAULT_PORT,
    C10dRendezvousBackend,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    create_backend,
)
from rallypoint.store.file import FileStore
from rallypoint.store.memory import HashStore
from rallypoint.store.tcp import TCPStore

HOST = "127.0.0.1"
AMPLE_S = 60.0
KEY = "torch.rendezvous.run"

Create = Callable[..., Any]


def parameters(endpoint: str, run_id: str = "run", **options: Any) -> RendezvousParameters:
    return RendezvousParameters("c10d", endpoint, run_id, 1, 2, **options)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def backend(store: HashStore) -> C10dRendezvousBackend:
    return C10dRendezvousBackend(store, "run")


@pytest.fixture
def create() -> Iterator[Create]:
    """Return a function that creates a backend and its store, which is closed at the end."""
    with ExitStack() as stack:

        def made(*arguments: Any, **options: Any) -> Any:
            backend, store = create_backend(parameters(*arguments, **options))
            stack.callback(store.close)
            return backend, store

        yield made


def written(backend: C10dRendezvousBackend, state: bytes, token: Any = None) -> Any:
    """Write the state, which must succeed; return its token."""
    result = backend.set_state(state, token)
    assert result is not None and result[::2] == (state, True)
    return result[1]


# The state


def test_a_new_backend_has_no_state(backend: C10dRendezvousBackend) -> None:
    assert backend.name == "c10d"
    assert backend.get_state() is None


def test_without_a_token_only_the_first_write_succeeds(backend: C10dRendezvousBackend) -> None:
    token = written(backend, b"first")
    assert backend.set_state(b"second") == (b"first", token, False)
    assert backend.get_state() == (b"first", token)


def test_a_token_is_stale_after_the_state_was_replaced(backend: C10dRendezvousBackend) -> None:
    old = written(backend, b"first")
    new = written(backend, b"second", old)
    assert backend.set_state(b"third", old) == (b"second", new, False)
    assert backend.get_state() == (b"second", new)


FOREIGN = [b"foreign", b"\xff\xfe", b"", "text", 7, object()]


@pytest.mark.parametrize("token", FOREIGN, ids=lambda token: type(token).__name__)
def test_a_foreign_token_writes_nothing(backend: C10dRendezvousBackend, token: object) -> None:
    assert backend.set_state(b"first", token) is None, "there is no state to return"
    assert backend.get_state() is None
    mine = written(backend, b"first")
    assert backend.set_state(b"second", token) == (b"first", mine, False)


@pytest.mark.parametrize("state", [b"", b"\0", bytes(range(256)), b"x" * 100_000], ids=len)
def test_any_bytes_are_a_state(backend: C10dRendezvousBackend, state: bytes) -> None:
    token = written(backend, state, written(backend, b"before"))
    assert backend.get_state() == (state, token)
    written(backend, b"after", token)


def test_a_second_node_finds_the_state(store: HashStore, backend: C10dRendezvousBackend) -> None:
    token = written(backend, b"first")
    assert C10dRendezvousBackend(store, "run").get_state() == (b"first", token)
    assert C10dRendezvousBackend(store, "other").get_state() is None


def test_a_state_that_was_deleted_can_be_written_again(store: HashStore, backend: C10dRendezvousBackend) -> None:
    token = written(backend, b"first")
    store.delete_key(KEY)
    assert backend.set_state(b"second", token) is None
    token = written(backend, b"second")
    assert backend.get_state() == (b"second", token)


@pytest.mark.parametrize("blob", ["not base64!", "abc", "YQ==YQ==", "\0", "YWJj\n"])
def test_a_corrupt_blob_is_reported_as_such(store: HashStore, backend: C10dRendezvousBackend, blob: str) -> None:
    store.set(KEY, blob)
    for call in (backend.get_state, lambda: backend.set_state(b"new"), lambda: backend.set_state(b"new", b"token")):
        with pytest.raises(RendezvousStateError, match=rf"corrupt: '{KEY}' in <HashStore"):
            call()


@pytest.mark.parametrize("run_id", ["", None])
def test_an_empty_run_id_is_refused(store: HashStore, run_id: Any) -> None:
    with pytest.raises(ValueError, match="run id"):
        C10dRendezvousBackend(store, run_id)


class Broken:
    """A foreign store whose calls raise `error` once it is set."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        if self.error is not None:
            raise self.error
        return getattr(self.store, name)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TimeoutError, ConnectionResetError, OSError])
def test_any_error_of_a_store_becomes_a_connection_error(kind: type[Exception]) -> None:
    store = Broken()
    backend = C10dRendezvousBackend(store, "run")
    store.error = kind("it is gone\n#0 frames of C++")
    for call in (backend.get_state, lambda: backend.set_state(b"new"), lambda: C10dRendezvousBackend(store, "run")):
        with pytest.raises(RendezvousConnectionError, match=rf"'{KEY}' .* {kind.__name__}: it is gone$") as caught:
            call()
        assert caught.value.__cause__ is store.error


def test_misuse_is_not_a_connection_error(backend: C10dRendezvousBackend) -> None:
    with pytest.raises(TypeError):
        backend.set_state("text")  # type: ignore[arg-type]


def test_a_lost_server_is_a_connection_error() -> None:
    with rallypoint.Server(grace=0.1) as server:
        backend = C10dRendezvousBackend(TCPStore(HOST, server.port, timeout=AMPLE_S), "run")
    with pytest.raises(RendezvousConnectionError, match=str(server.port)) as caught:
        backend.get_state()
    assert isinstance(caught.value.__cause__, rallypoint.NetworkError)


# Creating the store


def test_the_first_creator_at_its_own_address_hosts_and_later_ones_join(create: Create) -> None:
    endpoint = f"{HOST}:{reserve_port()}"
    first, hosted = create(endpoint)
    second, joined = create(endpoint, is_host="true", read_timeout="7")
    third, client = create(f" {endpoint} ", is_host="0")
    assert [type(store) for store in (hosted, joined, client)] == [TCPStore] * 3
    assert hosted.timeout == client.timeout == timedelta(seconds=60) and joined.timeout == timedelta(seconds=7)
    token = written(first, b"state")
    assert second.get_state() == third.get_state() == (b"state", token)
    hosted.close()
    assert second.get_state() == (b"state", token), "two hosts in one process share their server"


def test_an_endpoint_without_port_uses_the_default_port(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def refuse(host: str, port: int, **_: Any) -> None:
        seen.append((host, port))
        raise rallypoint.AddressTaken(address=f"{host}:{port}", why="it is a test")

    monkeypatch.setattr("rallypoint.compat.rendezvous.backend.TCPStore", refuse)
    for endpoint in ("", "localhost"):
        with pytest.raises(RendezvousConnectionError, match="it is a test"):
            create_backend(parameters(endpoint))
    assert seen == [("localhost", 29400)] * 2 and DEFAULT_PORT == 29400


def test_a_client_without_a_host_fails_to_connect() -> None:
    with pytest.raises(RendezvousConnectionError, match=r"by the option 'is_host', .* a client.*nothing listens"):
        create_backend(parameters(f"{HOST}:{reserve_port()}", is_host=False, read_timeout=1))


def test_hosting_at_a_foreign_address_is_refused() -> None:
    with pytest.raises(RendezvousConnectionError, match=r"not an address of this machine"):
        create_backend(parameters("203.0.113.9:4711", is_host=True))


def test_a_port_of_another_program_is_reported_as_in_use() -> None:
    with net.bound_socket(HOST) as silent:
        endpoint = f"{HOST}:{silent.getsockname()[1]}"
        with pytest.raises(RendezvousConnectionError, match=rf"cannot listen on {endpoint}: .* already in use"):
            create_backend(parameters(endpoint, read_timeout=1))


def test_the_state_can_be_in_a_file(create: Create, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    first, store = create(path, store_type=" FILE ", read_timeout=7)
    second, _ = create(path, store_type="file")
    assert isinstance(store, FileStore) and store.path == path and store.timeout == timedelta(seconds=7)
    token = written(first, b"state")
    assert second.get_state() == (b"state", token)


def test_a_file_without_a_name_is_temporary(create: Create, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    backend, store = create("", store_type="file")
    written(backend, b"state")
    assert Path(store.path).parent == tmp_path


def test_a_file_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "store")
    with pytest.raises(RendezvousConnectionError, match=f"'{path}'") as caught:
        create_backend(parameters(path, store_type="file"))
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"store_type": "etcd"}, "'store_type' must be tcp or file, not 'etcd'"),
        ({"read_timeout": 0}, "'read_timeout' must be positive, not 0"),
        ({"read_timeout": "-5"}, "'read_timeout' must be positive, not -5"),
        ({"read_timeout": "long"}, "'read_timeout' .*'long'"),
        ({"is_host": "perhaps"}, "'is_host' .*'perhaps'"),
    ],
)
def test_invalid_backend_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        create_backend(parameters(f"{HOST}:1", **options))


def test_a_refused_run_id_leaves_no_server_behind() -> None:
    port = reserve_port()
    with pytest.raises(ValueError, match="run id") as caught:
        create_backend(parameters(f"{HOST}:{port}", ""))
    net.listen([HOST], port)[0].close()
    assert caught.tb is not None, "the error and its frames are kept alive until here"


NODE = """
import os, sys
from rallypoint.compat.rendezvous import RendezvousParameters, create_backend
print("ready", flush=True)
sys.stdin.readline()
backend, store = create_backend(RendezvousParameters("c10d", sys.argv[1], "run", 2, 2))
backend.set_state(b"%d" % os.getpid())
store.barrier("all have written", 2)
print((store._server is not None, backend.get_state()[0]), flush=True)
sys.stdin.read()
"""


def line_of(node: subprocess.Popen[str]) -> str:
    assert node.stdout is not None
    return node.stdout.readline()


@pytest.mark.parametrize("host", [HOST, "localhost", "[::1]"])
def test_one_of_two_competing_processes_hosts(host: str) -> None:
    endpoint = f"{host}:{reserve_port()}"
    with ExitStack() as stack:
        nodes = []
        for _ in range(2):
            command = [sys.executable, "-c", NODE, endpoint]
            node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(node.communicate, timeout=AMPLE_S)
            nodes.append(node)
        assert [line_of(node) for node in nodes] == ["ready\n"] * 2
        for node in nodes:
            assert node.stdin is not None
            node.stdin.write("go\n")
            node.stdin.flush()
        printed = [ast.literal_eval(line_of(node)) for node in nodes]
        assert sorted(hosts for hosts, _ in printed) == [False, True]
        states = {state for _, state in printed}
        assert len(states) == 1 and states <= {b"%d" % node.pid for node in nodes}
