"""Comparison with PyTorch by running both: names, signatures, results and errors; and one store shared by both.

`DIFFERS` below and docs/migrate.md list the intended differences.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import random
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.ports import reserve_port

import rallypoint
from rallypoint.compat import rendezvous

pytestmark = pytest.mark.needs("torch")

THERE = "torch.distributed.elastic.rendezvous"
MODULES = [
    "",
    ".api",
    ".utils",
    ".c10d_rendezvous_backend",
    ".registry",
    ".static_tcp_rendezvous",
    ".dynamic_rendezvous",
]
PRIVATE = frozenset(
    ("_delay", "_matches_machine_hostname", "_parse_rendezvous_config", "_PeriodicTimer", "_try_parse_port")
)
"""Private names that other packages use nevertheless."""

HOST = "127.0.0.1"
AMPLE_S = 60.0
KEY = "torch.rendezvous.run"


def theirs(module: str = "") -> ModuleType:
    return importlib.import_module(THERE + module)


def exported(module: ModuleType) -> set[str]:
    """Return the names in a module's `__all__`; without one, the public names that it defines."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {
        name
        for name, value in public.items()
        if getattr(value, "__module__", None) == module.__name__ or name.isupper()
    }


def outcome(call: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """Return the call's result, or the name of the error it raised."""
    try:
        return "returned", call(*arguments)
    except Exception as error:
        return "raised", type(error).__name__


# Names and signatures


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    """Return the parameters of a function without their types."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("module", MODULES)
def test_every_exported_name_of_torch_exists(module: str) -> None:
    names = exported(theirs(module)) | (PRIVATE if module == ".utils" else set())
    assert names, "the module exports something"
    assert names <= set(rendezvous.__all__)
    assert all(hasattr(rendezvous, name) for name in names)


def unlike(there: Any, here: Any) -> Iterator[str]:
    """Yield every difference between torch's object and ours of the same name, members included."""
    if isinstance(there, type) and issubclass(there, Exception):
        if not issubclass(here, Exception):
            yield "is no error"
    elif isinstance(there, type):
        if shape(here) != shape(there):
            yield f"is made with {inspect.signature(here)}, not {inspect.signature(there)}"
        if here.__dict__.get("__abstractmethods__") != there.__dict__.get("__abstractmethods__"):
            yield "has other abstract methods"
        for name, value in vars(there).items():
            if name.startswith("_"):
                continue
            mine = inspect.getattr_static(here, name, None)
            if type(mine) is not type(value):
                yield f".{name} is {mine!r}, not {value!r}"
            elif callable(value) and shape(mine) != shape(value):
                yield f".{name} takes {inspect.signature(mine)}, not {inspect.signature(value)}"
    elif inspect.isfunction(there):
        if shape(here) != shape(there):
            yield f"takes {inspect.signature(here)}, not {inspect.signature(there)}"
    elif isinstance(there, (int, str)):
        if here != there:
            yield f"is {here!r}, not {there!r}"
    elif type(here).__name__ != type(there).__name__:
        yield f"is a {type(here).__name__}, not a {type(there).__name__}"


@pytest.mark.parametrize("module", MODULES)
def test_signatures_are_the_same(module: str) -> None:
    names = exported(theirs(module)) | (PRIVATE if module == ".utils" else set())
    wrong = [
        f"{name} {what}"
        for name in sorted(names)
        for what in unlike(getattr(theirs(module), name), getattr(rendezvous, name))
    ]
    assert not wrong


class A:
    """One of two classes that differ."""

    def __init__(self, a: int) -> None: ...
    def f(self, a: int = 1) -> None: ...
    def g(self) -> None: ...
    @property
    def p(self) -> int:
        return 1


class B:
    """The other: its constructor and two members differ, and one member is missing."""

    def f(self, a: int = 2) -> None: ...
    def p(self) -> None: ...


def test_the_comparison_detects_differences() -> None:
    assert [what.partition(" ")[0] for what in unlike(A, B)] == ["is", ".f", ".g", ".p"]
    assert list(unlike(lambda a, b=1: 0, lambda a, *, b=1: 0)) and list(unlike(1, 2)) and list(unlike(A, A)) == []


# Errors


@pytest.mark.parametrize("name", sorted(name for name in rendezvous.__all__ if name.endswith("Error")))
def test_errors_of_ours_are_caught_as_torchs(name: str) -> None:
    there, here = getattr(theirs(), name), getattr(rendezvous, name)
    with pytest.raises(there) as caught:
        raise here("why", node="a")
    assert isinstance(caught.value, here) and isinstance(caught.value, theirs().RendezvousError)
    assert type(caught.value).__name__ == name and str(caught.value) == "why" and caught.value.node == "a"
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is here and str(again) == "why", "unpickling needs no torch"
    with pytest.raises(there):
        raise here
    others = {theirs().RendezvousClosedError, theirs().RendezvousStateError} - {there}
    assert not any(isinstance(caught.value, other) for other in others)


def test_an_error_class_of_a_users_own_is_caught_as_torchs() -> None:
    class Late(rendezvous.RendezvousTimeoutError):
        def __init__(self, minutes: int) -> None:
            super().__init__(f"{minutes} minutes late")

    with pytest.raises(theirs().RendezvousTimeoutError, match="3 minutes late") as caught:
        raise Late(3)
    assert isinstance(caught.value, Late) and isinstance(caught.value, TimeoutError)


# The same input to both

DIFFERS: dict[str | None, tuple[str, Any]] = {
    # An IPv6 address without brackets has no port, however many colons it has
    "::1": ("returned", ("::1", 999)),
    "::1:5": ("returned", ("::1:5", 999)),
    "2001:db8::1": ("returned", ("2001:db8::1", 999)),
    "fe80::1%eth0": ("returned", ("fe80::1%eth0", 999)),
    "[fe80::1%eth0]:5": ("returned", ("fe80::1%eth0", 5)),
    # Not an address, and not a host either
    "h:1:2": ("raised", "ValueError"),
    "[h:3]:4": ("raised", "ValueError"),
}
"""Endpoints that we parse differently on purpose."""

ENDPOINTS = [None, "", "  ", "h", "h:1", " h:1 ", "h: 1", "h :1", "h:", "h:0", "h:65535", "h:65536", "h:-1", "h:x"]
ENDPOINTS += ["h:000001", "h:+5", "h:1_0", "h:123456", "h!:4", "a b:4", "a_b:3", "-a:3", "a.b-c:4", "a:b:c", ":1", ":"]
ENDPOINTS += ["1.2.3.4", "1.2.3.4:5", "[1.2.3.4]:5", "[host]:5", "localhost:29400", "http://h:3", "h\u00e9h:4"]
ENDPOINTS += ["[::1]", "[::1]:5", "[::1", "::1]", "[::1]:", "[::1]:x", "[ ::1 ]:4", "[]:5", "[]"]


@pytest.mark.parametrize("endpoint", [*ENDPOINTS, *DIFFERS])
def test_endpoints_are_parsed_as_torch_parses_them(endpoint: str | None) -> None:
    there = outcome(theirs(".utils").parse_rendezvous_endpoint, endpoint, 999)
    here = outcome(rendezvous.parse_rendezvous_endpoint, endpoint, 999)
    assert here == DIFFERS.get(endpoint, there)
    assert (here == there) == (endpoint not in DIFFERS)


PORTS = ["", "0", "00", "1", "65535", "65536", "70000", " 80", "80 ", "-1", "+5", "a", "8a", "1_0", "\u0661", None]


@pytest.mark.parametrize("text", PORTS)
def test_port_numbers_are_parsed_as_torch_parses_them(text: Any) -> None:
    assert rendezvous._try_parse_port(text) == theirs(".utils")._try_parse_port(text)


CONFIGURATIONS = [
    "",
    "  ",
    ",",
    "a=b",
    "a=b,c=d",
    " a = b , c = d ",
    "a=b,",
    "a",
    "=b",
    "a=",
    "a=,b=c",
    "a=b,a=c",
    "a=b=c",
]
CONFIGURATIONS += ["a==b", " =b", "a= ", ",a=b", "a=b,,c=d", "a=b;c=d", "a =\tb\n"]


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_configurations_are_parsed_as_torch_parses_them(text: str) -> None:
    there = outcome(theirs(".utils")._parse_rendezvous_config, text)
    assert outcome(rendezvous._parse_rendezvous_config, text) == there


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", HOST, "127.0.0.2", "::1", "0.0.0.0", "", "203.0.113.9", socket.gethostname()]
)
def test_hosts_match_this_machine_as_in_torch(host: str) -> None:
    there = theirs(".utils")._matches_machine_hostname(host)
    assert rendezvous._matches_machine_hostname(host) == there


