"""Kubernetes: the pods of an Indexed Job, or of the replicated job of a JobSet.

A pod knows its index (JOB_COMPLETION_INDEX), and its host name ends with it. Kubernetes does not say how many pods
there are, and many Indexed Jobs are independent pods, so only a number of nodes (`--nnodes`, PET_NNODES) makes them a
run. The full name of a pod, which its /etc/hosts has, contains the headless service; without a service, pods cannot
find each other.

In a JobSet with several jobs, the manifest also passes JOB_INDEX and REPLICATED_JOB_REPLICAS.
"""

from __future__ import annotations

from rallypoint.launch.clusters.evidence import Evidence, Facts, Unusable, number

__all__ = ["read_kubernetes"]

INDEX, JOB_INDEX, REPLICAS = "JOB_COMPLETION_INDEX", "JOB_INDEX", "REPLICATED_JOB_REPLICAS"


def read_kubernetes(facts: Facts, nnodes: tuple[int, int] | None, has_endpoint: bool) -> Evidence | Unusable | None:
    """Return what Kubernetes says about this pod; None outside of Indexed Jobs, and without other nodes."""
    index = number(facts.environ, INDEX)
    if index is None or not facts.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    if nnodes is None:
        return Unusable(
            f"pod {index} of a Kubernetes Indexed Job runs as a job of its own: for one job of all pods, set "
            f"PET_NNODES in the manifest to the number of pods (docs/clusters.md)",
            fatal=False,
        )
    least, most = nnodes
    if most == 1:
        return None
    place = _place(facts, index, most)
    if isinstance(place, Unusable):
        return place
    rank, rank_from, first = place
    if rank >= most and least == most:
        return Unusable(f"{rank_from} is too large for --nnodes={most} (PET_NNODES): it must be the number of pods")
    service = (facts.fqdn or facts.hostname).partition(".")[2]
    if not service and not has_endpoint:
        return Unusable(
            f"pod {facts.hostname!r} has no full name in /etc/hosts: create a headless Service, set the subdomain of "
            f"the pod template to its name (docs/clusters.md), or set PET_RDZV_ENDPOINT"
        )
    return Evidence(
        what="Kubernetes Indexed Job",
        nodes=most,
        nodes_from=f"--nnodes={most}",
        rank=rank if rank < most else None,
        rank_from=rank_from,
        head=f"{first}.{service}" if service else "",
        run_id=f"kubernetes-{first.removesuffix('-0')}.{service}".rstrip("."),
    )


def _place(facts: Facts, index: int, most: int) -> tuple[int, str, str] | Unusable:
    """Return the rank of a pod, what it comes from, and the host name of the first pod."""
    name = facts.hostname.partition(".")[0]  # with setHostnameAsFQDN it is the full name
    job = name.removesuffix(f"-{index}")
    if job == name:
        return Unusable(
            f"{INDEX}={index}, but the host name {facts.hostname!r} does not end with -{index} (hostNetwork, or a "
            f"host name of your own): set PET_NODE_RANK and PET_RDZV_ENDPOINT"
        )
    replicas, job_index = number(facts.environ, REPLICAS), number(facts.environ, JOB_INDEX) or 0
    if (replicas or 1) == 1 and not job_index:
        return index, f"{INDEX}={index}", f"{job}-0"
    shown = f"{JOB_INDEX}={job_index}, {INDEX}={index}"
    jobs = job.removesuffix(f"-{job_index}")
    if not replicas or job_index >= replicas or most % replicas or jobs == job:
        return Unusable(
            f"{shown} and {REPLICAS}={facts.environ.get(REPLICAS, '')} do not fit --nnodes={most} (PET_NNODES) and the "
            f"host name {facts.hostname!r}: pass all three from the JobSet (docs/clusters.md)"
        )
    pods = most // replicas
    if index >= pods:
        return Unusable(f"{shown}, but --nnodes={most} in {replicas} jobs are {pods} pods each")
    return job_index * pods + index, shown, f"{jobs}-0-0"
