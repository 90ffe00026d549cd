"""A state and its log, for tests of single entries."""

from __future__ import annotations

from typing import Any

from rallypoint.core import entries, ops
from rallypoint.core.entries import ConnectionRequest, Entry, OpenSession, SessionRequest, StartServer
from rallypoint.core.records import InternalError
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import State

from .state_checks import check_state

__all__ = ["Server"]

UNLIMITED = 1 << 62


class Server:
    """A state and its log; after each entry the state is checked, also through a snapshot."""

    def __init__(self, sessions: int = 0, max_bytes: int = UNLIMITED, max_kept_bytes: int = UNLIMITED) -> None:
        self.state = State()
        self.log: list[bytes] = []
        self.outputs: list[tuple[int, int, Any]] = []
        self.start(max_bytes, max_kept_bytes)
        for _ in range(sessions):
            self.open()

    def start(self, max_bytes: int = UNLIMITED, max_kept_bytes: int = UNLIMITED) -> None:
        self.apply(StartServer(entries.VERSION, b"server", max_bytes, UNLIMITED, max_kept_bytes, UNLIMITED))

    def open(self, former: list[bytes] | None = None, namespace: int = 0) -> Any:
        return self.apply(OpenSession(b"id %d" % (self.state.opened + 1), "", namespace, former or []))

    @property
    def engine(self) -> Any:
        return self.state.namespaces[0].engine

    @property
    def objects(self) -> Any:
        return self.state.namespaces[0].objects

    def apply(self, entry: Entry) -> Any:
        record = entries.encode(entry)
        self.log.append(record)
        answer = self.state.apply(entries.decode(record))
        assert not isinstance(answer, InternalError), answer
        self.outputs += [(owner.serial, number, later) for owner, number, later in self.state.take_outputs()]
        check_state(self.state)
        chunks = list(write(self.state))
        assert list(write(read(chunks))) == chunks
        return answer

    def ask(self, session: int, op: ops.Op) -> Any:
        return self.apply(SessionRequest(session, op))  # type: ignore[arg-type]

    def connection_request(self, connection_owner: int, op: ops.Op) -> Any:
        return self.apply(ConnectionRequest(connection_owner, 0, op))  # type: ignore[arg-type]

    def act(self, session: int, number: int, call: int, command: Any, member: str = "0", timeout_s: float = 9.0) -> Any:
        return self.ask(session, ops.Act(number, b"/o", member, call, command, timeout_s))

    def take_outputs(self) -> list[tuple[int, int, Any]]:
        outputs, self.outputs = self.outputs, []
        return outputs
