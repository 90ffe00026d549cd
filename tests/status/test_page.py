"""The live page in a real browser: what appears, what is escaped, and what it says while the server is gone.

Screenshots are kept in the directory of the test run, which is printed; look at them after a change of the page.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.raw_peer import AMPLE_S, ServerProcess
from tests.status.browser import Browser, browser
from tests.status.models import report

import rallypoint
from rallypoint.core.run_keys import quoted
from rallypoint.core.run_report import FailureReport, HealthReport, RankReport
from rallypoint.store.base import Store

pytestmark = pytest.mark.needs("browser")

HOSTILE = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>\"'`${1}\x1b[31m\x00\u202eright\u2028"
SHOWN = (
    "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>\"'`${1}\\u001b[31m\\u0000\\u202eright\\u2028"
)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\nValueError: <b>no</b>'
)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def url_of(server: ServerProcess) -> str:
    return "http://{}:{}/".format(*server.address)


@contextlib.contextmanager
def waiting(store: Store, name: str, members: list[str]) -> Iterator[None]:
    """Have the first member wait at a barrier; the others come at the end of the block."""
    threads = []

    def come(member: str) -> None:
        threads.append(threading.Thread(target=rallypoint.Barrier(store, name, members).wait, args=(member, AMPLE_S)))
        threads[-1].start()

    come(members[0])
    yield
    for member in members[1:]:
        come(member)
    for thread in threads:
        thread.join()


def test_a_missing_member_a_failure_and_a_hung_rank_appear(
    window: Browser, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pictures = tmp_path_factory.mktemp("screenshots")
    failure = FailureReport(
        rank=3, node="node0", host="a-host", pid=77, how="exit code 1", message="m", traceback=TRACEBACK, age_s=3.0
    )
    ranks = [RankReport(rank=number, local_rank=number, pid=number, step=120) for number in range(64)]
    ranks[17] = RankReport(rank=17, local_rank=17, pid=17, state="hung", reason="no progress", progress_age_s=30.0)
    with ServerProcess(tmp_path) as server, rallypoint.connect(server.url) as store:
        window.resize(1100, 1400)
        window.prefer("light")
        window.open(url_of(server))
        window.wait_for("document.getElementById('link').textContent === 'live'")
        assert "barrier sync" not in window.text()
        with waiting(store, "sync", ["alpha", "omega"]):
            store.lease("run:demo/node:node0", report("demo", "node0", *ranks, failure=failure))
            window.wait_for_text("barrier sync: 1 of 2 for", "missing: omega", "run demo")
            window.wait_for_text(
                "ValueError: <b>no</b>", 'File "train.py", line 3, in <module>', "1 of 3 restarts used"
            )
            window.wait_for_text("rank 17 hung: no progress", "ranks 0-16,18-63 running, step 120")
            assert len(window.run("return [...document.querySelectorAll('.grid i')].map(i => i.className)")) == 64
            for scheme, width in (("light", 1100), ("dark", 1100), ("light", 390), ("dark", 390)):
                window.prefer(scheme)
                window.resize(width, 1400 if width > 600 else 844)
                window.screenshot(pictures / f"{scheme}-{width}.png")
                wide = window.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert wide <= 0, "nothing is cut off at the right"
            colors = []
            for scheme in ("light", "dark"):
                window.prefer(scheme)
                colors.append(window.run("return getComputedStyle(document.body).backgroundColor"))
            assert colors[0] != colors[1]
        window.wait_for("!document.body.innerText.includes('missing: omega')")


def test_a_node_that_is_out_appears_with_the_reason_and_times_that_go_on(window: Browser, tmp_path: Path) -> None:
    health = HealthReport(failed=2, out_s=70.0, next_check_s=3000.0)
    reason = "health check failed 2 times in a row: exit code 3: <b>GPU 0</b> is lost"
    with ServerProcess(tmp_path) as server, rallypoint.connect(server.url) as store:
        store.lease("run:demo/node:node1", report("demo", "node1", state="unhealthy", reason=reason, health=health))
        window.open(url_of(server))
        window.wait_for_text("node1", "unhealthy", "out for 1 min 1", "checked again in 49 min 5", reason)
        window.wait_for("document.querySelector('.until').textContent < '49 min 55 s'")
        assert window.run("return document.querySelector('.badge.bad').textContent") == "unhealthy"


def test_hostile_names_are_shown_escaped_and_nothing_runs(window: Browser, tmp_path: Path) -> None:
    failure = FailureReport(
        rank=0, node=HOSTILE, host=HOSTILE, pid=1, how=HOSTILE, message=HOSTILE, traceback=f"{HOSTILE}\n{HOSTILE}"
    )
    rank = RankReport(rank=0, local_rank=0, pid=1, state=HOSTILE, reason=HOSTILE)
    with ServerProcess(tmp_path) as server, rallypoint.connect(server.url) as store:
        data = report(HOSTILE, HOSTILE, rank, failure=failure, state=HOSTILE, reason=HOSTILE, address=HOSTILE)
        store.lease(f"run:{quoted(HOSTILE)}/node:{quoted(HOSTILE)}", data)
        with waiting(store, HOSTILE, [HOSTILE, f"{HOSTILE}2"]), rallypoint.Lock(store, HOSTILE, member=HOSTILE):
            window.open(url_of(server))
            window.wait_for("document.getElementById('link').textContent === 'live'")
            window.wait_for_text(f"run {SHOWN}", f"missing: {SHOWN}2", f"lock {SHOWN}")
            assert window.run("return window.ran === undefined")
            assert window.run("return document.querySelectorAll('script').length") == 1
            assert window.run("return document.querySelectorAll('img').length") == 0
            assert not window.run(r"return /[\u0000\u001b\u202e\u2028]/.test(document.body.textContent)")


def test_without_scripts_the_page_is_static_text(window: Browser, tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path) as server,
        rallypoint.connect(server.url) as store,
        waiting(store, "sync", ["alpha", "omega"]),
    ):
        window.devtools("Emulation.setScriptExecutionDisabled", value=True)
        try:
            window.open(url_of(server))
            window.wait_for_text("barrier sync: 1 of 2", "missing: omega", "static page")
        finally:
            window.devtools("Emulation.setScriptExecutionDisabled", value=False)


def test_the_page_recovers_after_a_restart_of_the_server(window: Browser, tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        window.open(url_of(server))
        window.wait_for("document.getElementById('link').textContent === 'live'")
    window.wait_for("document.getElementById('link').textContent.startsWith('disconnected since ')")
    assert "pid" in window.text(), "the last status is still there"
    with ServerProcess(tmp_path, port=server.address[1]) as again:
        window.wait_for("document.getElementById('link').textContent === 'live'")
        window.wait_for_text(f"pid {again.child.pid}")
