"""The connection of the blocking client: one socket, one session, any number of threads.

A call takes no thread hop. The calling thread numbers and sends its request, and one of the waiting threads reads for
all: whoever finds nobody reading reads until its own answer is there, hands out the others' on the way, and wakes
another waiting thread to read on. Most calls are alone: they take the reader's part before they send, and then what
comes first is their answer, which needs no slot.

A cut is noticed by whoever reads, or, when no call is under way, by the keeper, a daemon thread. A thread of its own
(`reconnect.py`) then is the reader: it connects again, there or elsewhere, resumes the session and repeats what was not
answered. Calls wait meanwhile, each for as long as `outage.py` has it, and new ones with them. When there is no such
session any more, or it has been away for longer than it lasts, it is over for good: `SessionLost`, or `ServerRestarted`
when another server answers.

Where there are several addresses, or a relay, one that hangs is as good as lost. The keeper looks for it, by the rules
of `peer_check.py`, and the session goes on elsewhere.

Who reads is noted in `_reader` by a token of its own, so that a call that is interrupted anywhere can see whether it
was the reader, and stop being it: a lock could be left held by a signal right after it was taken. Whoever reads may
take `_sender` (the order of requests on the wire, and which connection they go to), and either `_lock` (the protocol
core, the slots and `_reader`; held over no I/O).

A reader that is interrupted (Ctrl-C) may have read what it can deliver to nobody any more. It cuts the connection,
and what was lost comes again when the session is resumed.

Rejected: a thread that reads for all. It costs two switches of threads for every answer, and Ctrl-C cannot reach it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rallypoint import net
from rallypoint.core import ops
from rallypoint.core.records import Event, Status, TimedOut
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectionLost, NoQuorum, RallypointError, SessionLost, StoreClosed
from rallypoint.protocol import BadMessage, native
from rallypoint.protocol.client import Client, Reply
from rallypoint.protocol.reported_errors import error_of
from rallypoint.store import keeper, lost_sessions, peer_check, reconnect
from rallypoint.store.dial import Contact, Dialer, NotOurs, dial
from rallypoint.store.ear import Ear, poll
from rallypoint.store.outage import Outage, Patience, ServerDown
from rallypoint.store.route import Cuts, Route
from rallypoint.store.slot import Slot

__all__ = ["Wire"]

GOODBYE_S = 1.0
"""How long closing may take: when it returns, as a rule, the server has given nothing more to this session."""

LEAST_PATIENCE_S = 10.0
"""How long a server may take to answer, however short the store's timeout is."""

LEAST_S = 0.1
"""How long repeating what was not answered may take, however little time is left."""

UNHEARD = 0
"""Of a request that is to be carried out even if nobody is left to hear its answer."""

_RECONNECTING = object()
"""The reader while a cut is mended."""

_BEAT = native.frame(ops.Beat(0))

_forks = 0
"""How many forks lie between this process and the one that imported this module."""

_fork_lock = threading.Lock()


def _forked() -> None:
    global _forks, _fork_lock
    _forks += 1
    _fork_lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


