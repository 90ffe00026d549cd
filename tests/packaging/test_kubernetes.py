"""deploy/kubernetes and the manifests on pages: schemas, references, arguments, and what the launcher makes of them.

No Kubernetes is here: objects are checked against the schemas of its versions, and the containers' commands run as
processes of this machine.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from tests.packaging.built import ROOT
from tests.packaging.manifests import (
    MANIFESTS,
    Manifest,
    Object,
    dangling,
    pod_templates,
    read,
    read_page,
    schema_errors,
)
from tests.raw_peer import AMPLE_S, http

import rallypoint
from rallypoint.cli import cluster_options, main
from rallypoint.cli.run import DEFAULT_GRACE_S
from rallypoint.core.policy.stop_policy import PREEMPTED_CODE
from rallypoint.launch.clusters.evidence import Facts
from rallypoint.net import parse_endpoint
from rallypoint.server.settings import DEFAULT_PORT

pytestmark = pytest.mark.needs("deploy")

SERVERS = ("server.yaml", "replicated-server.yaml")
TOKEN = "a-token-of-a-test-0123456789"
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if "\nkind: " in path.read_text(encoding="utf-8"))
UNITS = {"M": 1024**2, "G": 1024**3, "Mi": 1024**2, "Gi": 1024**3}


def manifest(name: str) -> Manifest:
    (path,) = [path for path in MANIFESTS if path.name == name]
    return read(path)


def container(name: str) -> Object:
    """Return the one container of a manifest."""
    ((_, template),) = pod_templates(manifest(name).objects)
    (found,) = template["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def of_kind(objects: list[Object], kind: str) -> Object:
    (found,) = [one for one in objects if one["kind"] == kind]
    return found


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def variables(found: Object, **values: str) -> dict[str, str]:
    """Return a container's variables; `values` are those that the cluster has."""
    given = {one["name"]: one["value"] if "value" in one else values[one["name"]] for one in found.get("env", [])}
    assert not set(values) - set(given), "the manifest does not ask for it"
    return given


def words(found: Object, environ: dict[str, str]) -> list[str]:
    """Return the arguments of `rallypoint`, as Kubernetes expands them."""
    command = list(found.get("args") or [])
    if "command" in found:  # otherwise the image's entry point
        command = [*found["command"], *command]
        assert command.pop(0) == "rallypoint"
    return [re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], word) for word in command]


