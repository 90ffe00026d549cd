"""Security: what a token costs, and a token with TLS, beside a plain store; and what strangers cost the others.

One server of each kind, and clients of all three, in one run and in turn. TLS is used on loopback only because it is
asked for. The attacker has a process of its own, away from the server's core; on *two cores* it shares the client's.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import rallypoint
from benchmarks.rig import CORES, PLACEMENTS, Placement, Team, cpu_s, in_turn, need, pin, say, team
from benchmarks.secured import Access, Attacker, RawClients, StoreClients
from benchmarks.table import Line, Target
from rallypoint.security.certificates import make_certificates
from rallypoint.security.credentials import OPEN, Credentials, new_token

TITLE = "Security: a token, and TLS, beside a plain store"
NOTES = (
    "*plain* is the same without credentials. *connect*: raw clients of one process, all at once, until the last has "
    "a session; and the processor time of the server for each. *add* and *get*: the median of one client's calls, "
    "ours, 32-byte values. *64 clients*: raw connections of one process, each with one `add` under way. *by a relay*: "
    "PyTorch's client on a relay, which has the token and uses TLS to the server. *p99 under attack*: the 99th "
    "percentile of an `add` every half millisecond, while another process makes 10,000 failed attempts a minute: a "
    "TLS handshake where the store has TLS, then a wrong proof; each attempt gets as far as the server lets it, and "
    "none waits for another. Its peer is the same client without the attacker."
)
PLAIN, TOKEN, TLS = "plain", "token", "TLS + token"
ATTEMPTS_A_SECOND = 10_000 / 60
RAW_CLIENTS = 64
OF_TOKEN = Target(at_most=1.05)
UNDER_ATTACK = Target(at_most=2.0)
_LARGE = ("set 8 MiB", "get 8 MiB")


class Stores:
    """The three servers, and how to connect to each."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        files = make_certificates(directory / "tls", ("127.0.0.1", "localhost"), 1)
        token = new_token()
        known = {
            PLAIN: OPEN,
            TOKEN: Credentials(token=token),
            TLS: Credentials(
                token=token,
                tls_ca=str(files["ca.pem"]),
                tls_cert=str(files["node.pem"]),
                tls_key=str(files["node.key"]),
            ),
        }
        self.servers = {name: stack.enter_context(rallypoint.Server(credentials=known[name])) for name in known}
        self.access = {
            name: Access(server.port, _client_environ(known[name]), name == TLS)
            for name, server in self.servers.items()
        }
        self._known = known

    @property
    def pids(self) -> list[int]:
        """The process ids of the servers."""
        return [server.pid for server in self.servers.values()]

    def relay(self, name: str) -> rallypoint.Relay:
        """Start a relay of a store, which has the credentials and uses TLS if its server does."""
        return rallypoint.Relay(self.access[name].url, credentials=self._known[name])


def _client_environ(known: Credentials) -> dict[str, str]:
    """Return the variables of a client: a certificate is the server's."""
    return Credentials(token=known.token, tls_ca=known.tls_ca).environ()


def run(quick: bool) -> list[Line]:
    """Measure one client, many, their connects, a client of a relay, and one under attack."""
    need("torch", "cryptography")
    with _stores() as stores:
        return [
            *_connects(stores, *((1, 50) if quick else (3, 2000))),
            *_one_client(stores, *((2, 50) if quick else (10, 1000))),
            *_many_clients(stores, *((2, 0.1) if quick else (6, 0.3))),
            *_by_relay(stores, *((2, 50) if quick else (8, 400))),
            *_under_attack(stores, *((2, 0.3) if quick else (4, 1.0))),
        ]


@contextmanager
def _stores() -> Iterator[Stores]:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        yield Stores(stack, Path(directory))


def _beside_plain(
    what: str, where: str, unit: str, figures: dict[str, list[float]], of_token: Target | None = None
) -> list[Line]:
    """Return the lines of the token alone, which may have a target, and of both."""
    targets = {TOKEN: of_token, TLS: None}
    return [
        Line(f"{what}: {name}", where, unit, figures[name], PLAIN, figures[PLAIN], targets[name])
        for name in (TOKEN, TLS)
        if name in figures
    ]


