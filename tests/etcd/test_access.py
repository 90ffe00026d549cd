"""Access to a store in etcd: users and passwords, and tokens that a restarted member has forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.conformance.calls import Call
from tests.etcd.access import USER, WORD, guarded
from tests.etcd.cluster import Cluster

from rallypoint import EtcdRefused, EtcdStore, NetworkError, connect
from rallypoint.cli import main
from rallypoint.store import etcd

__all__ = ["guarded"]

pytestmark = pytest.mark.needs("etcd")


def test_waits_and_watches_outlive_a_restart_that_forgets_every_token(guarded: Cluster) -> None:
    url = f"{guarded.url}/hers?user={USER}&password={WORD}"
    with connect(url) as store, connect(url) as other, store.watch("k") as watch:
        call = Call(store.get, "k").blocked()
        guarded.kill(0)
        guarded.restart(0)
        other.set("k", "v")
        assert call.result() == b"v"
        assert watch.next(60).value == b"v"


def test_passwords_are_not_in_arguments_or_pages(guarded: Cluster) -> None:
    url = f"{guarded.url}/hers?user={USER}&password={WORD}"
    with connect(url) as store:
        store.set("k", "v")
        (own,) = (own for address, own in etcd._own.items() if address.name == f"{guarded.url}/hers")
        assert own.server is not None
        arguments = Path(f"/proc/{own.server.pid}/cmdline").read_bytes()
        assert b"rallypoint" in arguments and WORD.encode() not in arguments
        assert WORD not in str(own.server.statistics()) and WORD not in repr(store)


def test_a_forbidden_operation_is_refused_and_named(guarded: Cluster) -> None:
    with pytest.raises(EtcdRefused, match="ann"):
        connect(f"{guarded.url}/hers?user={USER}&password=wrong")
    with pytest.raises(EtcdRefused, match="permission denied"):
        connect(f"{guarded.url}/others?user={USER}&password={WORD}")
    with pytest.raises(EtcdRefused, match="user name is empty"):
        connect(f"{guarded.url}/hers")


def test_errors_contain_no_password() -> None:
    with pytest.raises(ValueError, match="password=…") as caught:
        connect("etcd://a/x?user=ann&password=secret&colour=red")
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="unknown option 'pasword'") as misspelled:
        connect("etcd://a/x?user=ann&pasword=secret")
    assert "secret" not in str(misspelled.value)


@pytest.mark.parametrize("files", ["ca=/none", "cert=/none&key=/nokey"])
def test_a_file_of_tls_that_cannot_be_used_is_named(files: str) -> None:
    with pytest.raises(NetworkError, match="/none") as caught:
        connect(f"etcd://127.0.0.1:1/x?{files}&user=ann&password=secret")
    assert "secret" not in str(caught.value)
    done = CliRunner().invoke(main, ["get", "--store", f"etcd://127.0.0.1:1/x?{files}&user=a&password=secret", "k"])
    assert done.exit_code == 4 and "/none" in done.output and "secret" not in done.output


def test_no_store_is_among_the_keys_of_another(etcd_url: str) -> None:
    with connect(etcd_url) as outer, connect(f"{etcd_url}/k") as inner:
        inner.set("here", "1")
        outer.set("there", "2")
        assert outer.list_keys() == ["there"]
        assert outer.delete_prefix("") == 1
        assert inner.list_keys() == ["here"]


def test_an_empty_endpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="one of them is empty"):
        EtcdStore("127.0.0.1:1,,127.0.0.1:2")
