"""Fixtures for tests on etcd. A test that uses one of these is marked needs("etcd").

`etcd_cluster` serves all tests of a session, in all folders (tests/conftest.py): leave its members alone. `cluster`
serves the tests of one module, in the folders whose conftest.py imports it: its members may be killed and cut off.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
from collections.abc import Iterator

import pytest
from tests.etcd.cluster import Cluster

_serial = itertools.count(1)


@functools.cache
def shared_cluster() -> Cluster:
    """Return the cluster of three that all tests of this process share: leave its members alone."""
    cluster = Cluster()
    atexit.register(cluster.__exit__)
    return cluster


@pytest.fixture(scope="session")
def etcd_cluster() -> Cluster:
    """A cluster of three that all tests share: leave its members alone."""
    return shared_cluster()


@pytest.fixture
def etcd_url(etcd_cluster: Cluster) -> str:
    """The URL of a store that nobody else uses."""
    return etcd_space(etcd_cluster)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of three that the tests of a module share; a test that breaks it repairs it."""
    with Cluster(cuttable=True) as cluster:
        yield cluster


@pytest.fixture
def url(cluster: Cluster) -> str:
    """The URL of a store that nobody else uses, on `cluster` once all members are healthy."""
    cluster.settle()
    return etcd_space(cluster)


def etcd_space(cluster: Cluster) -> str:
    """Return the URL of a fresh prefix on a cluster."""
    return f"{cluster.url}/test-{os.getpid()}-{next(_serial)}"
