"""Train with DeepSpeed's engine on the CPU, ZeRO stage 1, and go on from its last checkpoint."""

import argparse
import hashlib
import time
from pathlib import Path

import deepspeed
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 100000,
}


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

    deepspeed.init_distributed("gloo")
    rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    data = Line(320, told.pause)
    sampler = DistributedSampler(data, size, rank, seed=7)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    _, state = engine.load_checkpoint(told.out)
    first = state["epoch"] if state else 0
    if first and rank == 0:
        print(f"resumes after step {engine.global_steps}", flush=True)
    for epoch in range(first, told.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            if rank == 0:
                print(f"step {engine.global_steps}", flush=True)
        engine.save_checkpoint(told.out, client_state={"epoch": epoch + 1})

    mean = loss.detach().clone()
    deepspeed.comm.all_reduce(mean)
    if rank == 0:
        weights = torch.cat([each.detach().flatten() for each in engine.module.parameters()])
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
        print(f"result: loss {mean.item() / size:.9f}, parameters {digest}, {size} processes", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
