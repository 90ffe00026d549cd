"""The wheel in clean environments, each with some extras: what works there, and which package an error names."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.packaging.built import CleanVenv
from tests.raw_peer import AMPLE_S

import rallypoint

CleanVenvs = Callable[[str], CleanVenv]

CLIENT = {"rallypoint", "msgspec"}
SERVER = CLIENT | {"h11", "uvloop"}
CLI = SERVER | {"click"}
INSTALLED = {
    "": CLIENT,
    "server": SERVER,
    "etcd": SERVER | {"hpack"},
    "cli": CLI,
    "all": CLI | {"hpack", "cryptography", "cffi", "pycparser"},
}
"""The distributions that are installed with each of the extras."""

WORKER = """
import rallypoint
worker = rallypoint.worker()
print(f"rank {worker.rank} of {worker.world_size}")
"""


@pytest.mark.parametrize("extras", INSTALLED)
def test_an_extra_installs_what_it_needs(clean_venv: CleanVenvs, extras: str) -> None:
    """Newer Pythons may need fewer packages."""
    optional = {"typing-extensions"}
    assert clean_venv(extras).distributions() - optional == INSTALLED[extras]


def test_the_package_is_imported_from_the_environment(clean_venv: CleanVenvs) -> None:
    place = clean_venv("")
    done = place.python("import rallypoint; print(rallypoint.__version__, rallypoint.__file__)")
    version, file = done.stdout.split()
    assert version == rallypoint.__version__ and Path(file).is_relative_to(place.folder / "venv"), done.stderr


def test_a_client_needs_no_part_of_a_server(clean_venv: CleanVenvs) -> None:
    with rallypoint.Server() as server:
        done = clean_venv("").python(
            f"import asyncio, rallypoint, rallypoint.aio\n"
            f"store = rallypoint.connect({server.url!r})\n"
            f"store.set('k', 'v')\n"
            f"rallypoint.Barrier(store, 'b', ['me']).wait('me', timeout={AMPLE_S})\n"
            f"async def main():\n"
            f"    async with await rallypoint.aio.connect({server.url!r}) as other:\n"
            f"        print(await other.get('k'))\n"
            f"asyncio.run(main())\n"
        )
    assert (done.stdout, done.stderr) == ("b'v'\n", "")


def test_a_client_has_every_public_name(clean_venv: CleanVenvs) -> None:
    """Also those that are imported late, and would need an extra only when they are called."""
    code = "from rallypoint import *; import rallypoint; assert set(rallypoint.__all__) <= set(dir(rallypoint))"
    done = clean_venv("").python(code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("code", ["rallypoint.Server()", "rallypoint.TCPStore('127.0.0.1', 0, is_master=True)"])
def test_starting_a_server_without_its_extra_names_the_package(clean_venv: CleanVenvs, code: str) -> None:
    done = clean_venv("").python(
        f"import rallypoint\ntry: {code}\nexcept rallypoint.ServerFailed as error: print(error)"
    )
    assert "pip install 'rallypoint[server]'" in done.stdout, done.stderr


@pytest.mark.parametrize("command", [("rallypoint", "--version"), ("python", "-m", "rallypoint", "serve")])
@pytest.mark.parametrize("extras", ["", "etcd"])
def test_the_command_without_its_extra_names_the_package(
    clean_venv: CleanVenvs, extras: str, command: tuple[str, ...]
) -> None:
    done = clean_venv(extras).run(*command)
    assert done.returncode == 1
    assert done.stderr == "rallypoint: the command line needs click: pip install 'rallypoint[cli]'\n"


def test_a_server_of_the_environment_serves_its_page(clean_venv: CleanVenvs) -> None:
    done = clean_venv("server").python(
        "import rallypoint, urllib.request\n"
        "with rallypoint.Server() as server:\n"
        "    rallypoint.connect(server.url).set('k', 'v')\n"
        "    with urllib.request.urlopen(server.url.replace('tcp', 'http')) as reply: print(reply.read().decode())\n"
    )
    assert "<script" in done.stdout and "</html>" in done.stdout, done.stderr
    assert "EventSource" in done.stdout, "the page lacks its script, a file beside the modules"


def test_the_command_line_launches_workers(clean_venv: CleanVenvs) -> None:
    place = clean_venv("cli")
    assert place.run("rallypoint", "--version").stdout == f"rallypoint, version {rallypoint.__version__}\n"
    (place.folder / "train.py").write_text(WORKER)
    done = place.run("rallypoint", "run", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert {line.partition(": ")[2] or line for line in done.stdout.splitlines()} >= {"rank 0 of 2", "rank 1 of 2"}


def test_every_subcommand_is_installed(clean_venv: CleanVenvs) -> None:
    """Their modules are imported only when they are called; none may need more than the extra `cli`."""
    code = (
        "from click.testing import CliRunner\n"
        "from rallypoint.cli import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    done = CliRunner().invoke(main, [name, '--help'])\n"
        "    assert done.exit_code == 0, (name, done.output, done.exception)\n"
    )
    done = clean_venv("cli").python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_servers_with_their_log_in_etcd_need_its_extra(clean_venv: CleanVenvs) -> None:
    """With it, the server gets to the point of connecting to etcd."""
    with socket.create_server(("127.0.0.1", 0)) as etcd:
        etcd.settimeout(AMPLE_S)
        url = "etcd://{}:{}/name".format(*etcd.getsockname())
        command = ("rallypoint", "serve", "--port", "0", "--storage", url)
        without = clean_venv("cli").run(*command)
        assert without.returncode == 1 and "pip install 'rallypoint[etcd]'" in without.stderr
        with clean_venv("all").start(*command) as server:
            etcd.accept()[0].close()
            server.kill()


def test_certificates_need_their_extra(clean_venv: CleanVenvs) -> None:
    command = ("rallypoint", "tls", "new", "--dir", "tls", "--host", "node-0")
    without, with_it = clean_venv("cli").run(*command), clean_venv("all").run(*command)
    assert "pip install 'rallypoint[tls]'" in without.stderr
    assert with_it.returncode == 0, with_it.stderr
    assert (clean_venv("all").folder / "tls" / "node.pem").exists()
