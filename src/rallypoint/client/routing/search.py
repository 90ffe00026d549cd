"""One search for a server on a route: which address to try next, for how long, and when to give up.

A search tries the addresses in turn, starting with the current one: each for its share of the remaining time, but not
longer than a limit that grows every round. So a silent host costs about a second, and one that refuses costs nothing.
Silent addresses come last in the next round, as does one that was left because it hung. While standbys reply, one of
them is about to lead, and they are asked again soon: silent addresses are then skipped for twice as long as they were
silent. If every address has replied that it is unusable, there is no further round.

The blocking client, the asyncio client and the relay search by these rules; this module opens no connections. A single
address gets the whole time when a session is opened. When one is resumed, a single address is retried, as several are:
its server may restart behind a proxy or a listener that outlives it, and never reply to an earlier greeting. Another
program may have the port meanwhile, so then only a reply of a rallypoint server ends the search.

A standby names the leader, which is tried next, at once, whether its address was given or not. But no address is tried
twice in a round: so standbys that name each other, themselves or a dead leader cost a pause per round, as others do. If
a standby reports something new, another server is about to lead, and pauses start again with the shortest. Without a
quorum of etcd there is no leader, and no session ends: the grace period of a session to be resumed runs only while no
server reports that, and a search that gives up raises `NoQuorum`.

Pauses grow from 10 ms, because a server that restarts is usually back within a second, and have jitter: all clients of
a dead server lose their connections at the same moment, and must not all return at the same moment.

A relay that is gone, is silent, or serves another store is skipped for the addresses of the store. A relay without a
connection to its server is retried before those, for a while: when the server is back, so is the relay within a second,
and if all its clients went to the server instead, the relay would be useless. A relay that stops replying is left like
a hung server.

For a store in etcd, the addresses are looked up at the end of a round in which no server replied, not even a standby.
etcd may refuse a client that has a relay, such as a worker without a password: then the search waits for the relay.

Rejected: trying all addresses at once. Each server would take the session from the previous one, at a commit each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from rallypoint import net
from rallypoint.client.routing.refusals import Refusals
from rallypoint.client.routing.relay_address import RelayAddress
from rallypoint.client.routing.route import GROWTH, Address, Route, backoff_s, read_server
from rallypoint.client.routing.server_replies import IsStandby, SessionRefused
from rallypoint.deadline import Deadline
from rallypoint.errors import (
    AuthenticationFailed,
    ConnectFailed,
    EtcdRefused,
    NoQuorum,
    RallypointError,
    ServerRestarted,
)
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import Standby

__all__ = ["Search"]

PATIENCE_S = (1.0, 30.0)
"""The limit on the silence of one of several addresses: in the first round, and after doubling each round."""

RESUMING_S = (1.0, 3.0)
"""The same for a single address when a session is resumed. A restarted server waits `RETURN_S` for its sessions: an
attempt that started before the restart, the pause after it and another attempt must fit into that."""

RELAY_S = 5.0
"""How long a relay may be silent, or without its server, when a session is opened; or half the timeout, if less.
When one is resumed, it limits only a relay without its server; a silent one has as long as a single address."""

LEAST_S = 0.1
"""Minimum time for each address, however little is left."""

AGAIN = 2.0
"""While standbys reply, an address is skipped for this many times as long as it was silent."""

STANDBY_PAUSE_S = 0.2
"""The longest pause if a standby replies and etcd has a quorum: another server leads soon."""

LOOK_S = 5.0
"""Timeout of one lookup of a store's servers in etcd."""