VALUES = [None, True, False, 0, 1, 2, -1, 1.0, 3.7, "0", "1", "2", "-3", "", " 5 ", "1_0", "3.7", " true ", b"1", [1]]
VALUES += ["true", "True", "TRUE", "t", "T", "yes", "YES", "y", "Y"]
VALUES += ["false", "f", "no", "No", "n", "on", "off", "tru", "x"]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("read", ["get", "get_as_bool", "get_as_int"])
def test_options_are_converted_as_in_torch(read: str, value: object) -> None:
    def ask(module: Any, key: str, *default: Any) -> tuple[str, Any]:
        return outcome(getattr(module.RendezvousParameters("b", "e", "run", 1, 1, k=value), read), key, *default)

    for question in (("k",), ("k", None), ("k", 1), ("absent",), ("absent", value), ("absent", 1)):
        here, there = ask(rendezvous, *question), ask(theirs(), *question)
        assert here == there and type(here[1]) is type(there[1]), question


@pytest.mark.parametrize(
    "arguments",
    [
        ("", "e", "r", 1, 1),
        (None, "e", "r", 1, 1),
        ("b", "", "", 1, 1),
        ("b", None, None, 1, 1),
        ("b", "e", "r", 0, 1),
        ("b", "e", "r", -1, 1),
        ("b", "e", "r", 3, 2),
        ("b", "e", "r", "1", 2),
        ("b", "e", "r", 2, 2, "here"),
    ],
)
def test_parameters_are_checked_as_in_torch(arguments: tuple[Any, ...]) -> None:
    def make(module: Any) -> tuple[str, Any]:
        return outcome(lambda: vars(module.RendezvousParameters(*arguments)))

    assert make(rendezvous) == make(theirs())


