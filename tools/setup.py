"""Make .venv fit for one make target: what it needs, and what it can use where that can be had.

`--need EXTRA` must install, or set-up fails. `--want EXTRA` (an extra of pyproject.toml) and `--want-debian PACKAGE`
are outside parts: no root, no apt-get, no network or a failing install is no error. Each one that is missing is said
here in a banner, and the banner stays in .venv/missing.txt, so that make can say it again after the run.

It may run any number of times: it looks first, and calls pip or apt-get only for what is missing. The package itself
is installed again when pyproject.toml changes or the tree moves. It never removes a .venv, and uses no service that
a Debian package starts by itself.

It starts on the caller's Python, with the standard library alone, and goes on inside .venv, where the installed
metadata says what is missing. Rejected: stamp files of make; they compare times, and git does not keep those.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed-from.txt"
MISSING = VENV / "missing.txt"
OLDEST = (3, 10)
PROGRAMS = {"etcd-server": "etcd", "chromium-driver": "chromedriver"}
"""The program of a Debian package, where the names differ."""


class Failed(Exception):
    """An install did not work; the text is the reason in one line."""


# Stage one: the caller's Python makes .venv.


def refuse(sentence: str) -> None:
    """End set-up with a sentence that says what to do."""
    sys.exit(f"set-up: {sentence}")


def make_venv() -> None:
    """Create .venv, or complete one whose making was interrupted."""
    if sys.version_info < OLDEST:
        have = ".".join(map(str, sys.version_info[:3]))
        refuse(f"rallypoint needs Python 3.10 or later, and {sys.executable} is {have}. Try: make PYTHON=python3.11 …")
    hint = "On Debian or Ubuntu: apt-get install python3-venv. Or name another Python: make PYTHON=/path/to/python3 …"
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        refuse(f"{sys.executable} cannot make virtual environments (no venv or no ensurepip). {hint}")
    try:
        run("creating .venv", [sys.executable, "-m", "venv", str(VENV)])
    except Failed as failed:
        refuse(f"`{sys.executable} -m venv {VENV}` failed: {failed}. {hint}")


def enter_venv() -> None:
    """Go on with this script on the Python of .venv; does not return."""
    probe = [str(PYTHON), "-c", "import importlib.util as u, sys; sys.exit(0 if u.find_spec('pip') else 3)"]
    try:
        code = subprocess.run(probe, check=False).returncode if os.path.lexists(PYTHON) else 3
    except OSError:
        code = 1
    if code == 3:
        make_venv()
    elif code:
        refuse(f"{PYTHON} does not start. `make clean` removes .venv, and the next make builds it anew")
    os.execv(PYTHON, [str(PYTHON), *sys.argv])


# Stage two: inside .venv.


def run(what: str, command: list[str], env: dict[str, str] | None = None) -> None:
    """Run a command quietly, saying what and how long; raise Failed with its most telling line."""
    print(f"set-up: {what} …", flush=True)
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except OSError as error:
        raise Failed(str(error)) from None
    if done.returncode == 0:
        print(f"set-up: {what}: done in {time.monotonic() - started:.0f} s", flush=True)
        return
    lines = [line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
    print("\n".join(f"    {line}" for line in lines[-15:]), flush=True)
    errors = [line for line in lines if line.lower().startswith(("error", "e:"))]
    raise Failed((errors or lines or [f"exit code {done.returncode}, and not a word"])[-1])


def pip_install(what: str, arguments: list[str]) -> None:
    """Install into .venv with its own pip."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    run(f"installing {what}", [*pip, *arguments])
    importlib.invalidate_caches()


