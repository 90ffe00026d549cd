"""Shared objects whose members host them on a store that keeps leases: nothing beats, and nobody asks who lives.

Who waits, waits for the bell alone. When a session ends, the ear of every process that waits (`recipes/vigil.py`) takes
it out of what is waited for there; the first to do so rings the bell for those whom that concerns. What was dead before
is found at the beginning of a wait, for then it is not among those of whom the ear has heard.

As only a few bells are kept, a ring may be missed by one who takes long between its look and its wait. It therefore
looks again: after a second, and then always when it has waited for as long again.
"""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.core.machine import Machine
from rallypoint.errors import StoreTimeout
from rallypoint.recipes.blob import Found
from rallypoint.recipes.life import key_of
from rallypoint.recipes.storehost import ObjectState, StoreHost
from rallypoint.recipes.vigil import vigil_of
from rallypoint.store.base import Store

__all__ = ["LeaseHost"]

FIRST_LOOK_S = 1.0


class LeaseHost(StoreHost):
    """The objects of one store, hosted by their members, who hear of each other's end."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._vigil = vigil_of(store)
        self._looks: dict[str, tuple[int, float]] = {}
        """By place: the number of the bell that was waited for last, and how long to wait for it."""

    @property
    def session(self) -> str:
        """That of this process on this store; it has a lease from now on."""
        return self._vigil.start()

    @property
    def former(self) -> tuple[str, ...]:
        """The sessions that this process had before, and has lost."""
        return self._vigil.former

    def make_sure(self, name: str, kind: type[Machine]) -> None:
        """Find out whether all who are in live, for nobody else may be here to notice; take out the dead."""
        place = f"{kind.kind}:{name}"
        _, machine = self._open(self._fetch(place)[0], kind)
        self._bury(place, kind, self._vigil.ask(machine.sessions()))

    def _fetch(self, place: str) -> Found:
        """Read the state, which costs less here than a change; and our own key, where no ear would tell of its loss."""
        own = [] if self._vigil.listens else [key_of(self.session)]
        try:
            blob = self._store.multi_get([place, *own], 0)[0]
        except StoreTimeout as missed:
            if set(own) & set(missed.missing):
                self._vigil.renew()
            return super()._fetch(place)
        return blob, blob

    def _disown(self, session: str) -> str:
        self._vigil.stop(session)
        return "its lease was gone, and others went on"

    def _dead(self, place: str, state: ObjectState, machine: Machine) -> Iterable[str]:
        return self._vigil.gone(machine.sessions())

    def _hear(self, place: str, state: ObjectState, machine: Machine, within_s: float) -> bool:
        """Wait for the bell, unless somebody in the machine is dead."""

        def mourn(gone: set[str]) -> None:
            _, now = self._open(self._fetch(place)[0], type(machine))
            self._bury(place, type(machine), sorted(now.sessions() & gone))

        with self._vigil.mourning(place, mourn):
            if self._vigil.gone(machine.sessions()):
                return False
            return self._rings(f"{place}:bell:{state.bell + 1}", min(within_s, self._look_s(place, state.bell)))

    def _look_s(self, place: str, bell: int) -> float:
        """Say after how long to look at the state, should the bell not ring."""
        last, look_s = self._looks.get(place, (-1, 0.0))
        self._looks[place] = bell, 2 * look_s if last == bell else FIRST_LOOK_S
        return self._looks[place][1]
