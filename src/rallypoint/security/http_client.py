"""HTTP requests of our own programs to a server or a relay. They prove the token in the greeting; it is not sent."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.protocol.challenge import HTTP_PREFACE, Denied
from rallypoint.protocol.native import ACCEPTED
from rallypoint.security.client_security import LEAST_S, ClientSecurity

if TYPE_CHECKING:
    from http.client import HTTPConnection

__all__ = ["connect_http", "open_http"]


@contextlib.contextmanager
def connect_http(endpoint: net.Endpoint, security: ClientSecurity, deadline: Deadline) -> Iterator[HTTPConnection]:
    """Connect to a server, by TLS if that is how to connect, for the time of this block.

    Raises ConnectFailed, AuthenticationFailed, OSError and BadMessage.
    """
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(net.connect(*endpoint, deadline, once=True))
        context = security.context_for(endpoint.host)
        if context is not None:
            sock.settimeout(max(deadline.remaining(), LEAST_S))
            try:
                sock = stack.enter_context(context.wrap_socket(sock, server_hostname=endpoint.host))
            except OSError as error:
                raise security.failure(error, str(endpoint)) or error from None
        yield open_http(sock, security, deadline)


def open_http(sock: socket.socket, security: ClientSecurity, deadline: Deadline) -> HTTPConnection:
    """Return an HTTP connection over a connected socket; it has proved the token, if there is one.

    Raises AuthenticationFailed, OSError and BadMessage; the caller closes the socket then.
    """
    from http.client import HTTPConnection  # costs as much as the rest of `import rallypoint`

    if security.credentials.token or security.credentials.run_token:
        try:
            security.greet(sock, HTTP_PREFACE, deadline).require(ACCEPTED)
        except Denied as error:
            raise security.failure(error, str(sock.getpeername())) or error from None
    sock.settimeout(max(deadline.remaining(), LEAST_S))
    connection = HTTPConnection("localhost")
    connection.sock = sock
    return connection