def installed(name: str) -> str | None:
    """Return the version of a distribution in .venv, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet(extra: str, package: str = "rallypoint") -> list[str]:
    """Return what of a package's requirements, with those of one extra, is not installed as asked for."""
    from pip._vendor.packaging.requirements import Requirement

    wanted = [Requirement(line) for line in importlib.metadata.requires(package) or []]
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": extra})]
    missing = [line for one in wanted if one.name == "rallypoint" for part in one.extras for line in unmet(part)]
    for one in wanted:
        version = installed(one.name)
        fits = version is not None and one.specifier.contains(version, prereleases=True)
        if not fits or (one.name != "rallypoint" and any(unmet(part, one.name) for part in one.extras)):
            extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
            missing.append(f"{one.name}{extras}{one.specifier}")
    return missing


def install_package() -> None:
    """Install the package itself, editable, unless it is there and from this pyproject.toml in this place."""
    source = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp = f"{ROOT} {source}\n"
    if installed("rallypoint") and STAMP.exists() and STAMP.read_text(encoding="utf-8") == stamp:
        return
    pip_install("rallypoint (editable)", ["--no-deps", "--editable", str(ROOT)])
    STAMP.write_text(stamp, encoding="utf-8")


def has_debian(package: str) -> bool:
    """Say whether a Debian package is installed, or its program is on the path by other means."""
    if shutil.which(PROGRAMS.get(package, package)):
        return True
    if not shutil.which("dpkg-query"):
        return False
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout == "installed"


def install_debian(packages: list[str]) -> dict[str, str]:
    """Install those that are missing; return, for each that could not be, why."""
    packages = [package for package in packages if not has_debian(package)]
    if not packages:
        return {}
    if not shutil.which("apt-get"):
        return dict.fromkeys(packages, "there is no apt-get here; install it by hand")
    if os.geteuid() != 0:
        return {package: f"not root; run: sudo apt-get install {package}" for package in packages}
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "--quiet", "--option", "DPkg::Lock::Timeout=120"]
    failures = {}
    try:
        run("reading Debian's package lists", [*apt, "update"], env)
    except Failed as failed:
        print(f"set-up: apt-get update: {failed}; going on with the lists that are here", flush=True)
    for package in packages:
        try:
            run(f"installing {package} (Debian)", [*apt, "install", "--yes", "--no-install-recommends", package], env)
        except Failed as failed:
            failures[package] = str(failed)
    return failures


def install_wanted(extras: list[str]) -> dict[str, str]:
    """Install the requirements of each extra that are missing; return, for each extra that could not be, why."""
    failures = {}
    for extra in extras:
        missing = unmet(extra)
        if missing:
            try:
                pip_install(" ".join(missing), missing)
            except Failed as failed:
                failures[extra] = str(failed)
    return failures


def report(failures: dict[str, str], label: str) -> None:
    """Say what is missing so that nobody overlooks it, and keep it for the end of the run."""
    lines = [f"{label}: {part} could not be installed: {why}" for part, why in failures.items()]
    rule = "!" * 100
    banner = "\n".join([rule, *lines, rule, ""]) if lines else ""
    MISSING.write_text(banner, encoding="utf-8")
    print(banner, end="", flush=True)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="tools/setup.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--need", metavar="EXTRA", nargs="*", default=[], help="extras without which set-up fails")
    parser.add_argument("--want", metavar="EXTRA", nargs="*", default=[], help="extras to install if they can be had")
    parser.add_argument("--want-debian", metavar="PACKAGE", nargs="*", default=[], help="the same, Debian packages")
    parser.add_argument("--label", default="MISSING", help="what to call it that a part is missing")
    return parser.parse_args()


def main() -> None:
    """Bring .venv to what was asked for."""
    asked = arguments()
    if Path(sys.prefix).resolve() != VENV.resolve():
        enter_venv()
    try:
        install_package()
        needed = sorted({line for extra in ["", *asked.need] for line in unmet(extra)})
        if needed:
            pip_install(" ".join(needed), needed)
    except Failed as failed:
        refuse(f"the package and what it needs could not be installed: {failed}")
    report({**install_wanted(asked.want), **install_debian(asked.want_debian)}, asked.label)


if __name__ == "__main__":
    main()
