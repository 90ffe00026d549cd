"""A cluster that requires a login, for tests of users and passwords. A fixture to import."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from tests.etcd.cluster import Cluster

USER, WORD = "ann", "secret"


def post(endpoint: str, path: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
    """Send a request to a member's JSON API; return the reply."""
    host, _, port = endpoint.rpartition(":")
    asked = HTTPConnection(host, int(port), timeout=60)
    asked.request("POST", path, json.dumps(body), {"Authorization": token} if token else {})
    answer: dict[str, Any] = json.loads(asked.getresponse().read())
    asked.close()
    return answer


def base64(text: str) -> str:
    """Return text in base64, as that API requires."""
    return b64encode(text.encode()).decode()


@pytest.fixture
def guarded() -> Iterator[Cluster]:
    """A cluster of one member that requires a login; `ann` may only use the store `hers`."""
    with Cluster(members=1) as cluster:
        place = cluster.endpoints[0]
        for name in ("root", USER):
            post(place, "/v3/auth/role/add", {"name": name})
            post(place, "/v3/auth/user/add", {"name": name, "password": WORD})
            post(place, "/v3/auth/user/grant", {"user": name, "role": name})
        hers = {"permType": "READWRITE", "key": base64("hers/"), "range_end": base64("hers0")}
        post(place, "/v3/auth/role/grant", {"name": USER, "perm": hers})
        post(place, "/v3/auth/enable", {})
        yield cluster
