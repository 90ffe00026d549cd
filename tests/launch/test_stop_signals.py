"""A preemption and the waits of an agent; and `should_stop` in a process without an agent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rallypoint.launch.wakeup_pipe import Preempted, Signalled, WakeupPipe
from rallypoint.launch.worker_context import Worker

BY_DRAIN = Preempted("drain")


@pytest.fixture
def wakeup() -> Iterator[WakeupPipe]:
    made = WakeupPipe(preempting=("SIGUSR1", "SIGTERM", "SIGINT"))
    with made.handling_signals():
        yield made


def send(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


def test_a_preemption_interrupts_a_long_wait_only(wakeup: WakeupPipe) -> None:
    def request() -> str:
        send("SIGUSR1")
        return "reply"

    assert wakeup.interruptible(request) == "reply"
    assert wakeup.preempted == Preempted("SIGUSR1", "SIGUSR1") and not wakeup.signals and not wakeup.is_ending()
    with pytest.raises(Signalled) as caught:
        wakeup.interruptible(lambda: pytest.fail("it was made"), patience_s=0.0)
    assert not caught.value.name
    assert wakeup.interruptible(lambda: "reply") == "reply"


def test_a_signal_ends_a_long_wait(wakeup: WakeupPipe) -> None:
    def wait() -> None:
        send("SIGTERM")
        signal.pause()

    with pytest.raises(Signalled):
        wakeup.interruptible(wait, patience_s=0.0)
    assert wakeup.preempted == Preempted("SIGTERM", "SIGTERM"), "it is not among those that end the agent"


def test_an_operator_ends_a_long_wait(wakeup: WakeupPipe) -> None:
    def wait() -> None:
        threading.Thread(target=wakeup.preempt, args=(BY_DRAIN,)).start()
        while True:  # in slices: a signal right before it sleeps does not wake this thread
            threading.Event().wait(0.1)

    with pytest.raises(Signalled):
        wakeup.interruptible(wait, patience_s=0.0)
    assert wakeup.preempted == BY_DRAIN


def test_the_first_reason_counts_but_for_a_drain_of_the_whole_run(wakeup: WakeupPipe) -> None:
    send("SIGUSR1")
    wakeup.preempt(BY_DRAIN)
    assert wakeup.preempted == Preempted("SIGUSR1", "SIGUSR1")
    everything = BY_DRAIN._replace(whole=True)
    wakeup.preempt(everything)
    send("SIGTERM")
    assert wakeup.preempted == everything and not wakeup.signals


def test_another_sigint_is_an_ordinary_one(wakeup: WakeupPipe) -> None:
    send("SIGINT")
    assert not wakeup.signals
    send("SIGINT")
    assert wakeup.signals == ["SIGINT"]


NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE TORCHELASTIC_RESTART_COUNT"
OURS = "URL RUN NODE ROUND SCOPE NODE_ADDR RANK0_ADDR"


@pytest.fixture
def worker() -> Worker:
    """A worker whose agent has no place for records."""
    names = [*NAMES.split(), *(f"RALLYPOINT_{name}" for name in OURS.split())]
    return Worker(dict.fromkeys(names, "1"))


def test_without_a_record_nobody_stops(worker: Worker) -> None:
    assert not any(worker.should_stop(step) for step in (0, 10, 5, -3, 2**63 - 1))


@pytest.mark.parametrize("step", ["3", 1.5, None, 2**63])
def test_a_step_is_an_integer(worker: Worker, step: Any) -> None:
    with pytest.raises(TypeError, match="step must be an integer of at most 64 bits, not"):
        worker.should_stop(step)
