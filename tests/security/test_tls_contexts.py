"""TLS contexts with real certificates: who is trusted, who is not, why in words, and files that change."""

from __future__ import annotations

import logging
import os
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.security.certs import HOSTS, certificate, node
from tests.security.tls_ends import MemoryEnd, connect

from rallypoint.security.credentials import Credentials
from rallypoint.security.tls import ServerTls, client_context, reason, shared_client_context, tls_error


def errors(server: Credentials, client: Credentials, name: str = "localhost") -> tuple[str, str]:
    """Return why each end of a connection refuses it, in words; "" and "" if none does."""
    ends = connect(ServerTls(server).context(), client_context(client), name)
    said = [tls_error(end.error) if end.error else "" for end in ends]
    if said == ["", ""]:
        assert exchange(*ends)
    return said[0], said[1]


def exchange(server: MemoryEnd, client: MemoryEnd) -> bool:
    """Send something each way; return whether it has arrived."""
    client.take(server.seal(b"from the server"))
    server.take(client.seal(b"from the client"))
    return (client.data, server.data) == (b"from the server", b"from the client")


def trusting(ca: Path) -> Credentials:
    return Credentials(tls_ca=str(ca / "ca.pem"))


def refused(*says: object) -> str:
    """The pattern of an error that has these words."""
    return ".*".join(map(str, says))


# Servers


@pytest.mark.parametrize("name", HOSTS)
def test_a_client_trusts_a_server_of_its_ca(name: str, tmp_path: Path) -> None:
    place = certificate(tmp_path / "a")
    assert errors(node(place), trusting(place), name) == ("", "")


def test_both_speak_tls_1_3_and_nothing_older_than_1_2(tmp_path: Path) -> None:
    place = certificate(tmp_path / "a")
    server, client = ServerTls(node(place)).context(), client_context(trusting(place))
    assert connect(server, client, "localhost")[1].tls.version() == "TLSv1.3"
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert connect(server, client, "localhost")[1].tls.version() == "TLSv1.2"
    old = client_context(trusting(place))
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    ends = connect(server, old, "localhost")
    assert ends[0].error is not None and not ends[1].shaken


def test_certificates_are_valid_by_the_strictest_rules(tmp_path: Path) -> None:
    """Those of the default contexts of Python 3.13."""
    place = certificate(tmp_path / "a")
    strict = ssl.create_default_context(cafile=str(place / "ca.pem"))
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    ends = connect(ServerTls(node(place)).context(), strict, "localhost")
    assert exchange(*ends)


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    ca = certificate(tmp_path / "ca")
    old = certificate(tmp_path / "old", ca=ca, days=0)
    said = errors(node(old), trusting(ca))
    assert said[1] == "the server's certificate is not valid here: certificate has expired"
    assert "certificate expired" in said[0]


def test_a_certificate_for_another_host_is_refused(tmp_path: Path) -> None:
    place = certificate(tmp_path / "a", "node-1", "10.0.0.1")
    for name in ("localhost", "node-2", "127.0.0.1", "10.0.0.2", "::1", "1.node-1"):
        said = errors(node(place), trusting(place), name)[1]
        assert said.startswith("the server's certificate is not valid here: ") and name in said
        assert "mismatch" in said and "--tls-ca" not in said
    for name in ("node-1", "NODE-1", "10.0.0.1"):
        assert errors(node(place), trusting(place), name) == ("", "")


def test_a_certificate_of_another_ca_is_refused_with_advice(tmp_path: Path) -> None:
    ours, theirs = certificate(tmp_path / "a"), certificate(tmp_path / "b")
    said = errors(node(theirs), trusting(ours))
    assert said[1].endswith("if it should be, give the certificate of its CA (--tls-ca)")
    assert "the server refused the certificate" in said[0]  # the server's words for an alert of its client


def test_a_certificate_that_signs_itself_is_refused(tmp_path: Path) -> None:
    ours, alone = certificate(tmp_path / "a"), certificate(tmp_path / "b")
    itself = Credentials(tls_cert=str(alone / "ca.pem"), tls_key=str(alone / "ca.key"))
    said = errors(itself, trusting(ours))[1]
    assert "self-signed certificate" in said.replace("self signed", "self-signed") and "--tls-ca" in said


def test_without_a_ca_those_of_the_system_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = certificate(tmp_path / "a")
    assert "--tls-ca" in errors(node(place), Credentials())[1]
    monkeypatch.setenv("SSL_CERT_FILE", str(place / "ca.pem"))
    assert errors(node(place), Credentials()) == ("", "")


# Clients


def test_mutual_tls_accepts_clients_of_its_ca(tmp_path: Path) -> None:
    servers, clients = certificate(tmp_path / "servers"), certificate(tmp_path / "clients", "anybody")
    server = node(servers, client_ca=clients)
    client = Credentials(
        tls_ca=str(servers / "ca.pem"), tls_cert=str(clients / "node.pem"), tls_key=str(clients / "node.key")
    )
    assert errors(server, client) == ("", "")


