"""What all tests share: the outside parts that some of them need, and how hypothesis runs.

`@pytest.mark.needs("torch")` skips a test where torch is missing. Where RALLYPOINT_REQUIRE lists the part, as in
"torch,redis", the test fails instead, so that CI cannot pass by having skipped what it was built to check.

The suite may itself run under a scheduler, whose variables the launcher would heed: they are removed.

A suite that nohup or a shell's `&` started ignores SIGINT, SIGHUP and SIGQUIT. An exec'd child inherits a signal that
is ignored, but not one that has a handler: these get one here, before any test starts a process.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.etcd.fixtures import etcd_cluster, etcd_url
from tests.status.browser import browser_is_available
from tests.storage.small_disk import mounts

from rallypoint.etcd.local.member import find_binary
from rallypoint.launch.monitoring.native_stacks import find_py_spy
from rallypoint.launch.workers.cgroup import make_cgroup
from rallypoint.storage.file.kernel_sync import KernelSync

__all__ = ["etcd_cluster", "etcd_url"]  # fixtures for tests in every folder

settings.register_profile(
    "rallypoint",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("rallypoint")


CLUSTER_VARIABLES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "JOB_COMPLETION_INDEX", "KUBERNETES_")
"""How the names of variables begin by which the launcher detects a scheduler."""


def pytest_configure() -> None:
    """Forget the scheduler, and stop ignoring inherited signals; SIGHUP does not end the suite, as nohup requires."""
    for name in [name for name in os.environ if name.startswith(CLUSTER_VARIABLES)]:
        del os.environ[name]
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: lambda *_: None,
        signal.SIGQUIT: lambda *_: None,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _makes_namespaces() -> bool:
    """Return whether this process may create network namespaces, by creating one."""
    ip = shutil.which("ip") or "/usr/sbin/ip"
    if os.geteuid() != 0 or not os.access(ip, os.X_OK):
        return False
    name = f"rally-probe-{os.getpid()}"
    made = subprocess.run([ip, "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run([ip, "netns", "del", name], capture_output=True)
    return made


def _has_etcd() -> bool:
    try:
        find_binary()
    except FileNotFoundError:
        return False
    return _importable("hpack")


def _makes_cgroups() -> bool:
    made = make_cgroup(f"rallypoint-probe-{os.getpid()}")
    if made:
        os.rmdir(made)
    return bool(made)


def _kernel_syncs() -> bool:
    try:
        KernelSync().close()
    except OSError:
        return False
    return True


def _traces() -> bool:
    """Return whether py-spy is installed and may trace a process of this user, by tracing this one."""
    program = find_py_spy()
    command = [str(program), "dump", "--native", "--pid", str(os.getpid())]
    return program is not None and subprocess.run(command, capture_output=True).returncode == 0


PARTS: dict[str, Callable[[], bool]] = {
    "torch": lambda: _importable("torch"),
    "redis": lambda: shutil.which("redis-server") is not None,
    "netns": _makes_namespaces,
    "root": lambda: os.geteuid() == 0,
    "etcd": _has_etcd,
    "openssl": lambda: shutil.which("openssl") is not None,
    "cgroup": _makes_cgroups,
    "tmpfs": mounts,
    "aio": _kernel_syncs,
    "browser": browser_is_available,
    "pyspy": _traces,
    "docs": lambda: _importable("mkdocs") and _importable("mkdocstrings"),
    "deploy": lambda: _importable("kubernetes_validate"),
    "hadolint": lambda: Path(sys.executable).with_name("hadolint").exists(),
}
"""The parts, each with a function that returns whether it is available."""

LEFT_OPEN = 100
"""More descriptors than tests leave to the garbage collector; with ten such tests, the process would have too many."""


@pytest.fixture(autouse=True)
def descriptors_closed() -> Iterator[None]:
    """Fail a test that leaves descriptors open; a few may wait for the garbage collector."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    left = len(os.listdir("/proc/self/fd")) - before
    assert left < LEFT_OPEN, f"the test has left {left} descriptors open"


@cache
def _available(part: str) -> bool:
    return PARTS[part]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    required = os.environ.get("RALLYPOINT_REQUIRE", "").replace(" ", "").split(",")
    for marker in item.iter_markers("needs"):
        (part,) = marker.args
        if part not in PARTS:
            raise pytest.UsageError(f"needs({part!r}): conftest.py knows {', '.join(PARTS)}")
        if _available(part):
            continue
        if part in required:
            pytest.fail(f"{part} is missing here, and RALLYPOINT_REQUIRE asks for it", pytrace=False)
        pytest.skip(f"{part} is missing here")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("skipped") + terminalreporter.getreports("failed")
    missed = Counter(
        found[1] for report in reports if (found := re.search(r"(\w+) is missing here", str(report.longrepr)))
    )
    if missed:
        terminalreporter.section("PARTS MISSING HERE", sep="!", red=True, bold=True)
        for part, tests in missed.items():
            terminalreporter.line(f"{part}: {tests} tests did not run without it", red=True)
