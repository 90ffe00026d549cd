"""The decision where a node belongs: what the environment says, and what the options say.

Rules:

- An option that is given wins; the environment fills in the others.
- An option that contradicts the environment is an error that names both.
- A command line that says how many nodes there are and where they meet is complete: unless --cluster names the
  scheduler, nothing is taken from the environment.
- A job of one node needs nothing from the environment, nor does a worker that starts another launcher.
- The innermost launcher counts: mpirun in a Slurm allocation is Open MPI, not Slurm.

Rejected: to look at files, the scheduler's commands or the network. Variables say enough, and always at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from rallypoint.launch.clusters.evidence import Evidence, Facts, Unusable, number
from rallypoint.launch.clusters.kubernetes import read_kubernetes
from rallypoint.launch.clusters.mpi import read_open_mpi, read_pmi
from rallypoint.launch.clusters.slurm import read_slurm
from rallypoint.launch.clusters.ssh_agents import HOSTS_OPTION, read_ssh

__all__ = ["AUTO", "CLUSTERS", "NONE", "GivenOptions", "Impossible", "Placement", "Unplaced", "place_node"]

AUTO, SLURM, KUBERNETES, MPI, NONE = CLUSTERS = "auto", "slurm", "kubernetes", "mpi", "none"
"""The values of --cluster."""

WORKER_VARIABLES = ("RALLYPOINT_RUN", "TORCHELASTIC_RUN_ID")
"""Variables of workers: a launcher that a worker starts is not the agent of its node."""


class GivenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that were given, on the command line or by PET_…; None, empty or false for those that were not."""

    cluster: str = AUTO
    nnodes: tuple[int, int] | None = None
    standalone: bool = False
    endpoint: bool = False
    """Whether --rdzv-endpoint, --master-addr or --store says where nodes meet."""

    port: int
    """The port of the server on the host that the environment names."""

    node_rank: int | None = None
    run_id: str = ""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The node's place in a job of several; None and empty for what options or defaults decide."""

    reason: str
    nnodes: tuple[int, int]
    node_rank: int | None
    endpoint: str
    is_host: bool | None
    run_id: str


class Unplaced(NamedTuple):
    """The environment changes nothing; `notable` if the user should know why."""

    reason: str
    notable: bool = False


class Impossible(NamedTuple):
    """Options and environment contradict each other, or the environment shows a mistake."""

    reason: str


def place_node(facts: Facts, given: GivenOptions) -> Placement | Unplaced | Impossible:
    """Decide where this node belongs."""
    environ = facts.environ
    ssh = read_ssh(environ)
    off = _switched_off(environ, given, ssh is not None)
    if off is not None:
        return off
    found = ssh or _look(facts, given)
    if found is None:
        return _unseen(given)
    if isinstance(found, Unusable):
        hint = not found.fatal and given.cluster == AUTO
        return Unplaced(found.reason, notable=True) if hint else Impossible(found.reason)
    wrong = _contradiction(found, given)
    if found.nodes == 1 and not (ssh and wrong):
        return Unplaced(f"{found.what} has one node")
    return Impossible(wrong) if wrong else _place(found, given)


def _switched_off(environ: Mapping[str, str], given: GivenOptions, ssh: bool) -> Unplaced | Impossible | None:
    chosen = given.cluster not in (AUTO, NONE)
    if ssh and chosen:
        return Impossible(f"--hosts and --cluster={given.cluster} are mutually exclusive: remove one of them")
    if given.standalone and (ssh or chosen):
        other = "--hosts" if ssh else f"--cluster={given.cluster}"
        return Impossible(f"--standalone and {other} are mutually exclusive: remove one of them")
    if ssh:
        return None
    if given.cluster == NONE or given.standalone:
        return Unplaced("--standalone" if given.standalone else "--cluster=none")
    if chosen:
        return None
    if given.nnodes is not None and given.endpoint:
        return Unplaced("the options say how many nodes there are, and where they meet")
    worker = next((name for name in WORKER_VARIABLES if environ.get(name)), "")
    return Unplaced(f"{worker} is set: a worker has started this launcher") if worker else None