def test_one_ca_will_do_for_both(tmp_path: Path) -> None:
    place = certificate(tmp_path / "a")
    assert errors(node(place, client_ca=place), node(place)) == ("", "")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_mutual_tls_refuses_a_client_without_a_certificate(version: ssl.TLSVersion, tmp_path: Path) -> None:
    place = certificate(tmp_path / "a")
    client = client_context(trusting(place))
    client.maximum_version = version
    server, one = connect(ServerTls(node(place, client_ca=place)).context(), client, "localhost")
    assert server.error is not None and not server.shaken
    assert reason(server.error) == "peer did not return a certificate"
    assert one.error is not None
    assert tls_error(one.error).startswith("the server requires a certificate of its clients (--tls-cert)")


def test_mutual_tls_refuses_a_client_of_another_ca(tmp_path: Path) -> None:
    place, other = certificate(tmp_path / "a"), certificate(tmp_path / "b")
    client = Credentials(
        tls_ca=str(place / "ca.pem"), tls_cert=str(other / "node.pem"), tls_key=str(other / "node.key")
    )
    said = errors(node(place, client_ca=place), client)
    assert said[1] == "the server refused the certificate of this client: tlsv1 alert unknown ca"


def test_mutual_tls_refuses_a_client_whose_certificate_has_expired(tmp_path: Path) -> None:
    place = certificate(tmp_path / "a")
    old = certificate(tmp_path / "old", ca=place, days=0)
    said = errors(node(place, client_ca=place), node(old))
    assert said[1] == "the server refused the certificate of this client: sslv3 alert certificate expired"


def test_without_mutual_tls_a_client_may_have_any_certificate_or_none(tmp_path: Path) -> None:
    place, other = certificate(tmp_path / "a"), certificate(tmp_path / "b")
    client = Credentials(
        tls_ca=str(place / "ca.pem"), tls_cert=str(other / "node.pem"), tls_key=str(other / "node.key")
    )
    assert errors(node(place), client) == ("", "")


# Files


def serial(server: ServerTls, ca: Path) -> str:
    """Return the number of the certificate that new clients get."""
    ends = connect(server.context(), client_context(trusting(ca)), "localhost")
    assert ends[1].error is None
    found = ends[1].tls.getpeercert()
    assert found is not None
    return str(found["serialNumber"])


