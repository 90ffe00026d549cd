"""PyTorch's names and signatures as thin wrappers, so that migration is a change of imports.

The error names of `torch.distributed` are aliases of ours:

    DistError             RallypointError, a RuntimeError
    ├── DistStoreError        StoreError: timeouts (also TimeoutError), refused operations
    │   └── QueueEmptyError       QueueEmpty
    └── DistNetworkError      NetworkError: no server, or connection lost; also ConnectionError

They are not torch's own classes, because this package does not import torch. A store passed to torch by
`rallypoint.torch` raises errors that are instances of both.
"""

from __future__ import annotations

from rallypoint.errors import NetworkError as DistNetworkError
from rallypoint.errors import QueueEmpty as QueueEmptyError
from rallypoint.errors import RallypointError as DistError
from rallypoint.errors import StoreError as DistStoreError

__all__ = ["DistError", "DistStoreError", "DistNetworkError", "QueueEmptyError"]
