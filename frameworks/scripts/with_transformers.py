"""Train a tiny language model with the `Trainer` of transformers, and go on from its last checkpoint."""

import argparse
import hashlib
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Counting(Dataset):
    """Sequences that count up from a random number; reading one takes a moment, as from a disk."""

    def __init__(self, rows, pause):
        starts = torch.randint(0, 64, (rows, 1), generator=torch.Generator().manual_seed(7))
        self.rows, self.pause = (starts + torch.arange(16)) % 64, pause

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        time.sleep(self.pause)
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


class Steps(TrainerCallback):
    """Print each step, and where training begins."""

    def on_train_begin(self, args, state, control, **_):
        if state.is_world_process_zero and state.global_step:
            print(f"resumes after step {state.global_step}", flush=True)

    def on_step_end(self, args, state, control, **_):
        if state.is_world_process_zero:
            print(f"step {state.global_step}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.01)
    told = parser.parse_args()

    told.out.mkdir(parents=True, exist_ok=True)
    set_seed(7)
    tiny = {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, **tiny))
    arguments = TrainingArguments(
        output_dir=str(told.out),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=8,
        num_train_epochs=told.epochs,
        learning_rate=0.01,
        save_steps=20,
        save_total_limit=2,
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        seed=7,
    )
    trainer = Trainer(model, arguments, train_dataset=Counting(320, told.pause), callbacks=[Steps()])
    done = trainer.train(resume_from_checkpoint=get_last_checkpoint(told.out))
    if trainer.is_world_process_zero():
        weights = torch.cat([each.detach().flatten() for each in model.parameters()])
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
        loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
        print(f"result: loss {float(loss):.9f}, parameters {digest}, {arguments.world_size} processes", flush=True)
        assert done.global_step == trainer.state.max_steps


if __name__ == "__main__":
    main()
