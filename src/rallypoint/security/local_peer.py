"""The user behind a connection on this machine, as the kernel knows it.

PyTorch's protocol has no place for a token. On a store that has one, its clients are accepted only from processes of
this machine that run as the server's own user or as root. For a Unix socket the kernel tells the user (SO_PEERCRED).
For TCP between two sockets of one machine, the kernel's socket table does: `inet_diag` looks up the peer's own socket,
by its addresses and ports, in one message (about 20 µs, however many sockets there are). Where the kernel does not
tell (another system, a restricted container), the user is unknown; a loopback address still means this machine.

A socket that its process has closed belongs to nobody: some kernels report it as root's, or not at all. Its user is
refused, not unknown. Otherwise a stranger could send requests and close before the server looks.

Rejected: /proc/net/tcp. It lists every socket of the machine for each question.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
from typing import Any

from rallypoint.net import is_loopback

__all__ = ["is_local", "may_use", "peer_uid"]

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _NLMSG_ERROR = 4, 20, 1, 2
_ANY_STATE, _ANY_COOKIE = 0xFFFFFFFF, b"\xff" * 8
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_REQUEST = struct.Struct("=BBBxI")  # struct inet_diag_req_v2, up to the socket's id
_ENDS, _INTERFACE = struct.Struct("!HH16s16s"), struct.Struct("=I8s")  # struct inet_diag_sockid
_REPLY = struct.Struct("=16x4x4s44x12xII")  # nlmsghdr and inet_diag_msg: the ports, the user and the inode
_ERROR = struct.Struct("=16xi")
_DOES_NOT_TELL = (
    errno.ENOENT, errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EAFNOSUPPORT,
    errno.EPROTONOSUPPORT, errno.ECONNREFUSED,
)  # fmt: skip
"""Errors of a kernel without this table, or that may not be asked; ENOENT is also that of a socket that is gone."""

ANSWER_S = 1.0

_Address = tuple[Any, ...]


def is_local(own: object, peer: object) -> bool:
    """Return whether a connection, given by its two addresses, has both ends on this machine."""
    if not (isinstance(own, tuple) and isinstance(peer, tuple)):
        return True  # a Unix socket
    return is_loopback(_plain(peer[0])) or _plain(own[0]) == _plain(peer[0])


def may_use(sock: socket.socket) -> str:
    """Return "" if the peer is a process of this machine that runs as this user or as root; else why it may not."""
    try:
        own, peer = sock.getsockname(), sock.getpeername()
        if not is_local(own, peer):
            return "PyTorch's protocol has no authentication, and is accepted only from this machine"
        uid = peer_uid(sock)
    except OSError as error:
        return f"its user is unknown: {error.strerror or error}"
    if uid is None:
        loopback = not isinstance(peer, tuple) or is_loopback(_plain(peer[0]))
        return "" if loopback else "its user is unknown: the kernel does not tell"
    ours = os.geteuid()
    return "" if uid in (0, ours) else f"it is a process of user {uid}, and this server's user is {ours}"


def peer_uid(sock: socket.socket) -> int | None:
    """Return the user id of the process at the other end of a connection on this machine.

    Returns None if this kernel does not tell; raises OSError if it would, but the peer is gone.
    """
    if sys.platform != "linux":
        return None
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("=iII", credentials)[1])
    own, peer = sock.getsockname(), sock.getpeername()
    uid = _tcp_uid(sock.family, peer, own)
    if uid is None and _tcp_uid(sock.family, own, peer) is not None:
        raise ConnectionError("it has closed the connection, or is in another network namespace")
    sock.getpeername()  # raises if our own end is gone as well
    return uid


def _tcp_uid(family: int, local: _Address, remote: _Address) -> int | None:
    """Return the user id of the process that has the TCP socket with these addresses open; None if unknown."""
    ends = (_packed(family, address) for address in (local, remote))
    identity = _ENDS.pack(local[1], remote[1], *ends) + _INTERFACE.pack(*(local[3:] or (0,)), _ANY_COOKIE)
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ANY_STATE) + identity
    head = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    try:
        reply = _ask_kernel(head + request)
    except OSError as error:
        if error.errno in _DOES_NOT_TELL:
            return None
        raise
    if len(reply) < _REPLY.size:
        return None
    ports, uid, inode = _REPLY.unpack_from(reply)
    return int(uid) if ports == identity[:4] and inode else None  # other ports: a listener at the local one


def _ask_kernel(request: bytes) -> bytes:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(ANSWER_S)
        kernel.sendto(request, (0, 0))
        reply = kernel.recv(4096)
    if _HEADER.unpack_from(reply)[1] == _NLMSG_ERROR:
        code = -_ERROR.unpack_from(reply)[0]
        raise OSError(code, os.strerror(code))
    return reply


def _packed(family: int, address: _Address) -> bytes:
    return socket.inet_pton(family, str(address[0]).partition("%")[0]).ljust(16, b"\0")


def _plain(host: object) -> str:
    """Return an address without its zone; one that is IPv4 inside IPv6 as IPv4."""
    text = str(host).partition("%")[0]
    with contextlib.suppress(ValueError):
        mapped = getattr(ipaddress.ip_address(text), "ipv4_mapped", None)
        return text if mapped is None else str(mapped)
    return text
