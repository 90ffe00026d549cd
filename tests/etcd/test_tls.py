"""A whole store on a member of etcd that requires TLS with client certificates."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.conformance.calls import Call
from tests.etcd.test_lookup import encrypted
from tests.raw_peer import AMPLE_S, MIB

from rallypoint import connect
from rallypoint.store import etcd

__all__ = ["encrypted"]

pytestmark = [pytest.mark.needs("etcd"), pytest.mark.needs("openssl")]


def own_server(name: str) -> int:
    """Return the pid of the server that this process has started for a store."""
    (own,) = (own for address, own in etcd._own.items() if address.name == name)
    assert own.server is not None
    return int(own.server.pid)


def test_a_store_and_its_failover_over_tls(encrypted: str, tmp_path: Path) -> None:
    url = f"{encrypted}?ca={tmp_path}/ca.pem&cert={tmp_path}/own.pem&key={tmp_path}/own.key"
    large = bytes(range(256)) * (MIB // 256)
    with connect(url, timeout=AMPLE_S) as store, connect(url, timeout=AMPLE_S) as other:
        store.set("k", "v")
        assert other.get("k") == b"v"
        assert [store.add("n", 1), other.add("n", 1)] == [1, 2]
        store.set("large", large)
        waiting = Call(other.get, "later").blocked()
        died = own_server(encrypted)
        os.kill(died, signal.SIGKILL)
        assert store.add("n", 1) == 3
        assert own_server(encrypted) != died
        assert (other.get("k"), other.get("large")) == (b"v", large)
        store.set("later", "now")
        assert waiting.result() == b"now"