def _look(facts: Facts, given: GivenOptions) -> Evidence | Unusable | None:
    """Return what the chosen scheduler says, or the innermost one."""
    environ, chosen = facts.environ, given.cluster
    slurm = read_slurm(environ, given.nnodes)
    if chosen == SLURM:
        return slurm
    if chosen == MPI:
        return read_open_mpi(environ) or read_pmi(environ)
    kubernetes = read_kubernetes(facts, given.nnodes, given.endpoint)
    if chosen == KUBERNETES:
        return kubernetes
    pmi = None if _is_of_srun(environ) else read_pmi(environ)
    return read_open_mpi(environ) or (pmi if _is_certain(pmi) else None) or slurm or kubernetes or pmi


def _is_certain(found: Evidence | Unusable | None) -> bool:
    """Return whether several processes were started; programs that are not of MPI set PMI's variables for one."""
    return found is not None and (found.fatal if isinstance(found, Unusable) else found.nodes > 1)


def _is_of_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun itself has set PMI's variables, as with --mpi=pmi2 or pmix."""
    rank, task = number(environ, "PMI_RANK", "PMIX_RANK"), number(environ, "SLURM_PROCID")
    size, tasks = number(environ, "PMI_SIZE"), number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return rank == task is not None and size in (None, tasks) and number(environ, "SLURM_STEP_ID") is not None


def _unseen(given: GivenOptions) -> Unplaced | Impossible:
    if given.cluster == AUTO:
        return Unplaced("no scheduler with several nodes")
    signs = {
        SLURM: "SLURM_JOB_ID, SLURM_STEP_ID and SLURM_PROCID, as srun sets them, with several nodes",
        KUBERNETES: "JOB_COMPLETION_INDEX and KUBERNETES_SERVICE_HOST, and --nnodes greater than 1",
        MPI: "OMPI_COMM_WORLD_SIZE or PMI_SIZE greater than 1",
    }
    return Impossible(f"--cluster={given.cluster}, but its signs are missing: {signs[given.cluster]}")


def _contradiction(found: Evidence, given: GivenOptions) -> str:
    """Return how an option contradicts the environment, or nothing."""
    if given.nnodes is not None:
        least, most = given.nnodes
        if least > found.nodes or (least == most != found.nodes):
            shown = most if least == most else f"{least}:{most}"
            alone = "" if found.what == HOSTS_OPTION else ", or add --standalone for a separate job on each node"
            return f"--nnodes={shown} contradicts {found.what}: {found.nodes_from}. Remove --nnodes{alone}"
    if given.node_rank is not None and given.node_rank != found.rank:
        return (
            f"--node-rank={given.node_rank} contradicts {found.what}: {found.rank_from}. Remove --node-rank, or add "
            f"--cluster=none and set --nnodes and --rdzv-endpoint"
        )
    return ""


def _place(found: Evidence, given: GivenOptions) -> Placement | Impossible:
    if not given.endpoint and not found.head:
        return Impossible(
            f"{found.what} has started {found.nodes} nodes, but does not say where they are: set "
            f"--rdzv-endpoint=HOST:PORT, with the first host"
        )
    nnodes = given.nnodes or (found.nodes, found.nodes)
    endpoint = "" if given.endpoint else f"{found.head}:{given.port}"
    rank = found.rank if found.rank is not None and found.rank < nnodes[1] else None
    run_id = given.run_id or found.run_id
    server = f", server at {endpoint}" if endpoint else ""
    this = "this may be a spare" if rank is None else f"this is node {rank}"
    run = f", run {run_id}" if run_id else ""
    return Placement(
        reason=f"{found.what}: {found.nodes} nodes, {this}{server}{run}",
        nnodes=nnodes,
        node_rank=rank,
        endpoint=endpoint,
        is_host=found.rank == 0 if endpoint and found.head_is_first else None,
        run_id=run_id,
    )
