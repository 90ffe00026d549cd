"""Slurm: the nodes of the step that `srun` has started.

The variables of a job and of a step differ. `sbatch` and `salloc` describe the allocation: SLURM_NNODES nodes, of which
the batch script runs on the first one only. `srun` starts a step, whose tasks may be on fewer nodes; SLURM_STEP_…
describes it, and SLURM_NODEID counts its nodes. So a task has a step id, and a batch script has none. The batch script
and the shell of an interactive step have ids at the end of the range in some versions; they are not tasks either.

A requeued job keeps its id, so the number of the requeue is part of the name of the run. The tasks of an array have job
ids of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rallypoint.launch.clusters.evidence import Evidence, Unusable, number
from rallypoint.launch.clusters.node_list import expand_hosts

__all__ = ["job_hosts", "read_slurm"]

FIRST_RESERVED_STEP = 0xFFFF_FFF0
"""Ids of steps from here on are not those of `srun`."""

NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
"""Variables with the hosts of a step; the others have those of the job, which must then be as many."""


def read_slurm(environ: Mapping[str, str], nnodes: tuple[int, int] | None) -> Evidence | Unusable | None:
    """Return what Slurm says about this task; None outside of Slurm, and without srun if one node is meant."""
    job, step = number(environ, "SLURM_JOB_ID", "SLURM_JOBID"), number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    if job is None:
        return None
    if step is None or step >= FIRST_RESERVED_STEP or "SLURM_PROCID" not in environ:
        return None if nnodes == (1, 1) else _outside_a_step(environ, job)
    name = f"Slurm step {job}.{step}"
    nodes, rank = number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"), number(environ, "SLURM_NODEID")
    tasks = number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if nodes == 1 and tasks in (None, 1):
        return Evidence(what=name, nodes=1, nodes_from="one node", rank=0, rank_from="one node", run_id="")
    if nodes is None or rank is None or tasks is None:
        absent = [("SLURM_STEP_NUM_NODES", nodes), ("SLURM_NODEID", rank), ("SLURM_STEP_NUM_TASKS", tasks)]
        return Unusable(f"{name}, but {', '.join(each for each, value in absent if value is None)} is not a number")
    if tasks > nodes:
        return _too_many_tasks(environ, name, nodes, tasks)
    hosts = _hosts_of_step(environ, name, nodes, rank)
    if isinstance(hosts, Unusable):
        return hosts
    requeue = number(environ, "SLURM_RESTART_COUNT")
    return Evidence(
        what=name,
        nodes=nodes,
        nodes_from=f"Slurm's step has {nodes} nodes",
        rank=rank,
        rank_from=f"SLURM_NODEID={rank}",
        head=hosts[0],
        run_id=f"slurm-{job}.{step}{f'-requeue-{requeue}' if requeue else ''}",
    )


def _hosts_of_step(environ: Mapping[str, str], name: str, nodes: int, rank: int) -> list[str] | Unusable:
    listed = next((each for each in NODE_LISTS if environ.get(each)), NODE_LISTS[0])
    try:
        hosts = expand_hosts(environ.get(listed, ""))
    except ValueError as error:
        return Unusable(f"{name}: {listed}: {error}. Set --nnodes and --rdzv-endpoint")
    if len(hosts) == nodes and rank < nodes:
        return hosts
    parts = " (a heterogeneous job, whose components have a list each)" if number(environ, "SLURM_HET_SIZE") else ""
    return Unusable(
        f"{name} contradicts itself{parts}: {nodes} nodes, but {listed}={environ.get(listed)} has {len(hosts)}, and "
        f"SLURM_NODEID={rank}. Set --nnodes and --rdzv-endpoint"
    )


def job_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of the allocation; none outside of Slurm, or if the list is unreadable."""
    text = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    try:
        return expand_hosts(text) if text else []
    except ValueError:
        return []


def _outside_a_step(environ: Mapping[str, str], job: int) -> Unusable | None:
    """Refuse to run on one node of several: in the batch script, or in the shell of an allocation."""
    nodes = number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    if nodes is None or nodes == 1:
        return None
    return Unusable(
        f"Slurm job {job} has {nodes} nodes, but this is not a task of srun: it would run on one of them. Write "
        f"'{srun(nodes)} rallypoint run …', or add --standalone to run on this node only"
    )


def _too_many_tasks(environ: Mapping[str, str], name: str, nodes: int, tasks: int) -> Unusable:
    counts = re.findall(r"([0-9]{1,9})(?:\(x[0-9]+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    each = max(-(-tasks // nodes), *map(int, counts), 1)
    return Unusable(
        f"{name} has {tasks} tasks on {nodes} node{'s' * (nodes > 1)}, but a node needs one agent, which starts its "
        f"workers. Write '{srun(nodes)} rallypoint run --nproc-per-node={each} …', or add --standalone to make each "
        f"task a job of its own"
    )


def srun(nodes: int) -> str:
    """Return the command that starts one task on each node, whatever sbatch was given."""
    return f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1"
