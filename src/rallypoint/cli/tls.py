"""`rallypoint tls`: a certificate authority and certificates, for trials and small sites.

Without `--host`, a certificate is for every name and address of this machine: clients may use any of them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from rallypoint.cli import COMMANDS
from rallypoint.security.certificates import make_certificates

__all__ = ["command"]

DAYS, MAX_DAYS = 365, 36_500
RESOLVE_S = 5.0
"""How long to wait for the resolver, which may know a longer name of this machine."""

_SIOCGIFADDR = 0x8915


@click.group(short_help=COMMANDS["tls"])
def command() -> None:
    """Make certificates for trials and small sites. A site with a certificate authority (CA) should use that."""


@command.command()
@click.option("--dir", "folder", type=click.Path(file_okay=False), required=True, help="Directory for the files.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help="Name or address by which clients reach the node; may be repeated.  [names and addresses of this machine]",
)
@click.option(
    "--days", type=click.IntRange(1, MAX_DAYS), default=DAYS, show_default=True, help="Validity of the certificate."
)
def new(folder: str, hosts: tuple[str, ...], days: int) -> None:
    """Write a certificate and its key (node.pem, node.key), and a CA that signs it (ca.pem, ca.key).

    A CA in the directory is used again. For the next node, copy ca.pem and ca.key to another directory.
    """
    hosts = hosts or tuple(own_hosts())
    try:
        files = make_certificates(Path(folder), hosts, days)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot write to {folder}: {error.strerror}") from None
    click.echo(f"{files['node.pem']} is valid for {', '.join(hosts)}", err=True)
    click.echo(f"server: --tls-cert {files['node.pem']} --tls-key {files['node.key']}", err=True)
    click.echo(f"client: --tls-ca {files['ca.pem']}", err=True)
    click.echo(f"keep {files['ca.key']} apart: whoever has it can make certificates that these clients trust", err=True)


def own_hosts() -> list[str]:
    """Return the names of this machine, the addresses of its interfaces, and those of loopback."""
    name = socket.gethostname()
    return list(dict.fromkeys([name, *_canonical_names(name), *_addresses(), "localhost", "127.0.0.1", "::1"]))


def _canonical_names(name: str) -> list[str]:
    """Return the name as the resolver has it; nothing if that takes long."""
    answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError):
            answers.put(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME))

    asking = threading.Thread(target=ask, name="resolve", daemon=True)
    asking.start()
    asking.join(RESOLVE_S)
    found = [] if answers.empty() else answers.get()
    return [canonical for *_, canonical, _ in found if canonical]


def _addresses() -> Iterator[str]:
    """Yield the addresses of the interfaces, without those that mean something on one link only (Linux)."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
                yield socket.inet_ntoa(found[20:24])
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            address = ipaddress.ip_address(bytes.fromhex(line.split()[0]))
            if not address.is_link_local:
                yield str(address)
