"""The store of an agent, in which a terminating signal interrupts every request of the agent's thread.

The window for the signal is exactly one request: it opens before the request is sent, and shuts when the reply is there
(`wakeup_pipe.py`). So the agent's loop and its view of the run need not know of it, and none of their lines runs in the
window. Requests of other threads, such as watches, are not affected.

Rejected: windows around calls of the agent, one by one. A call without one waited for a silent server; a call with one
could be interrupted in the middle of a report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.core import ops
from rallypoint.launch.wakeup_pipe import WakeupPipe
from rallypoint.store.base import Backend, Feed, Store
from rallypoint.store.internal import backend_of, view_with_backend
from rallypoint.store.native_backend import NativeBackend

__all__ = ["interruptible_view"]


def interruptible_view(store: Store, wakeup: WakeupPipe) -> Store:
    """Return a view of the same handle whose requests raise Signalled on a terminating signal."""
    backend = backend_of(store)
    assert isinstance(backend, NativeBackend)
    return view_with_backend(store, InterruptibleBackend(backend, wakeup))


class InterruptibleBackend(Backend):
    """A backend that executes the operations of another one."""

    def __init__(self, backend: NativeBackend, wakeup: WakeupPipe) -> None:
        self._backend = backend
        self._wakeup = wakeup
        self.name, self.root, self.hosts_objects = backend.name, backend.root, backend.hosts_objects

    @property
    def host(self) -> str:
        """The host of the server that the session is connected to."""
        return self._backend.host

    def execute(self, op: ops.Op) -> Any:
        return self._wakeup.interruptible(lambda: self._backend.execute(op))

    def watch(self, prefix: bytes) -> Feed:
        return self._wakeup.interruptible(lambda: self._backend.watch(prefix))

    def begin(self, batch: Sequence[ops.Op]) -> Callable[[], list[Any]]:
        wait = self._wakeup.interruptible(lambda: self._backend.begin(batch))
        return lambda: self._wakeup.interruptible(wait)

    def clone(self) -> Backend:
        return InterruptibleBackend(self._backend.clone(), self._wakeup)

    def close(self) -> None:
        self._backend.close()
