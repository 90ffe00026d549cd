"""The handler of one agent, called as torchrun calls it: results, refusals, leaving and shutdown."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from tests.etcd.access import USER, WORD, guarded
from tests.etcd.cluster import Cluster
from tests.ports import reserve_port
from tests.raw_peer import read_line, script, until

import rallypoint

from .torch_processes import AMPLE_S

__all__ = ["guarded"]

pytestmark = pytest.mark.needs("torch")

DOCS = Path(__file__).resolve().parents[2] / "docs" / "torch.md"
BARRIER = "torchelastic/agent/terminal_state/last_member"
Make = Callable[..., Any]


@pytest.fixture
def make(server: rallypoint.Server) -> Iterator[Make]:
    """A function that creates the handler of an agent; `timeout` is an option that torchrun always adds."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from rallypoint.integrations.torchrun import handler

    made: list[Any] = []

    def make(nodes: str = "1:1", port: int = server.port, **conf: str) -> Any:
        least, most = map(int, nodes.split(":"))
        endpoint = f"localhost:{port}"
        params = RendezvousParameters("rallypoint", endpoint, "run", least, most, "localhost", timeout=900, **conf)
        made.append(handler()(params))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def together(*handlers: Any) -> list[Any]:
    """Let agents join at the same time; return the result of each."""
    told: dict[int, Any] = {}

    def come(number: int) -> None:
        told[number] = handlers[number].next_rendezvous()

    threads = [threading.Thread(target=come, args=(number,)) for number in range(len(handlers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AMPLE_S)
    return [told[number] for number in range(len(handlers))]


def rendezvous(server: rallypoint.Server, nodes: int = 1, **more: Any) -> rallypoint.Rendezvous:
    store = rallypoint.TCPStore("localhost", server.port, timeout=AMPLE_S)
    return rallypoint.Rendezvous(store, "run", 1, nodes, **more)


# A round


def test_two_agents_form_a_round(make: Make, server: rallypoint.Server) -> None:
    one, two = make("2:2", node="a", rank="1"), make("2:2", node="b")
    first, second = together(one, two)
    assert [(info.rank, info.world_size) for info in (first, second)] == [(1, 2), (0, 2)]
    places = {
        (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in (first, second)
    }
    ((host, port),) = places
    assert host == "127.0.0.1" and port == two._provider._relay.relay.statistics()["round_ports"]["run"]["port"]
    assert one._provider._relay.relay.statistics()["round_ports"] == {}, "rank 0's node has it"
    with rallypoint.TCPStore(host, port, timeout=AMPLE_S) as workers:
        workers.set("k", "of a worker")
        assert server.statistics()["namespaces"]["run"]["keys"] == 1
    first.store.set("k", "v")
    assert second.store.get("k") == b"v"
    assert one.use_agent_store and one.get_backend() == "rallypoint" and one.get_run_id() == "run"
    assert not one.is_closed() and one.num_nodes_waiting() == two.num_nodes_waiting() == 0
    two.shutdown()
    assert until(one.num_nodes_waiting, bool) == 1
    assert not one.is_closed(), "leaving is not closing"
    assert server.statistics()["rounds"], "an agent is left"


def test_the_run_ends_when_all_have_passed_the_exit_barrier(make: Make, server: rallypoint.Server) -> None:
    agent = make()
    agent.next_rendezvous().store.set(BARRIER, "")
    agent.shutdown()
    status = rendezvous(server).status()
    assert (status.phase, status.result) == ("closed", "succeeded")
    assert server.statistics()["rounds"] == 0
    again = make().next_rendezvous()
    assert again.rank == 0 and not again.store.check([BARRIER])


def test_a_run_is_closed_for_all(make: Make) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    one, two = make("2:2"), make("2:2")
    together(one, two)
    one.set_closed()
    assert one.is_closed() and until(two.num_nodes_waiting, bool)
    with pytest.raises(RendezvousClosedError, match="closed with the result 'closed': by its agent"):
        two.next_rendezvous()


def test_a_round_that_ends_before_its_port_is_open_is_formed_again(make: Make) -> None:
    scopes: list[int] = []
    agent = make()
    relay = agent._provider._relay
    opened = relay.open

    def too_late_at_first(run: str, scope: int, *rest: Any, **more: Any) -> int:
        if not scopes:  # another agent has opened a later round
            opened(run, scope + 1, *rest, **more)
        scopes.append(scope)
        return int(opened(run, scope, *rest, **more))

    relay.open = too_late_at_first
    assert agent.next_rendezvous().rank == 0
    assert len(scopes) > 1 and scopes == sorted(set(scopes))


@pytest.mark.parametrize("relay", ["rank0", "local"])
def test_workers_get_the_addresses_of_their_relay_and_of_rank_0(make: Make, relay: str) -> None:
    one, two = make("2:2", relay=relay, node="a", rank="0"), make("2:2", relay=relay, node="b")
    infos = [info.bootstrap_store_info for info in together(one, two)]
    assert os.environ["RALLYPOINT_RANK0_ADDR"] == "127.0.0.1"
    told = {agent._provider.relay() for agent in (one, two)}
    assert os.environ["RALLYPOINT_RELAY"] in told and len(told) == 2
    own = [agent._provider._relay.relay.statistics()["round_ports"] for agent in (one, two)]
    if relay == "local":
        assert [ports["run"]["port"] for ports in own] == [info.master_port for info in infos]
    else:
        assert infos[0].master_port == infos[1].master_port == own[0]["run"]["port"] and not own[1]
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(rallypoint.TCPStore(info.master_addr, info.master_port, timeout=AMPLE_S))
            for info in infos
        ]
        stores[0].set("k", "v")
        assert stores[1].get("k") == b"v", "both are one store"
    for agent in (two, one):
        agent.shutdown()
    assert "RALLYPOINT_RELAY" not in os.environ


def test_agents_that_choose_another_relay_do_not_meet(make: Make) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousError

    one, two = make("2:2", relay="local", node="a"), make("2:2", node="b")
    ended: list[RendezvousError] = []

    def wait() -> None:
        try:
            one.next_rendezvous()
        except RendezvousError as error:
            ended.append(error)

    waits = threading.Thread(target=wait)
    waits.start()
    until(one._rendezvous.status, lambda status: status.waiting)
    with pytest.raises(RendezvousError, match="relay"):
        two.next_rendezvous()
    two.set_closed()
    waits.join(AMPLE_S)
    assert len(ended) == 1
    with pytest.raises(ValueError, match="relay must be rank0 or local, got 'near'"):
        make(relay="near")


def test_all_agents_form_a_new_round_when_a_relay_dies(make: Make, caplog: Any) -> None:
    one, two = make("2:2", node="a", rank="0"), make("2:2", node="b")
    before = [info.bootstrap_store_info.master_port for info in together(one, two)]
    relay = one._provider._relay.relay
    pid = relay.pid
    os.kill(pid, signal.SIGKILL)
    assert until(one.num_nodes_waiting, bool) and two.num_nodes_waiting() == 0
    assert f"its relay (pid {pid}) has died" in caplog.text
    after = [info.bootstrap_store_info for info in together(one, two)]
    assert one.num_nodes_waiting() == two.num_nodes_waiting() == 0
    assert len({info.master_port for info in after}) == 1 and after[0].master_port not in before
    with rallypoint.TCPStore(after[1].master_addr, after[1].master_port, timeout=AMPLE_S) as store:
        assert store.add("n", 1) == 1


def test_the_exit_barrier_does_not_wait_for_a_lost_agent(make: Make, caplog: Any) -> None:
    from torch.distributed import DistStoreError
    from torch.distributed.elastic.utils.store import barrier

    one, two = make("2:2", node="a"), make("2:2", node="b")
    info, _ = together(one, two)
    two.shutdown()
    with pytest.raises(DistStoreError):
        barrier(info.store, 2, "torchelastic/agent/terminal_state", barrier_timeout=10 * AMPLE_S)
    assert "no longer waiting for the other agents: b (" in caplog.text and "left" in caplog.text


def test_agents_whose_server_was_killed_meet_at_another(make: Make, caplog: Any) -> None:
    port = reserve_port()
    one, two = make("2:2", port, node="a"), make("2:2", port, node="b")
    together(one, two)
    with urlopen(f"http://localhost:{port}/about", timeout=AMPLE_S) as page:
        server = json.load(page)["pid"]
    os.kill(server, signal.SIGKILL)
    assert until(one.num_nodes_waiting, bool) and until(two.num_nodes_waiting, bool)
    after = together(one, two)
    assert sorted(info.rank for info in after) == [0, 1]
    after[0].store.set("k", "v")
    assert after[1].store.get("k") == b"v" and "looking for the server again" in caplog.text
    with urlopen(f"http://localhost:{port}/about", timeout=AMPLE_S) as page:
        os.kill(json.load(page)["pid"], signal.SIGTERM)


def test_control_characters_in_a_node_name_are_escaped_in_the_log(make: Make, caplog: Any) -> None:
    one, two = make("2:2", node="a"), make("2:2", node="b\x1b[2J\nFORGED")
    together(one, two)
    two.shutdown()
    until(one.num_nodes_waiting, bool)
    assert r"b\x1b[2J\nFORGED" in caplog.text and "\x1b" not in caplog.text and "\nFORGED" not in caplog.text


def test_agents_that_are_done_pass_the_exit_barrier_together(make: Make) -> None:
    from torch.distributed.elastic.utils.store import barrier

    one, two = make("2:2"), make("2:2")
    threads = [
        threading.Thread(target=barrier, args=(info.store, 2, BARRIER.rpartition("/")[0], AMPLE_S))
        for info in together(one, two)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AMPLE_S)
    one.shutdown()
    assert two.is_closed()


def test_a_lost_server_is_an_error_that_torch_knows(make: Make) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    with rallypoint.Server() as server:
        agent = make(port=server.port)
        agent.next_rendezvous()
    until(agent.num_nodes_waiting, bool)
    for call in (agent.is_closed, agent.set_closed):
        with pytest.raises(RendezvousConnectionError):
            call()
    assert agent.shutdown() is False


# A store in etcd


def agent_on_etcd(url: str) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from rallypoint.integrations.torchrun import handler

    return handler()(RendezvousParameters("rallypoint", url, "run", 1, 1, "localhost", timeout=900))


@pytest.mark.needs("etcd")
def test_an_agent_survives_its_server_and_forms_a_new_round_when_its_relay_dies(etcd_url: str, caplog: Any) -> None:
    agent = agent_on_etcd(etcd_url)
    try:
        info = agent.next_rendezvous()
        server, relay = agent._provider._child, agent._provider._relay.relay
        first = until(lambda: server.pid, bool)
        os.kill(first, signal.SIGKILL)
        info.store.set("k", "v")
        assert until(lambda: server.pid, bool) != first and info.store.get("k") == b"v"
        assert agent.num_nodes_waiting() == 0 and os.environ["RALLYPOINT_RELAY"].startswith(relay.url)
        pid, before = relay.pid, info.bootstrap_store_info
        os.kill(pid, signal.SIGKILL)
        until(agent.num_nodes_waiting, bool)
        assert f"its relay (pid {pid}) has died" in caplog.text
        after = agent.next_rendezvous().bootstrap_store_info
        assert agent.num_nodes_waiting() == 0 and before.master_port != after.master_port
        assert before.master_addr == after.master_addr == "127.0.0.1"
        with rallypoint.TCPStore(after.master_addr, after.master_port, timeout=AMPLE_S) as store:
            assert store.add("n", 1) == 1
    finally:
        agent.shutdown()


@pytest.mark.needs("etcd")
def test_an_endpoint_may_be_a_server_of_a_store_in_etcd(make: Make, etcd_url: str) -> None:
    with rallypoint.Server(storage=etcd_url) as server:
        one, two = make("2:2", server.port, is_host="0"), make("2:2", server.port)
        infos = together(one, two)
        assert sorted(info.rank for info in infos) == [0, 1]
        infos[0].store.set("k", "v")
        assert infos[1].store.get("k") == b"v"
        assert two.shutdown() and until(one.num_nodes_waiting, bool) == 1 and one.shutdown()


@pytest.mark.needs("etcd")
def test_workers_do_not_get_the_password_of_the_endpoint(guarded: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    url = f"{guarded.url}/hers?user={USER}&password={WORD}"
    monkeypatch.setenv("PET_RDZV_ENDPOINT", url)
    agent = agent_on_etcd(url)
    agent.next_rendezvous()
    assert not [value for value in os.environ.values() if WORD in value]
    agent.shutdown()
    with pytest.raises(RendezvousConnectionError, match=f"user {USER}") as caught:
        agent_on_etcd(url.replace(WORD, "mistaken"))
    assert "mistaken" not in str(caught.value)


# A run that has ended


def test_two_agents_that_find_a_closed_run_share_the_new_one(make: Make, server: rallypoint.Server) -> None:
    rendezvous(server).close("succeeded")
    agent = make("1:2", last_call_timeout="60", rank="0")
    other = rendezvous(server, 2, node="other", last_call=60)
    begin_anew, status = agent._rendezvous.begin_anew, agent._rendezvous.status
    found: list[Any] = []

    def after_the_other() -> None:
        """Right before the agent asks to open the run, the other one has opened it, and waits in it."""
        other.open()
        thread = threading.Thread(target=lambda: found.append(other.join(AMPLE_S)))
        thread.start()
        threads.append(thread)
        until(status, lambda now: now.waiting)
        begin_anew()

    threads: list[threading.Thread] = []
    agent._rendezvous.begin_anew = after_the_other
    assert agent.next_rendezvous().world_size == 2
    threads[0].join(AMPLE_S)
    assert found[0].world_size == 2
    other.leave()


def test_a_waiting_agent_succeeds_when_the_run_succeeds(make: Make, server: rallypoint.Server) -> None:
    members = [rendezvous(server, 2, node=name, last_call=30) for name in ("member", "other")]
    member = members[0]
    threads = [threading.Thread(target=node.join, args=(AMPLE_S,)) for node in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AMPLE_S)
    spare, ends = make("1:2"), []

    def wait() -> None:
        try:
            spare.next_rendezvous()
        except SystemExit as end:
            ends.append(end.code)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: member.status().spares, bool)
    status = spare._rendezvous.status
    spare._rendezvous.status = lambda: ([node.leave() for node in members], status())[1]  # the last agent
    member.close("succeeded")
    thread.join(AMPLE_S)
    assert ends == [0]


# Names

NODE = """
import sys, rallypoint
store = rallypoint.TCPStore("localhost", int(sys.argv[1]))
node = rallypoint.Rendezvous(store, "run", 1, node="a", last_call=30)
print(node.join(60).rank, flush=True)
sys.stdin.read()
"""


def test_a_killed_node_may_rejoin_before_its_session_ends(make: Make, server: rallypoint.Server) -> None:
    with script(NODE, server.port) as child:
        assert read_line(child) == "0"
        child.send_signal(signal.SIGKILL)
        child.wait(AMPLE_S)
        assert make(node="a").next_rendezvous().rank == 0


def test_a_node_name_in_use_is_refused(make: Make, server: rallypoint.Server, monkeypatch: Any) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousError

    from rallypoint.recipes import rendezvous

    monkeypatch.setattr(rendezvous, "TAKEN_S", 0.0)
    with script(NODE, server.port) as child:
        assert read_line(child) == "0"
        with pytest.raises(RendezvousError, match=rf"'a'.*:{child.pid}"):
            make(node="a").next_rendezvous()


# Options


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"last_cal": "3"}, "unknown --rdzv-conf option 'last_cal'.*last_call_timeout"),
        ({"join_timeout": "-1"}, "join_timeout must be a non-negative number, got '-1'"),
        ({"read_timeout": "soon"}, "read_timeout must be a non-negative number, got 'soon'"),
        ({"last_call_timeout": "inf"}, "last_call_timeout must be a non-negative number"),
        ({"rank": "1.5"}, "rank must be a non-negative number"),
        ({"is_host": "perhaps"}, "is_host must be true or false, got 'perhaps'"),
        ({"node": ""}, "node must have 1 to 256 characters"),
    ],
)
def test_an_invalid_option_is_refused_by_name(make: Make, conf: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**conf)


