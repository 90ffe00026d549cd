"""Kubernetes manifests: reading them, the schema of each kind, and whether what they refer to is there.

A schema knows the fields of an object. It does not know that a Service selects no pod, that a probe asks a port that no
container opens, or that a secret has no such key: an API server accepts all of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.packaging.built import ROOT

__all__ = ["MANIFESTS", "Manifest", "dangling", "pod_templates", "read", "read_page", "schema_errors"]

MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
OLDEST = (1, 29)
"""The oldest version of Kubernetes whose schema is checked; all newer ones are, too."""

JOB_LABEL = "batch.kubernetes.io/job-name"

Object = dict[str, Any]


class Manifest(NamedTuple):
    """The objects of one file, and its text."""

    text: str
    objects: list[Object]


def read(path: Path) -> Manifest:
    text = path.read_text(encoding="utf-8")
    return Manifest(text, _objects(text))


def read_page(path: Path) -> list[Object]:
    """Return the objects in the YAML blocks of a page; a JobSet counts as the Jobs in it."""
    blocks = re.findall(r"```yaml\n(.*?)```", path.read_text(encoding="utf-8"), re.S)
    found: list[Object] = []
    for one in (one for block in blocks for one in _objects(block) if "apiVersion" in one):
        jobs = one["spec"].get("replicatedJobs") if one["kind"] == "JobSet" else None
        if jobs is None:
            found.append(one)
        else:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": one["metadata"]}
            found += [{**job, "spec": each["template"]["spec"]} for each in jobs]
    return found


def _objects(text: str) -> list[Object]:
    import yaml

    return [one for one in yaml.safe_load_all(text) if one]


def schema_errors(one: Object) -> Iterator[str]:
    """Check an object against the schema of its kind, where unknown fields are errors."""
    import kubernetes_validate
    from kubernetes_validate.utils import all_versions

    versions = [version for version in dict.fromkeys(all_versions()) if _minor(version) >= OLDEST]
    assert len(versions) > 1
    for version in versions:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            yield f"{one['kind']} at {version}: {error.message}"


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def pod_templates(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Yield every object that makes pods, with the template of its pods."""
    for one in objects:
        if "template" in one["spec"]:
            yield one, one["spec"]["template"]


def dangling(manifest: Manifest) -> list[str]:
    """Return the references in a manifest that lead nowhere, in words."""
    services = [one for one in manifest.objects if one["kind"] == "Service"]
    templates = list(pod_templates(manifest.objects))
    found = [what for service in services for what in _of_service(service, templates)]
    for owner, template in templates:
        found += _of_pods(owner, template, services)
        found += _of_secrets(template, manifest.text)
    return found


def _labels(owner: Object, template: Object) -> dict[str, str]:
    """Return the labels of the pods; Kubernetes adds that of their job."""
    of_job = {JOB_LABEL: owner["metadata"]["name"]} if owner["kind"] == "Job" else {}
    return {**template["metadata"].get("labels", {}), **of_job}


def _ports(template: Object) -> dict[str, int]:
    containers = template["spec"]["containers"]
    return {port["name"]: port["containerPort"] for one in containers for port in one.get("ports", [])}


def _of_service(service: Object, templates: list[tuple[Object, Object]]) -> Iterator[str]:
    spec = service["spec"]
    chosen = [template for owner, template in templates if spec["selector"].items() <= _labels(owner, template).items()]
    if not chosen:
        yield f"service {service['metadata']['name']} selects no pods"
    for port in spec.get("ports", []):
        for template in chosen:
            if port["targetPort"] not in _ports(template):
                yield f"service {service['metadata']['name']}: no container opens {port['targetPort']}"


def _of_pods(owner: Object, template: Object, services: list[Object]) -> Iterator[str]:
    name, spec = owner["metadata"]["name"], owner["spec"]
    if "selector" in spec and not spec["selector"]["matchLabels"].items() <= _labels(owner, template).items():
        yield f"{name} does not select its own pods"
    headless = {one["metadata"]["name"] for one in services if one["spec"].get("clusterIP") == "None"}
    if template["spec"].get("subdomain", "") not in {"", *headless}:
        yield f"{name}: no headless service {template['spec']['subdomain']}"
    if spec.get("serviceName", "") not in {"", *(one["metadata"]["name"] for one in services)}:
        yield f"{name}: no service {spec['serviceName']}"
    volumes = {one["name"] for one in template["spec"].get("volumes", [])}
    volumes |= {one["metadata"]["name"] for one in spec.get("volumeClaimTemplates", [])}
    names = {one["name"] for one in template["spec"]["containers"]}
    for container in template["spec"]["containers"]:
        probes = [container[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe") if kind in container]
        yield from (
            f"{name}: a probe asks port {probe['httpGet']['port']}"
            for probe in probes
            if probe["httpGet"]["port"] not in _ports(template)
        )
        mounted = {one["name"] for one in container.get("volumeMounts", [])}
        yield from (f"{name}: no volume {one}" for one in sorted(mounted - volumes))
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        if rule.get("onExitCodes", {}).get("containerName", "") not in {"", *names}:
            yield f"{name}: no container {rule['onExitCodes']['containerName']}"


def _of_secrets(template: Object, text: str) -> Iterator[str]:
    """The comment at the top of a manifest makes the secrets that it refers to."""
    command = re.sub(r"\\\n#?\s*", "", text)
    made = {
        (name, key)
        for name, rest in re.findall(r"kubectl create secret generic (\S+)(.*)", command)
        for key in re.findall(r"--from-literal=(\w+)=", rest)
    }
    for container in template["spec"]["containers"]:
        for variable in container.get("env", []):
            secret = variable.get("valueFrom", {}).get("secretKeyRef")
            if secret and (secret["name"], secret["key"]) not in made:
                yield f"no command makes key {secret['key']} of secret {secret['name']}"
