"""Control characters in the names, keys and reasons that peers send are escaped wherever people read them."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.launch.runs import Place
from tests.raw_peer import AMPLE_S, until

import rallypoint
from rallypoint.cli import main
from rallypoint.errors import MembersMissing, RunClosed
from rallypoint.launch.events import Events
from rallypoint.launch.failure_report import report
from rallypoint.launch.failures import Failure
from rallypoint.recipes.hosting import shared_object
from rallypoint.recipes.rendezvous import Rendezvous
from rallypoint.server.listener import PeerLog
from rallypoint.text import printable

EVIL = "evil\x1b[2J\x9b2J\r\nFORGED \u202e"
SHOWN = r"evil\x1b[2J\x9b2J\r\nFORGED \u202e"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünï, 日本, \u00a0\u200d\U0001f600", "plain, ünï, 日本, \u00a0\u200d\U0001f600"),
        (EVIL, SHOWN),
        ("a\tb\x00\x7f\ud800\u2028", r"a\tb\x00\x7f\ud800\u2028"),
    ],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_characters_to_keep_are_not_escaped() -> None:
    assert printable("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"


def test_an_error_has_it_raw_in_its_field_and_shown_in_its_sentence() -> None:
    error = RunClosed(thing="rendezvous 'job'", result=EVIL, reason=EVIL)
    assert error.reason == error.result == EVIL
    assert f": {SHOWN}." in str(error) and str(error).isprintable()


def test_events_of_the_launcher(capfd: Any) -> None:
    events = Events("n", quiet=False, as_json=False)
    events.say("end", EVIL)
    events.fail("end", EVIL)
    events.waits(EVIL)
    events.fail("failure", "words", f"a\n\t{EVIL}")
    shown = capfd.readouterr().err
    assert shown.splitlines()[:3] == [f"rallypoint run: {SHOWN}"] * 3 and "\x1b" not in shown


def test_a_failure_reported_by_another_node() -> None:
    told = Failure(node=EVIL, host=EVIL, rank=1, local_rank=0, pid=2, code=1, how=EVIL, at=EVIL, message="boom")
    assert SHOWN in told.summary() and told.summary().isprintable()
    shown = report(told, [told])
    assert "\x1b" not in shown and not [line for line in shown.splitlines() if line.startswith("FORGED")]


def test_log_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    PeerLog().protocol_error("10.0.0.1", "10.0.0.1:1", EVIL)
    assert SHOWN in caplog.messages[-1] and caplog.messages[-1].isprintable()
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.01)
    barrier = rallypoint.Barrier(rallypoint.HashStore(), "b", [EVIL, "other"])
    with caplog.at_level(logging.INFO, "rallypoint"), pytest.raises(MembersMissing) as caught:
        barrier.wait("other", timeout=0.1)
    assert caught.value.missing == (EVIL,) and str(caught.value).isprintable()
    assert SHOWN in caplog.messages[-1] and all(message.isprintable() for message in caplog.messages)


def test_commands(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    with rallypoint.connect(url) as store:
        store.set(EVIL, EVIL)
        shown = CliRunner().invoke(main, ["ls", "--store", url])
        assert shown.output.splitlines() == [SHOWN]

        def hold() -> None:
            with rallypoint.Lock(store, "lock", member=EVIL):
                held.set()
                over.wait(AMPLE_S)

        held, over = threading.Event(), threading.Event()
        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(AMPLE_S)
        shown = CliRunner().invoke(main, ["lock", "--store", url, "--timeout", "0.1", "-v", "lock", "--", "true"])
        over.set()
        holder.join(AMPLE_S)
    assert shown.exit_code == 3 and SHOWN in shown.output and "\x1b" not in shown.output
    assert not [line for line in shown.output.splitlines() if line.startswith("FORGED")]


def test_nodes_and_results_of_a_run(tmp_path: Path) -> None:
    with Place(tmp_path) as place:
        node = place.node("a", place.script("stay()"), nodes="3")
        with rallypoint.TCPStore("localhost", place.port, timeout=AMPLE_S) as store:
            peer = Rendezvous(store, "job", 3, node=EVIL, settings={"restart": "group", "restart_budget": 0})
            until(peer.status, lambda status: status.waiting == ("a",))
            peer.close("failed", EVIL)
        assert node.end() == 1
    assert SHOWN in node.err and "\x1b" not in node.err
    assert not [line for line in node.err.splitlines() if line.startswith("FORGED")]
