"""Make .venv-frameworks fit for `make frameworks`: the package, and the versions in frameworks/requirements.txt.

One call of pip resolves everything against the exact versions, so that no framework brings another torch. It is made
again when requirements.txt or pyproject.toml changes, or the tree moves. DeepSpeed is built from source, without its
operators: those it needs on a CPU are compiled by its first job, which takes g++ and a minute.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import setup

VENV = setup.ROOT / ".venv-frameworks"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = setup.ROOT / "frameworks" / "requirements.txt"
STAMP = VENV / "installed-from.txt"
PIP = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]


def wanted_stamp() -> str:
    """Return what the stamp says when everything is installed."""
    files = b"".join(path.read_bytes() for path in (REQUIREMENTS, setup.ROOT / "pyproject.toml"))
    return f"{setup.ROOT} {hashlib.sha256(files).hexdigest()}\n"


def pinned_torch() -> str:
    """Return the line of requirements.txt that pins torch."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def torch_version() -> str:
    """Return the version of torch that is installed."""
    ask = "import importlib.metadata as m; print(m.version('torch'))"
    return subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def install() -> None:
    """Install torch, then the rest, and see that torch is still the same one."""
    setup.run("creating .venv-frameworks", [sys.executable, "-m", "venv", str(VENV)])
    setup.run(f"installing {pinned_torch()}", [*PIP, pinned_torch()])
    before = torch_version()
    environment = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    rest = ["--requirement", str(REQUIREMENTS), "--editable", f"{setup.ROOT}[cli]", f"torch=={before}"]
    setup.run("installing the frameworks", [*PIP, *rest], environment)
    if torch_version() != before:
        raise setup.Failed(f"torch was {before}, and is {torch_version()} now")


def main() -> None:
    """Bring .venv-frameworks to what requirements.txt says."""
    wanted = wanted_stamp()
    if STAMP.exists() and STAMP.read_text(encoding="utf-8") == wanted:
        return
    try:
        install()
    except setup.Failed as failed:
        setup.refuse(f"the frameworks could not be installed: {failed}")
    STAMP.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
