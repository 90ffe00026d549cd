"""The agents on this machine, by the directories that they write (`worker_records.py`): of this user, for root of all.

With the URL in agent.json, and the token beside it, an operator reaches the private server of a run. Both are readable
by the user of the run and by root only, as the environment of the workers is, which has them, too. Only tokens that an
agent made for its private server are written; a token of the user is not copied anywhere.

Root reads the directories of other users with suspicion: nothing but regular files of the owner, only agents that are
processes of the owner, and only private servers on loopback: a URL of theirs might name any file of root's.

Rejected: a socket of the agent. It would be a second way to ask for what the store already carries.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rallypoint.launch.monitoring.worker_records import TOKEN_FILE, AgentEntry, directory_name
from rallypoint.net import is_loopback
from rallypoint.security.credentials import Credentials
from rallypoint.store.url import parse_url

__all__ = ["agents_here", "credentials_of"]

SYSTEM_TEMPORARY = "/tmp"
"""A second directory to search: a job may have a TMPDIR of its own, or none."""

MAX_FILE = 16 * 1024 * 1024


def agents_here() -> Iterator[AgentEntry]:
    """Yield the agents on this machine that run workers: those of this user; for root, those of all users."""
    whose = directory_name("*" if os.geteuid() == 0 else os.geteuid())
    for base in dict.fromkeys((tempfile.gettempdir(), SYSTEM_TEMPORARY)):
        for path in sorted(Path(base).glob(f"{whose}/*/agent.json")):
            with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):  # it has just ended, or is no agent
                yield _read_agent(path)


def _read_agent(path: Path) -> AgentEntry:
    owner = _owner(path)
    entry = msgspec.json.decode(_read(path, owner), type=AgentEntry)
    os.kill(entry.pid, 0)  # raises if the agent was killed, and left its files behind
    if owner != os.geteuid():
        if any(os.stat(f"/proc/{pid}").st_uid != owner for pid in (entry.pid, *(one.pid for one in entry.workers))):
            raise ValueError(f"{path}: processes of other users")
        if entry.url and not _is_private(entry.url):
            entry = msgspec.structs.replace(entry, url="")
        here = str(path.parent)
        entry = msgspec.structs.replace(
            entry, workers=tuple(msgspec.structs.replace(one, directory=here) for one in entry.workers)
        )
    return msgspec.structs.replace(entry, directory=str(path.parent))


def _is_private(url: str) -> bool:
    parsed = parse_url(url)
    return parsed.scheme == "tcp" and is_loopback(parsed.endpoint().host)


def _owner(path: Path) -> int:
    """Return the user whose directory this file is in, by its name; raise ValueError if it belongs to another."""
    named = int(path.parents[1].name.rpartition("-")[2])
    facts = path.parents[1].lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != named or facts.st_mode & 0o022:
        raise ValueError(f"{path.parents[1]} is not a directory that only user {named} can change")
    return named


def _read(path: Path, owner: int) -> bytes:
    """Read a regular file of this owner."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)  # a FIFO would block
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != owner:
            raise ValueError(f"{path} is not a file of user {owner}")
        return file.read(MAX_FILE)


def credentials_of(agent: AgentEntry, given: Credentials) -> Credentials:
    """Return the credentials for the store of an agent: those of its private server, else those that are given."""
    path = Path(agent.directory, TOKEN_FILE)
    with contextlib.suppress(OSError, ValueError):
        return Credentials(token=_read(path, _owner(path)).decode("ascii"))
    return given