class Search:
    """One search on a route, until a deadline, to open a session or to resume one (`resumes`).

    `recovers`: its server may return with the session. `longest_s` replaces the upper limit of `PATIENCE_S`.
    """

    def __init__(
        self,
        route: Route,
        deadline: Deadline,
        resumes: bool = False,
        longest_s: float | None = None,
        recovers: bool = False,
    ) -> None:
        self._route = route
        self._deadline = deadline
        self._resumes = resumes
        self._failed: dict[Address, Mapping[str, str]] = {}
        self._refusals = Refusals(confirms=resumes and (recovers or route.several))
        self._useless = 0
        self._several_s = PATIENCE_S[1] if longest_s is None else longest_s
        self._patience_s, self._longest_s = (PATIENCE_S[0], self._several_s) if route.several else RESUMING_S
        self._relay_waits = False
        self._relay_s = Deadline(min(RELAY_S, deadline.remaining() / 2))
        self._rounds = 0
        self._silent: dict[Address, float] = {}  # silent addresses, and until when to skip each
        if route.hung is not None:
            self._silent[route.hung] = time.monotonic() + AGAIN * self._patience_s
            route.hung = None
        self._passed_over = False  # whether one was skipped in this round
        self._leader: net.Endpoint | None = None  # as named by a standby in this round
        self._told: dict[Address, tuple[str, bool]] = {}  # the last report of each standby
        self._standbys = 0  # their number in this round
        self._no_quorum = self._had_none = False  # whether one reported it in this round, and in the one before
        self._looks, self._look_at = 0, 0.0
        self._looked: Mapping[str, str] = {}  # why the last lookup failed

    def round(self) -> Iterator[tuple[Address, Deadline]]:
        """Yield each address to try, and its deadline; untried addresses even after the deadline of the search.

        Yields nothing after a relay that waits for its server.
        """
        self._useless = self._standbys = 0
        self._had_none, self._no_quorum, self._leader = self._no_quorum, False, None
        if self._route.relayed and self._route.relay is not None:
            self._relay_waits = False
            limit_s = RESUMING_S[0] if self._resumes else RELAY_S
            yield self._route.relay, Deadline(max(min(limit_s, self._deadline.remaining() / 2), LEAST_S))
            if self._relay_waits and not self._relay_s.expired():
                return
        yield from self._servers()

    def _servers(self) -> Iterator[tuple[Address, Deadline]]:
        """Yield the addresses of the store, each once, and after a standby the leader that it names."""
        before, self._silent, self._passed_over = self._silent, {}, False
        left = sorted(self._route.order(), key=before.__contains__)
        tried: set[Address] = set()
        while left or self._leader is not None:
            leader, self._leader = self._leader, None
            if leader is not None and (leader in tried or leader in before):
                continue
            if leader is None:
                leader = left.pop(0)
            elif leader in left:
                left.remove(leader)
            tried.add(leader)
            if self._standbys and time.monotonic() < before.get(leader, 0.0):
                self._silent[leader] = before[leader]
                self._passed_over = True
            elif not self._route.several and not self._resumes:
                yield leader, self._deadline
            elif leader not in self._failed or not self._deadline.expired():
                share_s = self._deadline.remaining() / (len(left) + 1)
                turn = Deadline(max(min(share_s, self._patience_s), LEAST_S))
                yield leader, turn
                if turn.expired():
                    self._silent[leader] = time.monotonic() + AGAIN * turn.timeout_s
            left += [each for each in self._route.addresses if each not in tried and each not in left]

    def failed(
        self,
        address: Address,
        why: str | Mapping[str, str],
        useless: bool = False,
        unwelcome: bool = False,
        no_quorum: bool = False,
    ) -> None:
        """Note why an address failed; whether it replied that it is `useless`, or accepted the preface and hung up.

        The latter (`unwelcome`) is the behaviour of a relay without its server. `no_quorum`: it reported that.
        """
        self._failed[address] = {str(address): why} if isinstance(why, str) else why
        self._no_quorum = self._no_quorum or no_quorum
        if isinstance(address, RelayAddress):
            self._relay_waits = unwelcome
        else:
            self._useless += useless and not self._resumes

    def attempt_failed(self, address: Address, error: Exception, why: str, trouble: str) -> None:
        """Note the error of an attempt, and `why` in words, or the `trouble` that the server had reported.

        Only a server of the store is believed to be a standby: another program may have the address of a relay.
        """
        if self._route.is_given(address):
            self._refusals.note(address, error)
        if isinstance(error, IsStandby) and not isinstance(address, RelayAddress):
            self.stands_by(address, error.answer)
            return
        useless, unwelcome = isinstance(error, (BadMessage, ValueError)), isinstance(error, SessionRefused)
        self.failed(address, trouble or why, useless, unwelcome, no_quorum=bool(trouble))

    def unreachable(self, address: Address, error: ConnectFailed) -> None:
        """Note that nothing accepts connections at an address."""
        self._refusals.note(address, error)
        self.failed(address, error.tried)

    def stands_by(self, address: Address, answer: Standby) -> None:
        """Note that a server is a standby: try the leader that it names next, and learn the other servers."""
        self.failed(address, str(IsStandby(answer)), no_quorum=answer.no_quorum)
        self._standbys += 1
        self._route.update_servers([answer.leader, *answer.servers])
        self._longest_s = self._several_s
        self._leader = read_server(answer.leader) if answer.leader else None
        if self._leader not in self._route.addresses:  # not usable from here, such as loopback
            self._leader = None
        said = (answer.leader, answer.no_quorum)
        if self._told.get(address, said) != said:
            self._rounds = 0
        self._told[address] = said

    @property
    def wants_look(self) -> bool:
        """Whether to `look` for the servers now: none is reachable at the known addresses."""
        nobody = not self._standbys and not self._relay_waits and time.monotonic() >= self._look_at
        return self._route.look is not None and nobody

    def look(self) -> None:
        """Look up the servers of a store in etcd; from any thread. Raises the error that ends the search."""
        assert self._route.look is not None
        self._looked, name = {}, self._route.name
        try:
            servers = self._route.look(Deadline(min(LOOK_S, self._deadline.remaining())))
        except NoQuorum as error:
            self._looked, self._no_quorum = error.tried, True
        except RallypointError as error:
            if not self._resumes and not (self._route.relay is not None and isinstance(error, EtcdRefused)):
                raise
            self._looked = {name: str(error)}
        else:
            if self._route.found(servers):
                self._rounds = 0
            else:
                self._looked = {name: "no server of the store is registered in etcd; waiting for one to start"}
        self._look_at = time.monotonic() + backoff_s(self._looks)
        self._looks += 1

    def ends(self, address: Address, error: Exception) -> bool:
        """Return whether an error ends the search at once: not if its address may not be the store's (any more).

        After a refusal (AuthenticationFailed) the other addresses are tried first; see `pause_s`.
        """
        if isinstance(error, AuthenticationFailed):
            return False
        doubtful = isinstance(error, ServerRestarted)
        return isinstance(error, RallypointError) and (not doubtful or self._route.is_given(address))

    @property
    def explain_failure(self) -> str:
        """The last failure at each address; without the address if there is only one."""
        each = [*self._failed.values(), *([self._looked] if self._looked else [])]
        if len(each) == 1 and len(each[0]) == 1:
            return next(iter(each[0].values()))
        return "; ".join(f"{where}: {why}" for failed in each for where, why in failed.items())

    @property
    def no_quorum(self) -> Mapping[str, str]:
        """The last failure at each address, if one of them reported that etcd has no quorum; else empty."""
        return self._tried if self._without_quorum else {}

    @property
    def _without_quorum(self) -> bool:
        """Whether etcd is known to have no quorum: the round in which time ran out may have reached no server."""
        return self._no_quorum or (self._had_none and self._deadline.expired())

    @property
    def _tried(self) -> Mapping[str, str]:
        return {where: why for each in (*self._failed.values(), self._looked) for where, why in each.items()}

    def pause_s(self) -> float:
        """Return the pause before the next round; raise ConnectFailed, NoQuorum or a final refusal if there is none."""
        refusal = self._refusals.final(self._route.endpoints)
        if refusal is not None and not self._standbys:  # a standby knows us, and may lead soon
            raise refusal
        if self._without_quorum and self._resumes:
            self._deadline.at = time.monotonic() + self._deadline.timeout_s
        vain = self._route.look is None and self._useless >= len(self._route.addresses)
        if vain or self._deadline.expired():
            self._give_up()
        pause_s = backoff_s(self._rounds)
        if self._standbys and not self._no_quorum:
            pause_s = min(pause_s, STANDBY_PAUSE_S)
        self._rounds += 1
        if not self._passed_over:
            self._patience_s = min((GROWTH if self._standbys else 2) * self._patience_s, self._longest_s)
        return min(pause_s, self._deadline.remaining())

    def _give_up(self) -> None:
        name, timeout_s = self._route.name, self._deadline.timeout_s
        if self._without_quorum:
            raise NoQuorum(store=self._route.label, timeout_s=timeout_s, tried=self._tried)
        raise ConnectFailed(peer=name, timeout_s=timeout_s, tried=self._tried)
