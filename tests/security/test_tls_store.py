"""Certificates of running servers: those that clients refuse, those that servers refuse, renewed and unusable ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.raw_peer import AMPLE_S, until
from tests.security.certs import certificate, node
from tests.security.refused_clients import CLIENTS

import rallypoint
from rallypoint.cli import main
from rallypoint.security.credentials import Credentials

COMMAND = [sys.executable, "-m", "rallypoint"]


def url_of(server: rallypoint.Server) -> str:
    return f"tcps://127.0.0.1:{server.port}"


def trusting(place: Path) -> Credentials:
    return Credentials(tls_ca=str(place / "ca.pem"))


# Servers whose certificate is refused


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CA that clients trust, with a certificate of it."""
    return certificate(tmp_path_factory.mktemp("ca") / "tls")


def expired(place: Path, ca: Path) -> Credentials:
    return node(certificate(place, ca=ca, days=0))


def for_another_host(place: Path, ca: Path) -> Credentials:
    return node(certificate(place, "node-1", "10.0.0.1", ca=ca))


def of_another_ca(place: Path, ca: Path) -> Credentials:
    return node(certificate(place))


def signed_by_itself(place: Path, ca: Path) -> Credentials:
    other = certificate(place)
    return Credentials(tls_cert=str(other / "ca.pem"), tls_key=str(other / "ca.key"))


