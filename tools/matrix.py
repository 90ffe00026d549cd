"""Run tests on every Python from 3.10 to 3.14 that is on this machine, each in a virtual environment of its own.

They also run with the oldest dependencies that pyproject.toml allows, on the oldest of these Pythons: a lower limit
that was never tried is a guess.

Usage: python3 tools/matrix.py TEST… [-- ARGUMENTS OF PYTEST]. The environments are in .matrix/ and are kept. An
interpreter is `python3.N` on the path, or one that pyenv has installed. A missing one is no failure: the last lines
say for every version whether it passed, failed or is not here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
OLDEST = "oldest-dependencies"
FOR_USERS = re.compile(r"^(?:dependencies|server|cli|etcd|tls) = \[(.*)\]", re.M)
"""The lines of pyproject.toml with what the package needs in use, not in development."""

HOLDS = "import sys; print('.'.join(map(str, sys.version_info[:2])))"


def find(version: str) -> str | None:
    """Return an interpreter of this version that starts, or None."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True)
    found = shutil.which(f"python{version}")
    for path in [*map(str, pyenv), *([found] if found else [])]:
        asked = subprocess.run([path, "-c", HOLDS], capture_output=True, text=True, check=False)
        if asked.stdout.strip() == version:
            return path
    return None


def lower_limits() -> list[str]:
    """Return the oldest version of each dependency that is allowed, as pip's constraints."""
    needed = " ".join(FOR_USERS.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    return [f"{name}=={version}" for name, version in re.findall(r'"([\w-]+)>=([\w.]+)', needed)]


def run(name: str, interpreter: str, tests: list[str], versions: list[str]) -> str:
    """Set up an environment with these versions and run the tests in it; return "passed", or what failed."""
    folder = ROOT / ".matrix" / name
    python = folder / "bin" / "python"
    if not python.exists():
        made = subprocess.run([interpreter, "-m", "venv", str(folder)], check=False)
        if made.returncode:
            return "no virtual environment"
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--editable",
        f"{ROOT}[all,dev]",
        *versions,
    ]
    if subprocess.run(pip, check=False).returncode:
        return "could not be set up"
    print(f"matrix: {name}", flush=True)
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *tests], cwd=ROOT, check=False
    )
    return "passed" if done.returncode == 0 else "FAILED"


def main() -> None:
    """Run the tests on every version; exit 1 where one failed."""
    tests = [argument for argument in sys.argv[1:] if argument != "--"]
    interpreters = {version: find(version) for version in VERSIONS}
    results = {
        f"Python {version}": run(version, interpreter, tests, []) if interpreter else "not on this machine"
        for version, interpreter in interpreters.items()
    }
    oldest = next(filter(None, interpreters.values()), sys.executable)
    results[OLDEST] = run(OLDEST, oldest, tests, lower_limits())
    for name, result in results.items():
        print(f"matrix: {name}: {result}")
    sys.exit(any(result not in ("passed", "not on this machine") for result in results.values()))


if __name__ == "__main__":
    main()