# Schemas


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_have_the_fields_of_their_schema(path: Path) -> None:
    assert not [error for one in read(path).objects for error in schema_errors(one)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_manifests_on_pages_have_the_fields_of_their_schema(path: Path) -> None:
    found = read_page(path)
    assert found and not [error for one in found for error in schema_errors(one)]


BROKEN: dict[str, tuple[str, str, Callable[[Object], Any]]] = {
    "an unknown field": ("server.yaml", "Service", lambda one: one["spec"].update(port=29400)),
    "a misspelled probe": ("server.yaml", "StatefulSet", lambda one: pod(one).update(readynessProbe={})),
    "a number as a string": ("replicated-server.yaml", "Deployment", lambda one: one["spec"].update(replicas="3")),
    "no selector": ("replicated-server.yaml", "Deployment", lambda one: one["spec"].pop("selector")),
    "a value that is not text": ("job.yaml", "Job", lambda one: pod(one)["env"][0].update(value=4)),
    "no such kind": ("job.yaml", "Job", lambda one: one.update(kind="Jobs")),
    "an old version": ("job.yaml", "Job", lambda one: one.update(apiVersion="batch/v0")),
}


def pod(one: Object) -> Object:
    found = one["spec"]["template"]["spec"]["containers"][0]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("case", BROKEN)
def test_the_schema_finds(case: str) -> None:
    name, kind, spoil = BROKEN[case]
    one = of_kind(manifest(name).objects, kind)
    assert not list(schema_errors(one))
    spoil(one)
    assert list(schema_errors(one))


# References


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_what_a_manifest_refers_to_is_there(path: Path) -> None:
    assert dangling(read(path)) == []


DANGLING: dict[str, tuple[str, str, Callable[[Object], Any], str]] = {
    "another label": (
        "server.yaml", "Service", lambda one: one["spec"].update(selector={"app": "x"}), "selects no pods",
    ),
    "another job": (
        "job.yaml", "Job", lambda one: one["metadata"].update(name="x"), "service train selects no pods",
    ),
    "a port that nobody opens": (
        "server.yaml", "StatefulSet", lambda one: pod(one)["ports"][0].update(name="x"), "no container opens store",
    ),
    "a probe of no port": (
        "server.yaml", "StatefulSet", lambda one: pod(one)["livenessProbe"]["httpGet"].update(port="x"), "a probe asks",
    ),
    "a volume that is not there": (
        "server.yaml", "StatefulSet", lambda one: one["spec"].update(volumeClaimTemplates=[]), "no volume data",
    ),
    "another service": (
        "server.yaml", "StatefulSet", lambda one: one["spec"].update(serviceName="x"), "no service x",
    ),
    "a service with an address": (
        "job.yaml", "Service", lambda one: one["spec"].pop("clusterIP"), "no headless service train",
    ),
    "another container": ("job.yaml", "Job", lambda one: pod(one).update(name="x"), "no container agent"),
    "another key": (
        "replicated-server.yaml", "Deployment",
        lambda one: pod(one)["env"][1]["valueFrom"]["secretKeyRef"].update(key="url"), "key url of secret rallypoint",
    ),
    "other pods": (
        "replicated-server.yaml", "Deployment", lambda one: one["spec"]["selector"]["matchLabels"].update(x="y"),
        "does not select its own pods",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DANGLING)
def test_a_reference_that_leads_nowhere_is_found(case: str) -> None:
    name, kind, spoil, expected = DANGLING[case]
    text, objects = manifest(name)
    spoilt = copy.deepcopy(objects)
    spoil(of_kind(spoilt, kind))
    assert expected in " ".join(dangling(Manifest(text, spoilt)))


# Servers


@pytest.mark.parametrize("name", SERVERS)
def test_clients_reach_the_port_that_servers_listen_on(name: str) -> None:
    service = of_kind(manifest(name).objects, "Service")
    assert [one["port"] for one in service["spec"]["ports"]] == [DEFAULT_PORT]
    assert [one["containerPort"] for one in container(name)["ports"]] == [DEFAULT_PORT]


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_fits_into_its_limits(name: str) -> None:
    """Resident memory is at most 1.5 times --max-memory and 64 MiB; the process that compacts holds the state again."""
    found = container(name)
    (largest,) = [size(word.partition("=")[2]) for word in found["args"] if word.startswith("--max-memory=")]
    memory = found["resources"]
    assert memory["limits"]["memory"] == memory["requests"]["memory"]
    assert size(memory["limits"]["memory"]) >= 2.5 * largest + 64 * UNITS["Mi"]
    for claim in (
        of_kind(manifest(name).objects, "StatefulSet")["spec"]["volumeClaimTemplates"] if name == SERVERS[0] else []
    ):
        assert size(claim["spec"]["resources"]["requests"]["storage"]) >= 3 * largest


@pytest.mark.parametrize("name", SERVERS)
def test_servers_have_no_privileges(name: str) -> None:
    ((_, template),) = pod_templates(manifest(name).objects)
    assert template["spec"]["securityContext"]["runAsNonRoot"] and template["spec"]["securityContext"]["runAsUser"] > 0
    expected = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert container(name)["securityContext"] == expected
    assert template["spec"]["automountServiceAccountToken"] is False


def test_the_server_with_a_volume_serves(tmp_path: Path) -> None:
    found = container("server.yaml")
    (mount,) = found["volumeMounts"]
    given = words(found, {})
    arguments = [word.replace(mount["mountPath"], str(tmp_path)) for word in given]
    assert arguments != given
    check_serving([*arguments, "--port=0"], found, variables(found, RALLYPOINT_TOKEN=TOKEN))
    assert os.listdir(tmp_path / "store"), "the state is not on the volume"


@pytest.mark.needs("etcd")
def test_a_replicated_server_serves(etcd_url: str) -> None:
    found = container("replicated-server.yaml")
    environ = variables(found, RALLYPOINT_TOKEN=TOKEN, RALLYPOINT_STORAGE=etcd_url, POD_IP="127.0.0.1")
    check_serving([*words(found, environ), "--port=0"], found, environ)


def check_serving(arguments: list[str], found: Object, environ: dict[str, str]) -> None:
    """Run a container's command, and ask what its probes ask; they have no token."""
    child = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    try:
        assert child.stdout
        said = child.stdout.readline()
        port = parse_endpoint(said.rpartition("tcp://")[2].strip(), 0).port
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = found[probe]["httpGet"]["path"]
            reply = http(("127.0.0.1", port), f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert reply.startswith(b"HTTP/1.1 200"), reply
        child.terminate()
        assert child.wait(AMPLE_S) == 0
    finally:
        child.kill()
        child.communicate()


def test_a_service_sets_no_variable_of_ours() -> None:
    """Kubernetes sets variables for every service in the namespace; RALLYPOINT_PORT comes from ours."""
    port = f"RALLYPOINT_PORT_{DEFAULT_PORT}_TCP"
    of_service = {
        "RALLYPOINT_SERVICE_HOST",
        "RALLYPOINT_SERVICE_PORT",
        "RALLYPOINT_SERVICE_PORT_STORE",
        "RALLYPOINT_PORT",
    }
    of_service |= {port, f"{port}_PROTO", f"{port}_PORT", f"{port}_ADDR"}
    read_here: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        read_here |= set(re.findall(r"RALLYPOINT_[A-Z_]+", path.read_text(encoding="utf-8")))
    assert "RALLYPOINT_STORE" in read_here and not of_service & read_here


# The page


def test_the_page_installs_what_is_there() -> None:
    """It makes each secret with the command at the top of the manifest."""
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    for path in MANIFESTS:
        assert f"\nkubectl apply -f {path.relative_to(ROOT)}\n" in page and f"`{path.name}`" in page
        comment = "".join(line.removeprefix("#") for line in path.read_text().splitlines(True) if line.startswith("#"))
        (command,) = re.findall(r"kubectl create secret(?:.*\\\n)*.*", comment)
        assert " ".join(command.split()) in " ".join(page.split())
    assert set(re.findall(r"deploy/kubernetes/[\w.-]+", page)) == {str(path.relative_to(ROOT)) for path in MANIFESTS}


def test_the_image_has_the_version_of_the_package() -> None:
    images = {container(name)["image"] for name in SERVERS}
    assert images == {f"registry.example/rallypoint:{rallypoint.__version__}"}
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert set(re.findall(r"registry\.example/rallypoint:[\w.]+", page)) == images


# The job


@pytest.fixture
def job() -> Object:
    return of_kind(manifest("job.yaml").objects, "Job")


@pytest.fixture
def in_pod(job: Object, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return a function that returns what the launcher makes of pod number N, with more variables and options."""

    def parse(index: int, *options: str, **more: str) -> dict[str, Any]:
        name = f"{job['metadata']['name']}-{index}"
        domain = f"{job['spec']['template']['spec']['subdomain']}.ml.svc.cluster.local"
        environ = {
            **variables(pod(job), RALLYPOINT_TOKEN=TOKEN),
            "KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": name, **more,
        }  # fmt: skip
        for variable, value in environ.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(cluster_options, "_facts", lambda ssh: Facts(environ, name, f"{name}.{domain}"))
        command, *arguments = words(pod(job), environ)
        run = main.get_command(click.Context(main), command)
        assert run is not None
        with run.make_context(command, [*options, *arguments]) as context:
            given = dict(context.params)
            given["store"] = given["store"] or more.get("RALLYPOINT_STORE")
            given["what"] = cluster_options.place_in_cluster(given)
        return given

    return parse


def test_pods_of_the_job_find_their_place(job: Object, in_pod: Callable[..., dict[str, Any]]) -> None:
    pods = job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["parallelism"] == pods
    for index in range(pods):
        found = in_pod(index)
        assert found["nnodes"] == (pods, pods) and found["node_rank"] == index and found["script"] == "train.py"
        assert found["rdzv_endpoint"] == f"train-0.train.ml.svc.cluster.local:{DEFAULT_PORT}"
        assert found["rdzv_conf"]["is_host"] is (index == 0)
        assert found["what"].startswith(f"Kubernetes Indexed Job: {pods} nodes, this is node {index}")


def test_pods_of_the_job_use_a_server_of_their_own(in_pod: Callable[..., dict[str, Any]]) -> None:
    """As docs/kubernetes.md says: two more lines."""
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (url,) = set(re.findall(r'name: RALLYPOINT_STORE\s+value: "?(tcp://[^"\s]+)', page))
    assert url == f"tcp://{of_kind(manifest('server.yaml').objects, 'Service')['metadata']['name']}:{DEFAULT_PORT}"
    (option,) = set(re.findall(r"rallypoint, run, (--cluster=\w+),", page))
    found = in_pod(2, option, RALLYPOINT_STORE=url)
    assert (found["node_rank"], found["store"], found["rdzv_endpoint"]) == (2, url, "")


def test_the_job_replaces_pods_and_knows_when_that_is_no_use(job: Object) -> None:
    rules = job["spec"]["podFailurePolicy"]["rules"]
    codes = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert codes == {PREEMPTED_CODE: "Ignore", 2: "FailJob", 126: "FailJob", 127: "FailJob"}
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never", "a policy needs it"


def test_a_pod_has_time_for_its_last_checkpoint(job: Object, in_pod: Callable[..., dict[str, Any]]) -> None:
    """Kubernetes sends SIGTERM, and SIGKILL when the time is up."""
    found = in_pod(0)
    template = job["spec"]["template"]["spec"]
    assert found["preempt_signal"] == ("SIGTERM",)
    assert template["terminationGracePeriodSeconds"] > found["preempt_timeout"] + DEFAULT_GRACE_S
