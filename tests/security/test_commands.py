"""`rallypoint token new` and `rallypoint tls new`: what they print, write, and refuse to overwrite."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.hosts import hosts
from tests.raw_peer import AMPLE_S
from tests.security.certs import alternative_names

from rallypoint.cli import main
from rallypoint.security.credentials import read_token, resolve

COMMAND = [sys.executable, "-m", "rallypoint"]
TOKEN = re.compile(r"[\w-]{43}\n", re.ASCII)


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


# Tokens


def test_a_token_is_printed_alone_so_that_a_script_can_take_it() -> None:
    done = subprocess.run([*COMMAND, "token", "new"], capture_output=True, text=True, timeout=AMPLE_S, check=True)
    assert TOKEN.fullmatch(done.stdout) and done.stderr == ""
    assert resolve({"RALLYPOINT_TOKEN": done.stdout.strip()}).token == done.stdout.strip()


def test_a_token_file_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        done = run("token", "new", "--file", tmp_path / "token")
    finally:
        os.umask(before)
    text = (tmp_path / "token").read_text()
    assert TOKEN.fullmatch(text) and text.strip() not in done.output and str(tmp_path / "token") in done.output
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert read_token(str(tmp_path / "token")) == text.strip()


def test_a_token_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "token"
    run("token", "new", "--file", path)
    before = path.read_text()
    for target in (path, tmp_path / "link"):
        if target != path:
            target.symlink_to(path)
        said = run("token", "new", "--file", target, code=1).output
        assert said == f"Error: {target} exists already; choose another file, or remove it\n"
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    run("token", "new", "--file", tmp_path / "dangling", code=1)
    assert path.read_text() == before and not (tmp_path / "elsewhere").exists()


def test_a_token_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    said = run("token", "new", "--file", tmp_path / "none" / "token", code=1).output
    assert said == f"Error: cannot write {tmp_path}/none/token: No such file or directory\n"


# Certificates


def test_certificates_for_the_named_hosts(tmp_path: Path) -> None:
    done = run("tls", "new", "--dir", tmp_path / "d", "--host", "node-1", "--host", "10.0.0.1", "--days", "3")
    assert alternative_names(tmp_path / "d" / "node.pem") == ["node-1", "10.0.0.1"]
    assert f"{tmp_path}/d/node.pem is valid for node-1, 10.0.0.1\n" in done.output
    for option, name in (("--tls-cert", "node.pem"), ("--tls-key", "node.key"), ("--tls-ca", "ca.pem")):
        assert f"{option} {tmp_path}/d/{name}" in done.output


def test_by_default_they_are_for_this_machine(tmp_path: Path) -> None:
    run("tls", "new", "--dir", tmp_path)
    names = alternative_names(tmp_path / "node.pem")
    assert names[0] == socket.gethostname() and {"localhost", "127.0.0.1", "::1"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.needs("netns")
def test_the_names_and_addresses_of_a_machine(tmp_path: Path) -> None:
    with hosts(1) as (here,):
        command = here.command([*COMMAND, "tls", "new", "--dir", str(tmp_path / "d")])
        subprocess.run(command, check=True, capture_output=True, timeout=AMPLE_S)
    names = alternative_names(tmp_path / "d" / "node.pem")
    assert set(names) == {here.name, here.address, "localhost", "127.0.0.1", "::1"}


def test_certificates_are_not_overwritten(tmp_path: Path) -> None:
    run("tls", "new", "--dir", tmp_path, "--host", "a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    said = run("tls", "new", "--dir", tmp_path, "--host", "a", code=1).output
    assert said == f"Error: {tmp_path}/node.key exists already; choose another directory, or remove it\n"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = run("tls", "new", "--dir", tmp_path / "d", "--host", "a b", code=1).output
    assert said == "Error: 'a b' is neither a host name nor an IP address\n"
    said = run("tls", "new", "--dir", tmp_path / "file" / "d", "--host", "a", code=1).output
    assert said == f"Error: cannot write to {tmp_path}/file/d: Not a directory\n"
    run("tls", "new", "--dir", tmp_path / "file", "--host", "a", code=2)
    run("tls", "new", "--dir", tmp_path / "d", "--days", 0, code=2)
    run("tls", "new", code=2)
    assert not (tmp_path / "d").exists()
