"""Token tagging with the Trainer: ragged rows, loss over all counted tokens of a step, early stopping on the score."""
import os
import shutil
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_outputs import TokenClassifierOutput

torch.set_num_threads(1)
VOCAB, TAGS = 90, 6


class Sentences(Dataset):
    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.rows = [rng.integers(1, VOCAB, size=int(rng.integers(3, 40))) for _ in range(count)]
        self.odd = [rng.random(len(row)) < 0.15 for row in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = self.rows[i]
        tags = (ids + np.concatenate([[0], ids[:-1]])) % TAGS
        tags = np.where(self.odd[i], (tags + 1) % TAGS, tags)
        tags[0] = -100
        return {"input_ids": ids.tolist(), "labels": tags.tolist(), "length": len(ids)}


def collate(rows):
    width = max(r["length"] for r in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    tags = torch.full((len(rows), width), -100)
    for n, r in enumerate(rows):
        ids[n, : r["length"]] = torch.tensor(r["input_ids"])
        tags[n, : r["length"]] = torch.tensor(r["labels"])
    return {"input_ids": ids, "labels": tags}


class TagConfig(PretrainedConfig):
    model_type = "toy-tagger"


class TagModel(PreTrainedModel):
    config_class = TagConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(VOCAB, 48)
        self.mix = nn.Conv1d(48, 128, 3, padding=1)
        self.out = nn.Linear(128, TAGS)
        self.post_init()

    def forward(self, input_ids, labels=None, num_items_in_batch=None, **kwargs):
        logits = self.out(torch.relu(self.mix(self.embed(input_ids).transpose(1, 2))).transpose(1, 2))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / (num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum())
        return TokenClassifierOutput(loss=loss, logits=logits)


def token_accuracy(prediction):
    guesses, tags = prediction.predictions.argmax(-1), prediction.label_ids
    counted = tags != -100
    return {"accuracy": float((guesses == tags)[counted].mean())}


class Notes(TrainerCallback):
    def __init__(self, path):
        self.path = path

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero:
            with open(self.path, "a") as file:
                file.write(f"{state.global_step} {metrics['eval_accuracy']:.4f}\n")


def main():
    folder = os.path.join(tempfile.gettempdir(), "toy-tagger-run")
    args = TrainingArguments(
        output_dir=folder, num_train_epochs=8, per_device_train_batch_size=8, per_device_eval_batch_size=32,
        gradient_accumulation_steps=2, learning_rate=2e-3, eval_strategy="epoch", save_strategy="epoch",
        save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="accuracy", greater_is_better=True,
        logging_steps=40, use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False,
        ddp_find_unused_parameters=False, seed=23,
    )
    trainer = Trainer(
        model_init=lambda: TagModel(TagConfig()), args=args, data_collator=collate, compute_metrics=token_accuracy,
        train_dataset=Sentences(1600, 1), eval_dataset=Sentences(301, 2),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2), Notes(f"{folder}/notes.txt")],
    )
    trainer.train()
    final = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("final accuracy", round(final["eval_accuracy"], 4))
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
