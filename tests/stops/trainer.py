"""Hugging Face's Trainer, as it is."""

import sys

import torch
from parts import error, finish, network, reach, samples
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network(dropout=0.1)

    def forward(self, x, labels):
        return {"loss": error(self.inner, x, labels), "logits": self.inner(x)}


def collate(rows):
    return {"x": torch.stack([x for x, _ in rows]), "labels": torch.stack([y for _, y in rows])}


class Told(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        reach("accumulate")

    def on_step_end(self, args, state, control, **kwargs):
        reach("evaluate" if control.should_evaluate else "save" if control.should_save else "step")


def main():
    arguments = TrainingArguments(
        output_dir="out", num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True, ddp_backend="gloo", learning_rate=0.01, save_steps=5,
        eval_strategy="steps", eval_steps=7, logging_steps=4,
    )  # fmt: skip
    data = samples()
    trainer = Trainer(
        Model(), arguments, data_collator=collate, train_dataset=data, eval_dataset=data, callbacks=[Told()]
    )
    for _ in range(1 + ("twice" in sys.argv)):  # the second training saves in the same folder
        trainer.train()
    finish(trainer.model)


if __name__ == "__main__":
    main()
