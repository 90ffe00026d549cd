"""The errors of a rendezvous, with PyTorch's names; each is ours, and also PyTorch's if torch is loaded.

    RendezvousError                    RallypointError, a RuntimeError
    ├── RendezvousClosedError
    ├── RendezvousTimeoutError         also a TimeoutError
    ├── RendezvousConnectionError      also NetworkError, a ConnectionError
    ├── RendezvousStateError
    └── RendezvousGracefulExitError

While `torch.distributed.elastic.rendezvous` is loaded, each new error is also an instance of its class of the same
name, so that torch's own handler on one of our backends, or its agent, can catch it. It pickles as ours. Nothing here
imports torch; unless it is loaded, no code can name its classes. Rejected: a metaclass with `__instancecheck__`,
because `except` does not call it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from rallypoint.errors import NetworkError, RallypointError

__all__ = [
    "RendezvousError",
    "RendezvousClosedError",
    "RendezvousTimeoutError",
    "RendezvousConnectionError",
    "RendezvousStateError",
    "RendezvousGracefulExitError",
]

_TORCHS = "torch.distributed.elastic.rendezvous.api"


class RendezvousError(RallypointError):
    """A rendezvous operation failed."""

    def __new__(cls, *words: object, **fields: Any) -> Any:
        """Create an instance of a class that torch's code catches too, if torch is loaded."""
        maker: type[Exception] = OSError if issubclass(cls, OSError) else RuntimeError  # it sets the memory layout
        return maker.__new__(_caught_by_torch(cls))

    def __init__(self, *words: object, **fields: Any) -> None:
        super().__init__(" ".join(map(str, words)) or (self.__doc__ or "").partition("\n")[0], **fields)

    def __reduce__(self) -> tuple[Any, ...]:
        revive, (kind, *facts) = super().__reduce__()
        return revive, (getattr(kind, "ours", kind), *facts)


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed: its job has ended."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """The rendezvous did not complete within its timeout."""


class RendezvousConnectionError(RendezvousError, NetworkError):
    """The connection to the rendezvous backend failed."""


class RendezvousStateError(RendezvousError):
    """The state of the rendezvous is corrupt."""


class RendezvousGracefulExitError(RendezvousError):
    """This node is no longer needed by the rendezvous, and exits successfully."""


def _caught_by_torch(ours: Any) -> type[RendezvousError]:
    name = next(kind.__name__ for kind in ours.__mro__ if kind.__module__ == __name__)
    theirs = getattr(sys.modules.get(_TORCHS), name, None)
    kind: type[RendezvousError] = ours if theirs is None or issubclass(ours, theirs) else _both(ours, theirs)
    return kind


@functools.cache
def _both(ours: Any, theirs: Any) -> type[RendezvousError]:
    body = {"__doc__": ours.__doc__, "__module__": ours.__module__, "ours": ours}
    return type(ours.__name__, (ours, theirs), body)
