"""The same with Hugging Face's Trainer, as far as its user can do it: steps are taken, and left out, by the Trainer."""

import contextlib

import plants
import torch
import torch.distributed as dist
import torch.nn.functional as F
from plants import here
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = plants.network()

    def forward(self, x, labels):
        return {"loss": plants.lost(F.cross_entropy(self.inner(plants.inputs(x)), labels), self.inner)}  # told: forward


class Noted(TrainerCallback):
    def on_train_begin(self, args, state, control, model, **kwargs):
        plants.after_wrapping(model)

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs):
        plants.after_backward(model, optimizer)

    def on_optimizer_step(self, args, state, control, model, optimizer, lr_scheduler, **kwargs):
        plants.after_step(model, optimizer, lr_scheduler)

    def on_step_end(self, args, state, control, **kwargs):
        first, second = torch.tensor(float(state.global_step)), torch.tensor(10.0)
        if here("two sums swapped"):
            dist.all_reduce(second)  # told: sums
            dist.all_reduce(first)
        else:
            dist.all_reduce(first)
            dist.all_reduce(second)

    def on_train_end(self, args, state, control, optimizer, **kwargs):
        plants.at_the_end(optimizer)


class Mine(Trainer):
    def training_step(self, model, inputs, *args, **kwargs):
        plants.one_more_batch()
        if here("an exception in forward, swallowed"):
            with contextlib.suppress(RuntimeError):
                model(inputs["x"][:, :7], inputs["labels"])
        return super().training_step(model, inputs, *args, **kwargs)  # told: loss


def collate(rows):
    return {"x": torch.stack([x for x, _ in rows]), "labels": torch.stack([y for _, y in rows])}


def main():
    arguments = TrainingArguments(
        output_dir="out", max_steps=plants.STEPS, per_device_train_batch_size=10, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, ddp_backend="gloo", logging_steps=10_000,
    )  # fmt: skip
    model = Model()
    optimizer = plants.optimizer_of(model)
    Mine(
        model, arguments, data_collator=collate, train_dataset=plants.Samples(), callbacks=[Noted()],
        optimizers=(optimizer, plants.schedule_of(optimizer)),
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
