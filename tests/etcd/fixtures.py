"""Fixtures for tests on etcd, in all folders: tests/conftest.py has them from here.

One cluster serves all tests of a session; tests that do something to members make a `Cluster` of their own. A test
that uses one of these is marked needs("etcd").
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os

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


def etcd_space(cluster: Cluster) -> str:
    """Return the URL of a fresh prefix on a cluster."""
    return f"{cluster.url}/test-{os.getpid()}-{next(_serial)}"
