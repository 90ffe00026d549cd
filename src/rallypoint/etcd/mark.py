"""Marks: the proof that a request took effect, written with it into a *lane* of its session.

A lane holds `NUMBER.STAGE ANSWER` of the last request that used it. A change happens only if its lane is lower, so of
all attempts at one request, one takes effect; and none does once a later request has used the lane. Most requests have
one stage. One that is carried out in several steps (an arrival at a barrier, and what becomes of it; a long list of
pairs) has a stage for each: whoever repeats it, here or at another gateway, finds how far it came.

A lane is used again only if it is known whether it is there, and if nobody else may still write to it on behalf of the
request that had it: not while something is undone for one who gave up, nor while an addition is posted
(`etcd/additions.py`). Such a lane is left alone, and goes with the session.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from rallypoint.etcd import messages
from rallypoint.etcd.answers import KV
from rallypoint.etcd.messages import Compare, Op

if TYPE_CHECKING:
    from rallypoint.etcd.session import Session

__all__ = ["Lanes", "Mark", "answered", "begun", "read_lane"]


def answered(number: int, answer: Any, stage: int = 0) -> bytes:
    """Return what is in a lane when a stage of a request was carried out."""
    return begun(number, stage) + msgspec.msgpack.encode(answer)


def begun(number: int, stage: int = 0) -> bytes:
    """Return what is in a lane while somebody else is to carry it out."""
    return b"%020d.%08d " % (number, stage)


class Mark:
    """The proof that one request took effect."""

    def __init__(self, session: Session, number: int, lane: bytes, fresh: bool = True) -> None:
        self.session = session
        self.number = number
        self.stage = 0
        self.lane = lane
        self._fresh = fresh
        self.doubtful = False
        """Whether it may have taken effect already, and nobody knows with what answer."""

        self.posted = False
        """Whether another may write the proof, at any time."""

        self.proven = False
        """Whether this stage is known to have taken effect; `answer` is its answer then, and `at` the revision."""

        self.answer: Any = None
        self.at = 0
        self.settling: asyncio.Future[Any] | None = None
        """What is still done about it, for one who gave up."""

    @property
    def reusable(self) -> bool | None:
        """Whether its lane may be used again as one that is there (True), or that is not (False); None: not at all."""
        if (self.posted and not self.proven) or (self._fresh and self.doubtful):
            return None
        return not self._fresh

    def wrote(self, answer: Any, at: int) -> None:
        """Note that this stage took effect, at a revision."""
        self._fresh = self.doubtful = False
        self.proven, self.answer, self.at = True, answer, at

    def handed_over(self) -> None:
        """Note that it is under way, and somebody else will write the proof."""
        self._fresh, self.doubtful = False, True

    def advance(self) -> None:
        """Go on with the next stage; this one took effect."""
        self.stage += 1
        self.proven, self.answer, self.at = False, None, 0

    def guards(self) -> list[Compare]:
        """Return what has to hold for it to take effect."""
        if self._fresh:
            lane = messages.version_is(self.lane, 0)
        else:
            lane = messages.value_below(self.lane, begun(self.number, self.stage))
        return [self.session.ours(), lane]

    def proof(self, answer: Any) -> Op:
        """Return what is written when it does."""
        return messages.put(self.lane, answered(self.number, answer, self.stage), self.session.lease)

    def begin(self) -> Op:
        """Return what is written when it is under way, and somebody else is to write the proof."""
        self.posted = True
        return messages.put(self.lane, begun(self.number, self.stage), self.session.lease)

    def look(self) -> list[Op]:
        """Return what reads whether it did."""
        return [messages.get(self.session.place), messages.get(self.lane)]

    def took_effect(self, record: list[KV], lane: list[KV]) -> bool:
        """Say so, from what was read, and keep the answer; raise SessionLost if the session is not ours any more."""
        if not record or record[0].value != self.session.record:
            raise self.session.end_of_it(record)
        return bool(lane) and self.proved(lane[0].value, lane[0].modified)

    def proved(self, value: bytes, at: int) -> bool:
        """Say whether it took effect, from what is in its lane as of a revision, and keep the answer."""
        number, stage, answer = read_lane(value)
        self._fresh = False
        if (number, stage) > (self.number, self.stage):
            raise AssertionError(f"lane {self.lane!r} of request {self.number}.{self.stage} went to {number}.{stage}")
        if (number, stage) != (self.number, self.stage):
            return False
        self.posted = not answer
        if answer:
            self.wrote(msgspec.msgpack.decode(answer), at)
        return bool(answer)


def read_lane(value: bytes) -> tuple[int, int, bytes]:
    """Return the number, the stage and the packed answer that are in a lane; no answer while others are at it."""
    which, _, answer = value.partition(b" ")
    number, _, stage = which.partition(b".")
    return int(number), int(stage), answer


class Lanes:
    """The lanes of a session that can be used again, and those that are still to be made."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._made = 0
        self._free: list[tuple[int, bytes, bool]] = []  # its last number, and whether it is not there yet

    def mark(self, session: Session, number: int) -> Mark:
        """Give a request a lane that no later one has used."""
        if self._free and self._free[-1][0] < number:
            _, lane, fresh = self._free.pop()
            return Mark(session, number, lane, fresh)
        self._made += 1
        return Mark(session, number, self._prefix + b"%d" % self._made)

    def free(self, mark: Mark) -> None:
        """Take a lane back when nothing is done about its mark any more, if it can be used again then."""
        if mark.settling is not None and not mark.settling.done():
            mark.settling.add_done_callback(lambda _: self.free(mark))
        elif mark.reusable is not None:
            self._free.append((mark.number, mark.lane, not mark.reusable))
