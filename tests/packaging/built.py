"""The package as users get it: a wheel and an sdist, and virtual environments without the repository.

Nothing here needs a network. hatchling, the build backend, is installed for development, so builds are not isolated.
The dependencies are packed into wheels again from the files that pip has installed for development; pip then chooses
among these by the metadata of our wheel, so a dependency that the metadata lacks is missing in the environment.

Rejected: dependencies from the package index. The tests would fail with the network, and take minutes without a cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["AMPLE_S", "ROOT", "CleanVenv", "Distributions", "build", "pack_dependencies"]

ROOT = Path(__file__).resolve().parents[2]
AMPLE_S = 120
OF_INSTALLATION = ("INSTALLER", "REQUESTED", "direct_url.json")
"""Files that pip adds when it installs a wheel."""


class Distributions(NamedTuple):
    """The paths of what `build` has made."""

    wheel: Path
    sdist: Path


def build(source: Path, folder: Path) -> Distributions:
    """Build the wheel and the sdist of a source tree."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=AMPLE_S)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Distributions(wheel, sdist)


def pack_dependencies(folder: Path, *more: str) -> None:
    """Make a wheel of every installed distribution that any of the users' extras needs, and of more."""
    waiting = [Requirement(line) for line in [*(metadata.requires("rallypoint") or []), *more] if "torch" not in line]
    packed: set[str] = set()
    extras = ("server", "cli", "etcd", "tls")
    while waiting:
        needed = waiting.pop()
        name = canonicalize_name(needed.name)
        markers = [{"extra": extra} for extra in (*extras, *needed.extras)]
        if name in packed or (needed.marker and not any(map(needed.marker.evaluate, markers))):
            continue
        packed.add(name)
        if name != "rallypoint":
            _pack(metadata.distribution(name), folder)
            waiting += map(Requirement, metadata.requires(name) or [])


def _pack(installed: metadata.Distribution, folder: Path) -> None:
    """Make a wheel of an installed distribution, without its scripts."""
    tag = next(line for line in (installed.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: "))
    name = canonicalize_name(installed.name).replace("-", "_")
    with zipfile.ZipFile(folder / f"{name}-{installed.version}-{tag.removeprefix('Tag: ')}.whl", "w") as wheel:
        for file in installed.files or []:
            if ".." not in file.parts and "__pycache__" not in file.parts and file.name not in OF_INSTALLATION:
                wheel.write(os.fspath(file.locate()), file.as_posix())


class CleanVenv:
    """A virtual environment with the wheel and the dependencies of some extras, used from outside the repository."""

    def __init__(self, folder: Path, wheel: Path, dependencies: Path, extras: str) -> None:
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        what = f"rallypoint[{extras}] @ {wheel.as_uri()}" if extras else os.fspath(wheel)
        pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(self.bin / "python"), "install", "--quiet"]
        options = ["--no-index", "--find-links", str(dependencies), "--no-compile", "--disable-pip-version-check"]
        subprocess.run([*pip, *options, what], cwd=folder, check=True, timeout=AMPLE_S)

    def distributions(self) -> set[str]:
        """Return the names of what is installed."""
        (packages,) = self.bin.parent.glob("lib/python*/site-packages")
        return {canonicalize_name(one.name) for one in metadata.distributions(path=[str(packages)])}

    def start(self, *command: object, **more: str) -> subprocess.Popen[str]:
        """Start a command of the environment, with more variables."""
        program, *arguments = map(str, command)
        environ = {**self.environ(), **more}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [self.bin / program, *arguments], cwd=self.folder, env=environ, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, *command: object, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        with self.start(*command, **more) as child:
            try:
                stdout, stderr = child.communicate(timeout=AMPLE_S)
            finally:
                child.kill()
        return subprocess.CompletedProcess(child.args, child.returncode, stdout, stderr)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run a program."""
        return self.run("python", "-W", "error", "-c", code)

    def environ(self) -> dict[str, str]:
        """Return the environment variables of a shell in which the environment is active."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RALLYPOINT", "PIP"))
        }
        return {**kept, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "HOME": str(self.folder)}
