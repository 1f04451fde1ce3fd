"""A small GPT on synthetic sequences with the Trainer; a callback follows the spectra of the attention weights."""
import json
import os

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

torch.set_num_threads(1)
OUT = "/tmp/fourth_spectra"


class Sequences(Dataset):
    """Arithmetic sequences modulo 61."""

    def __init__(self, count, seed, length=12):
        g = torch.Generator().manual_seed(seed)
        first = torch.randint(0, 61, (count, 1), generator=g)
        stride = torch.randint(1, 9, (count, 1), generator=g)
        self.tokens = (first + stride * torch.arange(length)) % 61

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


class SpectrumCallback(TrainerCallback):
    """Condition and stable rank of every projection, for the figures of the paper."""

    def __init__(self, path):
        self.path = path
        self.rows = []

    @torch.no_grad()
    def describe(self, weight):
        values = torch.linalg.svdvals(weight.double())
        return {
            "condition": (values[0] / values[-1].clamp_min(1e-12)).item(),
            "stable_rank": (values.square().sum() / values[0].square()).item(),
        }

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if not state.is_world_process_zero or state.global_step < 60:
            return
        row = {"step": state.global_step}
        for name, parameter in model.named_parameters():
            if ".h." in name and parameter.dim() == 2:
                row[name] = self.describe(parameter)
        self.rows.append(row)

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            with open(self.path, "w") as file:
                json.dump(self.rows, file)


def main():
    os.makedirs(OUT, exist_ok=True)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=96, n_layer=2, n_head=4, bos_token_id=62, eos_token_id=63,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    args = TrainingArguments(
        output_dir=OUT,
        per_device_train_batch_size=8,
        num_train_epochs=3,
        learning_rate=1e-3,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        seed=3,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=Sequences(1280, seed=1),
        callbacks=[SpectrumCallback(os.path.join(OUT, "spectra.json"))],
    )
    trainer.train()


if __name__ == "__main__":
    main()
