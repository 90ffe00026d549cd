"""`Credentials`: the token of a store and the files for TLS, from arguments, files or the environment.

A token is a shared secret. It never crosses a network (`protocol/challenge.py`) and never appears in arguments, logs,
errors or `repr`. It comes from RALLYPOINT_TOKEN or from a file that other users cannot read. An eavesdropper on a
connection without TLS can test guesses offline, so a token must be random: `new_token` makes one with 256 bits, and a
token of fewer than 16 characters is refused.

The same credentials serve both ends: a server presents `tls_cert` and accepts clients with certificates of
`tls_client_ca`; a client verifies servers by `tls_ca` and presents `tls_cert` if it has one.

Rejected: a token in the URL of a store. URLs end up in logs, in `ps` and in shell histories.
Rejected: credentials as a msgspec record or a dataclass. A page or a log that encodes the settings around them would
show the token; `environ` is the one explicit way to hand them to another process.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from typing import NoReturn

__all__ = ["OPEN", "RUN_TOKEN", "VARIABLES", "Credentials", "new_token", "read_token", "resolve"]

MIN_TOKEN, MAX_TOKEN = 16, 1024
"""The shortest and the longest token, in characters."""

VARIABLES = {
    "token": "RALLYPOINT_TOKEN",
    "token_file": "RALLYPOINT_TOKEN_FILE",
    "run_token": "RALLYPOINT_RUN_TOKEN",
    "tls_cert": "RALLYPOINT_TLS_CERT",
    "tls_key": "RALLYPOINT_TLS_KEY",
    "tls_ca": "RALLYPOINT_TLS_CA",
    "tls_client_ca": "RALLYPOINT_TLS_CLIENT_CA",
}
"""The environment variable of each option."""

RUN_TOKEN = VARIABLES["run_token"]
"""The variable with which a launcher gives its workers the token of their run."""

_SECRETS = ("token", "run_token")
_FIELDS = tuple(name for name in VARIABLES if name != "token_file")


class Credentials:
    """A token, and the files of a certificate, its key, the CA of servers and the CA of clients; "" for none.

    `run_token` is the token of the run that this process is a worker of. A client shows it to a server that asks for
    one, unless it has a `token`; servers ignore it. Credentials do not change, and can be neither pickled nor encoded.
    """

    __slots__ = ("run_token", "tls_ca", "tls_cert", "tls_client_ca", "tls_key", "token")
    token: str
    run_token: str
    tls_cert: str
    tls_key: str
    tls_ca: str
    tls_client_ca: str

    def __init__(
        self,
        *,
        token: str = "",
        run_token: str = "",
        tls_cert: str = "",
        tls_key: str = "",
        tls_ca: str = "",
        tls_client_ca: str = "",
    ) -> None:
        """Raise ValueError for a token that is too short, or does not fit into a variable or a line."""
        for secret, what in ((token, "the token"), (run_token, "the token of the run")):
            if secret:
                _checked(secret, what)
        values = (token, run_token, tls_cert, tls_key, tls_ca, tls_client_ca)
        for name, value in zip(_FIELDS, values, strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("credentials do not change; make new ones")

    def __reduce__(self) -> NoReturn:
        raise TypeError("credentials are not pickled; hand them to another process by its environment (`environ`)")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Credentials) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        shown = {name: "…" if name in _SECRETS else value for name, value in self._values() if value}
        return f"Credentials({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def _values(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, getattr(self, name)) for name in _FIELDS)

    @property
    def serves_tls(self) -> bool:
        """Whether a server with these credentials accepts TLS."""
        return bool(self.tls_cert)

    @property
    def dials_tls(self) -> bool:
        """Whether a client with these credentials connects by TLS only."""
        return bool(self.tls_ca or self.tls_cert)

    @property
    def protects(self) -> bool:
        """Whether a server with these credentials accepts PyTorch's protocol from this machine only."""
        return bool(self.token or self.tls_cert)

    @property
    def authenticates(self) -> bool:
        """Whether a server with these credentials keeps strangers out; a certificate of its own does not."""
        return bool(self.token or self.tls_client_ca)

    def environ(self) -> dict[str, str]:
        """Return the environment variables, "" for none, that give a child process exactly these credentials."""
        given = {
            VARIABLES[name]: os.path.abspath(value) if value and name not in _SECRETS else value
            for name, value in self._values()
        }
        return {**given, VARIABLES["token_file"]: ""}


