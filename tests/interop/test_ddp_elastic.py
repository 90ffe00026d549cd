"""examples/ddp_elastic.py, killed at random, makes every step once: its loss is that of an undisturbed run.

`make soak` kills for a minute.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from tests.kill_workers import KILLING_S, ROOT, run_and_kill
from tests.launch.runs import Place

pytestmark = pytest.mark.needs("torch")

PAUSE_S = 0.005


def loss_after(steps: int) -> float:
    """Return the loss of the example's model, trained in this process on all rows."""
    import torch

    spec = importlib.util.spec_from_file_location("ddp_elastic", ROOT / "examples" / "ddp_elastic.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, optimizer = example.untrained()
    x, y = example.data()
    for _ in range(steps):
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(model(x), y))


def test_a_job_killed_at_random_ends_with_the_right_loss(tmp_path: Path) -> None:
    checkpoint = tmp_path / "line.pt"
    arguments = f"--checkpoint={checkpoint} --steps=400 --pause={PAUSE_S + KILLING_S / 800}"
    kills, said = run_and_kill(
        "ddp_elastic.py", *arguments.split(), workers=2, begun=checkpoint.exists, between_s=(1.0, 7.0)
    )
    print(f"{kills} kills", *re.findall(r"\d workers go on.*|step \d+: loss.*", said), sep="\n")
    found = re.findall(r"step 400: loss (\S+)", said)
    assert kills and found, said
    assert [float(loss) for loss in found] == pytest.approx([loss_after(400)] * len(found), rel=0.01)
    assert loss_after(400) < 1e-5 < loss_after(300), "a few steps more or less would show"


def test_a_preempted_job_goes_on_from_the_step_at_which_all_ranks_stopped(tmp_path: Path) -> None:
    """There is no other checkpoint: a step that is lost or made twice, by any rank, would show in the loss."""
    checkpoint = tmp_path / "line.pt"
    script = [ROOT / "examples" / "ddp_elastic.py", f"--checkpoint={checkpoint}", "--steps=400", "--every=1000"]
    with Place(tmp_path) as place:

        def start(*more: str) -> list[Any]:
            options = ["--nproc-per-node", 2, "--preempt-signal", "SIGTERM", *script, *more]
            return [place.node(name, "--node-rank", at, *options) for at, name in enumerate(("n0", "n1"))]

        nodes = start("--pause=0.05")
        nodes[0].until("4 workers begin")
        nodes[1].signal("SIGTERM")
        assert [node.end() for node in nodes] == [75, 75], "\n".join(node.text() for node in nodes)
        (stopped,) = nodes[0].until(r"stopped before step (\d+)")
        nodes = start()
        assert [node.end() for node in nodes] == [0, 0], "\n".join(node.text() for node in nodes)
        assert f"4 workers go on after step {int(stopped[1]) - 1}" in nodes[0].out or stopped[1] == "1"
        (loss,) = nodes[0].until(r"step 400: loss (\S+)")
        assert float(loss[1]) == pytest.approx(loss_after(400), rel=0.01)
