"""One search for a server along a route: which address to try next, for how long, and when to give up.

Whoever looks for a server tries the addresses in turn, the one where it was first: each for its share of the time
that is left and not longer than a moment, which grows every round, so that a host that is silent costs about a second
and one that refuses costs nothing. Those that were silent are last in the next round. When all of them answered that
they are of no use, there is no other round.

The blocking client, the asyncio one and the relay search by the same rules, which are here; this module connects to
nothing. A single address keeps the whole time when a session is opened. When one is resumed, it is tried again and
again, as several are: its server may be restarted behind a proxy or a listener that outlives it, and never answer what
came before. Another program may have the port meanwhile, so then no answer ends the search but one of ours.

A server that stands by names the one that leads, which is tried next, at once, whether its address was given or not.
But no address is tried twice in a round: so standbys that name each other, themselves or a dead leader cost a pause a
round, as others do. Where a standby says something new, another server is about to lead: pauses begin again with the
shortest. Without a quorum of etcd there is no leader and no end of a session either: the time of one that is to be
resumed runs only while nobody says so, and a search that ends says `NoQuorum`.

Pauses grow from 10 ms, for a server that comes back does so within a second as a rule, and each is cut by chance: the
clients of a server that died have all been cut at the same moment, and must not all come back at the same moment.

A relay that is not there, is silent, or is not this store's, is passed over for the addresses of the store. One that is
there and has no connection to its server is tried again before those, for a while: when the server is back, so is the
relay within a second, and if all its clients went to the server instead, there would be no use in a relay. One that
stops answering is left like a server that hangs.

Of a store in etcd the addresses are looked up, at the end of a round in which nobody was there, not even to stand by.

Rejected: to call all at once. The session would be taken from one by the next, which each time takes a commit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed, NoQuorum, RallypointError, ServerRestarted
from rallypoint.protocol.native import Standby
from rallypoint.store.relay_address import RelayAddress
from rallypoint.store.route import GROWTH, Address, Route, backoff_s, read_server

__all__ = ["NOT_OF_SEVERAL", "Search", "StandsBy", "Unwelcome"]

PATIENCE_S = (1.0, 30.0)
"""How long one of several addresses may be silent at most: in the first round, and after doubling each round."""

RESUMING_S = (1.0, 3.0)
"""The same for a single address where a session is resumed. A server that was restarted waits `RETURN_S` for its
sessions: an attempt that began before, the pause after it and another attempt must fit into that."""

RELAY_S = 5.0
"""How long a relay may be silent, or without its server, when a session is opened; half the time, where that is less.
When one is resumed, that is the limit for one without its server; a silent one has as long as a single address."""

LEAST_S = 0.1
"""What each of them gets, however little time is left."""

STANDBY_PAUSE_S = 0.2
"""The longest pause where a server stands by and has a quorum: another leads soon."""

LOOK_S = 5.0
"""How long one look for the servers of a store in etcd may take."""

NOT_OF_SEVERAL = "a plain PyTorch server, which cannot be one of several"
"""What is said of an address in a list where PyTorch's server answers."""


class Unwelcome(ConnectionError):
    """Our preface was accepted, and then the connection was closed before we were welcome."""


class StandsBy(ConnectionError):
    """The server stands by for another; its answer says for which."""

    def __init__(self, answer: Standby) -> None:
        super().__init__(f"it stands by: {answer.why or 'another server leads'}")
        self.answer = answer


