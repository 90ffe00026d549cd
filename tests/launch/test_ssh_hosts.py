"""`rallypoint run --hosts` with an `ssh` of our own on the PATH, which runs the command here, or in a namespace.

It writes down its arguments, and refuses to connect to the host `unreachable`, as ssh does.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.hosts import Host, hosts
from tests.launch.runs import Node, Place, gone, has_in, parent, processes_of

from rallypoint.launch.ssh.remote_hosts import FORWARDED, forwarded_variables

SSH = """#!/bin/sh
printf '%s\\n' "$*" >> "{log}"
for word; do host=$command; command=$word; done
case $host in
unreachable) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255;;
{cases}
esac
exec sh -c "$command"
"""

Start = Callable[..., Node]
SECRET = "a-secret-of-more-than-sixteen-characters"
STAY = "say('agent', os.getppid())\nstay()"


def install_ssh(where: Path, places: tuple[Host, ...] = ()) -> dict[str, str]:
    """Write the ssh, which runs commands on these hosts or else here; return the variables for its use."""
    folder = where / "bin"
    folder.mkdir()
    cases = "\n".join(f'{host.name}) exec {shlex.join(host.command(["sh", "-c"]))} "$command";;' for host in places)
    (folder / "ssh").write_text(SSH.format(log=where / "ssh.log", cases=cases))
    (folder / "ssh").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def start(place: Place) -> Start:
    """Start a script on hosts, all of which are this one."""
    env = install_ssh(place.where)

    def start(names: str, code: str, *words: object, **more: str) -> Node:
        meet = ("--hosts", names, "--rdzv-endpoint", f"localhost:{place.port}")
        return place.run(*meet, *words, place.script(code), env={**env, **more})

    return start


def workers(node: Node, names: str) -> tuple[list[int], list[int]]:
    """Return the pids of the agents and of the workers, when all are up."""
    agents, pids = [], []
    for rank, name in enumerate(names.split(",")):
        agents.append(int(node.until(rf"^\[{name}\] agent (\d+)$")[0][1]))
        pids.append(int(node.until(rf"^\[{name}\] up {rank} {names.count(',') + 1} 0 (\d+)$")[0][1]))
    return agents, pids


def test_each_host_has_an_agent_with_the_directory_and_the_chosen_variables(place: Place, start: Start) -> None:
    code = """
    say('at', rank, world, os.getcwd(), os.environ['CHOSEN_1'], ascii(os.environ['CHOSEN_2']))
    assert not [name for name in os.environ if name.startswith('RALLYPOINT_SSH')]
    """
    odd = "$x 'y' \udcff\n"
    node = start("me@a,n[1-2]", code, "--forward-env", "CHOSEN_*", CHOSEN_1="one two", CHOSEN_2=odd)
    assert node.end() == 0, node.text()
    for rank, name in enumerate(("a", "n1", "n2")):
        node.until(re.escape(f"[{name}] at {rank} 3 {place.where} one two {odd!a}") + "$")
        assert node.err.count(f"[{name}] rallypoint run: --hosts: 3 nodes, this is node {rank}, run ssh-") == 1
    asked = (place.where / "ssh.log").read_text()
    assert asked.count("BatchMode=yes") == 3 and " me@a exec " in asked and " n2 exec " in asked


def test_a_token_is_not_in_arguments(place: Place, start: Start) -> None:
    node = start("a,b", STAY, "--relay", "local", RALLYPOINT_TOKEN=SECRET)
    _, pids = workers(node, "a,b")
    assert not has_in("cmdline", SECRET, processes_of(node.child.pid))
    assert SECRET not in (place.where / "ssh.log").read_text()
    place.token = SECRET
    assert place.server(), "the server has the token"
    node.signal("SIGUSR1")
    assert node.end() == 0, node.text()
    gone(*pids)


def test_the_first_failure_ends_all_and_is_the_exit_code(start: Start) -> None:
    node = start("a,b,c", "if rank == 1: os._exit(3)\nhang()")
    assert node.end() == 3, node.text()
    assert node.err.count("FAILED FIRST: exit code 3") == 3


def test_an_agent_that_is_killed_ends_the_others(start: Start) -> None:
    node = start("a,b,c", STAY)
    agents, pids = workers(node, "a,b,c")
    os.kill(agents[1], signal.SIGKILL)
    assert node.end() == 128 + signal.SIGKILL, node.text()
    node.until("the agent on b ended: exit code 137")
    gone(*agents, *pids)


def test_a_host_that_cannot_be_reached_ends_the_others(start: Start) -> None:
    node = start("a,unreachable", STAY)
    assert node.end() == 255, node.text()
    node.until(r"^\[unreachable\] ssh: connect to host unreachable port 22: No route to host")
    node.until("the agent on unreachable ended: exit code 255: ssh could not connect")


def test_long_arguments_and_a_signal_before_they_have_arrived(place: Place, start: Start) -> None:
    """An ssh that is not connected yet reads nothing; a signal waits until the agent has its settings."""
    os.mkfifo(place.where / "connected")
    fake = place.where / "bin" / "ssh"
    fake.write_text(fake.read_text().replace("exec sh -c", "echo connecting; cat connected; exec sh -c"))
    words = [word for number in range(2000) for word in ("--role", f"{number:<100}")]
    node = start("a", STAY, *words)
    node.until(r"^\[a\] connecting$")
    node.signal("SIGTERM")
    with open(place.where / "connected", "w"):
        pass
    assert node.end() == 128 + signal.SIGTERM, node.text()
    assert "up 0" not in node.out


def test_settings_that_are_too_long_are_refused(place: Place, start: Start) -> None:
    node = start("a", STAY, "--forward-env", "LONG_*", **{f"LONG_{number}": "x" * 100_000 for number in range(12)})
    assert node.end() == 2 and "too long: 12" in node.err.replace("\n", " ")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_reaches_all_workers(start: Start, name: str) -> None:
    node = start("a,b", f"on({name!r}, lambda: (say('got', {name!r}), os._exit(0)))\n{STAY}")
    agents, pids = workers(node, "a,b")
    node.signal(name)
    assert node.end() == 128 + getattr(signal, name), node.text()
    for host in "ab":
        node.until(rf"^\[{host}\] got {name}$")
    gone(*agents, *pids)


def test_nothing_is_left_of_a_launcher_that_is_killed(start: Start) -> None:
    node = start("a,b", STAY)
    agents, pids = workers(node, "a,b")
    node.signal("SIGKILL")
    gone(*agents, *pids)


def test_nothing_is_left_of_a_connection_that_is_killed(start: Start) -> None:
    """The ssh of these tests is the process that starts the agent on the host."""
    node = start("a,b", STAY)
    agents, pids = workers(node, "a,b")
    os.kill(parent(agents[0]), signal.SIGKILL)
    assert node.end() == 128 + signal.SIGKILL, node.text()
    gone(*agents, *pids)


def test_an_agent_that_does_not_end_is_killed(start: Start) -> None:
    node = start("a,b", STAY, "--grace", "0")
    agents, pids = workers(node, "a,b")
    os.kill(agents[0], signal.SIGSTOP)
    node.signal("SIGTERM")
    assert node.end() == 128 + signal.SIGTERM, node.text()
    gone(*agents, *pids)


def remote_agent(where: Path, settings: bytes) -> Node:
    """Start the process that ssh starts on a host, with these settings on its standard input."""
    (where / "settings").write_bytes(settings)
    script = 'cat settings; while read -r line; do echo "$line"; done'
    command = f"({script}) < input | exec {shlex.quote(sys.executable)} -m rallypoint.launch.ssh.remote_agent"
    os.mkfifo(where / "input")
    return Node(["sh", "-c", command], where, {})


def test_an_agent_whose_connection_has_ended_is_killed_if_it_does_not_end(place: Place) -> None:
    words = ["--standalone", "--grace", "0", place.script(STAY)]
    settings = {"words": words, "directory": str(place.where), "environment": {}, "kill_after_s": 0.1}
    node = remote_agent(place.where, json.dumps(settings).encode() + b"\n")
    place.nodes.append(node)
    with open(place.where / "input", "w"):
        agent = int(node.until(r"^agent (\d+)$")[0][1])
        pid = node.up(0, world=1)[0]
        os.kill(agent, signal.SIGSTOP)
    assert node.end() == 128 + signal.SIGKILL, node.text()
    gone(agent, pid)


@pytest.mark.parametrize(("settings", "says"), [(b"", "no settings"), (b"{}\n", "malformed settings")])
def test_settings_that_an_agent_cannot_use(place: Place, settings: bytes, says: str) -> None:
    node = remote_agent(place.where, settings)
    with open(place.where / "input", "w"):
        pass
    assert node.end() == 1 and says in node.err, node.text()


MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "twice": (("--hosts", "a,a"), "'a' is named twice"),
    "option": (("--hosts", "-oProxyCommand=x"), "'-oProxyCommand=x' is not"),
    "loopback": (("--hosts", "localhost,b"), "cannot reach the first one as 'localhost'"),
    "nodes": (("--hosts", "a,b", "--nnodes", "3"), "--nnodes=3 contradicts --hosts: 2 hosts"),
    "standalone": (("--hosts", "a,b", "--standalone"), "--standalone and --hosts are mutually exclusive"),
    "cluster": (("--hosts", "a,b", "--cluster", "slurm"), "--hosts and --cluster=slurm are mutually exclusive"),
    "variable": (("--hosts", "a,b", "--forward-env", "A-B"), "'A-B' is not the name of a variable"),
    "rank": (("--hosts", "a,b", "--node-rank", "0"), "--node-rank is for one node"),
    "name": (("--hosts", "a,b", "--node", "x"), "--node is for one node"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_a_usage_error_and_starts_nothing(place: Place, case: str) -> None:
    words, says = MISTAKES[case]
    node = place.run(*words, place.script("say('up')"), env=install_ssh(place.where))
    assert node.end() == 2 and says in node.err, node.text()
    assert not (place.where / "ssh.log").exists()


def test_options_that_depend_on_the_machine_are_parsed_on_the_hosts(place: Place, start: Start) -> None:
    """The launcher's machine may have no GPU, and none of the hosts' files and directories."""
    node = start("a", "say('up', world)", "--nproc-per-node", "gpu", "--log-dir", "logs", CUDA_VISIBLE_DEVICES="")
    assert node.end() != 0 and "[a] Error: Invalid value for '--nproc-per-node'" in node.err, node.text()


def test_a_directory_that_a_host_lacks_is_named(place: Place) -> None:
    here = place.where / "only-here"
    here.mkdir()
    env = install_ssh(place.where)
    fake = Path(env["PATH"].partition(os.pathsep)[0], "ssh")
    fake.write_text(fake.read_text().replace("exec sh -c", f"rmdir {here}; exec sh -c"))
    node = place.run("--hosts", "a", "--rdzv-endpoint", f"localhost:{place.port}", "x.py", env=env, where=here)
    assert node.end() == 1 and f"cannot change to the directory of the launcher, '{here}'" in node.err, node.text()


def test_variables_for_the_agents() -> None:
    environ = {"PET_ROLE": "x", "PYTHONPATH": "y", "HOME": "z", "NCCL_DEBUG": "1", "NCCL": "2", "RALLYPOINT_RUN": "r"}
    always = {"PET_ROLE": "x", "PYTHONPATH": "y"}
    assert forwarded_variables(environ, []) == always and "PET_*" in FORWARDED
    assert forwarded_variables(environ, ["NCCL_*", "HOME"]) == {**always, "HOME": "z", "NCCL_DEBUG": "1"}


@pytest.mark.needs("netns")
def test_hosts_in_namespaces_meet_on_the_first(place: Place) -> None:
    """No option but --hosts: the server is on the first host, and every agent on its own."""
    script = place.script("import socket\nsay('on', rank, world, socket.gethostname(), os.environ['MASTER_ADDR'])")
    with hosts(3) as places:
        node = place.run(
            "--hosts", "host-[a-c]".replace("[a-c]", "a,host-b,host-c"), script, env=install_ssh(place.where, places)
        )
        assert node.end() == 0, node.text()
    for rank, host in enumerate(places):
        node.until(rf"^\[{host.name}\] on {rank} 3 {host.name} {places[0].address}$")


STOP = """
import rallypoint
step = 0
while not rallypoint.worker().should_stop(step):
    if step == 5:
        say("on", rank)
    step += 1
    rallypoint.worker().barrier(timeout=600)
say("stopped", step)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGXCPU"])
def test_a_preemption_of_all_hosts(place: Place, name: str) -> None:
    env = install_ssh(place.where)
    meet = ("--hosts", "a,b", "--rdzv-endpoint", f"localhost:{place.port}", "--preempt-signal", name)
    node = place.run(*meet, place.script(STOP), env=env)
    node.until(r"on \d", 2)
    node.signal(name)
    assert node.end() == 75, node.text()
    steps = re.findall(r"stopped (\d+)$", node.out, re.M)
    assert len(steps) == 2 and steps[0] == steps[1]
