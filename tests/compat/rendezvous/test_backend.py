"""The state of a rendezvous in a store of ours, and making that store; processes that both would host are real."""

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


def parameters(endpoint: str, run_id: str = "run", **options: object) -> RendezvousParameters:
    return RendezvousParameters("c10d", endpoint, run_id, 1, 2, **options)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def backend(store) -> C10dRendezvousBackend:
    return C10dRendezvousBackend(store, "run")


@pytest.fixture
def create() -> Iterator[Callable[..., Any]]:
    """Return a function that makes a backend and its store, which is closed at the end."""
    with ExitStack() as stack:

        def made(*arguments: Any, **options: Any) -> Any:
            backend, store = create_backend(parameters(*arguments, **options))
            stack.callback(store.close)
            return backend, store

        yield made


# The state


def test_there_is_no_state_at_first(backend):
    assert backend.name == "c10d"
    assert backend.get_state() is None


def test_without_a_token_only_the_first_writes(backend):
    state, token, won = backend.set_state(b"first")
    assert (state, won) == (b"first", True)
    assert backend.set_state(b"second") == (b"first", token, False)
    assert backend.get_state() == (b"first", token)


def test_the_current_token_replaces_and_is_stale_then(backend):
    _, old, _ = backend.set_state(b"first")
    state, new, won = backend.set_state(b"second", old)
    assert (state, won) == (b"second", True)
    assert backend.set_state(b"third", old) == (b"second", new, False)
    assert backend.get_state() == (b"second", new)


FOREIGN = [b"foreign", b"\xff\xfe", b"", "text", 7, object()]


@pytest.mark.parametrize("token", FOREIGN, ids=lambda token: type(token).__name__)
def test_a_foreign_token_writes_nothing(backend, token):
    assert backend.set_state(b"first", token) is None, "nor is it a state"
    assert backend.get_state() is None
    _, mine, _ = backend.set_state(b"first")
    assert backend.set_state(b"second", token) == (b"first", mine, False)


@pytest.mark.parametrize("state", [b"", b"\0", bytes(range(256)), b"x" * 100_000], ids=len)
def test_any_bytes_are_a_state(backend, state):
    _, token, _ = backend.set_state(b"before")
    assert backend.set_state(state, token)[::2] == (state, True)
    read, token = backend.get_state()
    assert read == state
    assert backend.set_state(b"after", token)[::2] == (b"after", True)


def test_a_second_node_finds_the_state(store, backend):
    _, token, _ = backend.set_state(b"first")
    assert C10dRendezvousBackend(store, "run").get_state() == (b"first", token)
    assert C10dRendezvousBackend(store, "other").get_state() is None


def test_a_state_that_was_deleted_can_be_written_again(store, backend):
    _, token, _ = backend.set_state(b"first")
    store.delete_key(KEY)
    assert backend.set_state(b"second", token) is None
    assert backend.set_state(b"second")[::2] == (b"second", True)
    assert backend.get_state()[0] == b"second"


@pytest.mark.parametrize("blob", ["not base64!", "abc", "YQ==YQ==", "\0", "YWJj\n"])
def test_a_corrupt_blob_is_said_to_be(store, backend, blob):
    store.set(KEY, blob)
    for call in (backend.get_state, lambda: backend.set_state(b"new"), lambda: backend.set_state(b"new", b"token")):
        with pytest.raises(RendezvousStateError, match=rf"corrupt: '{KEY}' in <HashStore"):
            call()


@pytest.mark.parametrize("run_id", ["", None])
def test_an_empty_run_id_is_refused(store, run_id):
    with pytest.raises(ValueError, match="run id"):
        C10dRendezvousBackend(store, run_id)


