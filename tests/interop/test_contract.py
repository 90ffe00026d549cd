"""Arguments, attributes and environment of the store classes: PyTorch's and ours behave alike.

Each probe is a function of a module, `torch.distributed` or `rallypoint`, and runs in a process of its own, so that
variables of the environment reach PyTorch's C++ too.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from .torch_processes import TorchProcesses

pytestmark = pytest.mark.needs("torch")

HOST = "127.0.0.1"
BRIEF = timedelta(seconds=1)
MODULES = ("torch.distributed", "rallypoint")


@pytest.fixture(params=MODULES)
def library(request: pytest.FixtureRequest) -> str:
    """The module whose classes are tested."""
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=MODULES)
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a launcher's store, which has the key `launcher`."""
    store = importlib.import_module(request.param).TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    store.set("launcher", "1")
    yield store.port
    del store  # the server ends with it


def outcome(call: Any) -> str:
    try:
        return repr(call())
    except Exception as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        if "DistNetworkError" in names or "NetworkError" in names:
            return "network error"
        return next(name for name in names if hasattr(importlib.import_module("builtins"), name))


# use_libuv


def ask_for_libuv(library: str) -> list[str]:
    TCPStore = importlib.import_module(library).TCPStore
    default = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    given: list[dict[str, Any]] = [{}, {"use_libuv": True}, {"use_libuv": False}]
    answers = [TCPStore(HOST, default.port, **more).libuvBackend for more in given]
    last = TCPStore(HOST, 0, None, True, BRIEF, False, False, None, False)
    answers += [default.libuvBackend, default.clone().libuvBackend, last.libuvBackend]
    return [*map(repr, answers), outcome(lambda: setattr(default, "libuvBackend", True))]


def test_use_libuv_is_accepted_and_told(torch_processes: TorchProcesses, library: str) -> None:
    told = ["True", "True", "False", "True", "True", "False", "AttributeError"]
    assert torch_processes.start(ask_for_libuv, library).result() == told


# A launcher's store


def be_master(library: str, port: int, told: dict[str, str], more: dict[str, Any]) -> str:
    """Open a store as its master; return whether it is the launcher's store, or the error."""
    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": "1", **told})
    TCPStore = importlib.import_module(library).TCPStore
    return outcome(lambda: TCPStore(HOST, port, is_master=True, timeout=BRIEF, **more).check(["launcher"]))


def be_master_in_many_ways(library: str, port: int) -> list[str]:
    """Open a master with the launcher's variable, other spellings of it, another port, and without it."""
    served = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
    ways: list[tuple[dict[str, str], dict[str, Any]]] = [
        (served, {}),
        (served, {"world_size": 2}),
        (served, {"world_size": 2, "multi_tenant": True}),
        ({**served, "TORCHELASTIC_USE_AGENT_STORE": "1"}, {}),
        ({**served, "TORCHELASTIC_USE_AGENT_STORE": "yes"}, {}),
        ({**served, "TORCHELASTIC_USE_AGENT_STORE": "False"}, {}),
        ({**served, "MASTER_PORT": "1"}, {}),
        ({}, {}),
    ]
    return [be_master(library, port, *way) for way in ways]


def test_a_master_at_the_launchers_port_is_a_client(torch_processes: TorchProcesses, library: str, port: int) -> None:
    told = torch_processes.start(be_master_in_many_ways, library, port).result()
    assert told == ["True"] * 5 + ["network error"] * 3


def start_a_private_store(library: str, port: int) -> str:
    told = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
    return be_master(library, 0, told, {"wait_for_workers": False})


def create_store(library: str, port: int) -> str:
    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)})
    from torch.distributed.elastic.utils import distributed as theirs

    from rallypoint.compat import distributed as ours

    made = (theirs if library == "torch.distributed" else ours).create_c10d_store(True, HOST, port, 1, timeout=20)
    return repr(made.check(["launcher"]))


def create_backend(library: str, port: int) -> str:
    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)})
    from torch.distributed.elastic import rendezvous as theirs
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    from rallypoint.compat import rendezvous as ours

    names: Any = (theirs, c10d_rendezvous_backend) if library == "torch.distributed" else (ours, ours)
    parameters = names[0].RendezvousParameters("c10d", f"{HOST}:{port}", "run", 1, 1, is_host="true")
    return repr(names[1].create_backend(parameters)[1].check(["launcher"]))


@pytest.mark.parametrize(
    ("function", "expected"),
    [(create_store, "True"), (create_backend, "True"), (start_a_private_store, "False")],
)
def test_other_stores_at_the_launchers_port(
    torch_processes: TorchProcesses, library: str, port: int, function: Any, expected: str
) -> None:
    assert torch_processes.start(function, library, port).result() == expected


# The file of a FileStore


