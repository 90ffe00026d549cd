"""A linearizability checker, after Wing and Gong, with Lowe's memoization of visited states.

A history is a list of operations with the times of their call and return. It is linearizable if every operation can be
assigned one instant between the two, such that a simple model that executes them in that order returns the same
results. An operation of unknown outcome (a lost connection) has no return: it may have happened at any time after its
call, or not at all.

Keys are independent of each other, so each is checked alone, which keeps the search small.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

FOREVER = float("inf")


class Operation(NamedTuple):
    """One call: its arguments, its result and their times. `returned` is FOREVER if there was no reply."""

    process: str
    kind: str
    key: str
    arguments: tuple[Any, ...]
    result: Any
    called: float
    returned: float


Step = Callable[[Any, Operation], tuple[Hashable, Any]]
"""A model: maps a state and an operation to the next state and the result."""


def value_step(state: bytes | None, operation: Operation) -> tuple[bytes | None, Any]:
    """A key: its value, or None."""
    kind, arguments = operation.kind, operation.arguments
    if kind == "set":
        return arguments[0], None
    if kind == "get":  # asked with timeout 0: None means that the key did not exist
        return state, state
    if kind == "add":
        total = int(state or b"0") + arguments[0]
        return b"%d" % total, total
    if kind == "append":
        return (state or b"") + arguments[0], None
    if kind == "swap":
        expected, desired = arguments
        return (desired, (True, desired)) if state == expected else (state, (False, state))
    if kind == "delete":
        return None, state is not None
    raise ValueError(f"no model for {kind}")


def queue_step(state: tuple[bytes, ...], operation: Operation) -> tuple[tuple[bytes, ...], Any]:
    """A queue: its items, the next to be popped first."""
    if operation.kind == "push":
        return (*state, operation.arguments[0]), None
    if operation.kind == "pop":
        return (state[1:], state[0]) if state else (state, None)
    if operation.kind == "length":
        return state, len(state)
    raise ValueError(f"no model for {operation.kind}")


QUEUE_KINDS = frozenset({"push", "pop", "length"})


def check(history: Iterable[Operation]) -> list[Operation] | None:
    """Return None if a history is linearizable, else the operations of the first key for which it is not."""
    by_object: dict[tuple[bool, str], list[Operation]] = {}
    for operation in history:
        by_object.setdefault((operation.kind in QUEUE_KINDS, operation.key), []).append(operation)
    for (is_queue, _), operations in by_object.items():
        step, start = (queue_step, ()) if is_queue else (value_step, None)
        if not is_linearizable(operations, step, start):
            return sorted(operations, key=lambda operation: operation.called)
    return None


def is_linearizable(operations: list[Operation], step: Step, start: Hashable) -> bool:
    """Search for an order, depth first; visit each pair of executed operations and state once."""
    operations = sorted(operations, key=lambda operation: operation.called)
    must = sum(1 << place for place, operation in enumerate(operations) if operation.returned < FOREVER)
    tried: set[tuple[int, Hashable]] = set()
    stack: list[tuple[int, Hashable]] = [(0, start)]
    while stack:
        done, state = stack.pop()
        if done & must == must:
            return True
        if (done, state) in tried:
            continue
        tried.add((done, state))
        for place in _candidates(operations, done):
            operation = operations[place]
            after, result = step(state, operation)
            if operation.returned == FOREVER or result == operation.result:
                stack.append((done | 1 << place, after))
    return False


def _candidates(operations: list[Operation], done: int) -> Iterable[int]:
    """Return the pending operations that may come next: those called before any other pending one returned."""
    first_return = FOREVER
    for place, operation in enumerate(operations):
        if operation.called > first_return:
            return
        if not done >> place & 1:
            yield place
            first_return = min(first_return, operation.returned)
