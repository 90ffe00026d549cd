"""torchrun's options for workers and their logs, given to it and to `rallypoint run`, side by side."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.launch.test_numa import gpu, put

from rallypoint.launch.output.line_filter import parse_filters
from rallypoint.launch.signal_names import signal_names
from rallypoint.launch.workers.numa import MODES, cpus_of_workers

from .torch_processes import AMPLE_S

pytestmark = pytest.mark.needs("torch")

LAUNCHERS = {"torchrun": ["-m", "torch.distributed.run"], "ours": ["-m", "rallypoint", "run"]}
PRINTS = """
import os, sys
rank = os.environ["RANK"]
for stream in (sys.stdout, sys.stderr):
    for word in ("apple", "a,b", "pear"):
        stream.write(f"{word} of {rank}\\n")
sys.exit(int(os.environ.get("FAIL", "") == rank))
"""


def run_both(where: Path, words: str, **env: str) -> dict[str, subprocess.CompletedProcess[str]]:
    (where / "prints.py").write_text(PRINTS)
    done = {}
    for name, launcher in LAUNCHERS.items():
        logs = f"--log-dir={where / name}"
        command = [sys.executable, *launcher, "--nproc-per-node=2", logs, *words.split(), str(where / "prints.py")]
        done[name] = subprocess.run(
            command, cwd=where, env={**os.environ, **env}, capture_output=True, text=True, timeout=AMPLE_S, check=False
        )
    return done


def files(where: Path) -> dict[str, list[str]]:
    """Return the files of a run, without the name of the run, and their sorted lines."""
    (run,) = where.glob("*/")
    found = [path for path in run.rglob("*") if path.is_file()]
    return {str(path.relative_to(run)): sorted(path.read_text().splitlines()) for path in found}


@pytest.mark.parametrize(
    ("words", "env"),
    [
        ("--tee=3 --duplicate-stdout-filters=apple,a,,b", {}),
        ("--tee=0:3 --duplicate-stdout-filters=pear --duplicate-stderr-filters=apple --role=me", {}),
        ("--tee=3 --local-ranks-filter=1 --duplicate-stderr-filters=of", {}),
        ("--tee=1 --duplicate-stdout-filters=pear", {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}> "}),
        ("--logs-specs=default --redirects=3", {}),
        ("--logs-specs=default --tee=0:1,1:3 --local-ranks-filter=1", {}),
    ],
)
def test_files_have_the_same_names_and_lines(tmp_path: Path, words: str, env: dict[str, str]) -> None:
    done = run_both(tmp_path, words, **env)
    assert [each.returncode for each in done.values()] == [0, 0], done
    assert files(tmp_path / "ours") == files(tmp_path / "torchrun")


def test_attempts_have_the_same_numbers(tmp_path: Path) -> None:
    run_both(tmp_path, "--redirects=3 --max-restarts=2", FAIL="1")
    attempts = [{name.partition("/")[0] for name in files(tmp_path / each)} for each in LAUNCHERS]
    assert attempts == [{"attempt_0", "attempt_1", "attempt_2"}] * 2


@pytest.mark.parametrize("fails", ["", "1"])
def test_events_have_the_same_names_and_fields(tmp_path: Path, fails: str) -> None:
    done = run_both(tmp_path, "--event-log-handler=console --redirects=3 --max-restarts=1", FAIL=fails)
    told: dict[str, list[tuple[Any, ...]]] = {}
    for name, each in done.items():
        events = [json.loads(line) for line in each.stderr.splitlines() if line.startswith('{"name": "torch')]
        told[name] = []
        for event in events:
            facts, more = event["metadata"], json.loads(event["metadata"]["metadata"])
            ended = facts["state"] in ("SUCCEEDED", "FAILED") and event["source"] == "WORKER"
            code = more["exit_code"] if ended and facts["global_rank"] == 1 else None
            fields = tuple(event), tuple(facts), tuple(more)
            ranks = facts["global_rank"], facts["group_rank"]
            told[name].append((event["name"], event["source"], *ranks, facts["agent_restarts"], code, fields))
    theirs = [event for event in told["torchrun"] if not event[0].endswith("ASSIGN_WORKER_RANKS")]
    if fails:  # the other rank may have ended by itself, or have been stopped
        theirs, mine = ([one for one in events if one[2] != 0] for events in (theirs, told["ours"]))
        assert mine == theirs
    else:
        assert told["ours"] == theirs


@pytest.mark.parametrize("devices", [None, "5, 3", "5"])
def test_virtual_local_ranks_are_the_same(tmp_path: Path, devices: str | None) -> None:
    script = tmp_path / "prints.py"
    names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
    script.write_text(f"import os; os.write(1, ' '.join(os.environ[n] for n in {names}).encode() + b'\\n')")
    env = {**os.environ, **({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})}
    seen = []
    for launcher in LAUNCHERS.values():
        command = [sys.executable, *launcher, "--nproc-per-node=2", "--virtual-local-rank", str(script)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=AMPLE_S, check=False)
        seen.append((sorted(done.stdout.splitlines()), done.returncode == 0))
    assert seen[0] == seen[1]


def test_without_gpus_numa_binding_fails(tmp_path: Path) -> None:
    done = run_both(tmp_path, "--numa-binding=node", CUDA_VISIBLE_DEVICES="")
    assert all(each.returncode and "apple" not in each.stdout for each in done.values()), done
    assert "worker 0 has no GPU" in done["ours"].stderr


@pytest.mark.parametrize("text", ["a", "a,b", "a,,b", "a,,,b", "a,,,,b", "x y, z"])
def test_filters_are_parsed_alike(text: str) -> None:
    from torch.distributed.run import get_args_parser

    theirs = get_args_parser().parse_args([f"--duplicate-stdout-filters={text}", "s.py"]).duplicate_stdout_filters
    assert list(parse_filters(text)) == theirs


def test_the_default_signals_are_the_same() -> None:
    from torch.distributed.run import get_args_parser

    from rallypoint.launch.signal_names import ENDING_SIGNALS

    assert signal_names(get_args_parser().parse_args(["s.py"]).signals_to_handle) == ENDING_SIGNALS


def machine(root: Path, seed: int) -> tuple[int, set[int], list[int]]:
    """Fake a machine; return its number of GPUs, the CPUs that may be used, and the NUMA nodes of the GPUs."""
    chance = random.Random(seed)
    nodes, per_node, threads = chance.choice([1, 2, 4]), chance.choice([4, 8]), chance.choice([1, 2])
    cpus, cache = nodes * per_node, chance.choice([1, 2, 4])
    system = root / "sys/devices/system"
    put(system / "node/possible", f"0-{nodes - 1}")
    for cpu in range(cpus):
        core, node = cpu - cpu % threads, cpu // per_node
        put(system / f"node/node{node}/cpulist", f"{node * per_node}-{(node + 1) * per_node - 1}")
        put(system / f"cpu/cpu{cpu}/topology/physical_package_id", node // 2)
        put(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", f"{core}-{core + threads - 1}")
        for level, size in ((1, threads), (3, max(cache, threads))):
            place, first = system / f"cpu/cpu{cpu}/cache/index{level}", cpu - cpu % size
            put(place / "type", "Unified")
            put(place / "level", level)
            put(place / "shared_cpu_list", f"{first}-{first + size - 1}")
    where = [chance.randrange(nodes) for _ in range(chance.choice([1, 2, 3]))]
    for number, node in enumerate(where):
        gpu(root, f"0000:{number:02x}:00.0", node)
    allowed = {cpu for cpu in range(cpus) if cpu % per_node == 0 or chance.random() < 0.8}
    return len(where), allowed, where


@pytest.mark.parametrize("seed", range(12))
def test_workers_are_bound_to_the_cpus_that_torch_would_choose(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.numa import binding

    gpus, allowed, nodes = machine(tmp_path, seed)
    listdir = os.listdir
    monkeypatch.setattr(binding, "open", lambda path: io.StringIO(Path(f"{tmp_path}{path}").read_text()), raising=False)
    monkeypatch.setattr(os, "listdir", lambda path: listdir(f"{tmp_path}{path}" if path.startswith("/sys") else path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    monkeypatch.setattr(binding, "_get_gpu_count", lambda: gpus)
    monkeypatch.setattr(binding, "_get_numa_node_index_for_gpu_index", lambda gpu_index: nodes[gpu_index])
    for mode in MODES:
        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
        try:
            theirs = [binding._get_logical_cpus_to_bind_to(gpu_index=n, numa_options=options) for n in range(gpus)]
        except RuntimeError:
            with pytest.raises(ValueError, match="physical cores"):
                cpus_of_workers(mode, gpus, allowed, {}, tmp_path)
        else:
            assert list(cpus_of_workers(mode, gpus, allowed, {}, tmp_path)) == theirs
