"""`rallypoint.launch`: results by rank or the first failure; and nothing is left, however it ends."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.launch import launched
from tests.launch.runs import Node, every_process, gone, has_in, processes_of
from tests.raw_peer import AMPLE_S, until

import rallypoint

RECORDS = f"rallypoint-{os.geteuid()}"
"""The directory for what agents publish of themselves, which all agents of this user share."""


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves a process, a thread or a file behind."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before, threads = processes_of(os.getpid()), set(threading.enumerate())
    yield
    until(lambda: processes_of(os.getpid()) - before, lambda left: not left)
    until(lambda: has_in("environ", str(place), every_process()), lambda left: not left)
    assert not set(threading.enumerate()) - threads
    until(lambda: [path.name for path in place.iterdir()], lambda left: set(left) <= {RECORDS})


def script(where: Path, code: str) -> Node:
    """Run a script, with the tests on its module path."""
    path = where / "script.py"
    path.write_text(textwrap.dedent(code))
    root = str(Path(__file__).resolve().parents[2])
    return Node([sys.executable, str(path)], where, {"TMPDIR": str(where / "tmp"), "PYTHONPATH": root})


# Results


def test_results_come_by_rank_from_workers_of_the_launcher() -> None:
    found = rallypoint.launch(launched.ask, nproc=3, args=[1, "two"], kwargs={"three": 3.0}, env={"FOUR": "4"})
    assert [(rank, size, args, kwargs) for rank, size, args, kwargs, _ in found] == [
        (rank, 3, (1, "two"), {"three": 3.0}) for rank in range(3)
    ]
    for rank, environment in enumerate(one[4] for one in found):
        assert (environment["RANK"], environment["LOCAL_RANK"], environment["FOUR"]) == (str(rank), str(rank), "4")
        assert environment["MASTER_ADDR"] == "127.0.0.1" and environment["OMP_NUM_THREADS"]
    assert rallypoint.launch(launched.meet, 2, ("here",)) == [["here", "here"]] * 2


def test_workers_have_the_token_of_the_caller_or_one_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_TOKEN", "a-token-of-another-store")
    assert rallypoint.launch(launched.meet, 2, ("here",)) == [["here", "here"]] * 2
    monkeypatch.setenv("RALLYPOINT_TOKEN", "too short")
    with pytest.raises(ValueError, match="RALLYPOINT_TOKEN"):
        rallypoint.launch(launched.meet, 2, ("here",))


@pytest.mark.needs("torch")
def test_pytorch_meets_by_env() -> None:
    def reduce() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        dist.destroy_process_group()
        return float(ones)

    assert rallypoint.launch(reduce, nproc=2) == [2.0, 2.0]


def test_functions_that_workers_cannot_import_are_sent_by_value() -> None:
    offset = 5
    assert rallypoint.launch(lambda number: number + offset, 1, (2,)) == [7]
    assert rallypoint.launch(launched.adder(3), 1, (4,), {"more": 1}) == [8]
    assert rallypoint.launch(functools.partial(launched.adder(3), more=2), 1, (4,)) == [9]
    assert rallypoint.launch(launched.decorated, 1, (4,)) == [10]
    assert rallypoint.launch(inspect.unwrap(launched.decorated), 1, (4,)) == [5]
    assert rallypoint.launch(launched.Config(1.5).scaled, 1, (2.0,)) == [3.0]
    assert [found.rate for found in rallypoint.launch(launched.Config, 1, (2.5,))] == [2.5]


def test_large_values_travel_both_ways() -> None:
    data = os.urandom(1 << 20) * 64
    assert rallypoint.launch(bytes, 1, (data,)) == [data]


def test_it_runs_from_any_thread_and_several_at_once_and_in_workers() -> None:
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(rallypoint.launch, launched.meet, 2, (name,)) for name in "ab"]
        inner = pool.submit(rallypoint.launch, launched.nested, 2, (2,))
        assert [one.result() for one in found] == [[["a", "a"]] * 2, [["b", "b"]] * 2]
        assert inner.result() == [[0, 1], [0, 1]]


def test_output_goes_to_ours_or_to_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def say() -> None:
        print("out", rallypoint.worker().rank)
        print("err", file=sys.stderr)

    rallypoint.launch(say, 2)
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == ["out 0", "out 1"] and said.err == "err\nerr\n"
    rallypoint.launch(say, 2, log_dir=tmp_path / "logs")
    assert capfd.readouterr() == ("", "")
    assert sorted(file.read_text() for file in (tmp_path / "logs").rglob("stdout.log")) == ["out 0\n", "out 1\n"]


def test_the_package_is_the_function() -> None:
    from rallypoint import launch
    from rallypoint.launch import agent
    from rallypoint.launch import launch as function

    assert launch is rallypoint.launch and callable(launch) and inspect.isclass(agent.NodeAgent)
    assert launch(len, 1, ("four",), timeout=1e12) == function(len, 1, ("four",), timeout=float("inf")) == [4]


# Failures


def test_the_first_failure_is_raised_and_all_others_have_ended(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("the learning rate is negative")

    with pytest.raises(rallypoint.WorkerFailed) as caught:
        rallypoint.launch(launched.fail_on, nproc=3, args=(1, fail))
    error, said = caught.value, capfd.readouterr()
    assert (error.rank, error.code, error.signal, error.function) == (1, 1, None, "tests.launch.launched.fail_on")
    assert error.message == "ValueError: the learning rate is negative"
    assert error.traceback.startswith("Traceback") and "in fail_on\n    how()" in error.traceback
    assert "worker_main" not in error.traceback and error.traceback.strip() in str(error)
    assert str(error).startswith("rank 1 of tests.launch.launched.fail_on (pid ") and error.traceback in said.err
    assert "FAILED FIRST" not in said.err, "the caller reports it"
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", said.out)]
    assert len(pids) == 3 and error.pid in pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("kill", -9, "killed by SIGKILL (9)"),
        ("segfault", -11, "killed by SIGSEGV (11)"),
        ("exit 3", 3, "exit code 3"),
        ("exit words", 1, "exit code 1: no more disk"),
        ("vanish", 0, "ended without a result, as os._exit(0) does"),
        ("lock", 1, "the result of tests.launch.launched.end on rank 1, of type lock, cannot be pickled"),
        ("other", 1, "KeyError: 'other'"),
    ],
)
def test_a_worker_that_ends_otherwise_is_named(how: str, code: int, said: str) -> None:
    with pytest.raises(rallypoint.WorkerFailed, match=re.escape(said)) as caught:
        rallypoint.launch(launched.end, 2, (how,))
    assert (caught.value.rank, caught.value.code) == (1, code)
    assert caught.value.signal == (-code if code < 0 else None)


def test_a_worker_that_exits_with_0_has_succeeded() -> None:
    assert rallypoint.launch(launched.end, 2, ("exit 0",)) == ["fine", None]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill agent", "the launcher ended unexpectedly: killed by SIGKILL"),
        ("unreadable", "the result of rank 1 cannot be unpickled: ValueError: not here"),
    ],
)
def test_a_failure_of_the_launcher_itself_is_another_error(how: str, said: str) -> None:
    with pytest.raises(rallypoint.LaunchFailed, match=re.escape(said)):
        rallypoint.launch(launched.end, 2, (how,))


def test_failed_workers_are_restarted_within_the_budget() -> None:
    assert rallypoint.launch(launched.restarted, 2, (2,), max_restarts=2) == [(0, 2), (1, 2)]
    assert rallypoint.launch(launched.restarted, 2, (1,), max_restarts=1, restart="worker")[1] == (1, 1)
    with pytest.raises(rallypoint.WorkerFailed) as caught:
        rallypoint.launch(launched.restarted, 2, (2,), max_restarts=1)
    assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)


def test_a_timeout_names_the_ranks_that_have_not_returned(tmp_path: Path) -> None:
    def wait_on(rank: int) -> None:
        if rallypoint.worker().rank == rank:
            launched.hang()

    with pytest.raises(rallypoint.LaunchTimeout, match=r"has not returned on ranks 0, 1 within the timeout of 0 s"):
        rallypoint.launch(wait_on, 2, (0,), timeout=0)
    with pytest.raises(TimeoutError, match="rank") as caught:
        rallypoint.launch(wait_on, 2, (1,), timeout=3)
    assert isinstance(caught.value, rallypoint.LaunchTimeout) and 1 in caught.value.running


# Misuse


@pytest.mark.parametrize(
    ("arguments", "options", "error", "said"),
    [
        (("not callable", 1), {}, TypeError, "function must be callable, not 'not callable'"),
        ((len, 0), {}, ValueError, "nproc: '0' is not a number of workers"),
        ((len, 1.5), {}, ValueError, "nproc: '1.5' is not a number of workers"),
        ((len, 1, "text"), {}, TypeError, "args must be a sequence of arguments, such as (1, 2), not 'text'"),
        ((len, 1, (), {1: 2}), {}, TypeError, "kwargs must map names to arguments"),
        ((len, 1), {"timeout": -1}, ValueError, "timeout must not be negative"),
        ((len, 1), {"grace": "1"}, TypeError, "grace must be seconds"),
        ((len, 1), {"grace": float("inf")}, ValueError, "grace must be at most 86400 s"),
        ((len, 1), {"max_restarts": -1}, ValueError, "max_restarts must be"),
        ((len, 1), {"restart": "all"}, ValueError, "restart must be"),
        ((len, 1), {"env": {"A": 1}}, ValueError, "'A' is 1"),
        ((len, 1, (threading.Lock(),)), {}, TypeError, "cannot send builtins.len to the workers: its argument 0"),
        ((launched.ask, 1), {"kwargs": {"on": threading.Lock()}}, TypeError, "its argument 'on' cannot be pickled"),
    ],
)
def test_misuse_names_the_offender(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        rallypoint.launch(*arguments, **options)


def test_a_variable_that_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def use() -> bool:
        return lock.locked()

    with pytest.raises(TypeError, match=r"cannot send .*use to the workers: the variable 'lock' that it uses cannot"):
        rallypoint.launch(use, 1)


# Scripts, prompts and interruptions

SCRIPT = """
import os, sys, rallypoint
from dataclasses import dataclass

