"""Which CPUs `--numa-binding` gives to workers, from faked trees of /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.launch.workers.numa import MODES, cpus_of_workers

CPUS = 16
"""Two sockets of two NUMA nodes each, four CPUs a node, two threads a core (n and n + 2), a cache for each core."""


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def gpu(root: Path, address: str, node: int, driver: str = "nvidia") -> None:
    put(root / f"sys/bus/pci/devices/{address}/numa_node", node)
    put(root / f"sys/bus/pci/drivers/{driver}/{address}", "")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine; GPUs 0 and 1 are at node 0, 2 at node 1, 3 at node 3."""
    system = tmp_path / "sys/devices/system"
    put(system / "node/possible", "0-3")
    for node in range(4):
        put(system / f"node/node{node}/cpulist", f"{4 * node}-{4 * node + 3}")
    for cpu in range(CPUS):
        core = cpu - 2 if cpu % 4 > 1 else cpu
        put(system / f"cpu/cpu{cpu}/topology/physical_package_id", cpu // 8)
        put(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", f"{core},{core + 2}")
        for index, (level, kind, shared) in enumerate(
            [(1, "Data", f"{core},{core + 2}"), (1, "Instruction", "0-15"), (3, "Unified", f"{core},{core + 2}")]
        ):
            put(system / f"cpu/cpu{cpu}/cache/index{index}/level", level)
            put(system / f"cpu/cpu{cpu}/cache/index{index}/type", kind)
            put(system / f"cpu/cpu{cpu}/cache/index{index}/shared_cpu_list", shared)
    for address, node in (("0000:01:00.0", 0), ("0000:02:00.0", 0), ("0000:81:00.0", 1), ("0000:c1:00.0", 3)):
        gpu(tmp_path, address, node)
    gpu(tmp_path, "0000:00:02.0", 2, driver="ahci")
    return tmp_path


def found(
    root: Path, mode: str, workers: int = 4, allowed: str = "0-15", env: dict[str, str] | None = None
) -> list[list[int]]:
    low, high = map(int, allowed.split("-"))
    return [sorted(cpus) for cpus in cpus_of_workers(mode, workers, range(low, high + 1), env or {}, root)]


NODE0, NODE1, NODE3 = [0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15]


@pytest.mark.parametrize(
    ("mode", "cpus"),
    [
        ("node", [NODE0, NODE0, NODE1, NODE3]),
        ("socket", [NODE0 + NODE1, NODE0 + NODE1, NODE0 + NODE1, [8, 9, 10, 11, *NODE3]]),
        ("exclusive", [[0, 2], [1, 3], NODE1, NODE3]),
        ("core-complex", [[0, 2], [1, 3], [4, 6], [12, 14]]),
    ],
)
def test_the_cpus_of_each_mode(root: Path, mode: str, cpus: list[list[int]]) -> None:
    assert found(root, mode) == cpus


@pytest.mark.parametrize(
    ("mode", "allowed", "cpus"),
    [
        ("node", "2-4", [[2, 3], [2, 3], [4]]),
        ("socket", "2-4", [[2, 3, 4]] * 3),
        ("exclusive", "1-15", [[2], [1, 3], NODE1]),
        ("core-complex", "1-15", [[1, 3], [2], [4, 6]]),
    ],
)
def test_only_cpus_that_the_agent_may_use(root: Path, mode: str, allowed: str, cpus: list[list[int]]) -> None:
    assert found(root, mode, 3, allowed) == cpus


def test_one_node_that_the_kernel_does_not_number(root: Path) -> None:
    for address in ("0000:01:00.0", "0000:02:00.0"):
        put(root / f"sys/bus/pci/devices/{address}/numa_node", -1)
    assert found(root, "node", 2) == [NODE0, NODE0]


@pytest.mark.parametrize(
    ("visible", "cpus"),
    [("3,0", [NODE3, NODE0]), ("2, 3", [NODE1, NODE3]), ("GPU-abc,0", [NODE1, NODE0])],
)
def test_gpus_are_those_that_are_visible(root: Path, visible: str, cpus: list[list[int]]) -> None:
    put(root / "proc/driver/nvidia/gpus/0000:81:00.0/information", "Model: \t x\nGPU UUID: \t GPU-abcdef\n")
    assert found(root, "node", 2, env={"CUDA_VISIBLE_DEVICES": visible}) == cpus


@pytest.mark.parametrize(
    ("workers", "mode", "allowed", "visible", "says"),
    [
        (5, "node", "0-15", None, "worker 4 has no GPU"),
        (1, "node", "0-15", "", "worker 0 has no GPU"),
        (2, "node", "0-15", "0,9,1", "worker 1 has no GPU"),
        (1, "node", "4-15", None, "none of the CPUs of NUMA node 0, where GPU 0 is"),
        (2, "exclusive", "0-0", None, "NUMA node 0 has 1 physical cores for its 2 GPUs"),
    ],
)
def test_what_cannot_be_bound_is_refused(
    root: Path, workers: int, mode: str, allowed: str, visible: str | None, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        found(root, mode, workers, allowed, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.parametrize("mode", MODES)
def test_a_machine_without_gpus(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ValueError, match="worker 0 has no GPU to be near to: there are 1 workers on this node, and 0"):
        found(tmp_path, mode, 1)


def test_an_unreadable_tree_is_named(root: Path) -> None:
    (root / "sys/devices/system/node/node0/cpulist").unlink()
    with pytest.raises(ValueError, match="node0/cpulist"):
        found(root, "node", 1)
