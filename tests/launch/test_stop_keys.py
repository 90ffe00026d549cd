"""The keys of an agreement on a step: a decision replaces only the state that it was made for."""

from __future__ import annotations

from msgspec.structs import replace
from tests.raw_peer import until
from tests.served import server_fixture

import rallypoint
from rallypoint.core.policy.stop_policy import StopPhase, StopRequest, StopState
from rallypoint.launch.preemption.stop_keys import StopKeys

server = server_fixture()

ASKED = StopState(phase=StopPhase.ASKED, request=StopRequest(node="n0", reason="n0: SIGUSR1"))
LOW = replace(ASKED, phase=StopPhase.PROPOSED, step=5)
HIGH = replace(LOW, step=8)


def test_a_decision_about_a_state_that_was_replaced_is_dropped(server: rallypoint.Server) -> None:
    """Two agents can take themselves for the coordinator for a moment: one of them has not counted the nodes yet."""
    with rallypoint.connect(server.url) as store, rallypoint.connect(server.url) as other_store:
        late, other = StopKeys(store, lambda: None), StopKeys(other_store, lambda: None)
        late.begin(LOW)
        late.join()
        other.join()
        seen = late.state
        assert seen == LOW and other.state is not None
        other.advance(other.state, HIGH)
        until(lambda: late.state, lambda state: state == HIGH)
        late.advance(seen, replace(LOW, phase=StopPhase.COMMITTED))  # it decided on `seen`
        joining = StopKeys(store, lambda: None)
        joining.join()
        assert joining.state == HIGH
        for keys in (late, other, joining):
            keys.close()