def test_a_replaced_certificate_is_used_for_new_connections(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ca = certificate(tmp_path / "ca")
    place, renewed = certificate(tmp_path / "a", ca=ca), certificate(tmp_path / "b", ca=ca)
    server = ServerTls(node(place))
    first = serial(server, ca)
    assert serial(server, ca) == first and server.context() is server.context()
    standing = connect(server.context(), client_context(trusting(ca)), "localhost")
    for name in ("node.key", "node.pem"):
        os.replace(renewed / name, place / name)
    assert serial(server, ca) != first
    assert [record.getMessage() for record in caplog.records] == [
        f"TLS certificate {place / 'node.pem'} has changed, and is in use"
    ]
    assert exchange(*standing)


def test_a_certificate_rewritten_in_place_is_noticed(tmp_path: Path) -> None:
    ca = certificate(tmp_path / "ca")
    place, renewed = certificate(tmp_path / "a", ca=ca), certificate(tmp_path / "b", ca=ca)
    server = ServerTls(node(place))
    first = serial(server, ca)
    for name in ("node.key", "node.pem"):
        (place / name).write_bytes((renewed / name).read_bytes())
        os.utime(place / name, ns=(1, 1))
    assert serial(server, ca) != first


def test_a_certificate_behind_a_link_is_noticed(tmp_path: Path) -> None:
    """As Kubernetes replaces a secret: a link to a directory, replaced as one."""
    ca = certificate(tmp_path / "ca")
    one, two = certificate(tmp_path / "1", ca=ca), certificate(tmp_path / "2", ca=ca)
    current = tmp_path / "current"
    current.symlink_to(one)
    server = ServerTls(node(current))
    first = serial(server, ca)
    (tmp_path / "next").symlink_to(two)
    os.replace(tmp_path / "next", current)
    assert serial(server, ca) != first


def test_half_written_files_keep_the_old_certificate_and_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = certificate(tmp_path / "ca")
    place, renewed = certificate(tmp_path / "a", ca=ca), certificate(tmp_path / "b", ca=ca)
    server = ServerTls(node(place))
    first = serial(server, ca)
    whole = (renewed / "node.pem").read_bytes()
    for number, content in enumerate((b"", whole[:100], whole[:-30], whole), 1):  # the last one lacks its key
        (place / "node.pem").write_bytes(content)
        assert [serial(server, ca) for _ in range(3)] == [first] * 3
        assert len(caplog.records) == number
    assert all("continuing with the old ones" in record.getMessage() for record in caplog.records)
    assert "key values mismatch" in caplog.records[-1].getMessage()
    (place / "node.pem").unlink()
    assert serial(server, ca) == first
    assert "No such file" in caplog.records[-1].getMessage()
    for name in ("node.key", "node.pem"):
        shutil.copy(renewed / name, place / name)
    assert serial(server, ca) != first


def test_a_replaced_ca_of_clients_is_used(tmp_path: Path) -> None:
    place, other = certificate(tmp_path / "a"), certificate(tmp_path / "b")
    accepted = certificate(tmp_path / "clients", "anybody")
    server = ServerTls(node(place, client_ca=accepted))
    client = client_context(
        Credentials(tls_ca=str(place / "ca.pem"), tls_cert=str(other / "node.pem"), tls_key=str(other / "node.key"))
    )
    assert connect(server.context(), client, "localhost")[0].error is not None
    os.replace(other / "ca.pem", accepted / "ca.pem")
    assert connect(server.context(), client, "localhost")[0].error is None


@pytest.mark.parametrize("option", ["tls_cert", "tls_key", "tls_client_ca"])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.unlink(), "No such file or directory"),
        (lambda path: path.write_text("no certificate\n"), ""),
        (lambda path: path.write_text(""), ""),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    ],
    ids=["missing", "garbage", "empty", "directory"],
)
def test_a_server_names_the_file_that_it_cannot_use(
    option: str, make: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    place, clients = certificate(tmp_path / "a"), certificate(tmp_path / "b")
    files = node(place, client_ca=clients)
    path = Path(getattr(files, option))
    make(path)
    with pytest.raises(ValueError, match=refused("--" + option.replace("_", "-"), path)) as caught:
        ServerTls(files)
    assert says in str(caught.value)


@pytest.mark.parametrize("option", ["tls_cert", "tls_key", "tls_ca"])
def test_a_client_names_the_file_that_it_cannot_use(option: str, tmp_path: Path) -> None:
    files = node(certificate(tmp_path / "a"))
    path = Path(getattr(files, option))
    path.write_text("garbage")
    with pytest.raises(ValueError, match=refused("--" + option.replace("_", "-"), path)):
        client_context(files)
    path.unlink()
    with pytest.raises(ValueError, match=f"cannot read --{option.replace('_', '-')} {path}: No such file"):
        client_context(files)


def test_clients_share_a_context_until_a_file_changes(tmp_path: Path) -> None:
    first, second = certificate(tmp_path / "a"), certificate(tmp_path / "b")
    shared = shared_client_context(trusting(first))
    assert shared_client_context(Credentials(token="t" * 16, tls_ca=str(first / "ca.pem"))) is shared
    assert shared_client_context(node(first)) is not shared
    assert shared_client_context(trusting(second)) is not shared
    os.replace(second / "ca.pem", first / "ca.pem")
    ends = connect(ServerTls(node(second)).context(), shared_client_context(trusting(first)), "localhost")
    assert [end.error for end in ends] == [None, None]


def test_clients_without_a_ca_share_a_context_until_those_of_the_system_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = certificate(tmp_path / "a"), certificate(tmp_path / "b")
    monkeypatch.setenv("SSL_CERT_FILE", str(first / "ca.pem"))
    shared = shared_client_context(Credentials())
    assert shared_client_context(Credentials()) is shared
    os.replace(second / "ca.pem", first / "ca.pem")
    ends = connect(ServerTls(node(second)).context(), shared_client_context(Credentials()), "localhost")
    assert [end.error for end in ends] == [None, None]


def test_the_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    place, other = certificate(tmp_path / "a"), certificate(tmp_path / "b")
    os.replace(other / "node.key", place / "node.key")
    with pytest.raises(ValueError, match="key values mismatch"):
        ServerTls(node(place))


@pytest.mark.needs("openssl")
def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(tmp_path: Path) -> None:
    place = certificate(tmp_path / "a")
    command: list[str | Path] = ["openssl", "ec", "-in", place / "node.key", "-out", place / "locked", "-aes128"]
    command += ["-passout", "pass:word"]
    subprocess.run(command, check=True, capture_output=True)
    os.replace(place / "locked", place / "node.key")
    with pytest.raises(ValueError, match=f"--tls-key {place}/node.key has a passphrase"):
        ServerTls(node(place))


# Words


def test_an_error_that_is_not_of_tls_has_no_words_here() -> None:
    assert tls_error(ConnectionResetError(104, "reset")) == ""
    assert tls_error(TimeoutError()) == ""


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"220 mail ESMTP\r\n", bytes(5), b"SSH-2.0-x\r\n"]
)
def test_a_server_that_does_not_speak_tls_is_said_not_to(said: bytes, tmp_path: Path) -> None:
    end = MemoryEnd(client_context(trusting(certificate(tmp_path / "a"))), "localhost")
    end.go_on()
    end.take(said)
    assert end.error is not None
    assert tls_error(end.error) == "the server does not speak TLS"
