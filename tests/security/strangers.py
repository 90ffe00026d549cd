"""What strangers try: the requests of every protocol, with forged greetings and without; and all that they may get.

A protected server or relay has a fixed reply for each kind of attempt. `attack` makes all attempts, each on its own
connection, and returns the replies by protocol, with random numbers replaced by `NONCE`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import secrets
import socket
import ssl
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from rallypoint.core import ops
from rallypoint.protocol import channels, native
from rallypoint.protocol.c10d import MAGIC, Opcode, encode
from rallypoint.protocol.challenge import ANSWER_BYTES, CHALLENGE, DENIED, HTTP_PREFACE, NEEDS_TLS
from rallypoint.protocol.native import Hello, frame

__all__ = [
    "KEY",
    "PREFACES",
    "VALUE",
    "Connect",
    "ask",
    "attack",
    "attempts",
    "loopback_sources",
    "over_tls",
    "torch_requests",
]

KEY, VALUE = "stored/secret", b"the value of the secret"
PATH = b"/stored/secret"

NONCE = b"<32 random bytes>"
Connect = Callable[[int], Sequence[socket.socket]]
"""Makes so many connections, each from another address."""


_sources = itertools.count()


def loopback_sources(count: int) -> list[str]:
    """Return other addresses of this machine every time: a host that fails often is answered late."""
    numbers = itertools.islice(_sources, count)
    return [f"127.{1 + (number >> 14 & 63)}.{number >> 7 & 127}.{2 + (number & 127)}" for number in numbers]


# Requests


def native_requests() -> dict[str, ops.Op]:
    """Return a valid request of every operation, and of every command to a shared object."""
    kinds = typing.get_args(ops.Operation)
    found = {kind.__name__: _example(inspect.type_info(kind)) for kind in kinds if kind is not ops.Act}
    for command in typing.get_args(ops.Commands):
        example = _example(inspect.type_info(command))
        found[command.__name__] = ops.Act(1, PATH, "stranger", 1, example, 0.0)
    for op in found.values():
        native.decode_request(msgspec.msgpack.encode(op))
    return found


def _example(kind: Any) -> Any:
    """Return a value of a type."""
    if isinstance(kind, inspect.StructType):
        return kind.cls(**{field.name: _example(field.type) for field in kind.fields})
    if isinstance(kind, inspect.ListType):
        return [_example(kind.item_type)]
    if isinstance(kind, inspect.TupleType):
        return tuple(map(_example, kind.item_types))
    if isinstance(kind, inspect.UnionType):
        return _example(kind.types[0])
    if isinstance(kind, inspect.LiteralType):
        return kind.values[0]
    if isinstance(kind, inspect.DictType):
        return {}
    plain: dict[Any, Any] = {
        inspect.BytesType: PATH, inspect.StrType: "stranger", inspect.BoolType: True, inspect.IntType: 1
    }  # fmt: skip
    return plain.get(type(kind), 0.0)


def hello_frame(name: str = "stranger") -> bytes:
    """Return the first frame of a native client."""
    return frame(Hello(native.VERSION, name))


def torch_requests() -> dict[str, bytes]:
    """Return the first bytes of a PyTorch client with a request of every opcode."""
    validate = encode(Opcode.VALIDATE, MAGIC)
    key, value = PATH, b"forged"
    requests = {
        "VALIDATE": b"",
        "SET": encode(Opcode.SET, key, value),
        "COMPARE_SET": encode(Opcode.COMPARE_SET, key, VALUE, value),
        "GET": encode(Opcode.GET, key),
        "ADD": encode(Opcode.ADD, b"/counter", 1),
        "CHECK": encode(Opcode.CHECK, 1, key),
        "WAIT": encode(Opcode.WAIT, 1, key),
        "GETNUMKEYS": encode(Opcode.GETNUMKEYS),
        "DELETE_KEY": encode(Opcode.DELETE_KEY, key),
        "APPEND": encode(Opcode.APPEND, key, value),
        "MULTI_GET": encode(Opcode.MULTI_GET, 1, key),
        "MULTI_SET": encode(Opcode.MULTI_SET, 1, key, value),
        "CANCEL_WAIT": encode(Opcode.CANCEL_WAIT),
        "PING": encode(Opcode.PING, 7),
        "QUEUE_PUSH": encode(Opcode.QUEUE_PUSH, b"/queue", value),
        "QUEUE_POP": encode(Opcode.QUEUE_POP, b"/queue"),
        "QUEUE_LEN": encode(Opcode.QUEUE_LEN, b"/queue"),
        "LIST_KEYS": encode(Opcode.LIST_KEYS),
        "BARRIER": encode(Opcode.BARRIER, b"/barrier", 1),
    }
    assert {getattr(Opcode, name) for name in requests} == set(range(19)), "every opcode"
    return {name: validate + request for name, request in requests.items()}


METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT")
PATHS = (
    "/", "/about", "/statistics", "/login", "/login?code=guess", "/login?code=", "/rounds/run/1?round=1", "/rounds/run",
    "/status", "/events", "/metrics?ranks=1",
    "/healthz", "/nothing", "*", "//about", "/./about", "/about?token=guess", "http://x/statistics",
)  # fmt: skip
FORM = "content-type: application/x-www-form-urlencoded"
WITH_HEADERS = {
    "wrong bearer": "authorization: Bearer 0123456789abcdef0123456789abcdef",
    "empty bearer": "authorization: Bearer",
    "basic": "authorization: Basic cmFsbHk6cG9pbnQ=",
    "wrong cookie": "cookie: rallypoint=0123456789abcdef",
    "empty cookie": "cookie: rallypoint=",
    "wrong cookies": "cookie: a=b; rallypoint=; rallypoint=x",
    "upgrade": "connection: upgrade\r\nupgrade: websocket",
    "from a page": "origin: https://example.org",
}


def http_request(method: str, path: str, *headers: str, body: str | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", *headers]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", body or ""]).encode()


def http_requests() -> dict[str, bytes]:
    """Return requests of every path and method, with and without a body, some of them pipelined or malformed."""
    found = {f"{method} {path}": http_request(method, path) for method in ("GET", "PUT") for path in PATHS}
    found |= {f"{method} {path}": http_request(method, path) for method in METHODS for path in ("/", "/rounds/run/1")}
    found |= {
        f"{name} {m}": http_request(m, "/about", header) for name, header in WITH_HEADERS.items() for m in METHODS
    }
    for body in ("code=guess", "", "x=1", "code=" + "x" * 5000):
        found[f"login {body[:10]}"] = http_request("POST", "/login", FORM, body=body)
        found[f"body {body[:10]}"] = http_request("POST", "/statistics", FORM, body=body)
    chunked = "transfer-encoding: chunked\r\n\r\n5\r\ncode=\r\n0\r\n"
    found["chunked"] = http_request("POST", "/login", chunked)
    found["half a body"] = http_request("POST", "/login", "content-length: 100") + b"code="
    found["pipelined"] = 3 * http_request("GET", "/healthz") + 3 * http_request("GET", "/statistics")
    found["pipelined behind a refusal"] = 20 * http_request("GET", "/statistics")
    found["older"] = b"GET /statistics HTTP/1.0\r\n\r\n"
    found["no host"] = b"GET /statistics HTTP/1.1\r\n\r\n"
    found["nonsense"] = b"NONSENSE\r\n\r\n"
    found["endless"] = b"GET / HTTP/1.1\r\n" + b"x" * 20_000
    return found


PREFACES = {"native": native.PREFACE, "channels": channels.PREFACE, "own http": HTTP_PREFACE}


@functools.cache
def attempts() -> dict[str, dict[str, bytes]]:
    """Return all attempts by protocol: the name of each, and the bytes to send."""
    requests = native_requests()
    native_frames = {name: hello_frame() + frame(op) for name, op in requests.items()}
    channel_frames = {name: channels.data_frames(1, data) for name, data in native_frames.items()}
    own = {path: http_request("GET", path) for path in ("/", "/about", "/statistics")}
    own |= {method: http_request(method, "/rounds/run/1") for method in ("PUT", "DELETE")}
    found: dict[str, dict[str, bytes]] = {}
    for protocol, frames in (("native", native_frames), ("channels", channel_frames), ("own http", own)):
        forged = {
            f"{name} behind a forged proof": secrets.token_bytes(ANSWER_BYTES) + data for name, data in frames.items()
        }
        together = {"all of them": b"".join(frames.values()), "nothing more": b""}
        found[protocol] = {name: PREFACES[protocol] + data for name, data in (frames | forged | together).items()}
    return found | {"torch": torch_requests(), "http": http_requests()}


# Replies

POLICY = (
    b"default-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; connect-src 'self'; "
    b"style-src '<hash>'; script-src '<hash>'"
)


def _http_reply(status: int, text: bytes) -> bytes:
    lines = [
        b"HTTP/1.1 %d " % status,
        b"content-type: text/plain; charset=utf-8",
        b"content-length: %d" % len(text),
        b"cache-control: no-store",
        b"x-content-type-options: nosniff",
        b"referrer-policy: no-referrer",
        b"content-security-policy: " + POLICY,
        *([b"www-authenticate: Bearer"] if status == 401 else []),
        b"connection: close",
    ]
    return b"\r\n".join([*lines, b"", text])


def head_of(reply: bytes) -> bytes:
    """Return the reply to HEAD."""
    return reply.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def to_older(reply: bytes) -> bytes:
    """Return the reply to HTTP/1.0, whose last header h11 writes itself."""
    return reply.replace(b"connection: close", b"Connection: close")


NOTHING = b""
PLAIN_REFUSED = NEEDS_TLS
CHALLENGED = CHALLENGE + NONCE
REFUSED = CHALLENGED + DENIED
HEALTHY = _http_reply(200, b"ok\n")
BAD_REQUEST = _http_reply(400, b"bad request\n")
TOO_LONG = _http_reply(431, b"bad request\n")
NEEDS_TOKEN = _http_reply(
    401, b"access needs the token (Authorization: Bearer TOKEN), or a link from: rallypoint token link\n"
)
BAD_LINK = _http_reply(401, b"this login link is not valid, or was used; make one with: rallypoint token link\n")
IN_THE_CLEAR = _http_reply(403, b"send the token only over TLS, or from this machine\n")
NO_PLAIN_HTTP = _http_reply(403, b"this server requires TLS from other machines, and from other users (tcps://)\n")


def ask(sock: socket.socket, data: bytes) -> bytes:
    """Send data and no more; return everything that comes back, until the other side hangs up, gently or not."""
    reply = b""
    try:
        sock.sendall(data)
        with socket.socket(fileno=os.dup(sock.fileno())) as below:  # TLS goes on
            below.shutdown(socket.SHUT_WR)
        while piece := sock.recv(65536):
            reply += piece
    except TimeoutError:
        raise
    except OSError:
        pass
    finally:
        sock.close()
    reply = re.sub(rb"'sha256-[\w+/=]+'", b"'<hash>'", reply)
    return re.sub(rb"(?s)^RLYA.{32}", CHALLENGED, reply)


def over_tls(connect: Connect, certificate: tuple[str, str] | None = None) -> Connect:
    """Return what connects by TLS, with any certificate or none, to any server."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate is not None:
        context.load_cert_chain(*certificate)

    def wrap(sock: socket.socket) -> Iterator[socket.socket]:
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            yield context.wrap_socket(sock)

    return lambda count: [tls for sock in connect(count) for tls in wrap(sock)]


def attack(connect: Connect, protocols: Sequence[str]) -> dict[str, set[bytes]]:
    """Make every attempt of these protocols; return the replies by protocol."""
    replies: dict[str, set[bytes]] = {}
    for protocol in protocols:
        data = list(attempts()[protocol].values())
        replies[protocol] = {ask(sock, each) for sock, each in zip(connect(len(data)), data, strict=True)}
    return replies
