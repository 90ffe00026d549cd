"""The interface of launchers and handlers: parameters, rounds, errors, and the registry. Runs without torch."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import rallypoint
from rallypoint.compat import rendezvous
from rallypoint.compat.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousSettings,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    get_rendezvous_handler,
    rendezvous_handler_registry,
)
from rallypoint.store.memory import HashStore

AMPLE_S = 60.0
ERRORS = [name for name in rendezvous.__all__ if name.endswith("Error")]


class Handler(RendezvousHandler):
    """A handler that only has a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_backend(self) -> str:
        return self.name

    def next_rendezvous(self) -> RendezvousInfo:
        raise NotImplementedError

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        return True


def parameters(backend: str = "mine", **options: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, "host:1", "run", 1, 2, **options)


# Parameters


def test_parameters_keep_the_given_values() -> None:
    given = RendezvousParameters("mine", "host:1", "run", 1, 2, "here", colour="red")
    assert (given.backend, given.endpoint, given.run_id) == ("mine", "host:1", "run")
    assert (given.min_nodes, given.max_nodes, given.local_addr) == (1, 2, "here")
    assert given.config == {"colour": "red"}
    assert given.get("colour") == "red" and given.get("size") is None and given.get("size", 3) == 3


@pytest.mark.parametrize("name", ["colour", "size"])
def test_an_invalid_option_is_named(name: str) -> None:
    given = parameters(**{name: "soft"})
    for read in (given.get_as_bool, given.get_as_int):
        with pytest.raises(ValueError, match=f"{name!r} .*'soft'"):
            read(name)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("", "h", "run", 1, 1), "name .* empty"),
        (("b", "h", "run", 0, 1), "min_nodes is 0"),
        (("b", "h", "run", 3, 2), r"max_nodes \(2\), .* min_nodes \(3\)"),
    ],
)
def test_invalid_parameters_are_refused(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RendezvousParameters(*arguments)


# Rounds


def test_rank_0_publishes_and_the_others_wait_for_it() -> None:
    store = HashStore()
    found: list[RendezvousStoreInfo] = []
    other = threading.Thread(target=lambda: found.append(RendezvousStoreInfo.build(1, store, "not-me", 1)))
    other.start()
    mine = RendezvousStoreInfo.build(0, store, "node-a", 4711)
    other.join(AMPLE_S)
    assert mine == RendezvousStoreInfo("node-a", 4711) and found == [mine]


def test_rank_0_without_a_port_finds_one() -> None:
    assert 0 < RendezvousStoreInfo.build(0, HashStore(), "node-a").master_port < 65536


# Errors


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_messages_and_fields_and_pickle(name: str) -> None:
    kind = getattr(rendezvous, name)
    assert issubclass(kind, RendezvousError) and issubclass(kind, rallypoint.RallypointError)
    assert str(kind()) == kind.__doc__, "an error raised without a message has a default one"
    error = kind("two", "words", node="a")
    assert str(error) == "two words" and error.node == "a"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == "two words" and again.node == "a"


def test_errors_derive_from_the_builtin_kinds() -> None:
    assert issubclass(RendezvousTimeoutError, TimeoutError)
    assert issubclass(RendezvousConnectionError, ConnectionError)
    assert issubclass(RendezvousConnectionError, rallypoint.NetworkError)


# The registry


def test_the_registry_creates_a_registered_handler() -> None:
    registry = RendezvousHandlerRegistry()
    seen: list[RendezvousParameters] = []

    def creator(params: RendezvousParameters) -> RendezvousHandler:
        seen.append(params)
        return Handler("mine")

    registry.register("mine", creator)
    given = parameters()
    assert registry.create_handler(given).get_backend() == "mine"
    assert seen == [given]


def test_a_name_belongs_to_one_creator() -> None:
    registry = RendezvousHandlerRegistry()

    def creator(params: RendezvousParameters) -> RendezvousHandler:
        return Handler("mine")

    registry.register("mine", creator)
    registry.register("mine", creator)
    with pytest.raises(ValueError, match=r"'mine' cannot be registered .* already registered"):
        registry.register("mine", lambda params: Handler("mine"))
    assert registry.create_handler(parameters()).get_backend() == "mine"
    with pytest.raises(ValueError, match="empty"):
        registry.register("", creator)


def test_an_unknown_name_is_refused_with_the_registered_names() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("other", lambda params: Handler("other"))
    with pytest.raises(ValueError, match=r"'mine' is not registered \(registered: other\)\."):
        registry.create_handler(parameters())


def test_a_handler_of_another_name_is_refused() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", lambda params: Handler("yours"))
    with pytest.raises(RuntimeError, match=r"'yours'.* does not match the requested 'mine'"):
        registry.create_handler(parameters())


def test_the_static_handler_is_preregistered() -> None:
    given = RendezvousParameters("static", "host:1", "run", 1, 2, rank=1)
    for make in (rendezvous_handler_registry.create_handler, get_rendezvous_handler):
        assert make(given).get_backend() == "static"


PLUGIN = """
from rallypoint.compat.rendezvous import StaticTCPRendezvous
class Handler(StaticTCPRendezvous):
    def get_backend(self):
        return "plug"
def offer():
    return lambda params: Handler("host", 1, 0, 1, params.run_id, 1)
"""
ASK = """
import sys
from rallypoint.compat.rendezvous import RendezvousParameters, get_rendezvous_handler
get_rendezvous_handler(RendezvousParameters("static", "host:1", "run", 1, 1, rank=0))
print("plugin" in sys.modules)
print(get_rendezvous_handler(RendezvousParameters("plug", "", "run-7", 1, 1)).get_run_id())
try:
    get_rendezvous_handler(RendezvousParameters("broken", "", "run-7", 1, 1))
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_handlers_of_installed_packages_are_loaded_on_demand(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    facts = tmp_path / "plugin-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    offers = "plug = plugin:offer\nbroken = nowhere:offer\nstatic = nowhere:offer\n"
    (facts / "entry_points.txt").write_text(f"[torchrun.handlers]\n{offers}")
    ask = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{ASK}"
    run = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=AMPLE_S)
    assert run.stdout.split() == ["False", "run-7", "nowhere"], run.stderr


# The package


def test_no_torch_is_imported() -> None:
    look = "import sys, rallypoint.compat.rendezvous; print('torch' in sys.modules, 'asyncio' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=AMPLE_S)
    assert run.stdout == "False False\n", run.stderr


def test_settings_cannot_be_changed() -> None:
    timeout = rendezvous.RendezvousTimeout()
    settings = RendezvousSettings("run", 1, 2, timeout, timeout.heartbeat, 3)
    with pytest.raises(AttributeError):
        settings.run_id = "other"  # type: ignore[misc]
    assert "run_id='run'" in repr(settings) and "join=" in repr(settings)
