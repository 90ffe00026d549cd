"""The state is a function of its log: replayed in any process, from the beginning or from any snapshot, it is the same.

Each seed is a random history of a live server (`random_history.py`). FIRST_SEED is the first seed, STATE_SEEDS their
number. A failure names its seed. Mutants of core show that the histories detect bugs.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rallypoint.core import entries, snapshot
from rallypoint.core.connection_owner import ConnectionOwner
from rallypoint.core.engine import Engine
from rallypoint.core.entries import SessionRequest
from rallypoint.core.objects import Objects
from rallypoint.core.records import Waiter
from rallypoint.core.session import Session
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import State
from rallypoint.errors import NotAnInteger, StoreFull

from .random_history import History, replay, small_limits
from .state_checks import check_state

SEEDS = int(os.environ.get("STATE_SEEDS", "1000"))
FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))
ELSEWHERE = 120
"""Number of histories that are replayed in other processes."""

CUTS = 3
"""Number of places in a log at which a snapshot is restored, besides its beginning."""

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def _small_limits() -> Iterator[None]:
    with small_limits():
        yield


def judge(seed: int) -> None:
    """Make a history; fail if a replay of its log differs."""
    try:
        history = History(seed)
        check_state(history.state)
        chance = random.Random(seed)
        judge_log(history, sorted({0, *(chance.randrange(len(history.records)) for _ in range(CUTS))}))
    except Exception as error:
        again = f"STATE_SEEDS=1 FIRST_SEED={seed} pytest tests/core/test_state.py"
        raise AssertionError(f"seed {seed}: {error!r}\nagain: {again}") from error


def judge_log(history: History, cuts: list[int]) -> None:
    """Compare a replay of the log with the live state, and with replays that start from snapshots."""
    stops = sorted({*cuts, *history.snapshots})
    state, results, saved, at = State(), list[bytes](), dict[int, list[bytes]](), 0
    for stop in stops:
        state, more = replay(history.records[at:stop], state)
        results += more
        saved[stop], at = list(write(state)), stop
        assert saved[stop] == history.snapshots.get(stop, saved[stop]), f"record {stop}: the live state was different"
    check_state(state)
    assert results == history.results, f"other results: {differing(results, history.results)}"
    for cut in cuts:
        restored = read(saved[cut])
        check_state(restored)
        assert list(write(restored)) == saved[cut], f"record {cut}: a snapshot, read and written, is different"
        restored, rest = replay(history.records[cut:], restored)
        check_state(restored)
        assert rest == results[cut:], f"restored at {cut}: other results: {differing(rest, results[cut:])}"
        assert list(write(restored)) == saved[at], f"restored at {cut}: the rest of the log produces another state"


def differing(ours: list[bytes], theirs: list[bytes]) -> object:
    return next(((n, *pair) for n, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)


def judge_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        judge(seed)


def test_replaying_a_log_reproduces_state_and_results() -> None:
    judge_all(range(FIRST_SEED, FIRST_SEED + SEEDS))


# In other processes


def digests(logs: list[list[bytes]]) -> list[str]:
    """Return a digest of the state and the results of each log."""
    found = []
    for records in logs:
        state, results = replay(records)
        found.append(hashlib.sha256(b"".join([*write(state), *results])).hexdigest())
    return found


def elsewhere(path: Path, hash_seed: str, code: str = "") -> list[str]:
    """Return the digests of the logs in a file, computed by a process with another hash seed."""
    program = f"""
import msgspec
from rallypoint.core.engine import Engine
from tests.core.random_history import small_limits
from tests.core.test_state import digests
{code}
with small_limits(), open({str(path)!r}, "rb") as file:
    print(*digests(msgspec.msgpack.decode(file.read())))
"""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return child.stdout.split()


@pytest.fixture(scope="module")
def logs(_small_limits: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[bytes]]]:
    """Some logs, and the file that contains them."""
    logs = [History(seed).records for seed in range(FIRST_SEED, FIRST_SEED + ELSEWHERE)]
    path = tmp_path_factory.mktemp("logs") / "logs"
    path.write_bytes(msgspec.msgpack.encode(logs))
    return path, logs


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_replaying_a_log_is_independent_of_the_hash_seed(hash_seed: str, logs: tuple[Path, list[list[bytes]]]) -> None:
    path, records = logs
    assert elsewhere(path, hash_seed) == digests(records)


def test_an_order_that_depends_on_the_hash_seed_is_detected(logs: tuple[Path, list[list[bytes]]]) -> None:
    """The pairs of a multi_set are written in the order of a set."""
    mutant = """
def put_all(self, pairs, put_all=Engine.put_all):
    latest = dict(pairs)
    put_all(self, [(key, latest[key]) for key in set(latest)])
