"""Train with Lightning's `Trainer`, strategy ddp, and go on from `last.ckpt`."""

import argparse
import hashlib
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
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


class Regression(lightning.LightningModule):
    """A small network, its loss and its optimizer."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]


class Steps(Callback):
    """Print each step, and where training begins."""

    def on_train_start(self, trainer, _):
        if trainer.is_global_zero and trainer.global_step:
            print(f"resumes after step {trainer.global_step}", flush=True)

    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero:
            print(f"step {trainer.global_step}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.01)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2)
    told = parser.parse_args()

    lightning.seed_everything(7)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        num_nodes=told.nodes,
        devices=told.devices,
        max_epochs=told.epochs,
        callbacks=[ModelCheckpoint(told.out, save_last=True), Steps()],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=told.out,
    )
    model = Regression()
    loader = DataLoader(Line(320, told.pause), batch_size=8, shuffle=True)
    last = told.out / "last.ckpt"
    trainer.fit(model, loader, ckpt_path=last if last.exists() else None)

    environment = type(trainer.strategy.cluster_environment).__name__
    loss = trainer.callback_metrics["loss"].item()
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    if trainer.is_global_zero:
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
        print(f"environment: {environment}", flush=True)
        print(f"result: loss {loss:.9f}, parameters {digest}, {trainer.world_size} processes", flush=True)


if __name__ == "__main__":
    main()
