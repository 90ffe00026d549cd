"""FileStore with real processes and threads: killed writers, dead runs, forks, leases, and waits.

A `Child` is a Python process with a store on the same path; it runs a few lines, and exchanges lines with the test over
its standard input and output. tests/conformance covers the operations; test_log_file and test_follower cover death in
each system call.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import pytest
from tests.conformance.calls import blocking_calls

from rallypoint import CorruptFile, FileStore, PrefixStore, StoreClosed, StoreTimeout
from rallypoint.filestore import shared_file
from rallypoint.filestore.follower import COMPACT_BYTES, ReplicaFollower
from rallypoint.filestore.log_file import LogFile
from rallypoint.filestore.log_format import HEADER_BYTES, MAGIC
from rallypoint.filestore.replica import Replica
from rallypoint.store.file import GRACE_S

FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))
LONG_S = 60.0
"""A timeout for events that must happen, long enough for any machine; no test waits for it to pass."""

PRELUDE = f"""
import os, signal, sys
from rallypoint import DiskFull, FileStore
from rallypoint.store import file
from rallypoint.filestore import shared_file, log_file, follower

def say(*what, sep=' '): os.write(1, (sep.join(map(str, what)) + chr(10)).encode())
def hear(): return sys.stdin.readline().strip()
def opened(): return FileStore(sys.argv[1], timeout={LONG_S})
"""


class Child:
    """Another process, running `code` with a store's path as its first argument."""

    def __init__(self, path: str, code: str, *arguments: object) -> None:
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code), path, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.last = ""

    def hear(self) -> str:
        assert self.process.stdout is not None
        self.last = self.process.stdout.readline().strip()
        return self.last

    def say(self, what: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_and_count(self) -> int:
        """Kill it, and return the last number that it printed."""
        self.kill()
        assert self.process.stdout is not None
        words = [self.last, *self.process.stdout.read().split()]
        return int(words[-1]) if words[-1].isdigit() else 0

    def ends(self) -> int:
        """Let it run to its end; return the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(LONG_S)


Start = Callable[..., Child]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def start(path: str) -> Iterator[Start]:
    children: list[Child] = []

    def start(code: str, *arguments: object) -> Child:
        children.append(Child(path, code, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        assert child.process.stdin is not None and child.process.stdout is not None
        child.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.close()


@pytest.fixture
def store(path: str) -> Iterator[FileStore]:
    with FileStore(path, timeout=LONG_S) as store:
        yield store


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


# The file


def test_an_empty_file_is_a_new_store() -> None:
    with tempfile.NamedTemporaryFile(delete=False) as file, FileStore(file.name, 2) as store:
        assert store.path == file.name and store.world_size == 2
        store.set("key", "value")
        assert FileStore(Path(file.name)).get("key") == b"value"
    assert not os.path.exists(file.name), "a dropped handle does not count"


def test_the_file_outlives_all_but_the_last_handle(path: str, start: Start) -> None:
    first = FileStore(path)
    other_handle, second = first.clone(), FileStore(path)
    child = start("store = opened(); say(store.get('key')); hear(); store.close(); say('closed')")
    first.set("key", "value")
    first.close()
    other_handle.close()
    assert second.get("key") == b"value" and child.hear() == "b'value'"
    second.close()
    second.close()
    assert os.path.exists(path)
    child.say()
    assert child.hear() == "closed"
    assert not os.path.exists(path)


# Dropped handles


def test_dropping_the_last_handle_with_a_world_size_removes_the_file(path: str, start: Start) -> None:
    first = FileStore(path, 2)
    other_handle, view = first.clone(), PrefixStore("view", FileStore(path, 2))
    child = start("store = FileStore(sys.argv[1], 2); say(store.get('key')); hear(); del store; say('dropped'); hear()")
    first.set("key", "value")
    assert child.hear() == "b'value'"
    del first, other_handle
    assert view.underlying_store.get("key") == b"value"
    del view
    assert os.path.exists(path), "the child still uses it"
    child.say()
    assert child.hear() == "dropped"
    assert not os.path.exists(path)


def test_without_a_world_size_a_dropped_handle_leaves_the_file(path: str) -> None:
    store = FileStore(path)
    del store
    assert os.path.exists(path)
    with FileStore(path, 1):
        pass
    assert not os.path.exists(path), "closing the last handle removes it"


HOLDERS = {
    "global": "store = FileStore(sys.argv[1], 1)",
    "cycle": "class Holder: pass\nholder = Holder(); holder.me = holder; holder.store = FileStore(sys.argv[1], 1)",
    "class": "class Holder: store = FileStore(sys.argv[1], 1)",
    "module": "import types; sys.modules['mine'] = mine = types.ModuleType('mine')\n"
    "exec('import sys, rallypoint; store = rallypoint.FileStore(sys.argv[1], 1)', vars(mine))",
}


@pytest.mark.parametrize("code", HOLDERS.values(), ids=HOLDERS)
def test_the_end_of_the_last_process_removes_the_file(path: str, start: Start, code: str) -> None:
    child = start(f"{code}\nsay(os.path.exists(sys.argv[1])); hear()")
    assert child.hear() == "True"
    assert child.ends() == 0
    assert not os.path.exists(path)


def test_a_dropped_handle_does_not_remove_a_file_in_use(path: str, start: Start) -> None:
    killed, lives = (start("store = FileStore(sys.argv[1], 3); store.add('here', 1); say('up'); hear()") for _ in "ab")
    assert killed.hear() == lives.hear() == "up"
    killed.kill()
    store = FileStore(path, 3)
    assert store.get("here") == b"2"
    del store
    assert os.path.exists(path)
    assert FileStore(path).get("here") == b"2", "it is the same store"
    lives.kill()
    assert os.path.exists(path), "a killed process removes nothing"
    store = FileStore(path, 1)
    assert store.num_keys() == 0, "the next run starts with an empty store"
    del store
    assert not os.path.exists(path)


def test_a_forked_child_does_not_remove_its_parent_s_file(path: str, start: Start) -> None:
    child = start("""
        store = FileStore(sys.argv[1], 1)
        store.set("key", "value")
        if os.fork() == 0:
            del store
            os._exit(0)
        os.wait()
        say(store.get("key"))
        used = os.fork()
        if used == 0:
            store.set("child", "was here")
            del store
            os._exit(0)
        os.wait()
        say(store.get("child"))
    """)
    assert [child.hear(), child.hear()] == ["b'value'", "b'was here'"]
    assert child.ends() == 0
    assert not os.path.exists(path)


def test_concurrent_opening_and_dropping_never_loses_a_store(path: str, start: Start) -> None:
    code = """
        import threading
        def work(name):
            for number in range(40):
                store = FileStore(sys.argv[1], 4, 60.0)
                value = store.add(name, 1)
                assert value >= 1 and store.get(name) == b"%d" % value
                del store
        threads = [threading.Thread(target=work, args=(f"{os.getpid()}/{number}",)) for number in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        say("done")
    """
    children = [start(code) for _ in range(3)]
    assert [child.hear() for child in children] == ["done"] * 3
    assert [child.ends() for child in children] == [0] * 3
    assert not os.path.exists(path)


def test_a_relative_path_survives_a_change_of_directory(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(os.path.dirname(path))
    with FileStore("store") as store:
        monkeypatch.chdir("/")
        store.set("key", "value")
        store.clone().close()
        assert store.path == "store" and FileStore(path).get("key") == b"value"


def test_two_names_of_one_file_are_one_store(path: str, store: FileStore) -> None:
    os.symlink(path, path + ".link")
    os.link(path, path + ".hard")
    for name in (".link", ".hard"):
        with FileStore(path + name) as other:
            other.set(name, "value")
            assert other._backend._shared is store._backend._shared  # type: ignore[attr-defined]
    assert store.multi_get([".link", ".hard"]) == [b"value", b"value"]


@pytest.mark.parametrize(
    "content", [b"x", b"\0" * 5000, b"someone's thesis\n" * 999, MAGIC[:-1] + b"\x09 of the future"]
)
def test_a_foreign_file_is_refused_and_not_changed(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    with pytest.raises(CorruptFile) as caught:
        FileStore(path)
    assert caught.value.path == path and path in str(caught.value)
    assert Path(path).read_bytes() == content


def test_an_invalid_path_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, error in [
        (tmp_path / "missing" / "store", FileNotFoundError),
        (tmp_path, IsADirectoryError),
        (tmp_path / "file" / "store", NotADirectoryError),
    ]:
        with pytest.raises(error) as caught:
            FileStore(path)
        assert caught.value.filename == str(path)


def test_a_full_disk_is_an_error_that_names_the_file_and_does_no_harm(
    path: str, store: FileStore, start: Start
) -> None:
    child = start("""
        import resource
        store = opened()
        store.set("before", "1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(sys.argv[1]) + 100, resource.RLIM_INFINITY))
        for key, value in [("large", bytes(1000)), ("small", "2"), ("large", bytes(1000))]:
            before = os.path.getsize(sys.argv[1])
            try:
                store.set(key, value)
                say("done")
            except DiskFull as error:
                same = os.path.getsize(sys.argv[1]) == before
                say(type(error).__name__, error.filename == sys.argv[1], same, store.check([key]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        store.set("after", "3")
    """)
    assert [child.hear() for _ in range(3)] == ["DiskFull True True False", "done", "DiskFull True True False"]
    assert store.multi_get(["before", "small", "after"]) == [b"1", b"2", b"3"]
    assert not store.check(["large"])


def test_opening_on_a_full_disk_leaves_an_empty_file(path: str, start: Start) -> None:
    """An empty file is a new store for the next process when there is room; a part of a header would not be."""
    child = start("""
        import resource
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
        try:
            opened()
        except DiskFull as error:
            say(error.path == sys.argv[1], os.path.getsize(sys.argv[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        store = opened()
        store.set("key", "value")
        say(store.get("key"))
    """)
    assert [child.hear(), child.hear()] == ["True 0", "b'value'"]


def test_removing_a_file_in_use_is_an_error_for_writers_and_waiters(
    path: str, store: FileStore, threads: ThreadPoolExecutor
) -> None:
    store.set("key", "value")
    waiting = threads.submit(store.get, "other")
    os.unlink(path)
    with pytest.raises(CorruptFile, match="removed"):
        store.set("key", "value")
    assert isinstance(waiting.exception(LONG_S), CorruptFile)
    store.close()


@pytest.mark.parametrize("whole", [False, True])
def test_a_torn_last_record_is_ignored_and_overwritten(tmp_path: Path, whole: bool) -> None:
    with FileStore(tmp_path / "original") as original:
        original.multi_set(["one", "two"], ["1", "2"])
        before = os.path.getsize(original.path)
        original.set("last", "a value that is longer than the next")
        data = Path(original.path).read_bytes()
    for size in [len(data)] if whole else range(before, len(data)):
        path = str(tmp_path / str(size))
        Path(path).write_bytes(data[:size])
        someone = LogFile(path)
        someone.claim(1)  # otherwise it is the file of a dead run
        with FileStore(path) as store:
            assert store.list_keys() == (["last", "one", "two"] if whole else ["one", "two"])
            assert os.path.getsize(path) == size
            store.set("next", "3")
            someone.try_mutex()
            assert len(someone.read().payloads) == (3 if whole else 2)
            someone.close()


def test_damage_in_the_middle_is_an_error_for_new_processes(path: str, store: FileStore, start: Start) -> None:
    store.set("key", "value" * 10)
    store.set("other", "value")
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + 40)
        file.write(b"?")
    child = start("""
        try:
            opened()
        except Exception as error:
            say(type(error).__name__, error.offset)
    """)
    assert child.hear() == f"CorruptFile {HEADER_BYTES}"


# Dead runs


def test_data_of_a_dead_run_is_discarded(path: str, start: Start) -> None:
    child = start("store = opened(); store.set('stale', '1'); store.add('count', 5); say('set'); hear()")
    assert child.hear() == "set"
    with FileStore(path) as store:
        assert store.add("count", 1) == 6, "the store exists while the process lives"
    child.kill()
    assert os.path.exists(path)
    with FileStore(path) as store:
        assert store.num_keys() == 0 and store.add("count", 1) == 1
    assert not os.path.exists(path)


def test_one_of_many_new_processes_discards_the_data_of_a_dead_run(path: str, start: Start) -> None:
    child = start("store = opened(); store.set('stale', '1'); say('set'); hear()")
    assert child.hear() == "set"
    child.kill()
    newcomers = [
        start("store = opened(); store.add('here', 1); store.barrier('all', 6); say(store.get('here')); store.close()")
        for _ in range(6)
    ]
    assert [newcomer.hear() for newcomer in newcomers] == ["b'6'"] * 6
    assert [newcomer.ends() for newcomer in newcomers] == [0] * 6
    assert not os.path.exists(path)


def test_concurrent_opening_and_closing_never_loses_a_store(path: str, start: Start) -> None:
    code = """
        for number in range(60):
            with opened() as store:
                value = store.add(f"mine {os.getpid()}", 1)
                assert value >= 1 and store.get(f"mine {os.getpid()}") == b"%d" % value
        say("done")
    """
    children = [start(code) for _ in range(4)]
    assert [child.hear() for child in children] == ["done"] * 4
    assert [child.ends() for child in children] == [0] * 4
    assert not os.path.exists(path)


@pytest.mark.parametrize("alone", [True, False])
def test_dropping_a_handle_ends_its_leases(path: str, start: Start, alone: bool) -> None:
    child = start("store = opened(); watch = store.watch('lease'); say('ready')\nwhile True: say(watch.next().value)")
    assert child.hear() == "ready"
    dropped = FileStore(path, timeout=LONG_S)
    other = None if alone else dropped.clone()
    dropped.lease("lease", "value")
    assert child.hear() == "b'value'"
    del dropped
    gc.collect()
    if other is not None:
        assert not other.check(["lease"])
    assert child.hear() == "None"
    child.kill()
    if other is not None:
        other.close()
        assert not os.path.exists(path)


# Writers


def test_concurrent_additions_count_once(store: FileStore, start: Start) -> None:
    code = """
        from concurrent.futures import Future, ThreadPoolExecutor
        one = opened()
        handles = [one, one, one.clone(), opened()]
        def count(handle):
            for _ in range(100):
                handle.add("count", 1)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(count, handles))
        say("done")
    """
    children = [start(code) for _ in range(3)]
    assert [child.hear() for child in children] == ["done"] * 3
    assert store.get("count") == b"1200"


def test_values_of_eight_megabytes_are_exchanged_between_processes(store: FileStore, start: Start) -> None:
    child = start("""
        store = opened()
        value = store.get("large")
        store.set("ägain\\N{SNOWMAN}", value[::-1])
        say(len(value))
    """)
    value = random.Random(1).randbytes(8 * 1024 * 1024)
    store.set("large", value)
    assert child.hear() == str(len(value))
    assert store.get("ägain☃") == value[::-1]


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + 6))
def test_a_killed_writer_loses_no_acknowledged_write(path: str, store: FileStore, start: Start, seed: int) -> None:
    """Writers are killed while a reader reads continuously: every acknowledged write is there completely."""
    chance = random.Random(seed)
    writer = """
        store, name = opened(), sys.argv[2]
        number = 0
        while True:
            number += 1
            store.multi_set([f"{name}/{i}" for i in range(5)], [b"%d:" % number + bytes(40_000)] * 5)
            store.queue_push(name, str(number))
            say(number)
    """
    reader = start("""
        store = opened()
        say("reading")
        while not store.check(["stop"]):
            for name in ("0", "1", "2"):
                keys = [f"{name}/{i}" for i in range(5)]
                if store.check(keys):
                    assert len(set(store.multi_get(keys))) == 1
        say("done")
    """)
    assert reader.hear() == "reading"
    writers = [start(writer, name) for name in range(3)]
    for name, child in enumerate(writers):
        for _ in range(chance.randint(1, 12)):
            child.hear()
        acknowledged = child.kill_and_count()
        values = {value.partition(b":")[0] for value in store.multi_get([f"{name}/{i}" for i in range(5)])}
        assert len(values) == 1 and acknowledged <= int(values.pop()) <= acknowledged + 1
        assert acknowledged <= store.queue_len(str(name)) <= acknowledged + 1
    store.set("stop", "")
    assert reader.hear() == "done"


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + 4))
def test_a_process_killed_while_compacting_loses_nothing(store: FileStore, start: Start, seed: int) -> None:
    """All acknowledged additions of each process are there, and at most one more; others' leases are untouched."""
    chance = random.Random(seed)
    code = """
        follower.COMPACT_BYTES, follower.COMPACT_RATIO = 300, 0
        store, name = opened(), sys.argv[2]
        while True:
            say(store.add(name, 1))
            store.queue_push("q", store.queue_pop("q"))
    """
    store.lease("lease", "value")
    for item in "abcdef":
        store.queue_push("q", item)
    bystander = start(code, "bystander")
    bystander.hear()  # wait until it has started: it must not be killed before it has counted
    for number in range(3):
        victim = start(code, f"victim {number}")
        for _ in range(chance.randint(1, 30)):
            victim.hear()
        acknowledged = victim.kill_and_count()
        assert acknowledged <= int(store.get(f"victim {number}")) <= acknowledged + 1
    acknowledged = bystander.kill_and_count()
    assert acknowledged <= int(store.get("bystander")) <= acknowledged + 1
    assert store.get("lease") == b"value" and store.statistics().leased_keys == 1
    assert 6 - 4 <= store.queue_len("q") <= 6, "each of the four may have held one item"


@pytest.mark.parametrize("locks", ["of openings", "of processes"])
def test_every_item_of_a_queue_is_popped_once(store: FileStore, start: Start, locks: str) -> None:
    code = """
        log_file._HAS_OFD = sys.argv[2] == "of openings"
        store = opened()
        say("ready")
        while (item := store.queue_pop("q")) != b"end":
            say(item.decode())
            store.queue_push("popped", item)
    """
    takers = [start(code, locks) for _ in range(3)]
    assert [taker.hear() for taker in takers] == ["ready"] * 3
    for number in range(150):
        store.queue_push("q", str(number))
    popped = Counter(int(store.queue_pop("popped")) for _ in range(150))
    assert popped == Counter(range(150))
    for _ in takers:
        store.queue_push("q", "end")
    assert [taker.ends() for taker in takers] == [0] * 3
    printed = [int(line) for taker in takers for line in taker.process.stdout or ()]
    assert Counter(printed) == popped


def test_a_log_is_compacted_while_processes_use_it(path: str, store: FileStore, start: Start) -> None:
    code = """
        store, name = opened(), sys.argv[2]
        for number in range(1, 501):
            store.set(name, str(number) + "." * 400)
            store.add("count", 1)
            store.queue_push("q", name)
            store.queue_pop("q")
        say("done")
    """
    store.set("quiet", "unchanged")
    with store.watch("") as watch:
        writers = [start(code, name) for name in "ab"]
        last: Counter[str] = Counter()
        while last != {"a": 500, "b": 500, "count": 1000}:
            change = watch.next(LONG_S)
            assert change.value is not None
            number = int(change.value.partition(b".")[0])
            assert number > last[change.key], "a change was repeated or out of order"
            last[change.key] = number
        assert [writer.hear() for writer in writers] == ["done"] * 2
        with pytest.raises(StoreTimeout):
            watch.next(timeout=0)
    assert os.path.getsize(path) < 2 * COMPACT_BYTES, "some 500 KB were written"
    assert store.get("count") == b"1000" and store.get("quiet") == b"unchanged" and store.queue_len("q") == 0


def test_arrivals_and_leases_survive_a_compaction(
    path: str, store: FileStore, start: Start, threads: ThreadPoolExecutor
) -> None:
    child = start("""
        store = opened()
        store.lease("lease", "value")
        say("leased")
        store.barrier("gate", 3)
        say("through")
        hear()
    """)
    assert child.hear() == "leased"
    arrival = threads.submit(store.barrier, "gate", 3)
    wait_until(store, lambda: store.check(["gate"]) and store.get("gate") == b"2")
    for number in range(300):
        store.set("garbage", str(number) + "." * 400)
    assert os.path.getsize(path) < 2 * COMPACT_BYTES
    assert not arrival.done() and store.get("gate") == b"2"
    with FileStore(path) as third, store.watch("lease") as watch:
        third.barrier("gate", 3)
        arrival.result(LONG_S)
        assert child.hear() == "through" and store.check(["lease"])
        child.kill()
        assert watch.next(LONG_S).value is None


def wait_until(store: FileStore, true: Callable[[], bool]) -> None:
    """Wait until the condition holds, rechecking after every write to this store."""
    with store.watch("") as watch:
        while not true():
            with contextlib.suppress(StoreTimeout):
                watch.next(0.05)


# Waiting


@pytest.mark.parametrize(
    ("waits", "wakes"),
    [
        ("store.get('key')", "store.set('key', 'b')"),
        ("store.wait(['key', 'q'])", "store.queue_push('q', ''); store.add('key', 1)"),
        ("store.multi_get(['key', 'other'])", "store.multi_set(['key', 'other'], ['1', '2'])"),
        ("store.queue_pop('key')", "store.queue_push('key', 'item')"),
        ("store.barrier('key', 2)", "store.barrier('key', 2)"),
        (
            "watch = store.watch('ke'); store.set('on', ''); watch.next()",
            "store.wait(['on']); store.swap('key', None, '1')",
        ),
    ],
)
def test_a_waiting_process_is_woken_by_another(store: FileStore, start: Start, waits: str, wakes: str) -> None:
    child = start(f"store = opened(); say('waiting'); {waits}; say('woken')")
    assert child.hear() == "waiting"
    waker = start(f"store = opened(); {wakes}; say('done')")
    assert waker.hear() == "done" and child.hear() == "woken"


def test_threads_of_one_process_wake_each_other_without_polling(
    path: str, store: FileStore, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_file, "FIRST_POLL_S", 3600.0)
    monkeypatch.setattr(shared_file, "LAST_POLL_S", 3600.0)
    with FileStore(path, timeout=LONG_S) as other, store.watch("key") as watch:
        waits: list[Future[bytes] | Future[None]] = [
            threads.submit(store.get, "key"),
            threads.submit(other.wait, ["key"]),
            threads.submit(other.queue_pop, "q"),
            threads.submit(store.barrier, "gate", 2),
        ]
        change = threads.submit(watch.next)
        other.barrier("gate", 2)
        store.queue_push("q", "item")
        other.set("key", "value")
        assert [wait.result(LONG_S) for wait in waits] == [b"value", None, b"item", None]
        assert change.result(LONG_S).value == b"value"


def test_many_waiting_threads_poll_as_little_as_one(
    store: FileStore, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: Counter[str] = Counter()
    look = ReplicaFollower.look

    def counted(self: ReplicaFollower) -> bool:
        looks["all"] += 1
        return look(self)

    monkeypatch.setattr(ReplicaFollower, "look", counted)
    with pytest.raises(StoreTimeout):
        store.get("missing", timeout=1)
    assert 3 <= looks["all"] <= 1 + 6 + 20 + 2, "at once, after 1 2 4 8 16 32 ms, every 50 ms, and at the end"
    looks.clear()
    waits = [threads.submit(store.wait, ["missing"], 1) for _ in range(16)]
    assert all(isinstance(wait.exception(LONG_S), StoreTimeout) for wait in waits)
    assert looks["all"] <= 29 + 16 * 8, "one thread polls for all; each looks when it starts, takes over, and ends"


def test_another_thread_polls_when_the_polling_one_is_done(
    store: FileStore, start: Start, threads: ThreadPoolExecutor
) -> None:
    child = start("store = opened()\nwhile key := hear(): store.set(key, key)")
    shared = store._backend._shared  # type: ignore[attr-defined]
    waits: list[Future[bytes]] = []
    for number in range(3):
        waits.append(threads.submit(store.get, str(number)))
        wait_for(shared, lambda: shared.replica.statistics().waiters == len(waits))
    for number in (2, 0, 1):
        child.say(str(number))
        assert waits[number].result(LONG_S / 2) == b"%d" % number


def wait_for(shared: shared_file.SharedFile, true: Callable[[], bool]) -> None:
    """Wait until the condition holds, rechecking after every change in this process."""
    with shared.lock:
        while not true():
            shared.changed.wait(0.01)


def test_threads_pop_items_in_the_order_of_their_calls(
    path: str, store: FileStore, threads: ThreadPoolExecutor
) -> None:
    shared = store._backend._shared  # type: ignore[attr-defined]
    handles = [store, store.clone(), store, FileStore(path, timeout=LONG_S)]
    waits = []
    for handle in handles:
        waits.append(threads.submit(handle.queue_pop, "q"))
        wait_for(shared, lambda: len(shared.line) == len(waits))
    for number in range(4):
        store.queue_push("q", str(number))
    assert [wait.result(LONG_S) for wait in waits] == [b"0", b"1", b"2", b"3"]
    handles[1].close()
    handles[3].close()


def test_closing_a_handle_ends_only_its_own_waits(store: FileStore, threads: ThreadPoolExecutor) -> None:
    other_handle = store.clone()
    watch = other_handle.watch("key")
    waits = [threads.submit(call) for call in blocking_calls(other_handle, watch)]
    other = threads.submit(store.get, "key")
    wait_until(store, lambda: store.check(["gate"]))
    other_handle.close()
    assert [type(wait.exception(LONG_S)) for wait in waits] == [StoreClosed] * 5
    with pytest.raises(StoreClosed):
        other_handle.set("key", "value")
    with pytest.raises(StoreClosed):
        other_handle.clone()
    assert store.get("gate") == b"0" and not other.done()
    store.set("key", "value")
    assert other.result(LONG_S) == b"value"


def test_ctrl_c_ends_a_wait_and_withdraws_its_arrival(store: FileStore, start: Start) -> None:
    child = start("""
        store, said = opened(), []
        shared = store._backend._shared
        sleep = shared.changed.wait
        def wait(seconds):
            if not said:
                said.append(True)
                say("asleep")
            return sleep(seconds)
        shared.changed.wait = wait
        for call in (lambda: store.barrier("gate", 2), lambda: store.get("key"), lambda: store.queue_pop("q")):
            said.clear()
            try:
                call()
            except KeyboardInterrupt:
                say("interrupted")
        store.set("fine", "")
        say(store.statistics().waiters)
    """)
    for _ in range(3):
        assert child.hear() == "asleep"
        assert store.get("gate") in (b"0", b"1")
        child.process.send_signal(signal.SIGINT)
        assert child.hear() == "interrupted"
        assert store.get("gate") == b"0"
    store.wait(["fine"])
    assert child.hear() == "0"


@pytest.mark.parametrize(
    "operation",
    [
        lambda store: store.set("key", "value"),
        lambda store: store.add("count", 1),
        lambda store: store.get("there"),
        lambda store: store.queue_push("q", "item"),
        lambda store: store.queue_pop("q", timeout=0),
        lambda store: store.lease("lease", "value"),
        lambda store: store.barrier("gate", 1),
        lambda store: store.set("large", "x" * COMPACT_BYTES),
    ],
)
def test_an_interrupt_in_any_function_leaves_the_store_consistent(
    path: str, store: FileStore, operation: Callable[[FileStore], object]
) -> None:
    """Signals are handled where a function begins, so the interrupt comes there, each time one function later."""
    store.multi_set(["there", "garbage"], ["1", "x"])
    shared = store._backend._shared  # type: ignore[attr-defined]
    calls, done = 0, False
    while not done:
        calls += 1
        store.queue_push("q", "item")
        interrupt, before = Interrupt(calls), sys.gettrace()
        sys.settrace(interrupt)
        try:
            operation(store)
            done = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert not shared.lock.locked() and not shared.line and shared._poller is None
        seen = as_others_see_it(path)
        assert store.num_keys() == len(seen.values())
        assert vars_of(shared.replica) == vars_of(seen), f"interrupted in call {calls} of the operation"
    assert calls > 10


class Interrupt:
    """A trace function that raises KeyboardInterrupt where our n-th function begins."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and f"{os.sep}rallypoint{os.sep}" in frame.f_code.co_filename:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def as_others_see_it(path: str) -> Replica:
    """Return what a new process sees; the mutex must be free."""
    with contextlib.closing(LogFile(path)) as log:
        assert log.try_mutex(), "the mutex is still held"
        newcomer = ReplicaFollower(log, lambda: None)
        newcomer.enter()
        return newcomer.replica


def vars_of(replica: Replica) -> tuple[object, ...]:
    return (
        replica.values(),
        {key: list(queue) for key, queue in replica._queues.items()},
        set(replica.arrivals),
        set(replica.owners),
        replica.revision,
    )


def test_a_process_that_holds_the_lock_delays_no_call_past_its_deadline(
    path: str, store: FileStore, start: Start, threads: ThreadPoolExecutor
) -> None:
    store.set("key", "value")
    child = start("log = log_file.LogFile(sys.argv[1]); say(log.try_mutex()); hear()")
    assert child.hear() == "True"
    assert store.get("key", timeout=0) == b"value" and store.check(["key"]), "reading takes no lock"
    blocked = threads.submit(store.set, "other", "value")
    with pytest.raises(StoreTimeout, match="missing"):
        store.get("missing", timeout=0.05)
    store.set_timeout(0.1)
    with pytest.raises(StoreTimeout, match="another process holds the lock") as caught:
        store.set("key", "other")
    assert caught.value.timeout_s == GRACE_S and path in str(caught.value)
    assert not blocked.done()
    child.kill()
    blocked.result(LONG_S)
    store.set("key", "other")


# Members


@pytest.mark.parametrize("locks", ["of openings", "of processes"])
def test_leases_and_arrivals_of_a_killed_process_end(store: FileStore, start: Start, locks: str) -> None:
    child = start(
        """
        import threading
        log_file._HAS_OFD = sys.argv[2] == "of openings"
        store = opened()
        store.lease("lease/1", "value")
        other = store.clone()
        other.lease("lease/2", "value")
        store.lease("taken over", "value")
        threading.Thread(target=store.barrier, args=("gate", 3), daemon=True).start()
        hear()
    """,
        locks,
    )
    wait_until(store, lambda: store.check(["gate", "taken over"]))
    store.set("taken over", "mine")
    assert store.check(["lease/1", "lease/2"]) and store.get("gate") == b"1"
    with store.watch("") as watch:
        child.kill()
        changes = {
            (change.key, change.value) for change in (watch.next(LONG_S), watch.next(LONG_S), watch.next(LONG_S))
        }
    assert changes == {("lease/1", None), ("lease/2", None), ("gate", b"0")}
    assert store.list_keys() == ["gate", "taken over"]


def test_a_lease_ends_with_its_handle_for_all_processes(store: FileStore, start: Start) -> None:
    other_handle = store.clone()
    lease = other_handle.lease("lease", "value")
    kept = store.lease("kept", "value")
    child = start("store = opened(); watch = store.watch(''); say(store.list_keys()); say(watch.next().key)")
    assert child.hear() == "['kept', 'lease']"
    other_handle.close()
    assert child.hear() == "lease"
    with pytest.raises(StoreClosed):
        lease.release()
    assert store.list_keys() == ["kept"] and kept.release() and store.num_keys() == 0


def test_a_forked_child_has_its_own_leases_and_watches(path: str, store: FileStore, start: Start) -> None:
    parent = start("""
        store = opened()
        store.lease("parent's", "value")
        watch = store.watch("to the child")
        if os.fork() == 0:
            store.set("from the child", "value")
            store.lease("child's", "value")
            say(watch.next().key)
            os._exit(0)
        say(store.get("from the child"))
        store.wait(["child's"])
        say("there")
        gone = store.watch("child's")
        store.set("to the child", "value")
        os.wait()
        say(gone.next().value)
        say(*store.list_keys(), sep=", ")
        store.close()
    """)
    assert [parent.hear() for _ in range(4)] == ["b'value'", "there", "to the child", "None"]
    assert parent.hear() == "from the child, parent's, to the child"


def test_a_child_that_inherited_a_store_does_not_keep_its_parent_s_leases(store: FileStore, start: Start) -> None:
    parent = start("""
        store = opened()
        store.lease("parent's", "value")
        watch = store.watch("")
        child = os.fork()
        if child == 0:
            watch.close()
            store.close()
            say("forked")
            hear()
            os._exit(0)
        say(child)
        signal.pause()
    """)
    lines = {parent.hear(), parent.hear()}
    (child,) = (int(line) for line in lines - {"forked"})
    assert "forked" in lines and store.check(["parent's"])
    with store.watch("parent's") as watch:
        parent.kill()
        assert watch.next(LONG_S).value is None
    os.kill(child, 0)  # it still lives
    os.kill(child, signal.SIGKILL)


def test_forks_of_a_busy_process_harm_neither_side(store: FileStore, start: Start) -> None:
    parent = start("""
        import threading
        store = opened()
        stop = threading.Event()
        def work(name):
            number = 0
            while not stop.is_set():
                number += 1
                assert store.add(name, 1) == number
        threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
        for thread in threads: thread.start()
        for number in range(20):
            if os.fork() == 0:
                store.add("forks", 1)
                store.close()
                os._exit(0)
        results = [os.wait()[1] for _ in range(20)]
        stop.set()
        for thread in threads: thread.join()
        say(results == [0] * 20, store.get("forks"))
    """)
    assert parent.hear() == "True b'20'"
    assert store.get("forks") == b"20"


def test_reads_and_writes_of_concurrent_threads_stay_in_order(store: FileStore, threads: ThreadPoolExecutor) -> None:
    handles = [store, store, store.clone(), store.clone()]
    stop = threading.Event()

    def write(handle: FileStore, name: str) -> None:
        for number in range(200):
            handle.set(name, str(number))
            assert handle.get(name) == b"%d" % number

    def read(handle: FileStore) -> None:
        seen: Counter[str] = Counter()
        while not stop.is_set():
            for name in handle.list_keys():
                value = int(handle.get(name))
                assert value >= seen[name]
                seen[name] = value

    readers = [threads.submit(read, handle) for handle in handles]
    writers = [threads.submit(write, handle, str(number)) for number, handle in enumerate(handles)]
    for writer in writers:
        writer.result(LONG_S)
    stop.set()
    for reader in readers:
        reader.result(LONG_S)


def test_statistics_do_not_count_internal_keys(store: FileStore, start: Start) -> None:
    child = start("store = opened(); store.lease('lease', 'value'); store.set('key', ''); say('done'); hear()")
    assert child.hear() == "done"
    statistics = store.statistics()
    assert (statistics.keys, statistics.leased_keys, statistics.queues, statistics.revision) == (2, 1, 0, 2)
    assert store.num_keys() == 2 and store.list_keys() == ["key", "lease"]