class Search:
    """One search along a route, until a deadline; for a server to open a session at, or to resume one (`resumes`)."""

    def __init__(self, route: Route, deadline: Deadline, resumes: bool = False) -> None:
        self._route = route
        self._deadline = deadline
        self._resumes = resumes
        self._failed: dict[Address, Mapping[str, str]] = {}
        self._useless = 0
        self._patience_s, self._longest_s = PATIENCE_S if route.several else RESUMING_S
        self._relay_waits = False
        self._relay_s = Deadline(min(RELAY_S, deadline.remaining() / 2))
        self._rounds = 0
        self._silent: set[Address] = set()
        self._leader: net.Endpoint | None = None  # that a server which stands by has named in this round
        self._told: dict[Address, tuple[str, bool]] = {}  # what each of those said last
        self._standbys = 0  # how many there were in this round
        self._no_quorum = self._had_none = False  # whether one said so in this round, and in the one before
        self._looks, self._look_at = 0, 0.0
        self._looked: Mapping[str, str] = {}  # what came of the last look, where that was of no use

    def round(self) -> Iterator[tuple[Address, Deadline]]:
        """Yield each address to try, and by when it must have answered; those not tried yet even when time is up.

        There is nothing behind a relay that waits for its server.
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
        """Yield the addresses of the store, each once, and behind one that stands by the leader that it names."""
        before, self._silent = self._silent, set()
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
            if not self._route.several and not self._resumes:
                yield leader, self._deadline
            elif leader not in self._failed or not self._deadline.expired():
                share_s = self._deadline.remaining() / (len(left) + 1)
                turn = Deadline(max(min(share_s, self._patience_s), LEAST_S))
                yield leader, turn
                if turn.expired():
                    self._silent.add(leader)
            left += [each for each in self._route.addresses if each not in tried and each not in left]

    def failed(
        self,
        address: Address,
        why: str | Mapping[str, str],
        useless: bool = False,
        unwelcome: bool = False,
        no_quorum: bool = False,
    ) -> None:
        """Note what happened at an address; whether it answered that it is of no use, or took the preface and hung up.

        The latter is what a relay does that has no connection to its server. With `no_quorum`, it has none.
        """
        self._failed[address] = {str(address): why} if isinstance(why, str) else why
        self._no_quorum = self._no_quorum or no_quorum
        if isinstance(address, RelayAddress):
            self._relay_waits = unwelcome
        else:
            self._useless += useless and not self._resumes

    def stands_by(self, address: Address, answer: Standby) -> None:
        """Note that a server stands by: the leader that it names is next, and the others are known from now on."""
        self.failed(address, str(StandsBy(answer)), no_quorum=answer.no_quorum)
        self._standbys += 1
        self._route.learn([answer.leader, *answer.servers])
        self._longest_s = PATIENCE_S[1]
        self._leader = read_server(answer.leader) if answer.leader else None
        if self._leader not in self._route.addresses:  # it may be of no use from here
            self._leader = None
        said = (answer.leader, answer.no_quorum)
        if self._told.get(address, said) != said:
            self._rounds = 0
        self._told[address] = said

    @property
    def wants_look(self) -> bool:
        """Whether it is time to `look` where the servers are: nobody is where they were."""
        nobody = not self._standbys and not self._relay_waits and time.monotonic() >= self._look_at
        return self._route.look is not None and nobody

    def look(self) -> None:
        """Find out where the servers of a store in etcd are now; in any thread. Raises what makes a search vain."""
        assert self._route.look is not None
        self._looked, name = {}, self._route.name
        try:
            servers = self._route.look(Deadline(min(LOOK_S, self._deadline.remaining())))
        except NoQuorum as error:
            self._looked, self._no_quorum = error.tried, True
        except RallypointError as error:
            if not self._resumes:
                raise
            self._looked = {name: str(error)}
        else:
            if self._route.found(servers):
                self._rounds = 0
            else:
                self._looked = {name: "etcd knows no server of the store; waiting for one that another process starts"}
        self._look_at = time.monotonic() + backoff_s(self._looks)
        self._looks += 1

    def ends(self, address: Address, error: Exception) -> bool:
        """Return whether an error ends the search for good: that of another server does not, where it is no store's."""
        elsewhere = isinstance(error, ServerRestarted) and not self._route.is_given(address)
        return isinstance(error, RallypointError) and not elsewhere

    @property
    def why(self) -> str:
        """What happened last at each address, in words; where there is only one, without it."""
        each = [*self._failed.values(), *([self._looked] if self._looked else [])]
        if len(each) == 1 and len(each[0]) == 1:
            return next(iter(each[0].values()))
        return "; ".join(f"{where}: {why}" for failed in each for where, why in failed.items())

    @property
    def no_quorum(self) -> Mapping[str, str]:
        """What happened last at each address, where one of them said that etcd has no quorum; else nothing."""
        return self._tried if self._without_quorum else {}

    @property
    def _without_quorum(self) -> bool:
        """Whether etcd has no quorum, as far as is known: the round in which time ran out may have met nobody."""
        return self._no_quorum or (self._had_none and self._deadline.expired())

    @property
    def _tried(self) -> Mapping[str, str]:
        return {where: why for each in (*self._failed.values(), self._looked) for where, why in each.items()}

    def pause_s(self) -> float:
        """Return how long to wait before the next round; raise ConnectFailed or NoQuorum where there is to be none."""
        if self._without_quorum and self._resumes:
            self._deadline.at = time.monotonic() + self._deadline.timeout_s
        vain = self._route.look is None and self._useless >= len(self._route.addresses)
        if vain or self._deadline.expired():
            self._give_up()
        pause_s = backoff_s(self._rounds)
        if self._standbys and not self._no_quorum:
            pause_s = min(pause_s, STANDBY_PAUSE_S)
        self._rounds += 1
        self._patience_s = min((GROWTH if self._standbys else 2) * self._patience_s, self._longest_s)
        return min(pause_s, self._deadline.remaining())

    def _give_up(self) -> None:
        name, timeout_s = self._route.name, self._deadline.timeout_s
        if self._without_quorum:
            raise NoQuorum(store=self._route.label, timeout_s=timeout_s, tried=self._tried)
        raise ConnectFailed(peer=name, timeout_s=timeout_s, tried=self._tried)