Engine.put_all = put_all
"""
    path, _ = logs
    assert elsewhere(path, "1", mutant) != elsewhere(path, "2", mutant)


# Refused requests

SESSIONS = tuple(
    msgspec.msgpack.encode(kind) for kind in ("session", "suspended", "taken", "ttls", "kept", "kept shared")
)
"""The first bytes of a session's chunks, after the length. A refusal is an answer, which they keep."""


class Careful(History):
    """A history that checks that refused requests change nothing."""

    def _log(self, entry: entries.Entry, run: Callable[[Any], Any]) -> Any:
        before = self._namespaces()
        answer = super()._log(entry, run)
        full = isinstance(answer, (StoreFull, NotAnInteger)) or getattr(answer, "what", "") == "value"
        if full and isinstance(entry, SessionRequest):
            assert self._namespaces() == before, f"{entry} was refused ({answer}) and has changed the state"
        return answer

    def _namespaces(self) -> list[bytes]:
        """Return the chunks of a snapshot without those of sessions."""
        chunks = (chunk for chunk in write(self.state))
        return [chunk for chunk in chunks if not chunk[1:].startswith(SESSIONS)]


def test_a_refused_request_changes_nothing() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS // 10):
        try:
            Careful(seed)
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")


# Mutants

Method = Callable[..., Any]


def restores_nothing(restore: Method) -> Method:
    return lambda self, owner, rows: None


def restores_lines_backwards(line: Method) -> Method:
    return lambda self, lines, rows: line(self, lines, rows[::-1])


def counts_shared_answers_once_more(restore: Method) -> Method:
    def mutant(self: Any, index: int, data: bytes) -> None:
        restore(self, index, data)
        self._bodies[-1].holders += 1

    return mutant


def counts_reads_as_state(park: Method) -> Method:
    def mutant(self: Engine, waiter: Waiter) -> Waiter:
        parked: Waiter = park(self, waiter)
        self.size += parked.reads
        return parked

    return mutant


def keeps_the_answers_of_reads(answer: Method) -> Method:
    def mutant(self: Session, handle: Any, result: Any) -> Any:
        answered = answer(self, handle, result)
        if isinstance(handle, Waiter) and handle.reads:
            self.kept.setdefault(handle.number, (answered, 16))
        return answered

    return mutant


def lets_a_read_end_a_turn(changes: Method) -> Method:
    return lambda self, op: op.changes and changes(self, op)


def wakes_in_order_of_memory(woken: Method) -> Method:
    """Wake the waiters of a key in the order of their addresses in memory."""

    def mutant(self: Engine, key: bytes) -> None:
        self._waiting[key] = dict.fromkeys(sorted(self._waiting[key], key=id))
        woken(self, key)

    return mutant


def gives_items_back_to_itself(end: Method) -> Method:
    """End a session so that its own waits get the items that it returns, which are lost."""

    def mutant(self: Session) -> None:
        self.over = True
        for key, item in reversed(self.taken.values()):
            self._engine.push(key, item, front=True)
        self.taken.clear()
        self._forget(list(self.kept))
        self._seen(self.pushed)
        self._engine.end(self)

    return mutant


def leaves_the_wait_of_a_dropped_call(forget: Method) -> Method:
    return lambda self, waiter: None


SECTIONS = (
    *("suspended", "taken", "ttls", "pushes", "held", "waiting", "gates", "turns", "watches", "leases", "clearing"),
    *("calls", "late", "latecomers", "idle", "timers", "away", "doubts"),
)
"""Sections of a snapshot; a section that is not restored must be detected."""

MUTANTS: list[tuple[Any, str, Callable[[Method], Method]]] = [
    *((snapshot._Reader, f"_{kind}", restores_nothing) for kind in SECTIONS),
    (snapshot._Reader, "_line_up", restores_lines_backwards),
    (snapshot._Reader, "_shared", counts_shared_answers_once_more),
    (Engine, "_park", counts_reads_as_state),
    (Engine, "_wake", wakes_in_order_of_memory),
    (Session, "answer", keeps_the_answers_of_reads),
    (Session, "end", gives_items_back_to_itself),
    (ConnectionOwner, "changes", lets_a_read_end_a_turn),
    (Objects, "forget", leaves_the_wait_of_a_dropped_call),
]


@pytest.mark.parametrize(
    ("owner", "method", "mutate"), MUTANTS, ids=[f"{method}-{mutate.__name__}" for _, method, mutate in MUTANTS]
)
def test_a_mutant_is_detected(
    owner: Any, method: str, mutate: Callable[[Method], Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, mutate(getattr(owner, method)))
    with pytest.raises(AssertionError, match=r"seed \d+: .*\nagain: STATE_SEEDS=1 FIRST_SEED="):
        judge_all(range(1000))
