"""What is stored for a run goes with the last who takes part in it."""

from __future__ import annotations

import pytest
from tests.conformance.calls import until

from rallypoint import SessionLost, connect
from rallypoint.etcd import answers, messages, run
from rallypoint.etcd.messages import Method

pytestmark = pytest.mark.needs("etcd")


@pytest.fixture(autouse=True)
def brief_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RUN_TTL_S", 2)


def test_all_of_a_run_goes_with_the_last_who_is_in_it_and_nothing_else(etcd_url: str) -> None:
    with connect(etcd_url) as other, connect(f"{etcd_url}?run=j") as first, connect(f"{etcd_url}?run=j") as last:
        other.set("other", "stays")
        first.set("k", "1")
        first.multi_set(["a", "b"], ["", ""])
        last.set("large", "x" * 3_000_000)
        last.queue_push("q", "item")
        last.append("k", "2")
        last.add("n", 1)
        first.close()
        with other.watch("") as watch:
            other.set("meanwhile", "")
            assert watch.next().key == "meanwhile"
        assert set(other.list_keys()) >= {"k", "large", "n", "a", "b"}
        last.close()
        until(lambda: sorted(other.list_keys()) == ["meanwhile", "other"])
        assert other.queue_len("q") == 0
        assert other.get("other") == b"stays"


def test_a_run_whose_lease_has_ended_says_so(etcd_url: str) -> None:
    with connect(f"{etcd_url}?run=j") as store:
        store.set("k", "1")
        backend = store._backend
        ties = backend._space.ties

        async def revoke() -> None:
            from rallypoint.deadline import Deadline

            await ties.client.call(Method.LEASE_REVOKE, messages.lease(ties.run.lease), Deadline(30))

        backend._thread.run(revoke())
        for _ in range(2):
            with pytest.raises(SessionLost, match="the lease of run 'j' has ended"):
                store.set("k", "2")
        assert store.num_keys() == 0


def test_its_place_is_readable(etcd_url: str) -> None:
    with connect(f"{etcd_url}?run=j") as store:
        space = store._backend._space
        found = store._backend._thread.run(space.look([messages.get(space.layout.run("j"))]))
        assert isinstance(found[0], answers.Found)
        assert found[0].kvs[0].value == b"%d" % space.lease == b"%d" % found[0].kvs[0].lease