class Broken:
    """A store of somebody else, whose calls fail once it is broken."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        if self.error is not None:
            raise self.error
        return getattr(self.store, name)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TimeoutError, ConnectionResetError, OSError])
def test_whatever_a_broken_store_raises_is_a_connection_error(kind):
    store = Broken()
    backend = C10dRendezvousBackend(store, "run")
    store.error = kind("it is gone\n#0 frames of C++")
    for call in (backend.get_state, lambda: backend.set_state(b"new"), lambda: C10dRendezvousBackend(store, "run")):
        with pytest.raises(RendezvousConnectionError, match=rf"'{KEY}' .* {kind.__name__}: it is gone$") as caught:
            call()
        assert caught.value.__cause__ is store.error


def test_a_mistake_is_not_a_broken_connection(backend):
    with pytest.raises(TypeError):
        backend.set_state("text")


def test_a_lost_server_is_a_connection_error():
    with rallypoint.Server(grace=0.1) as server:
        backend = C10dRendezvousBackend(TCPStore(HOST, server.port, timeout=AMPLE_S), "run")
    with pytest.raises(RendezvousConnectionError, match=str(server.port)) as caught:
        backend.get_state()
    assert isinstance(caught.value.__cause__, rallypoint.NetworkError)


# Making a store


def test_whoever_has_the_address_hosts_and_whoever_comes_later_joins(create):
    endpoint = f"{HOST}:{net.free_port(HOST)}"
    first, hosted = create(endpoint)
    second, joined = create(endpoint, is_host="true", read_timeout="7")
    third, client = create(f" {endpoint} ", is_host="0")
    assert [type(store) for store in (hosted, joined, client)] == [TCPStore] * 3
    assert hosted.timeout == client.timeout == timedelta(seconds=60) and joined.timeout == timedelta(seconds=7)
    _, token, _ = first.set_state(b"state")
    assert second.get_state() == third.get_state() == (b"state", token)
    hosted.close()
    assert second.get_state() == (b"state", token), "two hosts in one process share their server"


def test_the_default_port(monkeypatch):
    seen: list[Any] = []

    def refuse(host: str, port: int, **_: Any) -> None:
        seen.append((host, port))
        raise rallypoint.AddressTaken(address=f"{host}:{port}", why="it is a test")

    monkeypatch.setattr("rallypoint.compat.rendezvous.backend.TCPStore", refuse)
    for endpoint in ("", "localhost"):
        with pytest.raises(RendezvousConnectionError, match="it is a test"):
            create_backend(parameters(endpoint))
    assert seen == [("localhost", 29400)] * 2 and DEFAULT_PORT == 29400


def test_nobody_hosts():
    with pytest.raises(RendezvousConnectionError, match=r"by the option 'is_host', .* no host .*nothing listens"):
        create_backend(parameters(f"{HOST}:{net.free_port(HOST)}", is_host=False, read_timeout=1))


def test_an_address_that_is_not_here_cannot_be_hosted():
    with pytest.raises(RendezvousConnectionError, match=r"not an address of this machine"):
        create_backend(parameters("203.0.113.9:4711", is_host=True))


def test_a_port_that_another_program_has_is_said_to_be_taken():
    with net.bound_socket(HOST) as silent:
        endpoint = f"{HOST}:{silent.getsockname()[1]}"
        with pytest.raises(RendezvousConnectionError, match=rf"cannot listen on {endpoint}: .* already in use"):
            create_backend(parameters(endpoint, read_timeout=1))


def test_a_file(create, tmp_path: Path):
    path = str(tmp_path / "store")
    first, store = create(path, store_type=" FILE ", read_timeout=7)
    second, _ = create(path, store_type="file")
    assert isinstance(store, FileStore) and store.path == path and store.timeout == timedelta(seconds=7)
    _, token, _ = first.set_state(b"state")
    assert second.get_state() == (b"state", token)


def test_a_file_without_a_name_is_a_temporary_one(create, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    backend, store = create("", store_type="file")
    assert backend.set_state(b"state")[::2] == (b"state", True)
    assert Path(store.path).parent == tmp_path


def test_a_file_that_cannot_be(tmp_path):
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
def test_options_that_cannot_be(options, says):
    with pytest.raises(ValueError, match=says):
        create_backend(parameters(f"{HOST}:1", **options))


def test_a_refused_run_id_leaves_no_server():
    port = net.free_port(HOST)
    with pytest.raises(ValueError, match="run id") as caught:
        create_backend(parameters(f"{HOST}:{port}", ""))
    net.listen([HOST], port)[0].close()
    assert caught.tb is not None, "whoever keeps the error keeps its frames, and what is in them"


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


@pytest.mark.parametrize("host", [HOST, "localhost", "[::1]"])
def test_of_two_processes_that_would_host_one_does(host):
    endpoint = f"{host}:{net.free_port(host.strip('[]'))}"
    with ExitStack() as stack:
        nodes = []
        for _ in range(2):
            command = [sys.executable, "-c", NODE, endpoint]
            node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(node.communicate, timeout=AMPLE_S)
            nodes.append(node)
        assert [node.stdout.readline() for node in nodes] == ["ready\n"] * 2
        for node in nodes:
            node.stdin.write("go\n")
            node.stdin.flush()
        said = [ast.literal_eval(node.stdout.readline()) for node in nodes]
        assert sorted(hosts for hosts, _ in said) == [False, True]
        states = {state for _, state in said}
        assert len(states) == 1 and states <= {b"%d" % node.pid for node in nodes}