def test_options_of_torchs_own_back_end_are_accepted(make: Make) -> None:
    assert make(keep_alive_interval="1", store_type="tcp", is_host="0", read_timeout="7").next_rendezvous().rank == 0


def test_an_agent_without_a_server_fails_after_its_own_timeout(make: Make) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    port = reserve_port()
    with pytest.raises(
        RendezvousConnectionError, match=rf"no server at localhost:{port}.* within the timeout of 0\.1 s"
    ):
        make(port=port, is_host="false", read_timeout="0.1")


def test_a_join_timeout_says_how_many_nodes_are_missing(make: Make) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes: waiting for 1"):
        make("2:2", join_timeout="0.1").next_rendezvous()


def test_the_documentation_lists_every_option() -> None:
    from rallypoint.integrations.torchrun_options import ACCEPTED, OPTIONS

    text = DOCS.read_text()
    assert re.findall(r"^\| `(\w+)` \| .* \| .* \|$", text, re.M) == list(OPTIONS)
    listed = text[text.index("`timeout`, ") : text.index("mean nothing here")]
    assert re.findall(r"`(\w+)`", listed) == list(ACCEPTED)


def test_torchrun_parses_the_command_of_the_documentation() -> None:
    run = importlib.import_module("torch.distributed.run")
    (command,) = re.findall(r"```sh\ntorchrun (.*?)```", DOCS.read_text(), re.S)
    words = command.replace("--nproc-per-node=8", "").replace("\\\n", "").split()
    config, _, _ = run.config_from_args(run.parse_args(words))
    assert (config.rdzv_backend, config.min_nodes, config.max_nodes) == ("rallypoint", 2, 4)
