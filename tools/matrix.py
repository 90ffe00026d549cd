"""Run tests on every Python from 3.10 to 3.14 that is on this machine, each in a virtual environment of its own.

Usage: python3 tools/matrix.py TEST… [-- ARGUMENTS OF PYTEST]. The environments are in .matrix/ and are kept. An
interpreter is `python3.N` on the path, or one that pyenv has installed. A missing one is no failure: the last lines
say for every version whether it passed, failed or is not here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
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


def run(version: str, interpreter: str, tests: list[str]) -> str:
    """Set up an environment and run the tests in it; return "passed", or what failed."""
    folder = ROOT / ".matrix" / version
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
    ]
    if subprocess.run(pip, check=False).returncode:
        return "could not be set up"
    print(f"matrix: Python {version}", flush=True)
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *tests], cwd=ROOT, check=False
    )
    return "passed" if done.returncode == 0 else "FAILED"


def main() -> None:
    """Run the tests on every version; exit 1 where one failed."""
    tests = [argument for argument in sys.argv[1:] if argument != "--"]
    results = {}
    for version in VERSIONS:
        interpreter = find(version)
        results[version] = run(version, interpreter, tests) if interpreter else "not on this machine"
    for version, result in results.items():
        print(f"matrix: Python {version}: {result}")
    sys.exit(any(result not in ("passed", "not on this machine") for result in results.values()))


if __name__ == "__main__":
    main()
