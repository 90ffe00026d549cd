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
