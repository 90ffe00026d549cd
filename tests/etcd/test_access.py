"""Being let in, and not: users and passwords, tokens that a restarted member has forgotten, names, forks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from tests.conformance.calls import Call
from tests.etcd.cluster import Cluster

from rallypoint import EtcdRefused, EtcdStore, Unsupported, connect

pytestmark = pytest.mark.needs("etcd")

USER, WORD = "ann", "secret"


def post(endpoint: str, path: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
    host, _, port = endpoint.rpartition(":")
    asked = HTTPConnection(host, int(port), timeout=60)
    asked.request("POST", path, json.dumps(body), {"Authorization": token} if token else {})
    answer: dict[str, Any] = json.loads(asked.getresponse().read())
    asked.close()
    return answer


def base64(text: str) -> str:
    from base64 import b64encode

    return b64encode(text.encode()).decode()


@pytest.fixture
def guarded() -> Iterator[Cluster]:
    """A cluster of one member where everybody has to log in, and `ann` may only use the space `hers`."""
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


def test_waits_and_watches_outlive_a_restart_that_forgets_every_token(guarded: Cluster) -> None:
    url = f"{guarded.url}/hers?user={USER}&password={WORD}"
    with connect(url) as store, connect(url) as other, store.watch("k") as watch:
        call = Call(store.get, "k").blocked()
        guarded.kill(0)
        guarded.restart(0)
        other.set("k", "v")
        assert call.result() == b"v"
        assert watch.next(60).value == b"v"


def test_what_a_user_may_not_do_is_refused_by_name(guarded: Cluster) -> None:
    with pytest.raises(EtcdRefused, match="ann"):
        connect(f"{guarded.url}/hers?user={USER}&password=wrong")
    with pytest.raises(EtcdRefused, match="permission denied"):
        connect(f"{guarded.url}/others?user={USER}&password={WORD}")
    with pytest.raises(EtcdRefused, match="user name is empty"):
        connect(f"{guarded.url}/hers")


def test_an_error_does_not_tell_a_password() -> None:
    with pytest.raises(ValueError, match="password=…") as caught:
        connect("etcd://a/x?user=ann&password=secret&colour=red")
    assert "secret" not in str(caught.value)


def test_no_store_is_among_the_keys_of_another(etcd_url: str) -> None:
    with connect(etcd_url) as outer, connect(f"{etcd_url}/k") as inner:
        inner.set("here", "1")
        outer.set("there", "2")
        assert outer.list_keys() == ["there"]
        assert outer.delete_prefix("") == 1
        assert inner.list_keys() == ["here"]


def test_an_endpoint_that_is_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="one of them is empty"):
        EtcdStore("127.0.0.1:1,,127.0.0.1:2")


def test_a_forked_child_lives_and_is_told_that_it_cannot_use_etcd(etcd_url: str) -> None:
    with connect(etcd_url) as store:
        store.set("k", "v")
        for use in (lambda: None, lambda: store.get("k"), lambda: connect(etcd_url, timeout=60)):
            pid = os.fork()
            if not pid:
                try:
                    use()
                    os._exit(0)
                except Unsupported:
                    os._exit(7)
                except BaseException:
                    os._exit(1)
            expected = 0 if use() is None else 7
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == expected
        assert store.get("k") == b"v"