def _with_cpu(
    stores: Stores, measure: Callable[[str], tuple[float, int]], rounds: int, after: Callable[[str], object] = str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Measure in turn; return the figures, and the servers' processor time for each call, in microseconds.

    `after` is called after each measurement.
    """
    spent: dict[str, list[float]] = {name: [] for name in stores.servers}

    def measure_both(name: str) -> float:
        pid = stores.servers[name].pid
        before_s = cpu_s(pid)
        figure, calls = measure(name)
        spent[name].append((cpu_s(pid) - before_s) * 1e6 / calls)
        after(name)
        return figure

    figures = in_turn(tuple(stores.servers), rounds, measure_both)
    return figures, {name: costs[1:] for name, costs in spent.items()}  # the first was for warming up


def _connects(stores: Stores, rounds: int, count: int) -> list[Line]:
    lines, what = [], f"connect {count:,}"
    with team(1, RawClients, stores.access) as clients:
        for placement in PLACEMENTS:
            placement.put(stores.pids, clients.pids)
            say(f"  {what}, {placement.name}")
            measure = functools.partial(_connect_all, clients, count)
            taken, costs = _with_cpu(stores, measure, rounds, functools.partial(clients.ask, "close"))
            lines += _beside_plain(what, placement.name, "ms", taken)
            lines += _beside_plain(f"{what}, server's CPU", placement.name, "µs/connect", costs)
    return lines


def _connect_all(clients: Team, count: int, name: str) -> tuple[float, int]:
    (taken_ms,) = clients.ask("connect", name, count)
    return float(taken_ms), count


def _one_client(stores: Stores, rounds: int, calls: int) -> list[Line]:
    lines = []
    with team(1, StoreClients, stores.access) as caller:
        for placement in PLACEMENTS:
            placement.put(stores.pids, caller.pids)
            for what in ("add", "get"):
                figures = _medians(caller, what, placement, tuple(stores.servers), rounds, calls)
                lines += _beside_plain(what, placement.name, "µs", figures, OF_TOKEN)
            for what in _LARGE:
                figures = _medians(caller, what, placement, tuple(stores.servers), max(2, rounds // 2), 3)
                lines += _beside_plain(what, placement.name, "µs", figures)
    return lines


def _medians(
    caller: Team, what: str, placement: Placement, names: tuple[str, ...], rounds: int, calls: int
) -> dict[str, list[float]]:
    say(f"  {what}, {placement.name}")
    return in_turn(names, rounds, lambda name: float(caller.ask("median_us", name, what, calls)[0]))


def _many_clients(stores: Stores, rounds: int, slice_s: float) -> list[Line]:
    lines, what = [], f"add, {RAW_CLIENTS} clients"
    with team(1, RawClients, stores.access) as clients:
        for name in stores.servers:
            clients.ask("connect", name, RAW_CLIENTS)
        for placement in PLACEMENTS:
            placement.put(stores.pids, clients.pids)
            say(f"  {what}, {placement.name}")
            rates, costs = _with_cpu(stores, lambda name: clients.ask("rate", name, slice_s)[0], rounds)
            lines += _beside_plain(what, placement.name, "op/s", rates)
            lines += _beside_plain(f"{what}, server's CPU", placement.name, "µs/op", costs)
    return lines


def _by_relay(stores: Stores, rounds: int, calls: int) -> list[Line]:
    lines = []
    with ExitStack() as stack:
        relays = {name: stack.enter_context(stores.relay(name)) for name in (PLAIN, TLS)}
        access = {name: Access(relay.port, {}, False) for name, relay in relays.items()}
        caller = stack.enter_context(team(1, StoreClients, access, True))
        for placement in PLACEMENTS:
            placement.put(stores.pids, [*(relay.pid for relay in relays.values()), *caller.pids])
            for what in ("add", "get"):
                figures = _medians(caller, what, placement, (PLAIN, TLS), rounds, calls)
                lines += _beside_plain(f"{what} by a relay", placement.name, "µs", figures)
    return lines


def _under_attack(stores: Stores, rounds: int, slice_s: float) -> list[Line]:
    lines = []
    with team(1, StoreClients, stores.access) as caller, team(1, Attacker, stores.access) as attacker:
        pin(attacker.pids[0], CORES[-1])
        for placement in PLACEMENTS:
            placement.put(stores.pids, caller.pids)
            for name in (TOKEN, TLS):
                say(f"  add under attack, {name}, {placement.name}")
                measure = functools.partial(_percentile_us, caller, attacker, name, slice_s)
                attacked, quiet = in_turn(("attacked", "quiet"), rounds, measure).values()
                what = f"add, p99 under attack: {name}"
                lines.append(Line(what, placement.name, "µs", attacked, "no attack", quiet, UNDER_ATTACK))
        lines += [_attempts(stores, attacker, name, rounds) for name in (TOKEN, TLS)]
    return lines


def _attempts(stores: Stores, attacker: Team, name: str, rounds: int) -> Line:
    """Measure what a failed attempt costs the server, which does nothing else."""
    pid, costs = stores.servers[name].pid, []
    for _ in range(rounds):
        before_s = cpu_s(pid)
        (count,) = attacker.ask("attack", name, 5 * ATTEMPTS_A_SECOND, 0.3)
        costs.append((cpu_s(pid) - before_s) * 1e6 / count)
        attacker.ask("rest")
    return Line(f"failed attempt, server's CPU: {name}", PLACEMENTS[-1].name, "µs", costs)


def _percentile_us(caller: Team, attacker: Team, name: str, slice_s: float, case: str) -> float:
    """Return the 99th percentile; the attack begins before the client does, and ends after it."""
    lead_s = slice_s / 4
    if case == "attacked":
        attacker.tell("attack", name, ATTEMPTS_A_SECOND, slice_s + 2 * lead_s)
        time.sleep(lead_s)
    (figure,) = caller.ask("percentile_us", name, slice_s)
    if case == "attacked":
        (count,) = attacker.hear()
        if count < ATTEMPTS_A_SECOND * slice_s:
            say(f"    only {count} attempts: the attacker could not keep up")
        attacker.ask("rest")
    return float(figure)
