"""Requests to the agents of a run, through its store: for stacks, and from operators.

    run:RUN/ask:ID             lease of the asker: an `AgentRequest` in JSON
    run:RUN/answer:ID:NODE     lease of the agent of that node: its answer

Every agent watches the requests, and carries them out in the thread of the watch, whatever its loop is doing: it sends
stacks, leaves the run as if it had received a signal, or tells its loop to restart the workers. An answer is bounded in
size; the asker waits for a bounded time, and knows from the leases of the agents which answers are missing. Both keys
vanish with the processes that wrote them.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from rallypoint.core.stacks import RankStack
from rallypoint.deadline import Deadline
from rallypoint.errors import RallypointError, StoreTimeout
from rallypoint.launch.changes import ChangeListener
from rallypoint.recipes.join_args import quoted
from rallypoint.store.base import Change, Store
from rallypoint.store.prefix import with_prefix

__all__ = [
    "DRAIN",
    "KILL",
    "RESTART",
    "STACKS",
    "AgentRequest",
    "RequestListener",
    "agents_of",
    "ask_agents",
    "runs_of",
]

STACKS, KILL, RESTART, DRAIN = "stacks", "kill", "restart", "drain"
"""The kinds of requests."""

ANSWER_BYTES = 2 * 1024 * 1024
"""The longest answer; the stacks of a node with many workers are cut to fit."""

BUSY = "the agent is busy with another request for them"

_Text = Annotated[str, Meta(max_length=512)]


class AgentRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request; `node` is the only node that it is for, if it is not for all."""

    kind: _Text
    node: _Text = ""
    who: _Text = ""
    why: _Text = ""
    ranks: list[int] | None = None
    """The ranks whose stacks are wanted; None for all."""

    native: bool = False
    """Whether native frames are wanted, too."""

    @property
    def origin(self) -> str:
        """Who asked for it, and why."""
        return f"asked for by {self.who or 'an operator'}{': ' * bool(self.why)}{self.why}"


def _run(run_id: str) -> str:
    return f"run:{quoted(run_id)}"


class RequestListener:
    """One agent's end: `stacks` returns the stacks of its workers, `on_request` carries out each other request."""

    def __init__(
        self,
        run_id: str,
        stacks: Callable[[AgentRequest], list[RankStack]],
        on_request: Callable[[AgentRequest], object],
    ) -> None:
        self._run = _run(run_id)
        self._stacks = stacks
        self._on_request = on_request
        self._tracing = threading.Lock()
        self._store: Store | None = None
        self._node = ""

    def attach(self, store: Store, node: str) -> None:
        """Listen to requests in this store from now on, until it is closed; again to change the name of this node."""
        self._node = node
        if store is self._store:
            return
        self._store = store
        with contextlib.suppress(RallypointError):
            ChangeListener(store, f"{self._run}/ask:", partial(self._changed, store), "requests to agents")

    def _changed(self, store: Store, change: Change) -> None:
        if change.value is not None:
            with contextlib.suppress(RallypointError):  # the answer does not reach the store; the next one may
                self._receive(store, change.key.rpartition(":")[2], change.value)

    def _receive(self, store: Store, number: str, data: bytes) -> None:
        try:
            request = msgspec.json.decode(data, type=AgentRequest)
        except msgspec.DecodeError:
            return
        if request.node not in ("", self._node):
            return
        answer = f"{self._run}/answer:{number}:{self._node}"
        if request.kind != STACKS:
            store.lease(answer, b"")
            self._on_request(request)
        elif not request.native:
            store.lease(answer, _encoded(self._stacks(request)))
        elif self._tracing.acquire(blocking=False):
            threading.Thread(target=self._trace, args=(store, answer, request), name="native", daemon=True).start()
        else:
            plain = self._stacks(msgspec.structs.replace(request, native=False))
            store.lease(answer, _encoded([msgspec.structs.replace(one, native_note=BUSY) for one in plain]))

    def _trace(self, store: Store, answer: str, request: AgentRequest) -> None:
        """Answer with native frames, in a thread of its own: that may take long, and an operator may want to kill."""
        try:
            with contextlib.suppress(RallypointError):
                store.lease(answer, _encoded(self._stacks(request)))
        finally:
            self._tracing.release()


def _encoded(stacks: list[RankStack]) -> bytes:
    data = msgspec.json.encode(stacks)
    if len(data) > ANSWER_BYTES:
        most = ANSWER_BYTES // (8 * len(stacks))  # two texts, and a character may take several bytes
        cut = [msgspec.structs.replace(one, text=one.text[-most:], native=one.native[:most]) for one in stacks]
        data = msgspec.json.encode(cut)
    return data


def runs_of(store: Store) -> list[str]:
    """Return the ids of all runs that have an agent."""
    found = [key.split("/", 1) for key in store.list_keys() if key.startswith("run:")]
    here = {run.removeprefix("run:") for run, rest in found if rest.startswith(("agent:", "node:"))}
    return sorted(run.replace("%3A", ":").replace("%2F", "/").replace("%25", "%") for run in here)


def agents_of(store: Store, run_id: str) -> list[str]:
    """Return the nodes of a run whose agents are connected."""
    keys: list[str] = with_prefix(_run(run_id), store).list_keys()
    return sorted({key.partition(":")[2] for key in keys if key.startswith(("agent:", "node:"))})


def ask_agents(
    store: Store, run_id: str, request: AgentRequest, timeout_s: float
) -> tuple[dict[str, bytes], list[str]]:
    """Send a request to the agents of a run; return the answers by node, and the nodes that did not answer in time."""
    deadline, number = Deadline(timeout_s), secrets.token_hex(8)
    missing = [node for node in agents_of(store, run_id) if request.node in ("", node)]
    answers: dict[str, bytes] = {}
    prefix = f"{_run(run_id)}/answer:{number}:"
    with store.watch(prefix) as watch, store.lease(f"{_run(run_id)}/ask:{number}", msgspec.json.encode(request)):
        while missing and not deadline.expired():
            with contextlib.suppress(StoreTimeout):
                change = watch.next(deadline.remaining())
                node = change.key.removeprefix(prefix)
                if change.value is not None and node in missing:
                    missing.remove(node)
                    answers[node] = change.value
    store.delete_prefix(prefix)
    return answers, missing