@pytest.mark.parametrize("seconds", [None, 1, 0, -1])
@pytest.mark.parametrize("part", ["join", "last_call", "close", "heartbeat"])
def test_timeouts_are_checked_as_in_torch(part: str, seconds: float | None) -> None:
    def make(kind: Any) -> dict[str, timedelta]:
        made = kind(**{part: None if seconds is None else timedelta(seconds=seconds)})
        return {name: getattr(made, name) for name in ("join", "last_call", "close", "heartbeat")}

    there = outcome(make, theirs(".dynamic_rendezvous").RendezvousTimeout)
    assert outcome(make, rendezvous.RendezvousTimeout) == there


def test_store_info_of_either_is_read_by_the_other() -> None:
    store = rallypoint.HashStore()
    here = rendezvous.RendezvousStoreInfo.build(0, store, "node-a", 4711)
    there = theirs().RendezvousStoreInfo.build(1, store, None)
    assert vars(here) == vars(there) == {"master_addr": "node-a", "master_port": 4711}
    assert repr(here) == repr(there)
    keys = rallypoint.HashStore()
    theirs().RendezvousStoreInfo.build(0, keys, "node-b", 1)
    assert rendezvous.RendezvousStoreInfo.build(1, keys, "node-c", 2).master_addr == "node-b"
    assert sorted(keys.list_keys()) == sorted(store.list_keys())


# One store for both

