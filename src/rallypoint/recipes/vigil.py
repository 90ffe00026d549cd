"""The sign of life of a process on a store that keeps leases: a key that goes with it, and the hearing of others'.

While a session takes part in something it leases its key, `pulse:SESSION`. The store takes the key away when the
session ends, however that comes; a session whose key is gone is dead, and nothing beats. From the first time that
somebody of this process has to wait, a thread, the ear, watches all such keys. So everybody knows who lives without
asking, and hears of a death at once. Only who was never heard of is asked for: one that came a moment ago, or is dead.

Whoever waits has a mourner: what the ear calls when sessions are gone, to take them out of the object. In the object,
that wakes whom it concerns, here and elsewhere: nobody else has to stir. The ears take turns, in a ring of all who
live: the one before the dead goes first, and the others find it done.

A session whose own key vanished leases it again: the ear hears of that, and before there is one, whoever reads a state
looks. Where others have ended it meanwhile it finds itself among the ended.

Rejected: to do without a thread. A death is that a key is gone, and waiting for the bell is waiting for a key to come.
Rejected: for each to watch the next in a ring of an object's sessions. That costs less (each ear hears every coming and
going, n times n short events for n processes), but of those who are in an object not all wait, as in a group.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from rallypoint.core import ops
from rallypoint.deadline import Deadline
from rallypoint.errors import StoreTimeout
from rallypoint.recipes.life import PULSES, Keeper, Life, key_of, life_of
from rallypoint.store.base import Store, Watch

__all__ = ["Mourner", "Vigil", "vigil_of"]

FEW = 8
"""How many keys are asked for one by one; for more of them, all are listed."""

TURN_S, LAST_TURN_S = 0.001, 0.05
"""How much later each in the ring takes its turn to bury, and how late the last does. Meanwhile more may die: those of
one machine do so together."""

Mourner = Callable[[set[str]], None]
"""What is told of sessions that are gone."""


class Vigil(Life):
    """The session of this process on one store, and who else lives; for many threads."""

    def begin(self) -> None:
        """Be a session that nobody has heard of, and that has heard of nobody."""
        self._mourners: dict[object, tuple[str, Mourner]] = {}
        super().begin()

    def show(self, session: str) -> None:
        """Lease a key of ours."""
        self._here().lease(key_of(session), "")

    def _keep(self, session: str) -> Keeper:
        return _Keeper(self, session)

    @contextlib.contextmanager
    def mourning(self, place: str, mourner: Mourner) -> Iterator[None]:
        """Have sessions that go from now on told to what takes them out of an object; one a place is told."""
        self._listen()
        token = object()
        self._mourners[token] = place, mourner
        try:
            yield
        finally:
            self._mourners.pop(token, None)

    def mourners(self) -> list[Mourner]:
        """Return who is to be told of sessions that are gone."""
        return list(dict(list(self._mourners.values())).values())

    @property
    def listens(self) -> bool:
        """Whether there is an ear, which would hear of the loss of our own key, too."""
        return self._ear() is not None

    def renew(self) -> None:
        """Lease our key again, which was taken away."""
        keeper = self._keeper
        if isinstance(keeper, _Keeper):
            keeper.renew()

    def gone(self, sessions: set[str]) -> list[str]:
        """Return those of these sessions, which were just read in a state, that are no more."""
        ear = self._ear()
        return self.ask(ear.unheard(sessions) if ear is not None else sessions)

    def ask(self, sessions: Iterable[str]) -> list[str]:
        """Return those of these sessions that are no more, as the store has it now."""
        store, others = self._here(), sorted(session for session in sessions if session != self.session)
        if not others or (len(others) <= FEW and store.check([key_of(session) for session in others])):
            return []
        here = _all(store)
        return [session for session in others if session not in here]

    def _ear(self) -> _Ear | None:
        keeper = self._keeper
        return keeper.ear if isinstance(keeper, _Keeper) and keeper.ear is not None and keeper.ear.listens else None

    def _listen(self) -> None:
        """Have an ear, unless the store is about to end."""
        self.start()
        with self._lock:
            if isinstance(self._keeper, _Keeper) and self._ear() is None:
                self._keeper.listen()


class _Keeper(Keeper):
    """What sleeps until a session is stopped, and then gives up its lease and its ear."""

    def __init__(self, life: Vigil, session: str) -> None:
        super().__init__(life, session)
        self._over, self._leasing = False, threading.Lock()
        self.ear: _Ear | None = None

    def listen(self) -> None:
        """Begin to listen, and wait until that is so."""
        life, store = self._life(), self._hold()
        assert isinstance(life, Vigil) and isinstance(store, Store)
        self.ear = _Ear(life, self._session, store, self.renew)
        self.ear.start()
        if self.ear.unheard({self._session}):
            self.renew()

    def renew(self) -> None:
        """Lease the key again, which was taken away."""
        with self._leasing:
            if not self._over:
                self._hold().lease(key_of(self._session), "")

    def run(self) -> None:
        self._rests()
        with contextlib.suppress(RuntimeError):  # the store is closed or lost: it has no lease any more
            with self._leasing:
                self._over = True
                store = self._hold()
                store._backend.execute(ops.Unlease(0, store._name(key_of(self._session))))
            if self.ear is not None:
                self.ear.close()
        self.ear = None


class _Ear(threading.Thread):
    """What hears sessions come and go on a store, from when it is made, and tells of those that are gone."""

    def __init__(self, life: Vigil, session: str, store: Store, renew: Callable[[], None]) -> None:
        super().__init__(name=f"vigil of {session}", daemon=True)
        self.listens = True
        self._life = weakref.ref(life)
        self._session = session
        self._renew = renew
        self._lock = threading.Lock()
        self._watch: Watch = store.watch(PULSES, float("inf"))
        self._alive = _all(store)  # as of after the watch began: no change is missed, and one told twice is the same

    def unheard(self, sessions: set[str]) -> set[str]:
        """Return those of these sessions that are not known to live."""
        with self._lock:
            return sessions - self._alive

    def close(self) -> None:
        """Hear no more."""
        self._watch.close()

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed or lost: whoever waits next listens anew
            while True:
                gone = self._heard(float("inf"))
                if gone and self._mourners():
                    self._tell(gone)
        self.listens = False

    def _heard(self, within_s: float) -> set[str]:
        """Take note of the next who comes or goes, within so long, and return who is gone."""
        try:
            change = self._watch.next(within_s)
        except StoreTimeout:
            return set()
        session = change.key[len(PULSES) :]
        with self._lock:
            if change.value is not None:
                self._alive.add(session)
                return set()
            self._alive.discard(session)
        if session != self._session:
            return {session}
        self._renew()
        return set()

    def _tell(self, gone: set[str]) -> None:
        """Tell of sessions that are gone when it is our turn, and of all that go until then."""
        turn = Deadline(self._turn_s(min(gone)))
        while not turn.expired():
            gone |= self._heard(turn.remaining())
        for mourner in self._mourners():
            with contextlib.suppress(RuntimeError):  # whoever waits there looks for itself
                mourner(gone)

    def _mourners(self) -> list[Mourner]:
        life = self._life()
        return [] if life is None else life.mourners()

    def _turn_s(self, dead: str) -> float:
        """Say how long others, who come before us in the ring, may take to bury one that is dead."""
        with self._lock:
            ring = sorted(self._alive)
        between = (bisect_left(ring, dead) - bisect_left(ring, self._session) - 1) % max(1, len(ring))
        return min(TURN_S * (1 + between), LAST_TURN_S)


def _all(store: Store) -> set[str]:
    """Return all sessions that live."""
    names = store._backend.execute(ops.List(0, store._name(PULSES)))
    return {store._unname(name)[len(PULSES) :] for name in names}


def vigil_of(store: Store) -> Vigil:
    """Return the vigil of this process on a store; there is one for all objects."""
    return life_of(store, Vigil)
