"""The built package and its clean environments, made once for the files of this folder that a process runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from tests.packaging.built import ROOT, CleanVenv, Distributions, build, pack_dependencies


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def clean_venv(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], CleanVenv]:
    """Return a function that returns the environment with some extras."""
    dependencies = tmp_path_factory.mktemp("dependencies")
    pack_dependencies(dependencies)
    return cache(lambda extras: CleanVenv(tmp_path_factory.mktemp("clean"), distributions.wheel, dependencies, extras))
