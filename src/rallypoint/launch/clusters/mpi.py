"""Open MPI, MPICH and Intel MPI: the processes that mpirun or mpiexec has started.

Their variables say which process this is, of how many, and how many are on its host. They do not say where the others
are, so the endpoint is the user's to give, except within a Slurm allocation, whose list of hosts mpirun fills in order.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.launch.clusters.evidence import Evidence, Unusable, number
from rallypoint.launch.clusters.slurm import job_hosts

__all__ = ["read_open_mpi", "read_pmi"]


def read_open_mpi(environ: Mapping[str, str]) -> Evidence | Unusable | None:
    """Return what Open MPI's mpirun says about this process."""
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",))
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return _processes(environ, "Open MPI", "mpirun --map-by ppr:1:node --bind-to none", names, job)


def read_pmi(environ: Mapping[str, str]) -> Evidence | Unusable | None:
    """Return what another mpiexec says about this process, by PMI's variables."""
    names = ("PMI_SIZE", "PMI_RANK", ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"))
    found = _processes(environ, "PMI", "mpiexec -ppn 1", names, environ.get("PMI_JOBID", ""))
    if found is None and number(environ, "PMIX_RANK") is not None and number(environ, "PMI_SIZE") is None:
        return Unusable(
            f"PMIX_RANK={environ['PMIX_RANK']} does not say how many processes were started: this one runs as a job "
            f"of its own. For one job of all, set --nnodes and --rdzv-endpoint",
            fatal=False,
        )
    return found


def _processes(
    environ: Mapping[str, str], what: str, command: str, names: tuple[str, str, tuple[str, ...]], job: str
) -> Evidence | Unusable | None:
    size_name, rank_name, local_names = names
    size, rank, here = number(environ, size_name), number(environ, rank_name), number(environ, *local_names)
    if size is None or rank is None:
        return None
    if rank >= size:
        return Unusable(f"{what} contradicts itself: {rank_name}={rank}, but {size_name}={size}")
    if here is None and size > 1:
        return Unusable(
            f"{size_name}={size}, but {' and '.join(local_names)} do not say how many of them are on this host: start "
            f"one on each, and set --nnodes, --node-rank and --rdzv-endpoint"
        )
    if here is not None and here > 1:
        return Unusable(
            f"{what} has started {here} processes on this host, but a node needs one agent, which starts its workers. "
            f"Write '{command} rallypoint run --nproc-per-node={here} …', or add --standalone to make each process a "
            f"job of its own"
        )
    hosts = job_hosts(environ)
    return Evidence(
        what=what,
        nodes=size,
        nodes_from=f"{size_name}={size}",
        rank=rank,
        rank_from=f"{rank_name}={rank}",
        head=hosts[0] if hosts else "",
        head_is_first=False,
        run_id=f"mpi-{job}" if job else "",
    )