@dataclass
class Model:
    weight: int

seen = []

def train(model):
    seen.append(1)
    by_value = lambda: len(seen)
    return Model(model.weight * 2), __name__, by_value(), sys.argv[1:]

if __name__ == "__main__":
    print(rallypoint.launch(train, 2, (Model(21),))[1])
"""


def test_functions_and_classes_of_a_script(tmp_path: Path) -> None:
    node = script(tmp_path, SCRIPT)
    assert node.end() == 0 and node.out == "(Model(weight=42), '__mp_main__', 1, [])", node.text()
    command = [sys.executable, "-m", "script", "word"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=AMPLE_S)
    assert done.stdout == "(Model(weight=42), '__mp_main__', 1, ['word'])\n", done.stderr


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    node = script(tmp_path, "import rallypoint\ndef f(): pass\nrallypoint.launch(f, 2)")
    assert node.end() == 1
    assert 'put the call under `if __name__ == "__main__":`' in node.err.splitlines()[-1]
    (tmp_path / "imported.py").write_text("import rallypoint\ndef f(): pass\nrallypoint.launch(f, 1)")
    assert script(tmp_path, "import imported").end() == 1


PROMPT = """
import math, rallypoint
scale = 10
def double(number):
    return 2 * number
def count(left):
    return 1 + count(left - 1) if left else 0
