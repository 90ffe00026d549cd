"""`Containerfile`, without a container engine: a linter, what it says, and its commands in a virtual environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.packaging.built import AMPLE_S, ROOT, pack_dependencies

from rallypoint.net import parse_endpoint
from rallypoint.server.settings import DEFAULT_PORT

TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
HADOLINT = Path(sys.executable).with_name("hadolint")
TOKEN = "a-token-of-a-test-0123456789"


class Instruction(NamedTuple):
    """One instruction, its lines joined."""

    name: str
    rest: str


def stages() -> Iterator[list[Instruction]]:
    """Yield the instructions of each image."""
    lines = re.sub(r"^#.*\n", "", TEXT, flags=re.M).replace("\\\n", " ").splitlines()
    found = [Instruction(*line.split(maxsplit=1)) for line in lines if line.strip()]
    starts = [at for at, one in enumerate(found) if one.name == "FROM"]
    for start, end in zip(starts, [*starts[1:], len(found)], strict=True):
        yield found[start:end]


BUILD, FINAL = stages()


def value(stage: list[Instruction], name: str) -> str:
    """Return what the one instruction of this name says."""
    (found,) = [one.rest for one in stage if one.name == name]
    return found


def words(name: str) -> list[str]:
    """Return the words of an instruction in JSON, `HEALTHCHECK … CMD […]` included."""
    found = json.loads(re.sub(r"^.*?(?=\[)", "", value(FINAL, name)))
    assert isinstance(found, list)
    return found


def lint(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, timeout=AMPLE_S)


@pytest.mark.needs("hadolint")
def test_the_linter_has_no_complaint() -> None:
    done = lint(TEXT)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.needs("hadolint")
@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("python:3.13-slim AS", "python AS"),
        ("WORKDIR /source", "WORKDIR source"),
        ('ENTRYPOINT ["rallypoint"]', "ENTRYPOINT rallypoint"),
        ("COPY --from=build", "COPY --from=builder"),
        ("EXPOSE 29400", "EXPOSE 294000"),
        ("HEALTHCHECK", "HEALTCHECK"),
    ],
)
def test_the_linter_finds(good: str, bad: str) -> None:
    assert good in TEXT
    assert lint(TEXT.replace(good, bad)).returncode == 1


def test_both_stages_have_the_same_python() -> None:
    """The environment that is copied refers to the interpreter of its image."""
    image, other = (value(stage, "FROM").removesuffix(" AS build") for stage in (BUILD, FINAL))
    version = re.fullmatch(r"python:(3\.\d+)-slim", image)
    assert version and image == other
    assert f"Python :: {version[1]}" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_server_is_not_root_and_its_port_is_known() -> None:
    user = value(FINAL, "USER")
    assert user == "65532:65532" and f"--owner={user.partition(':')[0]}" in value(FINAL, "RUN")
    for manifest in ("server.yaml", "replicated-server.yaml"):
        assert f"runAsUser: {user.partition(':')[0]}\n" in (ROOT / "deploy" / "kubernetes" / manifest).read_text()
    assert int(value(FINAL, "EXPOSE")) == DEFAULT_PORT


def test_what_is_copied_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for one in BUILD if one.name == "COPY" for source in one.rest.split()[:-1]}
    assert copied == kept and all((ROOT / name).exists() for name in kept)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the build's commands with a folder in place of the root; return the folder of the environment."""
    root, dependencies = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("dependencies")
    pack_dependencies(dependencies, "hatchling")
    source = root / value(BUILD, "WORKDIR").strip("/")
    for one in (one for one in BUILD if one.name == "COPY"):
        *names, target = one.rest.split()
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (source / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, source / target)
    command = re.sub(r"(?<=[ (])/(?=wheels|opt)", f"{root}/", value(BUILD, "RUN"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(dependencies), "PIP_CONFIG_FILE": os.devnull}
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    done = subprocess.run(
        ["sh", "-ec", command], cwd=source, env={**clean, "PATH": path, **offline}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return root / "opt" / "rallypoint"


def test_the_image_serves_and_is_healthy_only_then(image: Path, tmp_path: Path) -> None:
    search = value(FINAL, "ENV").split()[0].removeprefix("PATH=")
    assert search == "/opt/rallypoint/bin:$PATH"
    environ = {**os.environ, "PATH": f"{image / 'bin'}{os.pathsep}{os.environ['PATH']}", "RALLYPOINT_TOKEN": TOKEN}
    command = [*words("ENTRYPOINT"), *words("CMD"), "--port", "0"]
    server = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        port = parse_endpoint(server.stdout.readline().rpartition("tcp://")[2].strip(), 0).port
        check = [word.replace(f":{DEFAULT_PORT}/", f":{port}/") for word in words("HEALTHCHECK")]
        assert check != words("HEALTHCHECK")
        healthy = subprocess.run(check, cwd=tmp_path, env=environ, capture_output=True, timeout=AMPLE_S)
        assert healthy.returncode == 0, healthy.stderr
        server.terminate()
        assert server.wait(AMPLE_S) == 0
        dead = subprocess.run(check, cwd=tmp_path, env=environ, capture_output=True, timeout=AMPLE_S)
        assert dead.returncode == 1
    finally:
        server.kill()
        server.communicate()
