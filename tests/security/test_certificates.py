"""`make_certificates`: what it writes, and what it refuses to touch. Who trusts them: test_tls_contexts.py."""

from __future__ import annotations

import datetime
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.raw_peer import AMPLE_S
from tests.security.certs import alternative_names, certificate

from rallypoint.security.certificates import make_certificates

FILES = {"ca.pem", "ca.key", "node.pem", "node.key"}


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_files_and_their_modes(tmp_path: Path) -> None:
    place = tmp_path / "new" / "place"
    files = make_certificates(place, ["localhost"], 30)
    assert files == {name: place / name for name in FILES}
    assert {path.name for path in place.iterdir()} == FILES
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    for name, path in files.items():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == (0 if name.endswith(".key") else 0o044), name


def test_keys_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_certificates(tmp_path / "a", ["localhost"], 30)
    finally:
        os.umask(before)
    for name in ("ca.key", "node.key"):
        assert stat.S_IMODE((tmp_path / "a" / name).stat().st_mode) == 0o600


def test_what_is_in_a_certificate(tmp_path: Path) -> None:
    hosts = ["node-1.example.org", "*.example.org", "under_score", "10.0.0.1", "fd00::2", "ends-with-a-dot."]
    place = certificate(tmp_path / "a", *hosts, days=7)
    node, ca = read(place / "node.pem"), read(place / "ca.pem")
    assert alternative_names(place / "node.pem") == [*hosts[:-1], "ends-with-a-dot"]
    assert node.subject.rfc4514_string() == "CN=node-1.example.org" and node.issuer == ca.subject == ca.issuer
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    assert node.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(False, None)
    assert set(node.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == {
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
    }
    now, skew = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(minutes=50)
    assert node.not_valid_before_utc < now - skew
    assert abs(node.not_valid_after_utc - now - datetime.timedelta(days=7)) < skew
    assert abs(ca.not_valid_after_utc - now - datetime.timedelta(days=70)) < skew
    node.verify_directly_issued_by(ca)


def test_a_long_name_fits(tmp_path: Path) -> None:
    name = ".".join(["a" * 60] * 4)
    assert alternative_names(certificate(tmp_path / "a", name) / "node.pem") == [name]


def test_a_ca_is_used_again(tmp_path: Path) -> None:
    one = certificate(tmp_path / "1", "node-1")
    two = certificate(tmp_path / "2", "node-2", ca=one)
    assert (one / "ca.pem").read_bytes() == (two / "ca.pem").read_bytes()
    assert (one / "ca.key").read_bytes() == (two / "ca.key").read_bytes()
    certificates = [read(place / "node.pem") for place in (one, two)]
    for each in certificates:
        each.verify_directly_issued_by(read(one / "ca.pem"))
    assert certificates[0].serial_number != certificates[1].serial_number
    keys = [load_pem_private_key((place / "node.key").read_bytes(), None) for place in (one, two)]
    assert [key.public_key() for key in keys] == [each.public_key() for each in certificates]
    assert keys[0].public_key() != keys[1].public_key()


def test_a_certificate_ends_with_its_ca(tmp_path: Path) -> None:
    ca = certificate(tmp_path / "ca", days=1)
    late = certificate(tmp_path / "late", ca=ca, days=1000)
    assert read(late / "node.pem").not_valid_after_utc == read(ca / "ca.pem").not_valid_after_utc


@pytest.mark.parametrize("name", ["node.pem", "node.key"])
@pytest.mark.parametrize("dangling", [False, True])
def test_nothing_is_overwritten(name: str, dangling: bool, tmp_path: Path) -> None:
    if dangling:
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / name).write_text("precious")
    with pytest.raises(ValueError, match=f"{tmp_path / name} exists already"):
        make_certificates(tmp_path, ["localhost"], 30)
    assert os.listdir(tmp_path) == [name]
    assert dangling or (tmp_path / name).read_text() == "precious"


@pytest.mark.parametrize("name", ["ca.pem", "ca.key"])
def test_half_a_ca_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    """As when the key of the CA is kept apart, as it should be."""
    shutil.copy(certificate(tmp_path / "ca") / name, tmp_path / name)
    with pytest.raises(ValueError, match=f"{tmp_path / name} exists alone"):
        make_certificates(tmp_path, ["localhost"], 30)
    assert set(os.listdir(tmp_path)) == {"ca", name}


@pytest.mark.parametrize("name", ["ca.pem", "ca.key"])
def test_an_unusable_ca_is_refused(name: str, tmp_path: Path) -> None:
    ca, other = certificate(tmp_path / "ca"), certificate(tmp_path / "other")
    for node in ("node.pem", "node.key"):
        (ca / node).unlink()
    shutil.copy(other / name, ca / name)
    with pytest.raises(ValueError, match=f"{ca}/ca.key is not the key of {ca}/ca.pem"):
        make_certificates(ca, ["localhost"], 30)
    (ca / name).write_text("garbage")
    with pytest.raises(ValueError, match=f"cannot use the CA in {ca}"):
        make_certificates(ca, ["localhost"], 30)
    assert set(os.listdir(ca)) == {"ca.pem", "ca.key"}


def test_an_expired_ca_is_refused(tmp_path: Path) -> None:
    ca = certificate(tmp_path / "ca", days=0)
    with pytest.raises(ValueError, match=rf"the CA {tmp_path}\S+ expired on \d{{4}}-"):
        certificate(tmp_path / "node", ca=ca)


@pytest.mark.parametrize("host", ["", "a b", "host:80", "[::1]", "tcp://x", "a..b", ".a", "ü.org", "a\n", "a" * 254])
def test_an_invalid_host_is_refused_and_nothing_is_written(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is neither a host name nor an IP address"):
        make_certificates(tmp_path / "a", ["localhost", host], 30)
    assert not (tmp_path / "a").exists()


def test_no_host_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one host"):
        make_certificates(tmp_path / "a", [], 30)


def test_without_the_package_it_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from pathlib import Path\n"
        "from rallypoint.security.certificates import make_certificates\n"
        "try: make_certificates(Path(sys.argv[1]), ['localhost'], 30)\n"
        "except ValueError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=AMPLE_S, check=True)
    assert done.stdout == "certificates need the package cryptography: pip install 'rallypoint[tls]'\n"
    assert not (tmp_path / "a").exists()
