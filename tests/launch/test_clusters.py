"""Where a node belongs, by its environment and its options: tables, and what the command line makes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as generated
from hypothesis import strategies as st
from tests.launch.runs import Place

from rallypoint.launch.clusters.detection import GivenOptions, Impossible, Placement, Unplaced, place_node
from rallypoint.launch.clusters.evidence import Facts
from rallypoint.launch.clusters.ssh_agents import ssh_variables

PORT = 29400

STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NODEID": "2", "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_NODELIST": "n[01-04]", "SLURM_JOB_NODELIST": "n[01-04]", "SLURM_JOB_NUM_NODES": "4",
}  # fmt: skip
"""The environment of the third of four tasks of `srun`."""

BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "4", "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NTASKS": "32", "SLURM_JOB_NODELIST": "n[01-04]",
}  # fmt: skip
"""The environment of a batch script, which `sbatch` starts."""

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "2"}
POD_NAMES = ("train-2", "train-2.mesh.ml.svc.cluster.local")
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-a-9@1",
}  # fmt: skip
PMI = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1", "PMI_FD": "5"}


def place(
    environ: dict[str, str], names: tuple[str, str] = ("host", ""), **options: Any
) -> Placement | Unplaced | Impossible:
    return place_node(Facts(environ, *names), GivenOptions(**{"port": PORT, **options}))


PLACED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "srun": (STEP, {}, "4:4 2 n01:29400 False slurm-7.0"),
    "srun, the first node": ({**STEP, "SLURM_NODEID": "0"}, {}, "4:4 0 n01:29400 True slurm-7.0"),
    "a step on fewer nodes than the job": (
        {**STEP, "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "n[02-04]", "SLURM_STEP_NUM_TASKS": "3"},
        {}, "3:3 2 n02:29400 False slurm-7.0",
    ),
    "a step without variables of its own": (
        {name: value for name, value in STEP.items() if not name.startswith("SLURM_STEP_N")},
        {}, "4:4 2 n01:29400 False slurm-7.0",
    ),
    "requeued": ({**STEP, "SLURM_RESTART_COUNT": "2"}, {}, "4:4 2 n01:29400 False slurm-7.0-requeue-2"),
    "not requeued": ({**STEP, "SLURM_RESTART_COUNT": "0"}, {}, "4:4 2 n01:29400 False slurm-7.0"),
    "a component of a heterogeneous job": (
        {**STEP, "SLURM_HET_SIZE": "2"}, {}, "4:4 2 n01:29400 False slurm-7.0",
    ),
    "srun, elastic": (STEP, {"nnodes": (2, 4)}, "2:4 2 n01:29400 False slurm-7.0"),
    "srun, with a spare": (
        {**STEP, "SLURM_NODEID": "3"}, {"nnodes": (2, 3)}, "2:3 None n01:29400 False slurm-7.0",
    ),
    "srun, with its number of nodes": (STEP, {"nnodes": (4, 4)}, "4:4 2 n01:29400 False slurm-7.0"),
    "srun, with a server": (STEP, {"endpoint": True}, "4:4 2  None slurm-7.0"),
    "srun, with a run id": (STEP, {"run_id": "mine"}, "4:4 2 n01:29400 False mine"),
    "srun, with a port": (STEP, {"port": 5}, "4:4 2 n01:5 False slurm-7.0"),
    "srun, with its rank": (STEP, {"node_rank": 2}, "4:4 2 n01:29400 False slurm-7.0"),
    "srun with pmi2": (
        {**STEP, "PMI_RANK": "2", "PMI_SIZE": "4", "PMI_FD": "5"}, {}, "4:4 2 n01:29400 False slurm-7.0",
    ),
    "srun of an image with PMI's variables": (
        {**STEP, "PMI_RANK": "0", "PMI_SIZE": "1"}, {}, "4:4 2 n01:29400 False slurm-7.0",
    ),
    "srun with pmix": ({**STEP, "PMIX_RANK": "2"}, {}, "4:4 2 n01:29400 False slurm-7.0"),
    "everything given, but asked for": (
        STEP, {"cluster": "slurm", "nnodes": (4, 4), "endpoint": True}, "4:4 2  None slurm-7.0",
    ),
    "a worker, but asked for": (
        {**STEP, "RALLYPOINT_RUN": "r"}, {"cluster": "slurm"}, "4:4 2 n01:29400 False slurm-7.0",
    ),
    "mpirun in a Slurm job": ({**BATCH, **OMPI}, {}, "4:4 3 n01:29400 None mpi-prterun-a-9@1"),
    "mpirun in a Slurm step of its daemons": ({**STEP, **OMPI}, {}, "4:4 3 n01:29400 None mpi-prterun-a-9@1"),
    "mpirun": (OMPI, {"endpoint": True}, "4:4 3  None mpi-prterun-a-9@1"),
    "mpiexec": (PMI, {"endpoint": True}, "4:4 1  None "),
    "mpiexec in a Slurm job": ({**BATCH, **PMI}, {}, "4:4 1 n01:29400 None "),
    "ssh": (ssh_variables(["me@a", "b"], 1, "r"), {}, "2:2 1 a:29400 False r"),
    "ssh in a Slurm job": ({**BATCH, **ssh_variables(["a", "b"], 0, "r")}, {}, "2:2 0 a:29400 True r"),
    "ssh without detection": (ssh_variables(["a", "b"], 0, "r"), {"cluster": "none"}, "2:2 0 a:29400 True r"),
}  # fmt: skip
"""Environment, options, and the place: nodes, rank, endpoint, whether it hosts the server, run."""


@pytest.mark.parametrize("case", PLACED)
def test_a_node_has_its_place(case: str) -> None:
    environ, options, expected = PLACED[case]
    check(place(environ, **options), expected)


def check(placed: Placement | Unplaced | Impossible, expected: str) -> None:
    assert isinstance(placed, Placement), placed
    least, most = placed.nnodes
    words = (f"{least}:{most}", placed.node_rank, placed.endpoint, placed.is_host, placed.run_id)
    assert " ".join(map(str, words)) == expected
    assert placed.endpoint in placed.reason and placed.run_id in placed.reason


PODS: dict[str, tuple[dict[str, str], tuple[str, str], dict[str, Any], str]] = {
    "Indexed Job": (POD, POD_NAMES, {}, "4:4 2 train-0.mesh.ml.svc.cluster.local:29400 False"),
    "its first pod": (
        {**POD, "JOB_COMPLETION_INDEX": "0"}, ("train-0", "train-0.mesh.ml.svc.cluster.local"), {},
        "4:4 0 train-0.mesh.ml.svc.cluster.local:29400 True",
    ),
    "the host name is the full name": (
        POD, (POD_NAMES[1], ""), {}, "4:4 2 train-0.mesh.ml.svc.cluster.local:29400 False",
    ),
    "elastic": (POD, POD_NAMES, {"nnodes": (2, 4)}, "2:4 2 train-0.mesh.ml.svc.cluster.local:29400 False"),
    "a spare": (POD, POD_NAMES, {"nnodes": (1, 2)}, "1:2 None train-0.mesh.ml.svc.cluster.local:29400 False"),
    "JobSet": (POD, ("js-w-0-2", "js-w-0-2.js.ml.svc.x"), {}, "4:4 2 js-w-0-0.js.ml.svc.x:29400 False"),
    "JobSet of two jobs": (
        {**POD, "JOB_COMPLETION_INDEX": "1", "JOB_INDEX": "1", "REPLICATED_JOB_REPLICAS": "2"},
        ("js-w-1-1", "js-w-1-1.js.ml.svc.x"), {}, "4:4 3 js-w-0-0.js.ml.svc.x:29400 False",
    ),
    "the first of two jobs": (
        {**POD, "JOB_COMPLETION_INDEX": "1", "JOB_INDEX": "0", "REPLICATED_JOB_REPLICAS": "2"},
        ("js-w-0-1", "js-w-0-1.js.ml.svc.x"), {}, "4:4 1 js-w-0-0.js.ml.svc.x:29400 False",
    ),
    "JobSet of four jobs": (
        {**POD, "JOB_COMPLETION_INDEX": "0", "JOB_INDEX": "3", "REPLICATED_JOB_REPLICAS": "4"},
        ("js-w-3-0", "js-w-3-0.js.ml.svc.x"), {}, "4:4 3 js-w-0-0.js.ml.svc.x:29400 False",
    ),
}  # fmt: skip
"""Environment, host name and full name, options, and the place; the run has the name of the job and its service."""


@pytest.mark.parametrize("case", PODS)
def test_a_pod_has_its_place(case: str) -> None:
    environ, names, options, expected = PODS[case]
    head, _, service = expected.split()[2].partition(".")
    run = f"kubernetes-{head.removesuffix('-0')}.{service.partition(':')[0]}"
    check(place(environ, names, **{"nnodes": (4, 4), **options}), f"{expected} {run}")


def test_a_pod_with_a_server_elsewhere_needs_no_service() -> None:
    placed = place(POD, ("train-2", ""), cluster="kubernetes", nnodes=(4, 4), endpoint=True)
    check(placed, "4:4 2  None kubernetes-train")


UNPLACED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "nothing": ({}, {}, "no scheduler"),
    "one node": (
        {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}, {}, "one node",
    ),
    "one node, and nothing else": (
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NNODES": "1",
         "SLURM_NODELIST": "(null)"}, {}, "one node",
    ),
    "a batch script on one node": ({**BATCH, "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1"}, {}, "no scheduler"),
    "a batch script, everything given": (BATCH, {"nnodes": (4, 4), "endpoint": True}, "the options say"),
    "a batch script, standalone": (BATCH, {"standalone": True}, "--standalone"),
    "a batch script, one node given": (BATCH, {"nnodes": (1, 1)}, "no scheduler"),
    "switched off": (STEP, {"cluster": "none"}, "--cluster=none"),
    "standalone": (STEP, {"standalone": True}, "--standalone"),
    "everything given": (STEP, {"nnodes": (8, 8), "endpoint": True, "node_rank": 7}, "the options say"),
    "eight tasks, everything given": (
        {**STEP, "SLURM_STEP_NUM_TASKS": "32"}, {"nnodes": (32, 32), "endpoint": True}, "the options say",
    ),
    "a worker": ({**STEP, "RALLYPOINT_RUN": "r"}, {}, "RALLYPOINT_RUN is set"),
    "a worker of torchrun": ({**OMPI, "TORCHELASTIC_RUN_ID": "r"}, {}, "TORCHELASTIC_RUN_ID is set"),
    "not a number": ({**STEP, "SLURM_JOB_ID": "x"}, {}, "no scheduler"),
    "one process of mpirun": (
        {**OMPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, {}, "one node",
    ),
    "an index without Kubernetes": ({"JOB_COMPLETION_INDEX": "2"}, {"nnodes": (4, 4)}, "no scheduler"),
    "a pod of one": (POD, {"nnodes": (1, 1)}, "no scheduler"),
    "a pod without an index": ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, {"nnodes": (4, 4)}, "no scheduler"),
    "ssh to one host": (ssh_variables(["a"], 0, "r"), {}, "--hosts has one node"),
    "half of ssh's variables": ({"RALLYPOINT_SSH_RANK": "1"}, {}, "no scheduler"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNPLACED)
def test_an_environment_that_changes_nothing_and_is_not_mentioned(case: str) -> None:
    environ, options, reason = UNPLACED[case]
    decision = place(environ, **options)
    assert isinstance(decision, Unplaced) and not decision.notable and reason in decision.reason, decision


@pytest.mark.parametrize(
    ("environ", "says"),
    [(POD, "pod 2 of a Kubernetes Indexed Job runs as a job of its own"), ({"PMIX_RANK": "3"}, "PMIX_RANK=3 does not")],
)
def test_a_hint_changes_nothing_but_is_mentioned(environ: dict[str, str], says: str) -> None:
    decision = place(environ)
    assert isinstance(decision, Unplaced) and decision.notable and says in decision.reason, decision
    assert isinstance(place(environ, cluster="kubernetes" if environ is POD else "mpi"), Impossible), "it was asked for"


SRUN = "'srun --nodes=4 --ntasks=4 --ntasks-per-node=1 rallypoint run"
IMPOSSIBLE: dict[str, tuple[dict[str, str], dict[str, Any], list[str]]] = {
    "a batch script": (BATCH, {}, ["job 7 has 4 nodes", SRUN, "--standalone"]),
    "a batch script in versions with a step id": ({**BATCH, "SLURM_STEP_ID": "4294967291"}, {}, [SRUN]),
    "an interactive step": ({**BATCH, "SLURM_STEP_ID": "4294967290"}, {}, [SRUN]),
    "the shell of salloc": ({k: v for k, v in BATCH.items() if k != "SLURM_PROCID"}, {}, [SRUN]),
    "eight tasks on a node": (
        {**STEP, "SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, {},
        ["32 tasks on 4 nodes", SRUN, "--nproc-per-node=8", "--standalone"],
    ),
    "uneven tasks": (
        {**STEP, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "1,2(x3)"}, {}, ["--nproc-per-node=2"],
    ),
    "tasks without their distribution": (
        {**STEP, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": ""}, {}, ["--nproc-per-node=2"],
    ),
    "eight tasks on one node": (
        {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "8"}, {},
        ["8 tasks on 1 node,", "'srun --nodes=1 --ntasks=1 --ntasks-per-node=1 rallypoint run --nproc-per-node=8"],
    ),
    "a list of other nodes": ({**STEP, "SLURM_STEP_NODELIST": "n[1-3]"}, {}, ["4 nodes", "n[1-3] has 3"]),
    "components": (
        {**STEP, "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_HET_SIZE": "2"}, {}, ["a heterogeneous job"],
    ),
    "no list": (
        {**STEP, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, {}, ["SLURM_STEP_NODELIST", "not a list"],
    ),
    "a list that is none": ({**STEP, "SLURM_STEP_NODELIST": "n[2-1]"}, {}, ["SLURM_STEP_NODELIST", "'2-1'"]),
    "a node beyond the last": ({**STEP, "SLURM_NODEID": "4"}, {}, ["4 nodes", "SLURM_NODEID=4"]),
    "no node": ({**STEP, "SLURM_NODEID": "x"}, {}, ["SLURM_NODEID is not a number"]),
    "other numbers of nodes": (STEP, {"nnodes": (8, 8)}, ["--nnodes=8", "step has 4 nodes"]),
    "too many nodes": (STEP, {"nnodes": (5, 8)}, ["--nnodes=5:8", "step has 4 nodes"]),
    "one node of four": (STEP, {"nnodes": (1, 1)}, ["--nnodes=1", "step has 4 nodes", "--standalone"]),
    "another rank": (STEP, {"node_rank": 0}, ["--node-rank=0", "SLURM_NODEID=2"]),
    "everything given, and contradicted": (
        STEP, {"cluster": "slurm", "nnodes": (8, 8), "endpoint": True}, ["--nnodes=8", "4 nodes"],
    ),
    "standalone, and a scheduler": (STEP, {"cluster": "slurm", "standalone": True}, ["--standalone", "--cluster=slu"]),
    "no Slurm": ({}, {"cluster": "slurm"}, ["--cluster=slurm", "SLURM_JOB_ID"]),
    "no Kubernetes": ({}, {"cluster": "kubernetes"}, ["--cluster=kubernetes", "JOB_COMPLETION_INDEX"]),
    "no MPI": (STEP, {"cluster": "mpi"}, ["--cluster=mpi", "OMPI_COMM_WORLD_SIZE"]),
    "mpirun without hosts": (OMPI, {}, ["Open MPI has started 4 nodes", "--rdzv-endpoint=HOST:PORT"]),
    "mpirun with slots": (
        {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, {},
        ["8 processes", "'mpirun --map-by ppr:1:node --bind-to none rallypoint run --nproc-per-node=8"],
    ),
    "mpirun with slots in a Slurm step": ({**STEP, **OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, {}, ["mpirun --map-by"]),
    "mpiexec with slots in a Slurm step": (
        {**STEP, **PMI, "PMI_SIZE": "32", "MPI_LOCALNRANKS": "8"}, {}, ["'mpiexec -ppn 1 rallypoint run"],
    ),
    "a rank beyond the last": ({**OMPI, "OMPI_COMM_WORLD_RANK": "4"}, {}, ["_RANK=4", "_SIZE=4"]),
    "mpiexec that does not say how many": ({"PMI_SIZE": "4", "PMI_RANK": "1"}, {}, ["MPI_LOCALNRANKS"]),
    "a pod without a service": (POD, {"nnodes": (4, 4)}, ["'train-2' has no full name", "headless Service"]),
    "a pod beyond the last": (POD, {"nnodes": (2, 2)}, ["JOB_COMPLETION_INDEX=2", "--nnodes=2"]),
    "a pod with the name of its machine": (
        {**POD, "JOB_COMPLETION_INDEX": "1"}, {"nnodes": (4, 4)}, ["'train-2' does not end with -1", "hostNetwork"],
    ),
    "a second job of unknown many": ({**POD, "JOB_INDEX": "1"}, {"nnodes": (4, 4)}, ["REPLICATED_JOB_REPLICAS"]),
    "ssh and a scheduler": (ssh_variables(["a", "b"], 0, "r"), {"cluster": "slurm"}, ["--hosts", "--cluster=slurm"]),
    "ssh, standalone": (ssh_variables(["a", "b"], 0, "r"), {"standalone": True}, ["--hosts", "--standalone"]),
    "ssh to one host of two": (ssh_variables(["a"], 0, "r"), {"nnodes": (2, 2)}, ["--nnodes=2", "1 host."]),
    "ssh, other numbers of nodes": (ssh_variables(["a", "b"], 0, "r"), {"nnodes": (3, 3)}, ["--nnodes=3", "2 hosts"]),
}  # fmt: skip
"""Environment, options, and what the error says."""


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_contradiction_is_an_error_that_names_both_sides(case: str) -> None:
    environ, options, says = IMPOSSIBLE[case]
    decision = place(environ, ("train-2", ""), **options)
    assert isinstance(decision, Impossible), decision
    assert not [words for words in says if words not in decision.reason], decision.reason


NAMES = sorted(
    {*STEP, *OMPI, *PMI, *POD, "JOB_INDEX", "REPLICATED_JOB_REPLICAS", "SLURM_HET_SIZE", *ssh_variables([], 0, "")}
)
VALUES = st.sampled_from(["", "0", "1", "2", "4", "n[01-04]", "n[1-2]", "x", "9" * 30, "-1", "1(x4)", " 3 ", "a,b"])


@generated(
    st.dictionaries(st.sampled_from(NAMES), VALUES), st.sampled_from(["host", "train-2", "js-1-2"]), st.booleans()
)
def test_any_environment_gets_a_decision_with_a_reason(environ: dict[str, str], hostname: str, asked: bool) -> None:
    options: dict[str, Any] = {"nnodes": (2, 4)} if asked else {}
    decision = place(environ, (hostname, f"{hostname}.mesh"), **options)
    assert decision.reason
    if isinstance(decision, Placement):
        assert decision.node_rank is None or 0 <= decision.node_rank < decision.nnodes[1]


# The manifests of docs/clusters.md

MANIFESTS = re.findall(r"```yaml\n(.*?)```", (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(), re.S)


def setting(manifest: str, name: str) -> str:
    """Return the last value of a setting in a manifest."""
    return str(re.findall(rf"^ *(?:- )?{name}: (.*)$", manifest, re.M)[-1]).strip('"')


def ranks(pods: list[tuple[str, str, dict[str, str]]], nodes: int) -> list[int | None]:
    """Return the ranks of pods, by host name, service and variables; all must find the same server."""
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    placed = [
        place({**environ, **more}, (name, f"{name}.{service}.ml.svc.x"), nnodes=(nodes, nodes))
        for name, service, more in pods
    ]
    assert all(isinstance(one, Placement) for one in placed), placed
    found = [one for one in placed if isinstance(one, Placement)]
    assert {one.endpoint for one in found} == {f"{pods[0][0]}.{pods[0][1]}.ml.svc.x:{PORT}"}
    assert len({one.run_id for one in found}) == 1 and [one.is_host for one in found].index(True) == 0
    return [one.node_rank for one in found]


def test_the_manifest_of_an_indexed_job() -> None:
    manifest = MANIFESTS[0]
    count, service = int(setting(manifest, "completions")), setting(manifest, "subdomain")
    service_part, _, job_part = manifest.partition("---")
    job = re.findall(r"^  name: (.*)$", job_part, re.M)[0]
    assert re.findall(r"^  name: (.*)$", service_part, re.M) == [service] and setting(service_part, "job-name") == job
    assert setting(manifest, "parallelism") == setting(manifest, "completions") == setting(manifest, "value")
    pods = [(f"{job}-{index}", service, {"JOB_COMPLETION_INDEX": str(index)}) for index in range(count)]
    assert ranks(pods, count) == list(range(count))


def test_the_manifest_of_a_job_set() -> None:
    manifest = MANIFESTS[1]
    (name,), replicas = re.findall(r"^  name: (.*)$", manifest, re.M), int(setting(manifest, "replicas"))
    job, each = re.findall(r"^    - name: (.*)$", manifest, re.M)[0], int(setting(manifest, "completions"))
    assert int(setting(manifest, "value")) == replicas * each and setting(manifest, "parallelism") == str(each)
    pods = [
        (
            f"{name}-{job}-{index}-{pod}",
            name,
            {"JOB_INDEX": str(index), "JOB_COMPLETION_INDEX": str(pod), "REPLICATED_JOB_REPLICAS": str(replicas)},
        )
        for index in range(replicas)
        for pod in range(each)
    ]
    assert {"JOB_INDEX", "REPLICATED_JOB_REPLICAS"} <= set(re.findall(r"- name: (\w+)$", manifest, re.M))
    assert ranks(pods, replicas * each) == list(range(replicas * each))


# The command line

HERE = {
    **STEP, "SLURM_STEP_NODELIST": "localhost,other", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "0", "SLURM_PROCID": "0",
}  # fmt: skip


def test_tasks_of_srun_need_no_option(place: Place) -> None:
    """Two agents with the environments of two tasks meet on the first host of the step, and have their ranks."""
    script = place.script("say('up', rank, world, os.environ['TORCHELASTIC_RUN_ID'])")
    port = ("--master-port", place.port)
    nodes = [place.run(*port, script, env={**HERE, "SLURM_NODEID": str(rank)}) for rank in (0, 1)]
    assert [node.end() for node in nodes] == [0, 0], nodes[0].text() + nodes[1].text()
    for rank, node in enumerate(nodes):
        assert f"up {rank} 2 slurm-7.0" in node.out
        said = f"Slurm step 7.0: 2 nodes, this is node {rank}, server at localhost:{place.port}, run slurm-7.0"
        assert node.err.count(said) == 1, node.err


@pytest.mark.parametrize("words", [("--standalone",), ("--cluster", "none")])
def test_detection_is_switched_off(place: Place, words: tuple[str, ...]) -> None:
    node = place.run(*words, place.script("say('up', rank, world)"), env=HERE)
    assert node.end() == 0 and node.out == "up 0 1" and "Slurm" not in node.err, node.text()


def test_a_launcher_in_a_worker_is_not_the_agent_of_the_node(place: Place) -> None:
    inner = place.script("say('inner', rank, world)")
    outer = place.script(
        f"import subprocess as s; sys.exit(s.run([sys.executable, '-m', 'rallypoint', 'run', {inner!r}]).returncode)"
    )
    node = place.run("--standalone", outer, env=HERE)
    assert node.end() == 0 and "inner 0 1" in node.out, node.text()


@pytest.mark.parametrize(
    ("env", "says"),
    [({"SLURM_STEP_NUM_TASKS": "8"}, "--nproc-per-node=4"), ({"SLURM_STEP_ID": ""}, "not a task of srun")],
)
def test_a_mistake_is_a_usage_error(place: Place, env: dict[str, str], says: str) -> None:
    node = place.run(place.script("say('up')"), env={**HERE, **env})
    assert node.end() == 2 and says in node.err.replace("\n", " ") and not node.out