def drop_handles(library: str, folder: str) -> list[bool]:
    """Return whether the file exists after each of several ways to drop its handles."""
    module = importlib.import_module(library)
    left: list[bool] = []

    def look(path: str) -> None:
        left.append(os.path.exists(path))

    for world_size in (-1, 0, 1):
        path = f"{folder}/alone{world_size}"
        store = module.FileStore(path, world_size)
        store.set("k", "v")
        del store
        look(path)
    first, second = (module.FileStore(f"{folder}/two", 2) for _ in range(2))
    clone, view = first.clone(), module.PrefixStore("p", second)
    del first
    look(f"{folder}/two")
    del second
    look(f"{folder}/two")
    del clone
    look(f"{folder}/two")
    del view
    look(f"{folder}/two")
    return left


def test_the_file_is_removed_with_its_last_handle(
    torch_processes: TorchProcesses, library: str, tmp_path: Path
) -> None:
    stays = [True, False, False, True, True, True, False]
    assert torch_processes.start(drop_handles, library, str(tmp_path)).result() == stays


# Misuse


def misuse(library: str) -> list[str]:
    module = importlib.import_module(library)
    store = module.HashStore()
    calls = [
        lambda: module.TCPStore(HOST, 0, world_size=0, is_master=True, timeout=BRIEF),
        lambda: module.TCPStore(HOST, 0, world_size=0, is_master=True, timeout=BRIEF, wait_for_workers=False),
        lambda: module.TCPStore(HOST, 0, world_size=-1, is_master=True, timeout=BRIEF).num_keys(),
        lambda: module.PrefixStore("p", None),
        lambda: module.PrefixStore("p", 7),
        lambda: module.PrefixStore("p", module.PrefixStore("q", store))._underlying_non_prefix_store is store,
        lambda: module.PrefixStore("p", store)._underlying_non_prefix_store is store,
    ]
    return [outcome(call) for call in calls]


def test_both_libraries_refuse_the_same_misuse(torch_processes: TorchProcesses, library: str) -> None:
    refused = ["ValueError", "ValueError", "0", "ValueError", "TypeError", "True", "True"]
    assert torch_processes.start(misuse, library).result() == refused


def be_client_of_port_0(library: str) -> str:
    from torch.distributed.elastic.utils import distributed as theirs

    from rallypoint.compat import distributed as ours

    create = (theirs if library == "torch.distributed" else ours).create_c10d_store
    return outcome(lambda: create(False, HOST, 0, timeout=1))


def test_a_client_of_port_0_finds_no_server(torch_processes: TorchProcesses, library: str) -> None:
    assert torch_processes.start(be_client_of_port_0, library).result() == "network error"


# Words that people search for in errors

WORDS = {
    "hash get": "timeout",
    "hash wait": "timeout",
    "hash multi_get": "timeout",
    "tcp get": "timeout",
    "tcp wait": "timeout",
    "tcp queue_pop": "timeout",
    "tcp barrier": "timeout",
    "tcp pop of nothing": "empty",
    "file get": "timeout",
    "port taken": "address already in use|EADDRINUSE",
    "nobody there": "timed out",
    "workers missing": "timed out|clients joined",
    "world size 0": "world size|cannot be 0",
    "prefix of nothing": "cannot be None",
}
"""Failing calls, and words that both PyTorch's error and ours contain, ignoring case."""


def fail(library: str, folder: str) -> dict[str, str]:
    """Return the message of the error that each call raises."""
    module = importlib.import_module(library)
    tcp = module.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    hashed, file, brief = module.HashStore(), module.FileStore(f"{folder}/file", 1), timedelta(milliseconds=20)
    for store in (tcp, hashed, file):
        store.set_timeout(BRIEF if store is file else brief)
    calls = [
        lambda: hashed.get("k"),
        lambda: hashed.wait(["k"], brief),
        lambda: hashed.multi_get(["k"]),
        lambda: tcp.get("k"),
        lambda: tcp.wait(["j", "k"], brief),
        lambda: tcp.queue_pop("q"),
        lambda: tcp.barrier("b", 2, brief),
        lambda: tcp.queue_pop("q", False),
        lambda: file.get("k"),
        lambda: module.TCPStore(HOST, tcp.port, is_master=True, timeout=BRIEF),
        lambda: module.TCPStore(HOST, 1, timeout=brief),
        lambda: module.TCPStore(HOST, 0, 2, True, timeout=brief),
        lambda: module.TCPStore(HOST, 0, 0, True, timeout=brief),
        lambda: module.PrefixStore("p", None),
    ]
    return {name: words_of(call) for name, call in zip(WORDS, calls, strict=True)}


def words_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    raise AssertionError("it went through")


def test_errors_have_the_words_that_people_look_for(
    torch_processes: TorchProcesses, library: str, tmp_path: Path
) -> None:
    said = torch_processes.start(fail, library, str(tmp_path)).result()
    lacking = {
        name: (word, said[name])
        for name, words in WORDS.items()
        for word in words.split("|")
        if word.lower() not in said[name].lower()
    }
    assert not lacking
