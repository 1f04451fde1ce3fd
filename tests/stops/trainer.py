"""Hugging Face's Trainer, as it is: trainer.py [KIND | twice]."""

import sys

import torch
from parts import error, finish, network, reach, samples
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1}
KINDS = {
    "unsaved": {"save_strategy": "no"},
    "steps": {"max_steps": 20, "save_total_limit": 1},
    "best": {"save_strategy": "best", "eval_strategy": "epoch", **BEST},
    "patient": {"eval_steps": 2, "save_steps": 2, "num_train_epochs": 9, "learning_rate": 0.3, **BEST},
}


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
    kind = sys.argv[-1]
    usual = {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "disable_tqdm": True, "output_dir": "out"}
    usual |= {"num_train_epochs": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    usual |= {"learning_rate": 0.01, "save_steps": 5, "eval_strategy": "steps", "eval_steps": 7, "logging_steps": 4}
    arguments = TrainingArguments(**usual | KINDS.get(kind, {}))
    data, callbacks = samples(), [Told()]
    if kind == "patient":
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=3))
    trainer = Trainer(
        Model(), arguments, data_collator=collate, train_dataset=data, eval_dataset=data, callbacks=callbacks
    )
    for _ in range(1 + ("twice" in sys.argv)):  # the second training saves in the same folder
        trainer.train()
    finish(trainer.model)


if __name__ == "__main__":
    main()
