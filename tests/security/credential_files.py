"""The token file and the certificates of the nodes of a job, and the options that name them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.hosts import Host
from tests.security.certs import HOSTS, certificate, node

from rallypoint.security.credentials import Credentials, new_token

__all__ = ["CredentialFiles", "token_file"]

TLS_FILES = {"tls_ca": "ca.pem", "tls_cert": "node.pem", "tls_key": "node.key"}


def token_file(path: Path) -> str:
    """Write a new token to a file that is the user's alone; return the token."""
    path.touch(0o600)
    path.write_text(new_token())
    return path.read_text()


class CredentialFiles:
    """A token, and with `tls` a certificate of a new CA for the hosts, in a new directory; loopback if no hosts."""

    def __init__(self, place: Path, hosts: Iterable[Host] = (), tls: bool = True) -> None:
        place.mkdir()
        self.place, self._tls = place, tls
        self.token = token_file(place / "token")
        if tls:
            names = [name for host in hosts for name in (host.name, host.address)]
            certificate(place / "tls", *(names or HOSTS))

    def named(self) -> dict[str, str]:
        """Return the files by the name of their option."""
        files = {name: str(self.place / "tls" / file) for name, file in TLS_FILES.items() if self._tls}
        return {"token_file": str(self.place / "token"), **files}

    def options(self, *left_out: str) -> list[str]:
        """Return the options of a command, without those named."""
        files = self.named().items()
        return [f"--{name.replace('_', '-')}={path}" for name, path in files if name not in left_out]

    def conf(self) -> str:
        """Return the value of torchrun's --rdzv-conf."""
        return ",".join(f"{name}={path}" for name, path in self.named().items())

    @property
    def credentials(self) -> Credentials:
        """The credentials of a node, for both ends."""
        return node(self.place / "tls", token=self.token) if self._tls else Credentials(token=self.token)
