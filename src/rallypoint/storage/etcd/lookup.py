"""Find the servers of a store in etcd, and decide which process may start one if there is none. For clients and relays.

`look_up` reads the leader and the standbys at one moment, by quorum. A process that finds none may start a server after
`claim_start_permit`: of many processes that begin at the same moment, three get a permit, and the others wait for their
servers. A permit is a key with a lease of a few seconds: if its holder dies, or the server does not come up, it is free
again soon. Once a server is listed, clients get no permit; the nodes of a job get one while servers and permits
together are fewer than three.

Rejected: a single permit. If its holder were slow or died, all others would wait for its lease to expire, and the store
would start without a standby.
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
from rallypoint.etcd.requests import next_after
from rallypoint.storage.etcd.layout import Layout, LeaderEntry, ServerEntry

__all__ = ["MAX_PERMITS", "StoreServers", "claim_start_permit", "release_start_permit", "look_up"]

MAX_PERMITS = 3
"""Processes that may start a server at the same moment, and servers that the nodes of a job run."""

PERMIT_S = 15
"""Time to live of a permit: longer than a server takes to come up."""


class StoreServers(NamedTuple):
    """The URLs of a store's servers; `leader` is empty if no server leads at the moment."""

    leader: str
    servers: tuple[str, ...]


def look_up(address: Address, deadline: Deadline) -> StoreServers:
    """Return the leader and all servers of a store. Raises NoQuorum, EtcdRefused."""
    layout = Layout(address.space)
    answer = JsonApi(address).call("/v3/kv/txn", {"success": [_get(layout.leader), _get_all(layout.servers)]}, deadline)
    leaders, servers = (_values(response) for response in answer.get("responses", ({}, {})))
    leader = msgspec.json.decode(leaders[0], type=LeaderEntry).url if leaders else ""
    urls = [msgspec.json.decode(value, type=ServerEntry).url for value in servers]
    return StoreServers(leader, tuple(dict.fromkeys(sorted(urls, key=lambda url: url != leader))))


def claim_start_permit(address: Address, deadline: Deadline, beside: bool = False) -> int | None:
    """Claim a permit to start a server; return its lease, to be released once the server is up.

    Return None if there are servers, or if all permits are taken. With `beside`, other servers may exist: return None
    if servers and permits together reach `MAX_PERMITS`. Raises NoQuorum, EtcdRefused.
    """
    layout, api = Layout(address.space), JsonApi(address)
    ranges = layout.servers, layout.permits
    lease = 0
    while True:
        answer = api.call("/v3/kv/txn", {"success": list(map(_get_all, ranges))}, deadline)
        servers, permits = (_kvs(response) for response in answer["responses"])
        if lease and any(int(permit.get("lease", 0)) == lease for permit in permits):  # an earlier attempt succeeded
            return lease
        if len(servers) + len(permits) >= MAX_PERMITS or (servers and not beside):
            break
        lease = lease or int(api.call("/v3/lease/grant", {"TTL": PERMIT_S, "ID": 0}, deadline)["ID"])
        taken = {b64decode(permit["key"]) for permit in permits}
        key = next(key for number in range(MAX_PERMITS) if (key := layout.permits + b"%d" % (number + 1)) not in taken)
        txn = {
            "compare": [_unchanged(one, int(answer["header"]["revision"])) for one in ranges],
            "success": [{"request_put": {"key": _base64(key), "value": _base64(b"taken"), "lease": str(lease)}}],
        }
        if api.call("/v3/kv/txn", txn, deadline).get("succeeded"):
            return lease
    if lease:
        release_start_permit(address, lease, deadline)
    return None


def release_start_permit(address: Address, lease: int, deadline: Deadline) -> None:
    """Release a permit; if etcd does not answer, the permit expires by itself."""
    with contextlib.suppress(NoQuorum, EtcdRefused):
        JsonApi(address).call("/v3/lease/revoke", {"ID": str(lease)}, deadline)


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


def _get(key: bytes) -> dict[str, Any]:
    return {"request_range": {"key": _base64(key)}}


def _get_all(prefix: bytes) -> dict[str, Any]:
    return {"request_range": {"key": _base64(prefix), "range_end": _base64(next_after(prefix))}}


def _unchanged(prefix: bytes, revision: int) -> dict[str, Any]:
    """Return the comparison that no key with this prefix was created or changed since a revision."""
    keys = {"key": _base64(prefix), "range_end": _base64(next_after(prefix))}
    return {**keys, "target": "MOD", "result": "LESS", "mod_revision": str(revision + 1)}


def _kvs(response: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = response.get("response_range", {}).get("kvs", [])
    return found


def _values(response: dict[str, Any]) -> list[bytes]:
    return [b64decode(one.get("value", "")) for one in _kvs(response)]
