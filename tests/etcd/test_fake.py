"""The fake etcd of the simulation answers random transactions as the real one does, and refuses what it refuses."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.etcd.fake import FakeEtcd, Refused

from rallypoint.etcd import messages
from rallypoint.etcd.answers import KV, Deleted, Found, Put, Result, read_txn
from rallypoint.etcd.messages import Method, Op, Txn

pytestmark = pytest.mark.needs("etcd")


class Pair:
    """A real cluster and a fake one that are asked the same."""

    def __init__(self, endpoint: str, prefix: bytes) -> None:
        import grpc

        self.error, self.fake, self.prefix = grpc.RpcError, FakeEtcd(), prefix
        self._txn = grpc.insecure_channel(endpoint).unary_unary(Method.TXN)

    def real(self, txn: Txn) -> Any:
        try:
            return plain(read_txn(self._txn(txn.encode(), timeout=60)))
        except self.error as error:
            return error.details()

    def made_up(self, txn: Txn) -> Any:
        try:
            return plain(read_txn(self.fake.call(Method.TXN, txn.encode())))
        except Refused as refused:
            return refused.why


def plain(answer: Any) -> Any:
    """Return an answer without what two clusters need not have in common: their revisions."""
    if isinstance(answer, Result):
        return answer.succeeded, [plain(one) for one in answer.answers]
    if isinstance(answer, Found):
        return answer.total, [plain(kv) for kv in answer.kvs]
    if isinstance(answer, KV):
        return answer.key, answer.value, answer.lease
    assert isinstance(answer, (Put, Deleted))
    return answer


def some_txn(dice: random.Random, prefix: bytes, deep: int = 2) -> Txn:
    keys = [prefix + b"%d" % number for number in range(5)]

    def op() -> Op:
        first, last = sorted(dice.sample(keys, 2))
        kinds = [
            messages.put(first, b"%d" % dice.randrange(4)),
            messages.put(first, b"", keep_value=True),
            messages.put(first, b"1", lease=12345) if dice.random() < 0.1 else messages.put(first, b"2"),
            messages.delete(first),
            messages.delete(first, last),
            messages.get(first),
            messages.get(first, last, limit=dice.randrange(3), names_only=dice.random() < 0.5),
            messages.tally(first, last),
            messages.get(keys[0], messages.next_after(prefix), oldest_first=True, limit=1),
        ]
        return some_txn(dice, prefix, deep - 1).as_op() if deep and dice.random() < 0.2 else dice.choice(kinds)

    def compare() -> bytes:
        first, last = sorted(dice.sample(keys, 2))
        value = b"%d" % dice.randrange(4)
        return dice.choice(
            [
                messages.exists(first),
                messages.version_is(first, dice.randrange(3)),
                messages.none_in(first, last),
                messages.modified_at(first, 0),
                messages.value_is(first, value),
                messages.value_below(first, value),
                messages.lease_is(first, 0),
            ]
        )

    ops = [[op() for _ in range(dice.randrange(4))] for _ in range(2)]
    return Txn([compare() for _ in range(dice.randrange(3))], *ops)


def test_it_answers_as_etcd_does(etcd_cluster):
    pair = Pair(etcd_cluster.endpoints[0], b"test-fake/")
    dice, told = random.Random(1), []
    for number in range(400):
        txn = some_txn(dice, pair.prefix)
        real, made_up = pair.real(txn), pair.made_up(txn)
        assert real == made_up, f"transaction {number}: {txn}"
        told.append(real)
    refusals = {one for one in told if isinstance(one, str)}
    assert len(refusals) == 3, f"a key twice, no such key, no such lease; not {refusals}"


def test_it_takes_as_many_requests_as_etcd_does(etcd_cluster):
    pair = Pair(etcd_cluster.endpoints[0], b"test-many/")
    for outer in (1, 60, 61, 128, 129):
        for inner in (1, 67, 68, 128):
            reads = [messages.get(pair.prefix) for _ in range(outer - 1)]
            txn = Txn((), [*reads, Txn((), [messages.get(pair.prefix)] * inner).as_op()])
            assert pair.real(txn) == pair.made_up(txn), (outer, inner)