STORES = [
    "our HashStore",
    "our FileStore",
    "our TCPStore",
    "our TCPStore on torch's server",
    "torch's HashStore",
    "torch's FileStore",
    "torch's TCPStore",
    "torch's TCPStore on our server",
]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_store(kind: str, stack: ExitStack, path: str) -> Any:
    """Make a store of torch's or of ours."""
    dist = importlib.import_module("torch.distributed")
    if kind == "our HashStore":
        return rallypoint.HashStore()
    if kind == "our FileStore":
        return stack.enter_context(rallypoint.FileStore(path))
    if kind == "our TCPStore":
        return stack.enter_context(rallypoint.TCPStore(HOST, 0, is_master=True))
    if kind == "our TCPStore on torch's server":
        server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        stack.callback(lambda: server)  # it serves as long as it is referenced
        return stack.enter_context(rallypoint.TCPStore(HOST, server.port))
    if kind == "torch's HashStore":
        return dist.HashStore()
    if kind == "torch's FileStore":
        return dist.FileStore(path, -1)
    if kind == "torch's TCPStore":
        return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    assert kind == "torch's TCPStore on our server"
    server = stack.enter_context(rallypoint.Server())
    return dist.TCPStore(HOST, server.port, wait_for_workers=False)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path) -> Any:
    made = make_store(request.param, stack, str(tmp_path / "store"))
    made.set_timeout(timedelta(seconds=AMPLE_S))
    return made


@pytest.mark.parametrize("ours_first", [True, False])
def test_our_backend_and_torch_s_share_a_state(store: Any, ours_first: bool) -> None:
    kinds = [rendezvous.C10dRendezvousBackend, theirs(".c10d_rendezvous_backend").C10dRendezvousBackend]
    a, b = (kind(store, "run") for kind in (kinds if ours_first else kinds[::-1]))
    assert store.get(KEY) == b"Y2FuaW1hZGFt" and a.get_state() is b.get_state() is None
    first = bytes(range(256))
    state, token, won = a.set_state(first)
    assert (state, won) == (first, True) and store.get(KEY) == token
    assert b.get_state() == (first, token)
    assert b.set_state(b"second") == (first, token, False)
    _, newer, won = b.set_state(b"second", token)
    assert won and store.get(KEY) == newer == b"c2Vjb25k"
    assert a.get_state() == (b"second", newer)
    assert a.set_state(b"third", token) == (b"second", newer, False)
    assert a.set_state(b"third", newer)[::2] == (b"third", True)
    assert b.get_state() == (b"third", b"dGhpcmQ=")


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_have_equal_results_on_our_backend_and_torch_s(seed: int) -> None:
    """Make the same random calls on both, each on its own store; tokens are earlier ones or invalid."""
    dice = random.Random(seed)
    here, there = rallypoint.HashStore(), rallypoint.HashStore()
    ours = rendezvous.C10dRendezvousBackend(here, "run")
    torchs = theirs(".c10d_rendezvous_backend").C10dRendezvousBackend(there, "run")
    tokens: list[Any] = [None, b"foreign", "text", 5]
    for number in range(60):
        state, token = dice.randbytes(dice.randint(1, 9)), dice.choice([*tokens, *[tokens[-1]] * len(tokens)])
        call = "get_state" if dice.random() < 0.3 else "set_state"
        arguments = () if call == "get_state" else (state, token)
        mine, other = outcome(getattr(ours, call), *arguments), outcome(getattr(torchs, call), *arguments)
        assert mine == other, (number, call, arguments)
        assert here.get(KEY) == there.get(KEY)
        if mine[1] is not None:
            tokens.append(mine[1][1])
    assert len(set(map(str, tokens))) > 10, "states were written"


@pytest.mark.parametrize("blob", [b"abc", b"YQ", b"Y\xff", b"a", b"non_base64"])
def test_a_corrupt_blob_is_an_error_in_our_backend_and_torch_s(blob: bytes) -> None:
    store = rallypoint.HashStore()
    ours = rendezvous.C10dRendezvousBackend(store, "run")
    torchs = theirs(".c10d_rendezvous_backend").C10dRendezvousBackend(store, "run")
    store.set(KEY, blob)
    assert outcome(ours.get_state) == outcome(torchs.get_state) == ("raised", "RendezvousStateError")
    assert outcome(ours.set_state, b"x") == outcome(torchs.set_state, b"x") == ("raised", "RendezvousStateError")