def train(number):
    global scale
    scale += 1
    return [double(each) * scale + math.floor(0.5) + count(3) for each in (number,)]
print(rallypoint.launch(train, nproc=2, args=(4,)))
class Net: pass
try:
    rallypoint.launch(lambda: Net(), nproc=2)
except TypeError as error:
    print(error)
"""


@pytest.mark.parametrize("words", [["-c", PROMPT], ["-"], ["-i"]])
def test_functions_of_a_prompt_take_their_variables_along(words: list[str], tmp_path: Path) -> None:
    """A notebook is such a prompt, too: its `__main__` has no file."""
    code = PROMPT if words == ["-"] else re.sub(r"\n(?=\S)", r"\n\n", PROMPT).replace("\n\nexcept", "\nexcept")
    done = subprocess.run(
        [sys.executable, *words], input=code, cwd=tmp_path, capture_output=True, text=True, timeout=AMPLE_S
    )
    assert done.stdout.splitlines()[0] == "[[91], [91]]", done.stderr
    assert "the variable 'Net' that it uses cannot be pickled: class Net is defined in a notebook" in done.stdout


HANGING = """
import os, signal, sys, threading, rallypoint

def hang(deaf):
    try:
        if deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(1, f"up {os.getpid()}\\n".encode())
        while True:
            threading.Event().wait(0.1)
    finally:
        os.write(1, b"cleaned up\\n")

if __name__ == "__main__":
    deaf = "deaf" in os.environ
    os.write(1, b"ready\\n")
    try:
        rallypoint.launch(hang, 2, (deaf,), grace=600 if deaf else 30)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_workers_end_with_their_caller(name: str, tmp_path: Path) -> None:
    node = script(tmp_path, HANGING)
    pids = [int(match[1]) for match in node.until(r"^up (\d+)$", 2)]
    node.signal(name)
    assert node.end() == (0 if name == "SIGINT" else -getattr(signal, name))
    gone(*pids)
    if name == "SIGINT":
        assert node.out.splitlines().count("cleaned up") == 2 and "interrupted" in node.out.splitlines()[-1]
        assert "Traceback" not in node.err
    until(lambda: list((tmp_path / "tmp").glob("rallypoint-launch-*")), lambda left: not left)


@pytest.mark.parametrize("signals", [1, 2])
def test_an_interrupt_at_the_start_leaves_nothing(signals: int, tmp_path: Path) -> None:
    node = script(tmp_path, HANGING)
    node.until("^ready$")
    for _ in range(signals):
        node.signal("SIGINT")
    node.end()  # whatever is left now would be found


def test_a_second_interrupt_kills_workers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("deaf", "1")
    node = script(tmp_path, HANGING)
    pids = [int(match[1]) for match in node.until(r"^up (\d+)$", 2)]
    node.signal("SIGINT")
    node.until("SIGINT: stopping the workers")
    node.signal("SIGINT")
    assert node.end() == 0 and "interrupted" in node.out
    gone(*pids)
