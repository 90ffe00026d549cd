"""Finding a store's servers by etcd's JSON API: replies, silence, users, certificates, and start permits."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.etcd.access import USER, WORD, base64, guarded, post
from tests.etcd.cluster import Cluster
from tests.ports import reserve_port
from tests.raw_peer import AMPLE_S

from rallypoint import EtcdRefused, NoQuorum
from rallypoint.deadline import Deadline
from rallypoint.etcd.address import Address
from rallypoint.etcd.local.member import find_binary
from rallypoint.storage.etcd.lookup import MAX_PERMITS, StoreServers, claim_start_permit, look_up, release_start_permit
from rallypoint.store.url import parse_url

__all__ = ["guarded"]

pytestmark = pytest.mark.needs("etcd")


def address_of(url: str) -> Address:
    return parse_url(url).etcd()


def put(endpoint: str, key: str, value: object) -> None:
    post(endpoint, "/v3/kv/put", {"key": base64(key), "value": base64(json.dumps(value))})


def look(url: str, timeout_s: float = AMPLE_S) -> StoreServers:
    return look_up(address_of(url), Deadline(timeout_s))


def claim(url: str) -> int | None:
    return claim_start_permit(address_of(url), Deadline(AMPLE_S))


def fill(endpoint: str, name: str) -> StoreServers:
    """Write the keys that the servers of a store write, and return the expected result."""
    put(endpoint, f"{name}/servers/1", {"url": "tcp://a:1"})
    put(endpoint, f"{name}/servers/2", {"url": "tcp://b:2"})
    put(endpoint, f"{name}/leader", {"url": "tcp://b:2", "epoch": 3})
    return StoreServers("tcp://b:2", ("tcp://b:2", "tcp://a:1"))


def test_the_leader_comes_first_among_the_servers(etcd_cluster: Cluster, etcd_url: str) -> None:
    assert look(etcd_url) == StoreServers("", ())
    expected = fill(etcd_cluster.endpoints[0], address_of(etcd_url).space)
    assert look(etcd_url) == expected


def test_a_dead_or_hanging_member_is_skipped(etcd_cluster: Cluster, etcd_url: str) -> None:
    name = address_of(etcd_url).space
    expected = fill(etcd_cluster.endpoints[0], name)
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        silent, gone = hangs.getsockname()[1], reserve_port()
        places = f"127.0.0.1:{gone},127.0.0.1:{silent},{etcd_cluster.endpoints[1]}"
        assert look(f"etcd://{places}/{name}") == expected
        with pytest.raises(NoQuorum) as caught:
            look(f"etcd://127.0.0.1:{gone},127.0.0.1:{silent}/{name}", 0.3)
    assert "refused" in caught.value.tried[f"127.0.0.1:{gone}"]
    assert "no answer" in caught.value.tried[f"127.0.0.1:{silent}"]


def test_a_port_that_is_not_etcd_is_named_in_the_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(b"220 mail.example ESMTP\r\n")

        answering = pool.submit(answer)
        with pytest.raises(NoQuorum, match="not etcd's JSON API"):
            look(f"etcd://127.0.0.1:{server.getsockname()[1]}/x", 0.0)
        answering.result(AMPLE_S)


def test_at_most_three_of_many_may_start_a_server(etcd_url: str) -> None:
    with ThreadPoolExecutor(12) as pool:
        claims = list(pool.map(claim, [etcd_url] * 12))
    assert sum(lease is not None for lease in claims) == MAX_PERMITS
    release_start_permit(address_of(etcd_url), next(lease for lease in claims if lease), Deadline(AMPLE_S))
    assert claim(etcd_url) is not None
    assert claim(etcd_url) is None


def test_no_permit_is_given_if_there_is_a_server(etcd_cluster: Cluster, etcd_url: str) -> None:
    put(etcd_cluster.endpoints[0], f"{address_of(etcd_url).space}/servers/1", {"url": "tcp://a:1"})
    assert claim(etcd_url) is None
    assert post(etcd_cluster.endpoints[0], "/v3/kv/range", permits(etcd_url)).get("kvs") is None


@pytest.mark.parametrize("listed", [0, 1, 2, 3])
def test_permits_are_given_for_missing_servers_only(etcd_cluster: Cluster, etcd_url: str, listed: int) -> None:
    for number in range(listed):
        put(etcd_cluster.endpoints[0], f"{address_of(etcd_url).space}/servers/{number}", {"url": f"tcp://a:{number}"})

    def beside(url: str) -> int | None:
        return claim_start_permit(address_of(url), Deadline(AMPLE_S), beside=True)

    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(beside, [etcd_url] * 8))
    assert sum(lease is not None for lease in claims) == MAX_PERMITS - listed


def permits(url: str) -> dict[str, str]:
    name = address_of(url).space
    return {"key": base64(f"{name}/seats/"), "range_end": base64(f"{name}/seats0")}


def test_users_are_let_in_by_password_and_others_are_not(guarded: Cluster) -> None:
    own = f"{guarded.url}/hers?user={USER}&password={WORD}"
    assert look(own) == StoreServers("", ())
    assert claim(own) is not None
    for url, why in (
        (f"{guarded.url}/hers?user={USER}&password=wrong", "user ann"),
        (f"{guarded.url}/others?user={USER}&password={WORD}", "permission denied"),
        (f"{guarded.url}/hers", "user name is empty"),
    ):
        with pytest.raises(EtcdRefused, match=why) as caught:
            look(url)
        assert WORD not in str(caught.value) and "wrong" not in str(caught.value)


CERTIFICATES = """
[req]
distinguished_name = name
prompt = no
[name]
CN = rallypoint test
[authority]
basicConstraints = critical, CA:true
[member]
subjectAltName = IP:127.0.0.1
extendedKeyUsage = serverAuth, clientAuth
"""


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


def certificates(folder: Path) -> None:
    """Create an authority, and a certificate signed by it for the member and its clients."""
    (folder / "cnf").write_text(CERTIFICATES)
    new = ("req", "-config", "cnf", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, *new, "-x509", "-extensions", "authority", "-keyout", "ca.key", "-out", "ca.pem")
    openssl(folder, *new, "-keyout", "own.key", "-out", "own.csr")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "cnf", "-extensions", "member")
    openssl(folder, "x509", "-req", "-in", "own.csr", *signed, "-out", "own.pem")


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[str]:
    """The URL of a member that requires TLS with client certificates; without the path of our own."""
    certificates(tmp_path)
    port, peer = reserve_port(), reserve_port()
    flags = {
        "name": "m",
        "data-dir": f"{tmp_path}/data",
        "listen-client-urls": f"https://127.0.0.1:{port}",
        "advertise-client-urls": f"https://127.0.0.1:{port}",
        "listen-peer-urls": f"http://127.0.0.1:{peer}",
        "initial-advertise-peer-urls": f"http://127.0.0.1:{peer}",
        "initial-cluster": f"m=http://127.0.0.1:{peer}",
        "cert-file": f"{tmp_path}/own.pem",
        "key-file": f"{tmp_path}/own.key",
        "trusted-ca-file": f"{tmp_path}/ca.pem",
        "client-cert-auth": "true",
    }
    command = [find_binary(), *(f"--{name}={value}" for name, value in flags.items())]
    member = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"etcd://127.0.0.1:{port}/x"
    finally:
        member.kill()
        member.wait()


@pytest.mark.needs("openssl")
def test_tls_with_certificates(encrypted: str, tmp_path: Path) -> None:
    ca, own = f"ca={tmp_path}/ca.pem", f"cert={tmp_path}/own.pem&key={tmp_path}/own.key"
    assert look(f"{encrypted}?{ca}&{own}") == StoreServers("", ())
    with pytest.raises(NoQuorum, match="certificate"):
        look(f"{encrypted}?{ca}", 0.5)
    with pytest.raises(NoQuorum, match="certificate verify failed"):
        look(f"{encrypted}?{own}", 0.5)


def test_looking_up_imports_no_hpack_and_no_asyncio() -> None:
    code = "import sys, rallypoint.storage.etcd.lookup; print(*{'hpack', 'asyncio'} & set(sys.modules))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == ""
