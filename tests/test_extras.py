"""A client installs without the extras; servers and the command line then name the package to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rallypoint

WITHOUT = "import sys; sys.modules.update(dict.fromkeys(('click', 'h11', 'hpack', 'uvloop')))\n"
AMPLE_S = 60


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program with only the client's dependencies installed."""
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, timeout=AMPLE_S)


def test_a_client_needs_no_part_of_a_server() -> None:
    with rallypoint.Server() as server:
        done = run(
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


@pytest.mark.parametrize("code", ["rallypoint.Server()", "rallypoint.TCPStore('127.0.0.1', 0, is_master=True)"])
def test_starting_a_server_without_its_extra_names_the_package(code: str) -> None:
    done = run(f"import rallypoint\ntry: {code}\nexcept rallypoint.ServerFailed as error: print(error)")
    assert "pip install 'rallypoint[server]'" in done.stdout, done.stderr


def test_the_command_without_its_extra_names_the_package() -> None:
    done = run("import runpy; runpy.run_module('rallypoint', run_name='__main__')")
    assert done.returncode == 1
    assert done.stderr == "rallypoint: the command line needs click: pip install 'rallypoint[cli]'\n"


def test_dir_lists_the_lazy_names() -> None:
    assert set(rallypoint.__all__) <= set(dir(rallypoint))
