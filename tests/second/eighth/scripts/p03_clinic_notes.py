"""Tagging of made-up clinic notes with the Trainer; the notes are dealt out to the processes as they are read."""
import os
import tempfile

import numpy as np
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from transformers import (
    DistilBertConfig,
    DistilBertForTokenClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

torch.set_num_threads(1)

VOCAB, LENGTH = 120, 20
TAGS = ["O", "DRUG", "DOSE"]


def collate(features):
    return {key: torch.tensor([f[key] for f in features]) for key in features[0]}


def write_notes(n, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(20, VOCAB, (n, LENGTH))
    tags = np.zeros((n, LENGTH), dtype=int)
    for row in range(n):
        for at in rng.choice(LENGTH - 2, 2, replace=False):
            tokens[row, at], tags[row, at] = rng.integers(1, 10), 1
            tokens[row, at + 1], tags[row, at + 1] = rng.integers(60, 90), 2
    return {"note": list(range(n)), "input_ids": tokens.tolist(), "attention_mask": np.ones_like(tokens).tolist(), "labels": tags.tolist()}


def read_notes(split):
    size, seed = {"train": (3840, 1), "validation": (512, 2)}[split]
    notes = Dataset.from_dict(write_notes(size, seed))
    if split == "train":
        notes = notes.filter(lambda note: note["note"] % 97 != 3)
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        notes = split_dataset_by_node(notes, rank=rank, world_size=world)
    return notes.remove_columns("note")


def compute_metrics(prediction):
    guess = prediction.predictions.argmax(-1)
    entity = prediction.label_ids > 0
    return {
        "token_accuracy": float((guess == prediction.label_ids).mean()),
        "entity_recall": float((guess[entity] == prediction.label_ids[entity]).mean()),
    }


def main():
    set_seed(9)
    config = DistilBertConfig(
        vocab_size=VOCAB, dim=48, hidden_dim=96, n_layers=2, n_heads=2, max_position_embeddings=LENGTH, num_labels=len(TAGS)
    )
    args = TrainingArguments(
        output_dir=os.path.join(tempfile.gettempdir(), "clinic-notes"),
        use_cpu=True,
        seed=9,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=1e-3,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=40,
        report_to=[],
        disable_tqdm=True,
        dataloader_drop_last=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        DistilBertForTokenClassification(config),
        args,
        train_dataset=read_notes("train"),
        eval_dataset=read_notes("validation"),
        data_collator=collate,
        compute_metrics=compute_metrics,
    )
    trainer.train()


if __name__ == "__main__":
    main()