def test_a_lost_server_under_torchs_client_is_a_connection_error() -> None:
    dist = importlib.import_module("torch.distributed")
    with rallypoint.Server() as server:
        client = dist.TCPStore(HOST, server.port, wait_for_workers=False)
        backend = rendezvous.C10dRendezvousBackend(client, "run")
        backend.set_state(b"state")
    for call in (backend.get_state, lambda: backend.set_state(b"x")):
        with pytest.raises(rendezvous.RendezvousConnectionError, match=rf"'{KEY}'") as caught:
            call()
        assert "\n" not in str(caught.value), "frames of C++ are left to the cause"


# Created by one, joined by the other


@pytest.mark.parametrize("ours_first", [True, False])
def test_either_can_join_a_store_that_the_other_hosts(stack: ExitStack, ours_first: bool) -> None:
    """Either would host the store: the address is this machine's."""
    endpoint = f"{HOST}:{reserve_port()}"
    modules = [(rendezvous, rendezvous), (theirs(), theirs(".c10d_rendezvous_backend"))]
    made = []
    for api, backend in modules if ours_first else modules[::-1]:
        made.append(backend.create_backend(api.RendezvousParameters("c10d", endpoint, "run", 1, 2)))
    stack.callback(next(store for _, store in made if isinstance(store, rallypoint.Store)).close)
    (first, _), (second, _) = made
    _, token, _ = first.set_state(b"state")
    assert second.get_state() == (b"state", token)


def test_torchs_own_handler_runs_on_our_backend() -> None:
    """torch accepts any object with the methods of a backend: one node joins alone and leaves."""
    dynamic = theirs(".dynamic_rendezvous")
    store = importlib.import_module("torch.distributed").HashStore()
    timeout = dynamic.RendezvousTimeout(last_call=timedelta(milliseconds=1))
    backend = rendezvous.C10dRendezvousBackend(store, "run")
    handler = dynamic.DynamicRendezvousHandler.from_backend("run", store, backend, 1, 1, HOST, timeout)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert handler.shutdown()


def test_torch_s_static_rendezvous_joins_ours(stack: ExitStack) -> None:
    port = reserve_port()
    ours = rendezvous.StaticTCPRendezvous(HOST, port, 0, 2, "run", 60)
    here = ours.next_rendezvous()
    assert ours._store is not None
    stack.callback(ours._store.close)
    there = theirs(".static_tcp_rendezvous").StaticTCPRendezvous(HOST, port, 1, 2, "run", 60).next_rendezvous()
    here.store.set("k", "v")
    assert there.store.get("k") == b"v"
    assert vars(here.bootstrap_store_info) == vars(there.bootstrap_store_info)


def test_each_registry_accepts_handlers_of_the_other() -> None:
    there = theirs().RendezvousHandler
    handler = type("Handler", (there,), dict.fromkeys(there.__abstractmethods__, lambda self: "mine"))
    registry = rendezvous.RendezvousHandlerRegistry()
    registry.register("mine", lambda params: handler())
    assert isinstance(registry.create_handler(rendezvous.RendezvousParameters("mine", "", "", 1, 1)), there)
    registry = theirs().RendezvousHandlerRegistry()
    registry.register("static", rendezvous.create_rdzv_handler)
    made = registry.create_handler(theirs().RendezvousParameters("static", "h:1", "run", 1, 2, rank="1"))
    assert isinstance(made, rendezvous.StaticTCPRendezvous) and made.rank == 1


def test_the_migration_page_lists_every_name() -> None:
    page = (Path(__file__).parents[3] / "docs/migrate.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \|$", page, re.M)
    assert len(rows) > 20
    for old, new in rows:
        module, _, name = old.rpartition(".")
        assert name == new and hasattr(theirs(f".{module}"), name)
    assert {new for _, new in rows} == set(rendezvous.__all__)
