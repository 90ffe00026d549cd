"""PyTorch's names and signatures, thin over the rest, so that moving over is a change of imports.

The error names of `torch.distributed` are here, as names for ours:

    DistError             RallypointError, a RuntimeError
    ├── DistStoreError        StoreError: time-outs (also TimeoutError), refusals
    │   └── QueueEmptyError       QueueEmpty
    └── DistNetworkError      NetworkError: nobody there, or gone; also ConnectionError

They are not torch's own classes, because nothing here imports torch. A store given to torch by `rallypoint.torch`
raises errors that are both.
"""

from __future__ import annotations

from rallypoint.errors import NetworkError as DistNetworkError
from rallypoint.errors import QueueEmpty as QueueEmptyError
from rallypoint.errors import RallypointError as DistError
from rallypoint.errors import StoreError as DistStoreError

__all__ = ["DistError", "DistStoreError", "DistNetworkError", "QueueEmptyError"]
