"""Lists of hosts in Slurm's notation: a table, an inverse as oracle, and text that is no list."""

from __future__ import annotations

import itertools
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.machines.machine import MAX_MEMBERS
from rallypoint.launch.clusters.node_list import expand_hosts
from rallypoint.launch.ssh.remote_hosts import parse_hosts

LISTS = {
    "node1": "node1",
    "a,b,c": "a b c",
    "node[1-3]": "node1 node2 node3",
    "node[001-003,7],gpu-a[1-2]-b[0-1]": "node001 node002 node003 node7 gpu-a1-b0 gpu-a1-b1 gpu-a2-b0 gpu-a2-b1",
    "n[08-11]": "n08 n09 n10 n11",
    "n[9-11]": "n9 n10 n11",
    "n[098-101]": "n098 n099 n100 n101",
    "n[1,3,5-6]x": "n1x n3x n5x n6x",
    "rack[1-2]node[3,1]": "rack1node3 rack1node1 rack2node3 rack2node1",
    "[1-2]": "1 2",
    "gnode[10,20,25,37]": "gnode10 gnode20 gnode25 gnode37",
    "a.b-c_d,E[0-0]": "a.b-c_d E0",
}

NOT_LISTS = [
    "", ",", "a,", ",a", "a,,b", "a b", "n[", "n]", "n[]", "n[1-]", "n[-1]", "n[1-2", "n1-2]", "n[2-1]", "n[1,]",
    "n[a-b]", "n[1-2-3]", "n[[1-2]]", "n[1][", "-n", "n[1-65537]", "n[0-255][0-256]", "(null)", "n\n", "n[1-2]\0", "é",
    "n[٣-٤]", "n[" + "9" * 40 + "]", "a" * 254, "$(reboot)", "a;b", "n[0-9]" + "[0-9]" * 60, "n[" + "1," * 99999 + "1]",
]  # fmt: skip


@pytest.mark.parametrize("text", LISTS)
def test_a_list_is_expanded(text: str) -> None:
    assert expand_hosts(text) == LISTS[text].split()


@pytest.mark.parametrize("text", NOT_LISTS, ids=lambda text: repr(text)[:20])
def test_what_is_not_a_list_is_refused_with_a_short_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"host|range") as caught:
        expand_hosts(text)
    assert 0 < len(str(caught.value)) < 1000


def test_a_list_as_long_as_a_run_may_be() -> None:
    assert len(expand_hosts(f"n[1-{MAX_MEMBERS}]")) == MAX_MEMBERS


LETTERS = st.text(string.ascii_letters, min_size=1, max_size=4)
RANGES = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=3)
NAMES = st.tuples(LETTERS, st.lists(st.tuples(RANGES, LETTERS | st.just("")), max_size=2))


@given(st.lists(NAMES, min_size=1, max_size=4))
def test_a_list_that_was_written_from_its_hosts(
    names: list[tuple[str, list[tuple[list[tuple[int, int, int]], str]]]],
) -> None:
    written, expected = [], []
    for letters, groups in names:
        text, pieces = letters, [[letters]]
        for ranges, suffix in groups:
            text += (
                "[" + ",".join(f"{low:0{width}}-{low + more:0{width}}" for low, more, width in ranges) + "]" + suffix
            )
            numbers = [
                str(n).zfill(max(w, len(str(low)))) for low, more, w in ranges for n in range(low, low + more + 1)
            ]
            pieces += [numbers, [suffix]]
        written.append(text)
        expected += ["".join(piece) for piece in itertools.product(*pieces)]
    assert expand_hosts(",".join(written)) == expected


@given(st.text() | st.text("n[]-,0123456789", max_size=40))
def test_any_text_is_a_list_of_names_or_a_value_error(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except ValueError:
        return
    assert 0 < len(hosts) <= MAX_MEMBERS
    assert all(host and not set(host) & set("[], \n") and not host.startswith("-") for host in hosts)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [("a", "a"), ("a, b", "a b"), ("me@n[1-2],you@c", "me@n1 me@n2 you@c")],
)
def test_hosts_for_ssh(text: str, hosts: str) -> None:
    assert parse_hosts(text) == tuple(hosts.split())


@pytest.mark.parametrize("text", ["", "a,a", "n[1-2],n2", "a,me@a", "-oProxyCommand=x", "@a", "-l@a", "a b@c", "a,,b"])
def test_hosts_that_ssh_must_not_see(text: str) -> None:
    with pytest.raises(ValueError, match=r"twice|not a list|not the name"):
        parse_hosts(text)
