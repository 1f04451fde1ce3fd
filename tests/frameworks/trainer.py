"""Hugging Face's Trainer, as it is."""

import time

import torch
from parts import FOR_EVER_SECONDS, STEPS, error, hangs, network, samples
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x, labels):
        return {"loss": error(self.inner, x, labels)}


def collate(rows):
    if hangs("collate"):
        time.sleep(FOR_EVER_SECONDS)  # FAULT collate
    return {"x": torch.stack([x for x, _ in rows]), "labels": torch.stack([y for _, y in rows])}


class Said(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if hangs("callback"):
            time.sleep(FOR_EVER_SECONDS)  # FAULT callback


class Mine(Trainer):
    def training_step(self, *args, **kwargs):
        if hangs("step"):
            time.sleep(FOR_EVER_SECONDS)  # FAULT step
        return super().training_step(*args, **kwargs)


def main():
    arguments = TrainingArguments(
        output_dir="out", max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, ddp_backend="gloo",
    )  # fmt: skip
    Mine(Model(), arguments, data_collator=collate, train_dataset=samples(), callbacks=[Said()]).train()


if __name__ == "__main__":
    main()
