"""gRPC, without its handlers for forks: with them, forked children die that never use what they inherit.

It reads this variable when it is imported. Whoever has imported it before, or has set the variable, has decided.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import grpc.aio

__all__ = ["grpc"]
