"""The commands and code of docs/etcd.md are run, and the flags that it names are flags of etcd."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.raw_peer import AMPLE_S

from rallypoint.etcd.local.cluster import LocalCluster
from rallypoint.etcd.local.member import find_binary

pytestmark = pytest.mark.needs("etcd")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "etcd.md").read_text(encoding="utf-8")
OF_OURS = {"--max-memory", "--storage", "--store"}
UNLISTED = {"--enable-grpc-gateway"}
"""Flags of etcd that its help leaves out."""

LATER = {"--peer-"}
"""A prefix of several flags, which looks like a flag."""


def blocks(kind: str) -> list[str]:
    found: list[str] = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)
    assert found
    return found


def without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def test_the_console_session_of_the_page_is_real(tmp_path: Path) -> None:
    (session,) = blocks("console")
    (tmp_path / "rallypoint").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m rallypoint "$@"\n')
    (tmp_path / "rallypoint").chmod(0o755)
    shown = re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", session, re.M)
    script = "exec 2>&1\n" + "".join(f"{command}\necho ----\n" for command, _ in shown)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    try:
        done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=env, stdout=-1, text=True, timeout=3 * AMPLE_S)
        said = done.stdout.split("----\n")
        for (command, output), text in zip(shown, said, strict=False):
            assert without_numbers(text) == without_numbers(output), f"$ {command}"
        assert len(said) == len(shown) + 1
    finally:
        LocalCluster(tmp_path / "cluster").down(purge=True)


def test_the_python_of_the_page_runs(etcd_url: str) -> None:
    (block,) = blocks("python")
    block = re.sub(r"etcd://[^\"]+", etcd_url, block)
    names: dict[str, object] = {}
    for line in block.splitlines():
        code, _, says = line.partition("  # ")
        if says:
            value = re.split(";", says)[0].strip()
            assert repr(eval(code.strip(), names)) == value, line
        else:
            exec(line, names)


def test_the_flags_on_the_page_are_flags_of_etcd() -> None:
    asked = subprocess.run([find_binary(), "--help"], capture_output=True, text=True)
    known = set(re.findall(r"--[a-z0-9-]+", asked.stdout + asked.stderr))
    manifest = "".join(re.findall(r"- etcd\n(.*?)ports:", blocks("yaml")[0], re.S))
    running = PAGE.partition("## Running it")[2].partition("## On Kubernetes")[0]
    named = set(re.findall(r"(?<![\w-])--[a-z0-9-]+", manifest + running)) - LATER
    assert len(named) > 15
    assert not named - known - OF_OURS - UNLISTED
