"""A worker's part in the agreement on a step to stop at, in the record that it shares with its agent.

`answer` looks at the record once. The worker writes the first three numbers below, the agent the other two; each is
written as a whole, and no order between two of them is needed: a rank counts as in agreement only when it has written
so itself. `core/policy/stop_policy.py` has the protocol. Workers import this module, so it is small.
"""

from __future__ import annotations

import time
from typing import Protocol

from rallypoint.core.policy.stop_policy import NONE

__all__ = ["ACCEPTED", "COMMITTED", "PASSED", "PROPOSED", "STOPPED", "StopRecord", "answer", "wait_for_answer"]

PASSED = 8
"""Index of the highest step at which the worker was told to go on."""

ACCEPTED = 9
"""Index of the step that the worker has accepted last."""

STOPPED = 10
"""Index of the step at which the worker was told to stop."""

PROPOSED = 11
"""Index of the step that is proposed."""

COMMITTED = 12
"""Index of the step at which all ranks stop."""

SHORTEST_S, LONGEST_S = 0.001, 0.02
"""The pauses between two looks of a worker that waits for an answer."""


class StopRecord(Protocol):
    """The numbers of a record."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


def answer(record: StopRecord, step: int) -> bool | None:
    """Return whether the worker stops at a step; None if that is not known yet."""
    committed = record[COMMITTED]
    if committed != NONE and step >= committed:
        record[STOPPED] = step
        return True
    proposed, passed = record[PROPOSED], record[PASSED]
    if proposed != NONE:
        if passed >= proposed and committed == NONE:
            return None  # a higher step will be proposed
        record[ACCEPTED] = proposed
        if step >= proposed:
            return None
    if step > passed:
        record[PASSED] = step
    return False


def wait_for_answer(record: StopRecord, step: int) -> bool:
    """Return whether the worker stops at a step, when that is known; signals are handled meanwhile.

    The agent bounds this wait: at the preemption timeout it stops the worker.
    """
    pause_s = SHORTEST_S
    while (found := answer(record, step)) is None:
        time.sleep(pause_s)
        pause_s = min(LONGEST_S, 2 * pause_s)
    return found
