"""Fixtures for tests on etcd, in all folders: tests/conftest.py has them from here.

One cluster serves all tests of a session; tests that do something to members make a `Cluster` of their own. A test
that uses one of these is marked needs("etcd").
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from tests.etcd.cluster import Cluster

_serial = itertools.count(1)


@pytest.fixture(scope="session")
def etcd_cluster() -> Iterator[Cluster]:
    """A cluster of three that all tests share: leave its members alone."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def etcd_url(etcd_cluster: Cluster) -> str:
    """The URL of a store that nobody else uses."""
    return etcd_space(etcd_cluster)


def etcd_space(cluster: Cluster) -> str:
    """Return the URL of a fresh prefix on a cluster."""
    return f"{cluster.url}/test-{os.getpid()}-{next(_serial)}"