class Wire:
    """A session with one of our servers, and the connection that carries it now; for many threads, and after a fork."""

    def __init__(self, route: Route, timeout_s: float) -> None:
        self._peer, self.label = route.name, route.label
        self.beat_s = float("inf")
        """How often the heart of this process must beat, for the sake of its leases."""

        self._route = route
        self._timeout_s = timeout_s
        self.patience_s = max(timeout_s, LEAST_PATIENCE_S)
        self._begin()

    def _begin(self) -> None:
        self._reader: object = None
        """The call or the thread that reads; None where nobody does."""

        self._sender, self._lock = threading.Lock(), threading.Lock()
        self._slots: dict[int, Slot] = {}
        self._parked: dict[int, Slot] = {}
        """Requests that were open when their callers' time was over in an outage, by the call that comes again."""

        self._outage: Outage | None = None
        self._over: RallypointError | None = None
        self.closed = threading.Event()
        """Set when the session is over."""

        self._core = Client(net.caller_name(), self._route.begin(), lost_sessions.of(self._peer))
        self._cuts = Cuts(self._route)
        self._ping, self._pinged_at, self._seen = 0, time.monotonic(), 0
        self._connect(dial(self._route, self._core, self._lock, Deadline(self._timeout_s)))
        self._forks = _forks
        self.server = self._core.server
        keeper.start(self)

    @property
    def recovers(self) -> bool:
        """Whether the server comes back with its sessions when it is restarted."""
        return self._core.recovers

    @property
    def servers(self) -> Sequence[str]:
        """The URLs of all servers of the store, as one of them said last."""
        return self._core.servers

    # Requests

    def ask(self, op: ops.Op, wait_s: float | None = None, left: int | None = None) -> Any:
        """Send a request and wait for its answer: at once (`wait_s` None), or once so long has passed.

        TimedOut also says that the server was down when the time was over. The request is then taken back; with `left`
        UNHEARD it is left to be carried out; with the number of a call, to be waited for again by `act`, and then
        ServerDown is raised.
        """
        if _forks != self._forks:
            self._after_fork()
        token = object()
        try:
            with self._lock:
                if self._reader is None and not self._sender.locked():
                    self._reader = token
            if self._reader is token:
                reply = self._ask_alone(token, op, wait_s, left)
            else:
                reply = self._ask_among_others(op, wait_s, left)
        except ServerDown as down:
            if left:
                raise
            if left is None and down.no_quorum:
                raise NoQuorum(store=self.label, timeout_s=wait_s or 0.0, tried=down.no_quorum) from None
            return TimedOut((), str(down))
        finally:
            if self._reader is token:
                self._reader = None
            if self._slots:
                self._wake_another()
        return reply.result if reply.status == Status.OK else self._failed(reply)

    def _ask_alone(self, me: object, op: ops.Op, wait_s: float | None, left: int | None) -> Reply:
        """Ask and read, being the reader."""
        number = 0
        try:
            with self._sender:  # and we read: so nobody else is at the core
                if self._over is not None:
                    raise _again(self._over)
                number = self._core.number
                until = time.monotonic() + wait_s if wait_s else None
                self._send(self._core.ask(op, until))
                ear = self._ear
            data = ear.hear_soon()
            if data:
                with self._lock:
                    reply = self._core.sole(data, number)
                if reply is not None:
                    self._cuts.in_a_row = 0
                    return reply
            # More than our answer came, or none yet, or a cut: take the part of one reader among others.
            slot = self._slots[number] = Slot(number)
            patience = Patience(self.patience_s, wait_s)
            if not self._took(ear, data):
                self._read(slot, patience)
            return self._answer(slot, _verb(op), patience)
        except BaseException as error:
            if self._reader is me and not isinstance(error, RallypointError):
                self._cut()
            self._unanswered(error, number, left)
            raise

    def _ask_among_others(self, op: ops.Op, wait_s: float | None, left: int | None) -> Reply:
        """Ask, and wait for the answer while another reads, or for the reader's part."""
        slot, patience = Slot(), Patience(self.patience_s, wait_s)
        until = patience.own_at if wait_s else None
        try:
            if not self._in_turn(lambda: self._send(self._number(op, slot, until)), until or patience.at):
                raise patience.unsent(self._peer, _verb(op), until is not None)
            return self._answer(slot, _verb(op), patience)
        except BaseException as error:
            self._unanswered(error, slot.number, left)
            raise

    def _answer(self, slot: Slot, operation: str, patience: Patience) -> Reply:
        """Wait for the answer to a request, and take it out of its slot."""
        reply = self._await(slot, operation, patience)
        self._slots.pop(slot.number, None)
        return reply

    def _unanswered(self, error: BaseException, number: int, left: int | None) -> None:
        """Deal with a request whose caller goes: take it back, unless the server is down and it is to be `left`."""
        if isinstance(error, ServerDown) and left is not None:
            error.sent = number < error.unsent_from
            if left != UNHEARD and error.sent:
                self._parked[left] = self._slots[number]
                return
        self._slots.pop(number, None)
        if left != UNHEARD or not isinstance(error, ServerDown):
            self._abandon(number)

    def act(self, op: ops.Act) -> Any:
        """Ask something of a shared object, or go on waiting for the answer to what this call asked before an outage.

        Raises ServerDown when its time is over and the server is down; then it may come again.
        """
        call = op.call
        slot = self._parked.pop(call, None) if self._parked and _forks == self._forks else None
        if slot is None:
            return self.ask(op, op.timeout_s, call)
        try:
            reply = self._answer(slot, _verb(op), Patience(self.patience_s, op.timeout_s))
        except BaseException as error:
            self._unanswered(error, slot.number, call)
            raise
        finally:
            self._wake_another()
        return reply.result if reply.status == Status.OK else self._failed(reply)

    def unpark(self, call: int) -> None:
        """Let go of what a call asked before an outage: its answer is for nobody."""
        slot = self._parked.pop(call, None)
        if slot is not None:
            self._slots.pop(slot.number, None)

    def confirm(self) -> None:
        """Tell the server now what was delivered here, if that is more than a little; or else with the next request."""
        if self._core.owes:
            self._in_turn(self._send_confirmation, time.monotonic() + LEAST_S)

    def _send_confirmation(self) -> None:
        with self._lock:
            data = self._core.confirm()
        if data:
            self._send(data)

    def ask_all(self, batch: Sequence[ops.Op]) -> list[Any]:
        """Send requests together and wait for all their answers; raise the first error among them."""
        if _forks != self._forks:
            self._after_fork()
        slots = [Slot() for _ in batch]
        patience = Patience(self.patience_s, None)

        def send() -> None:
            self._send(b"".join([self._number(op, slot) for op, slot in zip(batch, slots, strict=True)]))

        try:
            if not self._in_turn(send, patience.at):
                raise patience.unsent(self._peer, "pipeline", False)
            replies = [self._await(slot, "pipeline", patience) for slot in slots]
        except BaseException:
            with self._lock:
                for slot in slots:
                    self._core.forget(slot.number)
            raise
        finally:
            for slot in slots:
                self._slots.pop(slot.number, None)
            self._wake_another()
        return [reply.result if reply.status == Status.OK else self._failed(reply) for reply in replies]

    def _number(self, op: ops.Op, slot: Slot | None = None, until: float | None = None) -> bytes:
        """Number a request, the sender's lock being held; return what to send."""
        with self._lock:
            if self._over is not None:
                raise _again(self._over)
            if slot is not None:
                slot.number = self._core.number
                self._slots[slot.number] = slot
            return self._core.ask(op, until)

    def _in_turn(self, send: Callable[[], object], until: float) -> bool:
        """Send, holding the sender's lock; return False, and send nothing, where others keep it until then."""
        taken: list[bool] = []
        left_s = min(max(until - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        try:
            taken.extend(map(self._sender.acquire, [True], [left_s]))  # in C: no signal between taking and noting it
            if taken[0]:
                send()
            return taken[0]
        finally:
            if True in taken:
                self._sender.release()

    def _send(self, request: bytes) -> None:
        """Send, the sender's lock being held; what a cut swallows is repeated when it is mended."""
        sock = self._ear.socket
        try:
            sent = sock.send(request)
            if sent < len(request):
                sock.sendall(request[sent:])
        except OSError:
            sock.close()
        except BaseException:  # Ctrl-C between the bytes of a request: what follows would make no sense
            self._cut()
            raise

    def _cut(self) -> None:
        """Cut the connection, after an interruption; that says nothing of the server, and is not held against it."""
        self._cuts.forgive()
        self._ear.socket.close()

    def _failed(self, reply: Reply) -> TimedOut:
        """Return that the time was over, or raise what else went wrong."""
        if reply.status == Status.TIMED_OUT:
            return TimedOut(tuple(reply.result))
        raise error_of(reply, self.label)

    def _abandon(self, number: int) -> None:
        """After Ctrl-C: nobody will take this answer. The server stops waiting, and takes back what it gave.

        What was asked in an outage it has never seen: calls that poll then must not leave something to say each.
        """
        if not number:
            return
        with contextlib.suppress(OSError, RallypointError), self._sender:
            with self._lock:
                self._core.forget(number)
            if self._outage is None or number < self._outage.unsent_from:
                self._send(self._number(ops.Drop(0, number)))

    # What the keeper calls

    def look(self) -> tuple[socket.socket | None, bool] | None:
        """Return the socket, and whether what comes there is for nobody who reads.

        None is there while another is being made, and instead of all when the session is over. Whoever waits is told
        that the server is down, when it is time.
        """
        if self._over is not None:
            return None
        outage = self._outage
        if outage is not None:
            if outage.look():
                with self._lock:
                    for slot in list(self._slots.values()):
                        slot.ring()
            return None, False
        return self._ear.socket, self._reader is None and (bool(self._slots) or not self._core.answered(self._ping))

    def mend(self, sock: socket.socket) -> None:
        """Have a cut of this socket mended, unless somebody reads there, who will notice."""
        ear = self._ear
        if ear.socket is sock and self._reader is None:
            reconnect.start(self, ear, None)

    def doubts(self) -> socket.socket | None:
        """Ping, or at a relay look whether any recent request was answered; return the socket where that is in vain."""
        now, sock, lately_at = time.monotonic(), self._ear.socket, self._pinged_at
        pause_s = peer_check.silence_s(self._route)
        if not self._route.doubted or now < lately_at + pause_s or self._outage is not None:
            return None
        if self._route.relayed:
            self._pinged_at = now
            asked, self._seen = self._seen, self._core.number  # of the first request since the last look, and the next
            return None if asked < self._seen and self._core.answered(asked) else sock
        in_vain = True
        if self._core.answered(self._ping):
            if self._sender.acquire(blocking=False):
                try:
                    in_vain = not self._send_ping(sock)
                finally:
                    self._sender.release()
            elif now < lately_at + 2 * pause_s:  # somebody sends; if for longer, the server does not read
                return None
        self._pinged_at = now
        return sock if in_vain else None

    def _send_ping(self, sock: socket.socket) -> bool:
        """Ping, the sender's lock being held; say whether the connection took it at once."""
        self._ping = self._core.number
        try:
            ping = self._number(ops.Ping(0))
            if sock.send(ping, socket.MSG_DONTWAIT) < len(ping):
                sock.close()  # in the middle of a frame; it is said again when the cut is mended
        except OSError:
            with self._lock:
                self._core.forget(self._ping)
            return False
        except RallypointError:
            pass  # all is over
        return True

    def probe(self, sock: socket.socket) -> None:
        """Find out whether the peer of this socket hangs, and cut it if so: the session then goes on elsewhere."""
        hangs, same = peer_check.hangs(self._route), self._ear.socket is sock and sock.fileno() >= 0
        if hangs and same and not poll(sock, select.POLLIN, 0.0):
            self._route.leave()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # Watches, and the end

    def watch(self, prefix: bytes) -> Slot:
        """Ask for the changes under a prefix; return where they come."""
        if _forks != self._forks:
            self._after_fork()
        slot, patience = Slot(), Patience(self.patience_s, None)
        slot.session = self._core
        early: list[Event] = []  # after a cut they come before the answer, which is asked for again
        try:
            if not self._in_turn(lambda: self._send(self._number(ops.Watch(0, prefix), slot)), patience.at):
                raise patience.unsent(self._peer, "watch", False)
            while isinstance(answer := self._next(slot, "watch", patience), Event):
                early.append(answer)
        except BaseException:
            self._slots.pop(slot.number, None)
            self._abandon(slot.number)
            raise
        finally:
            self._wake_another()
        slot.answers.extendleft(reversed(early))
        if answer.status != Status.OK:
            self._failed(answer)
        return slot

    def event(self, slot: Slot, deadline: Deadline) -> Event | TimedOut:
        """Return the next event of a watch."""
        if _forks != self._forks or slot.session is not self._core:
            raise SessionLost(peer=self._peer, why="this process was forked off, and the watch is its parent's")
        try:
            answer = self._next(slot, "watch", Patience(0.0, deadline.remaining()))
        except ConnectionLost:
            if self._over is None and deadline.expired():
                outage = self._outage
                return TimedOut((), outage.words() if outage is not None and outage.down else "")
            raise
        finally:
            self._wake_another()
        assert isinstance(answer, Event)
        return answer

    def unwatch(self, slot: Slot) -> None:
        """Give up a watch, and wake whoever waits for its events."""
        if _forks == self._forks and slot.session is self._core:
            with contextlib.suppress(RallypointError):
                self.ask(ops.Drop(0, slot.number), 0.0, UNHEARD)
            self._slots.pop(slot.number, None)
        slot.give(StoreClosed(store=f"a watch of {self.label}"))

    def close(self) -> None:
        if _forks != self._forks:  # a forked child: the connection, and perhaps a lock, are its parent's
            self._over = StoreClosed(store=self.label)
            self._ear.socket.close()
            return
        if self._over is None and self._sender.acquire(timeout=GOODBYE_S):
            goodbye: Slot | None = Slot()
            try:
                self._ear.socket.settimeout(GOODBYE_S)
                with self._lock:
                    unanswered = self._core.unanswered()
                takes_back = [self._number(ops.Drop(0, number)) for number in unanswered]
                self._ear.socket.sendall(b"".join([*takes_back, self._number(ops.Bye(0), goodbye)]))
            except (OSError, RallypointError):
                goodbye = None
            finally:
                self._sender.release()
            if goodbye is not None:
                self._hear_out(goodbye, Patience(GOODBYE_S, None))
        self._end(StoreClosed(store=self.label))

    def _hear_out(self, slot: Slot, patience: Patience) -> None:
        """Wait for an answer, but mend no cut for it."""
        while not slot.answers and self._over is None and self._outage is None and not patience.expired():
            with self._reading() as reads:
                data = self._ear.hear(patience.remaining()) if reads else None
                if data == b"":
                    return
                if data:
                    self._hand_out(data)
            if not reads:
                self._follow(slot, patience)

    def __del__(self, at_the_end: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_the_end() and "_ear" in self.__dict__ and self._over is None:
            self.close()

    # Waiting and reading

    @contextlib.contextmanager
    def _reading(self) -> Iterator[bool]:
        """Be the reader in this block, if nobody else is: yields whether. Then let another read on."""
        token = object()
        try:
            with self._lock:
                if self._reader is None:
                    self._reader = token
            yield self._reader is token
        finally:
            if self._reader is token:
                self._reader = None
                self._wake_another()

    def _await(self, slot: Slot, operation: str, patience: Patience) -> Reply:
        """Return the answer that comes for a slot."""
        answer = self._next(slot, operation, patience)
        assert isinstance(answer, Reply)
        return answer

    def _next(self, slot: Slot, operation: str, patience: Patience) -> Reply | Event:
        """Return what comes next for a slot, reading for all if nobody else does.

        Raises ConnectionLost when no answer came in time, ServerDown when the caller's time is over in an outage.
        """
        while not slot.answers:
            if self._over is not None:
                raise _again(self._over)
            outage = self._outage
            trouble = self._core.trouble
            if time.monotonic() >= patience.until(outage, trouble):
                raise patience.ended(self._peer, operation, outage, trouble)
            with self._reading() as reads:
                if reads:
                    self._read(slot, patience)
            if not reads:
                self._follow(slot, patience)
        answer = slot.answers.popleft()
        if isinstance(answer, RallypointError):
            slot.answers.append(answer)
            raise _again(answer)
        return answer

    def _follow(self, slot: Slot, patience: Patience) -> None:
        """Sleep while another thread reads; it hands us our answer, or the reading, or the news of an outage."""
        with self._lock:
            slot.waiting = True
            if slot.bell is None:
                slot.bell = threading.Lock()
                slot.bell.acquire()
        try:
            if not slot.answers and self._reader is not None:
                slot.wait(max(0.0, patience.until(self._outage, self._core.trouble) - time.monotonic()))
        finally:
            slot.waiting = False

    def _wake_another(self) -> None:
        """When we stop reading, somebody who waits must go on with it."""
        if not self._slots or self._reader is not None:
            return
        with self._lock:
            for slot in list(self._slots.values()):
                if slot.waiting and not slot.answers:
                    slot.ring()
                    return

    def _read(self, slot: Slot, patience: Patience) -> None:
        """Read and hand out until our own answer is there, our patience ends, or a cut makes another the reader."""
        ear = self._ear
        try:
            while not slot.answers and self._over is None:
                left_s = patience.until(None, self._core.trouble) - time.monotonic()
                data = ear.hear(max(left_s, 0.0))
                if self._took(ear, data) or (data is None and left_s <= 0.0):
                    return
        except BaseException:
            if ear is self._ear:
                self._cut()
            raise

    def _took(self, ear: Ear, data: bytes | None) -> bool:
        """Deal with what was read: hand it out, or have a cut mended, and return that we read no more."""
        if data:
            self._hand_out(data)
        if data != b"":
            return False
        reader = self._reader
        reconnect.start(self, ear, reader)
        if self._reader is reader:
            self._reader = None  # it is over, so nobody took over from us
        return True

    def read_idle(self) -> None:
        """Take in what came unasked, if nobody else reads."""
        with self._reading() as reads:
            data = self._ear.hear(0.0) if reads else None
            if data:
                self._hand_out(data)

    def beat(self) -> bool:
        """Tell the server that this process runs, unless a cut is being mended; say whether that was done."""
        if not self._sender.acquire(blocking=False):
            return False
        try:
            self._ear.socket.send(_BEAT, socket.MSG_DONTWAIT)
        except OSError:
            return False
        finally:
            self._sender.release()
        return True

    def _hand_out(self, data: bytes) -> None:
        """Deliver what came."""
        core = self._core
        servers, trouble = core.servers, core.trouble
        try:
            with self._lock:
                replies = core.receive(data)
                for reply in replies:
                    self._deliver(reply)
                if core.servers is not servers or core.trouble != trouble:
                    self._noticed()
            if replies and not replies[-1].number:
                self._confirm()
        except BadMessage as error:
            self._end(ConnectionLost(peer=self._peer, operation="reading", why=str(error)))

    def _confirm(self) -> None:
        """Let the server forget pushes, which no request may follow; not while a sender waits for us to read on."""
        if not self._sender.acquire(blocking=False):
            return
        try:
            with self._lock:
                confirm = self._core.confirm()
            sock = self._ear.socket
            if sock.send(confirm, socket.MSG_DONTWAIT) < len(confirm):
                sock.close()  # in the middle of a frame; it is said again when the cut is mended
        except OSError:
            pass
        finally:
            self._sender.release()

    def _noticed(self) -> None:
        """Take in what the server has said of itself, the lock being held: calls may have to end sooner."""
        if self._core.servers:
            self._route.learn(self._core.servers)
        for slot in list(self._slots.values()):
            slot.ring()

    def _deliver(self, reply: Reply) -> None:
        if not self._core.expects(reply):
            return
        self._cuts.in_a_row = 0
        if reply.number:
            slot = self._slots.get(reply.number)
            if slot is not None:
                slot.give(reply)
        else:
            number, event = reply.event()
            slot = self._slots.get(number)
            if slot is not None:
                slot.give(event)
        self._core.settle(reply)

    # The connection

    def _connect(self, contact: Contact) -> None:
        """Go on with a connection; nobody else reads or sends meanwhile."""
        self._away_s = contact.away_s
        with self._lock:
            for reply in contact.replies:
                self._deliver(reply)
        self._ear = Ear(contact.socket)

    # What brings the session back calls

    def take_over(self, connection: object, reader: object) -> bool:
        """Let the calling thread be the reader instead of `reader`, if this connection is still the one to mend."""
        with self._lock:
            if self._over is not None or self._ear is not connection or self._reader not in (None, reader):
                return False
            self._reader = _RECONNECTING
            return True

    def lose(self) -> tuple[Dialer, float] | None:
        """Close the connection; return what finds another, after what pause; None where the session ends."""
        with contextlib.suppress(OSError):
            self._ear.socket.shutdown(socket.SHUT_RDWR)  # wakes whoever sends there
        with self._sender:
            self._ear.socket.close()
            outage = self._outage = Outage(self._peer, self._away_s, self._core.number, self._core.trouble)
        try:
            pause_s = self._cuts.count(self._core.recovers)
        except ConnectionLost as error:
            self.give_up(error)
            return None
        return Dialer(self._route, self._core, self._lock, outage.deadline), pause_s

    def met(self, why: str, no_quorum: Mapping[str, str]) -> None:
        """Note why an attempt failed; what it met at each address, where one said that etcd has no quorum."""
        if self._outage is not None:
            self._outage.why, self._outage.no_quorum = why, no_quorum

    def resume(self, contact: Contact) -> bool:
        """Repeat on a new connection what was not answered, and let the callers go on; return False if it is lost."""
        sock = contact.socket
        with self._sender:
            with self._lock:
                again = self._core.repeat(time.monotonic())
            if self.beat_s < float("inf"):  # first: the time of leases runs
                again = _BEAT + again
            outage = self._outage
            assert outage is not None
            try:
                sock.settimeout(max(outage.deadline.remaining(), LEAST_S))
                sock.sendall(again)
            except OSError:
                sock.close()
                return False
            self._connect(contact)
            self._outage = None
        if self._over is None:
            outage.over()
        else:
            sock.close()  # closed meanwhile
        self._reader = None
        self._wake_another()
        return True

    def give_up(self, error: Exception) -> None:
        """End the session, which cannot be brought back."""
        if isinstance(error, NotOurs):
            error.socket.close()
        self._end(reconnect.why_over(error, self._peer, self._away_s))
        self._outage = self._reader = None

    def _end(self, reason: RallypointError) -> None:
        """Refuse every further call, and wake those under way."""
        with self._lock:
            if self._over is None:
                self._over = reason
                if not isinstance(reason, StoreClosed):
                    lost_sessions.note(self._peer, self._core.session)
            for slot in list(self._slots.values()):
                slot.give(self._over)
        self.closed.set()
        with contextlib.suppress(OSError):
            self._ear.socket.shutdown(socket.SHUT_RDWR)
        self._ear.socket.close()

    def _after_fork(self) -> None:
        """In a forked child: leave the parent's session to the parent, and begin one of our own."""
        with _fork_lock:
            if self._forks != _forks:
                self._ear.socket.close()
                self._begin()


def _verb(op: ops.Op) -> str:
    """Return what errors call an operation."""
    return op.command.machine.kind if isinstance(op, ops.Act) else op.verb


def _again(error: RallypointError) -> RallypointError:
    """A fresh copy to raise: an exception that several threads raise collects all their tracebacks."""
    return copy.copy(error)