BAD = {
    "expired": (expired, "certificate has expired"),
    "for another host": (for_another_host, "IP address mismatch"),
    "of another CA": (of_another_ca, "unable to get local issuer certificate"),
    "signed by itself": (signed_by_itself, "self"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_certificate_is_refused_by_every_client(fault: str, ca: Path, tmp_path: Path) -> None:
    make, why = BAD[fault]
    with rallypoint.Server(credentials=make(tmp_path / "tls", ca)) as server:
        for client in CLIENTS.values():
            said = client(url_of(server), trusting(ca))
            assert "the server's certificate is not valid here: " in said and why in said
        assert not server.statistics()["sessions"]


def test_a_good_one_is_not(ca: Path) -> None:
    with (
        rallypoint.Server(credentials=node(ca)) as server,
        rallypoint.connect(url_of(server), credentials=trusting(ca)) as store,
    ):
        store.set("key", "value")
        assert store.get("key") == b"value"


# Clients whose certificate is refused


def test_mutual_tls_refuses_every_client_without_a_certificate_of_its_ca(ca: Path, tmp_path: Path) -> None:
    other, old = node(certificate(tmp_path / "other")), node(certificate(tmp_path / "old", ca=ca, days=0))
    own = {"tls_ca": str(ca / "ca.pem")}
    clients = {
        "requires a certificate of its clients": Credentials(**own),
        "refused the certificate of this client: tlsv1 alert unknown ca": Credentials(
            **own, tls_cert=other.tls_cert, tls_key=other.tls_key
        ),
        "refused the certificate of this client: sslv3 alert certificate expired": Credentials(
            **own, tls_cert=old.tls_cert, tls_key=old.tls_key
        ),
    }
    with rallypoint.Server(credentials=node(ca, client_ca=ca)) as server:
        for why, credentials in clients.items():
            for client in CLIENTS.values():
                assert why in client(url_of(server), credentials)
        assert not server.statistics()["sessions"]
        with rallypoint.connect(url_of(server), credentials=node(ca)) as store:
            assert store.num_keys() == 0


def test_a_certificate_is_no_token(ca: Path) -> None:
    token = "a-token-beside-the-certificates"
    both = Credentials(**{**facts(node(ca, client_ca=ca)), "token": token})
    with rallypoint.Server(credentials=both) as server:
        for client in CLIENTS.values():
            assert "the server requires a token, and this client has none" in client(url_of(server), node(ca))
            wrong = Credentials(**{**facts(node(ca)), "token": token.upper()})
            assert "the server has another token" in client(url_of(server), wrong)


def facts(credentials: Credentials) -> dict[str, str]:
    return {name: getattr(credentials, name) for name in ("tls_cert", "tls_key", "tls_ca", "tls_client_ca")}


# Certificates that change


def replace(source: Path, place: Path) -> None:
    """Put the certificate of one directory into the place of another, each file at once."""
    for name in ("node.key", "node.pem"):
        new = place / f"{name}.new"
        new.write_bytes((source / name).read_bytes())
        os.replace(new, place / name)


def test_a_renewed_certificate_is_for_new_connections(ca: Path, tmp_path: Path) -> None:
    place, renewed = certificate(tmp_path / "in use"), certificate(tmp_path / "renewed", ca=ca)
    with (
        rallypoint.Server(credentials=node(place)) as server,
        rallypoint.connect(url_of(server), credentials=trusting(place)) as before,
    ):
        assert "not valid here" in CLIENTS["blocking"](url_of(server), trusting(ca))
        replace(renewed, place)
        with rallypoint.connect(url_of(server), credentials=trusting(ca)) as after:
            before.set("key", "from the old connection")
            assert after.get("key") == b"from the old connection"
        assert "not valid here" in CLIENTS["blocking"](url_of(server), trusting(place))


def test_half_a_certificate_is_not_used(ca: Path, tmp_path: Path) -> None:
    place = certificate(tmp_path / "in use", ca=ca)
    whole = (place / "node.pem").read_bytes()
    with rallypoint.Server(credentials=node(place)) as server:
        for broken in (whole[:100], b"", b"no certificate at all"):
            (place / "node.pem").write_bytes(broken)
            with rallypoint.connect(url_of(server), credentials=trusting(ca)) as store:
                store.set("key", "value")
        (place / "node.pem").unlink()
        with rallypoint.connect(url_of(server), credentials=trusting(ca)) as store:
            assert store.get("key") == b"value"


def test_a_relay_uses_its_renewed_certificate_too(ca: Path, tmp_path: Path) -> None:
    place, renewed = certificate(tmp_path / "in use", ca=ca), certificate(tmp_path / "renewed")
    with (
        rallypoint.Server(credentials=node(ca)) as server,
        rallypoint.Relay(url_of(server), credentials=node(place)) as relay,
    ):
        until(relay.statistics, lambda found: found["upstream_connected"])
        url = f"tcps://127.0.0.1:{relay.port}"
        with rallypoint.connect(url, credentials=trusting(ca)) as store:
            store.set("key", "value")
        replace(renewed, place)
        with rallypoint.connect(url, credentials=trusting(renewed)) as store:
            assert store.get("key") == b"value"


# Files that are unusable


def unusable(place: Path) -> dict[str, dict[str, str]]:
    """Return options with an unusable file each, by that file."""
    good, other = certificate(place / "good"), certificate(place / "other")
    (place / "text").write_text("not a certificate\n")
    pair = {"tls_cert": str(good / "node.pem"), "tls_key": str(good / "node.key")}
    return {
        str(place / "missing.pem"): {**pair, "tls_cert": str(place / "missing.pem")},
        str(place / "missing.key"): {**pair, "tls_key": str(place / "missing.key")},
        str(place / "text"): {**pair, "tls_cert": str(place / "text")},
        str(other / "node.key"): {**pair, "tls_key": str(other / "node.key")},
        str(good / "ca.key"): {**pair, "tls_client_ca": str(good / "ca.key")},
        str(place / "missing ca"): {**pair, "tls_client_ca": str(place / "missing ca")},
    }


def test_unusable_files_are_named_when_a_server_starts(tmp_path: Path) -> None:
    for path, files in unusable(tmp_path).items():
        known = Credentials(**files)
        for start in (
            lambda known=known: rallypoint.Server(credentials=known),
            lambda known=known: rallypoint.Relay("tcp://127.0.0.1:1", credentials=known),
        ):
            with pytest.raises(rallypoint.ServerFailed) as caught:
                start()
            assert path in str(caught.value) and "tls-" in str(caught.value)


def test_unusable_files_end_the_commands_in_one_line(tmp_path: Path) -> None:
    commands = (["serve", "--port", "0"], ["relay", "--upstream", "tcp://127.0.0.1:1"])
    started = []
    for path, files in list(unusable(tmp_path).items())[:2]:
        options = [word for name, value in files.items() for word in (f"--{name.replace('_', '-')}", value)]
        for command in commands:
            child = subprocess.Popen([*COMMAND, *command, *options], stderr=subprocess.PIPE, text=True)
            started.append((path, command[0], child))
    for path, what, child in started:
        said = child.communicate(timeout=AMPLE_S)[1]
        assert child.returncode == 1 and path in said and said.count("\n") == 1, (what, said)


def test_unusable_files_end_a_run_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('it began')\n")
    run = ["run", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1"]
    faults = [*unusable(tmp_path).items(), (str(tmp_path / "text"), {"tls_ca": str(tmp_path / "text")})]
    for path, files in faults:
        options = [word for name, value in files.items() for word in (f"--{name.replace('_', '-')}", value)]
        done = CliRunner().invoke(main, [*run, *options, str(tmp_path / "script.py")])
        assert done.exit_code == 2 and path in done.output and "began" not in done.output, done.output


def test_clients_name_unusable_files_before_they_connect(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.pem", tmp_path / "text"):
        if path.name == "text":
            path.write_text("no CA\n")
        with pytest.raises(ValueError, match=str(path)):
            rallypoint.connect("tcps://127.0.0.1:1", AMPLE_S, credentials=Credentials(tls_ca=str(path)))
