"""Find the servers of a store in etcd, and decide who may start one where there is none; for clients and relays.

`look_up` reads at one moment, by quorum, who leads and which servers stand by. Whoever finds none at all may start one
of its own, after `claim_seat`: of many processes that begin at the same moment, three get a seat, and the others wait
for those. A seat is a key on a lease of a few seconds: one whose holder has died, or whose server does not come up, is
free again soon. Once any server is listed, a client gets no seat; the nodes of a job get one while servers and seats
are fewer than three.

Rejected: one seat. If its holder were slow or died, all others would wait for its lease to end, and the store would
begin without a standby.
"""

from __future__ import annotations

import contextlib
from base64 import b64decode, b64encode
from typing import Any, NamedTuple

import msgspec

from rallypoint.deadline import Deadline
from rallypoint.errors import EtcdRefused, NoQuorum
from rallypoint.etcd.address import Address
from rallypoint.etcd.json_api import JsonApi
from rallypoint.etcd.messages import next_after
from rallypoint.storage.etcd_layout import Layout, Leader, Server

__all__ = ["SEATS", "Found", "claim_seat", "give_up_seat", "look_up"]

SEATS = 3
"""How many processes may start a server at the same moment, and how many servers the nodes of a job have."""

SEAT_S = 15
"""How long a seat is held: longer than a server takes to come up."""


class Found(NamedTuple):
    """The servers of a store, as URLs; `leader` is empty where none leads at the moment."""

    leader: str
    servers: tuple[str, ...]


def look_up(address: Address, deadline: Deadline) -> Found:
    """Return who leads and which servers there are. Raises NoQuorum, EtcdRefused."""
    layout = Layout(address.space)
    answer = JsonApi(address).call("/v3/kv/txn", {"success": [_get(layout.leader), _get_all(layout.servers)]}, deadline)
    leaders, servers = (_values(response) for response in answer.get("responses", ({}, {})))
    leader = msgspec.json.decode(leaders[0], type=Leader).url if leaders else ""
    urls = [msgspec.json.decode(value, type=Server).url for value in servers]
    return Found(leader, tuple(dict.fromkeys(sorted(urls, key=lambda url: url != leader))))


def claim_seat(address: Address, deadline: Deadline, beside: bool = False) -> int | None:
    """Take a seat, so that this process may start a server; return its lease, to be given up once the server is up.

    None: there are servers, or the seats are taken; with `beside`, servers and taken seats are as many as `SEATS`.
    Raises NoQuorum, EtcdRefused.
    """
    layout, api = Layout(address.space), JsonApi(address)
    ranges = layout.servers, layout.prefix + b"seats/"
    lease = 0
    while True:
        answer = api.call("/v3/kv/txn", {"success": list(map(_get_all, ranges))}, deadline)
        servers, seats = (_kvs(response) for response in answer["responses"])
        if lease and any(int(seat.get("lease", 0)) == lease for seat in seats):  # an earlier attempt succeeded
            return lease
        if len(servers) + len(seats) >= SEATS or (servers and not beside):
            break
        lease = lease or int(api.call("/v3/lease/grant", {"TTL": SEAT_S, "ID": 0}, deadline)["ID"])
        taken = {b64decode(seat["key"]) for seat in seats}
        key = next(key for number in range(SEATS) if (key := ranges[1] + b"%d" % (number + 1)) not in taken)
        txn = {
            "compare": [_unchanged(one, int(answer["header"]["revision"])) for one in ranges],
            "success": [{"request_put": {"key": _text(key), "value": _text(b"taken"), "lease": str(lease)}}],
        }
        if api.call("/v3/kv/txn", txn, deadline).get("succeeded"):
            return lease
    if lease:
        give_up_seat(address, lease, deadline)
    return None


def give_up_seat(address: Address, lease: int, deadline: Deadline) -> None:
    """Let go of a seat; where etcd does not answer, it ends by itself."""
    with contextlib.suppress(NoQuorum, EtcdRefused):
        JsonApi(address).call("/v3/lease/revoke", {"ID": str(lease)}, deadline)


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _get(key: bytes) -> dict[str, Any]:
    return {"request_range": {"key": _text(key)}}


def _get_all(prefix: bytes) -> dict[str, Any]:
    return {"request_range": {"key": _text(prefix), "range_end": _text(next_after(prefix))}}


def _unchanged(prefix: bytes, revision: int) -> dict[str, Any]:
    """Compare: no key that begins like this has come, or changed, since a revision."""
    keys = {"key": _text(prefix), "range_end": _text(next_after(prefix))}
    return {**keys, "target": "MOD", "result": "LESS", "mod_revision": str(revision + 1)}


def _kvs(response: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = response.get("response_range", {}).get("kvs", [])
    return found


def _values(response: dict[str, Any]) -> list[bytes]:
    return [b64decode(one.get("value", "")) for one in _kvs(response)]
