"""torchrun's `--numa-binding`: the CPUs of each worker, near the GPU whose number is the worker's local rank.

    node          the CPUs of the GPU's NUMA node
    socket        the CPUs of all NUMA nodes of its socket
    exclusive     its share of the node's physical cores, which the GPUs of that node divide among them
    core-complex  the cores that share one last-level cache, another one for each GPU of the node where possible

As with torchrun, only CPUs that this process may use count, and a job without a GPU for each worker is refused. All
of it is read from /proc and /sys; PyTorch and numactl are not needed. GPUs are counted in the order of their PCI
addresses, which is CUDA's order if all GPUs are of one kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

__all__ = ["MODES", "cpus_of_workers"]

MODES = ("node", "socket", "exclusive", "core-complex")
"""The values of --numa-binding."""

GPU_DRIVERS = ("nvidia", "amdgpu")
CPUS, NODES, PCI = "sys/devices/system/cpu", "sys/devices/system/node", "sys/bus/pci"


def cpus_of_workers(
    mode: str, workers: int, allowed: Collection[int], environment: Mapping[str, str], root: Path = Path("/")
) -> tuple[frozenset[int], ...]:
    """Return the CPUs of each worker, by local rank; raise ValueError if they cannot be determined."""
    machine = _Machine(root, frozenset(allowed), _visible_gpus(root, environment))
    if workers > len(machine.gpu_nodes):
        raise ValueError(
            f"worker {len(machine.gpu_nodes)} has no GPU to be near to: there are {workers} workers on this node, and "
            f"{len(machine.gpu_nodes)} GPUs"
        )
    return tuple(machine.cpus_of(mode, gpu) for gpu in range(workers))


class _Machine:
    """The CPUs, caches and NUMA nodes of this machine, and the NUMA nodes of its GPUs."""

    def __init__(self, root: Path, allowed: frozenset[int], gpus: Sequence[str]) -> None:
        self._root, self._allowed = root, allowed
        # One node only is often written as -1.
        self.gpu_nodes = [max(0, self._number(f"{PCI}/devices/{address}/numa_node")) for address in gpus]

    def cpus_of(self, mode: str, gpu: int) -> frozenset[int]:
        """Return the CPUs near a GPU."""
        node = self.gpu_nodes[gpu]
        sharing = [other for other, its_node in enumerate(self.gpu_nodes) if its_node == node]
        cpus = self._cpus_of_node(node)
        if not cpus:
            raise ValueError(f"this process may use none of the CPUs of NUMA node {node}, where GPU {gpu} is")
        if mode == "node":
            return cpus
        if mode == "socket":
            return self._socket(cpus)
        if mode == "exclusive":
            return self._share(sharing.index(gpu), len(sharing), cpus, node)
        complexes = sorted(_grouped(cpus, self._last_cache), key=lambda group: (-len(group), min(group)))
        return complexes[sharing.index(gpu) % len(complexes)]

    def _socket(self, cpus: frozenset[int]) -> frozenset[int]:
        """Return the CPUs of all nodes on the socket of these."""
        package = self._package(min(cpus))
        nodes = map(self._cpus_of_node, sorted(_numbers(self._text(f"{NODES}/possible"))))
        return frozenset[int]().union(*(group for group in nodes if group and self._package(min(group)) == package))

    def _share(self, which: int, sharers: int, cpus: frozenset[int], node: int) -> frozenset[int]:
        """Return one of several equal shares of the physical cores; the first ones get the remainder."""
        cores = _grouped(cpus, self._siblings)
        each, more = divmod(len(cores), sharers)
        if not each:
            raise ValueError(f"NUMA node {node} has {len(cores)} physical cores for its {sharers} GPUs")
        begin = which * each + min(which, more)
        return frozenset[int]().union(*cores[begin : begin + each + (which < more)])

    def _cpus_of_node(self, node: int) -> frozenset[int]:
        return _numbers(self._text(f"{NODES}/node{node}/cpulist")) & self._allowed

    def _package(self, cpu: int) -> int:
        return self._number(f"{CPUS}/cpu{cpu}/topology/physical_package_id")

    def _siblings(self, cpu: int) -> int:
        return min(_numbers(self._text(f"{CPUS}/cpu{cpu}/topology/thread_siblings_list")))

    def _last_cache(self, cpu: int) -> int:
        """Return the first CPU of those that share the last-level cache."""
        caches = []
        for cache in sorted((self._root / CPUS / f"cpu{cpu}/cache").glob("index[0-9]*")):
            place = cache.relative_to(self._root)
            if self._text(f"{place}/type").strip() in ("Unified", "Data"):
                caches.append((self._number(f"{place}/level"), str(place)))
        if not caches:
            raise ValueError(f"the caches of CPU {cpu} are unknown: there are none in {self._root / CPUS}")
        return min(_numbers(self._text(f"{max(caches)[1]}/shared_cpu_list")))

    def _text(self, path: str) -> str:
        try:
            return (self._root / path).read_text()
        except OSError as error:
            raise ValueError(f"cannot read {self._root / path}: {error.strerror}") from None

    def _number(self, path: str) -> int:
        return int(self._text(path))


def _visible_gpus(root: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the PCI addresses of the GPUs that workers may use, in their order."""
    devices = (root / PCI).glob("drivers/*/*:*:*.*")
    every = sorted(device.name for device in devices if device.parent.name in GPU_DRIVERS)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return every
    gpus = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdecimal() and int(name) < len(every):
            gpus.append(every[int(name)])
        elif (address := _address_of(root, name)) is not None:
            gpus.append(address)
        else:
            break  # CUDA ignores an unknown device, and all after it
    return gpus


def _address_of(root: Path, name: str) -> str | None:
    """Return the PCI address of the GPU with this UUID, or the beginning of one; None if it is unknown."""
    if not name.startswith("GPU-"):
        return None
    for facts in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        found = re.search(r"GPU UUID:\s*(\S+)", facts.read_text())
        if found and found[1].startswith(name):
            return facts.parent.name.lower()
    return None


def _numbers(text: str) -> frozenset[int]:
    """Parse ranges: 0-3,5."""
    numbers: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        low, _, high = part.partition("-")
        numbers.update(range(int(low), int(high or low) + 1))
    return frozenset(numbers)


def _grouped(cpus: Iterable[int], key: Callable[[int], int]) -> list[frozenset[int]]:
    """Return the CPUs in groups with one key, in the order of the keys."""
    groups: dict[int, set[int]] = {}
    for cpu in sorted(cpus):
        groups.setdefault(key(cpu), set()).add(cpu)
    return [frozenset(groups[found]) for found in sorted(groups)]