OPEN = Credentials()
"""No credentials: whoever reaches the port may use the store."""


def new_token() -> str:
    """Return a new random token."""
    import secrets  # clients do not need it

    return secrets.token_urlsafe(32)


def read_token(path: str) -> str:
    """Read a token from a file; raise ValueError, which names the file, if other users could read or change it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block
        try:
            _check_file(path, os.fstat(descriptor))
            text = os.read(descriptor, MAX_TOKEN + 64).decode(errors="replace")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValueError(f"cannot read the token file {path}: {error.strerror}") from None
    return _checked(text.rstrip("\r\n"), f"the token in {path}")


def _check_file(path: str, status: os.stat_result) -> None:
    """Raise ValueError if a file is not private.

    Kubernetes gives a secret to a user by a group: root's file, which that group can read.
    """
    mode, own = stat.S_IMODE(status.st_mode), status.st_uid == os.geteuid()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"token file {path} is not a regular file")
    if not own and status.st_uid != 0:
        raise ValueError(f"token file {path} belongs to user {status.st_uid}; it must be your own, or root's")
    if mode & (0o077 if own else 0o027):
        raise ValueError(f"token file {path} has mode {mode:o}: other users can read or change it: chmod 600 {path}")


def resolve(environ: Mapping[str, str] | None = None, **options: str | None) -> Credentials:
    """Return the credentials that options (`token_file`, `tls_ca`, …) and, for the rest, the environment give.

    Raises ValueError for an unusable token or an incomplete certificate. Files for TLS are read when they are used.
    """
    if unknown := set(options) - set(VARIABLES):
        raise TypeError(f"no such credentials: {', '.join(sorted(unknown))}; there are {', '.join(VARIABLES)}")
    environ = os.environ if environ is None else environ
    if not options and not any(map(environ.get, VARIABLES.values())):
        return OPEN  # most clients, and quickly
    given = {name: options.get(name) or "" for name in VARIABLES}
    if given["token"] and given["token_file"]:
        raise ValueError("give a token or a token file, not both")
    for names in (("token", "token_file"), ("run_token",), ("tls_cert", "tls_key"), ("tls_ca",), ("tls_client_ca",)):
        if not any(given[name] for name in names):  # those that belong together come from one place
            given.update((name, environ.get(VARIABLES[name], "")) for name in names)
    path = given.pop("token_file")
    if path and not given["token"]:
        given["token"] = read_token(path)
    elif given["token"]:
        _checked(given["token"], f"the token ({VARIABLES['token']})")
    if given["run_token"]:
        _checked(given["run_token"], f"the token of the run ({RUN_TOKEN})")
    _check_complete(given)
    return Credentials(**given)


def _check_complete(given: Mapping[str, str]) -> None:
    """Raise ValueError for a certificate without its key, or a server's CA for clients without a certificate."""
    for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
        if given[name] and not given[other]:
            option, missing = (f"--{each.replace('_', '-')} ({VARIABLES[each]})" for each in (name, other))
            raise ValueError(f"{option} needs {missing}")


def _checked(token: str, what: str) -> str:
    """Return a usable token; the errors do not quote it."""
    advice = "make one with: rallypoint token new"
    if not re.fullmatch(r"[!-~]*", token):
        raise ValueError(f"{what} has characters other than ASCII letters, digits and punctuation; {advice}")
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        size = f"{len(token)} characters" if len(token) <= MAX_TOKEN else f"more than {MAX_TOKEN} characters"
        raise ValueError(f"{what} has {size}; it must have {MIN_TOKEN} to {MAX_TOKEN}, at random: {advice}")
    return token
