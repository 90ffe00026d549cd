"""Train with accelerate's `Accelerator`, and go on from the last state that `save_state` has saved."""

import argparse
import hashlib
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset


class Line(Dataset):
    """Points of a function that the model can learn; reading one takes a moment, as from a disk."""

    def __init__(self, rows, pause):
        self.x, self.pause = torch.randn(rows, 8, generator=torch.Generator().manual_seed(7)), pause
        self.y = self.x.sin().sum(dim=1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        time.sleep(self.pause)
        return self.x[row], self.y[row]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.01)
    told = parser.parse_args()

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    loader = DataLoader(Line(320, told.pause), batch_size=8, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    first = 0
    saved = sorted(told.out.glob("epoch_*"), key=lambda path: int(path.name.removeprefix("epoch_")))
    if saved:
        accelerator.load_state(saved[-1])
        first = int(saved[-1].name.removeprefix("epoch_"))
        accelerator.print(f"resumes after step {first * len(loader)}", flush=True)
    for epoch in range(first, told.epochs):
        loader.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, 1):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"step {epoch * len(loader) + number}", flush=True)
        scheduler.step()
        accelerator.save_state(told.out / "draft")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:  # whenever we are killed, a state that has a number is complete
            (told.out / "draft").rename(told.out / f"epoch_{epoch + 1}")

    mean = accelerator.reduce(loss.detach(), reduction="mean").item()
    weights = torch.cat([each.detach().flatten() for each in accelerator.unwrap_model(model).parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    accelerator.print(
        f"result: loss {mean:.9f}, parameters {digest}, {accelerator.num_processes} processes", flush=True
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
