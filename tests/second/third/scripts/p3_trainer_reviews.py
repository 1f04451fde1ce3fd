"""Reviews, good or bad: transformers.Trainer with words that are dropped at random."""

import os
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, random_split
from transformers import Trainer, TrainingArguments, set_seed

SEED = 13
WORDS, LENGTH, UNKNOWN = 600, 40, 0


class Reviews(Dataset):
    def __init__(self, count):
        rng = np.random.default_rng(SEED)
        self.labels = rng.integers(0, 2, count)
        self.ids = rng.integers(1, WORDS, (count, LENGTH))
        told = rng.random((count, LENGTH)) < 0.12
        self.ids = np.where(told, 1 + self.labels[:, None] * 20 + self.ids % 20, self.ids)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": torch.from_numpy(self.ids[i]), "labels": int(self.labels[i])}


class BagOfContexts(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        self.embed = nn.Embedding(WORDS, dim, padding_idx=UNKNOWN)
        self.mix = nn.Conv1d(dim, dim, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 2))

    def forward(self, input_ids, labels=None):
        if self.training:
            input_ids = input_ids.masked_fill(torch.rand_like(input_ids, dtype=torch.float) < 0.1, UNKNOWN)
        h = torch.relu(self.mix(self.embed(input_ids).transpose(1, 2))).amax(-1)
        logits = self.head(h)
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main():
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    set_seed(SEED + rank)

    reviews = Reviews(4800)
    train_set, test_set = random_split(reviews, [0.8, 0.2])
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="reviews-"),
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        num_train_epochs=3,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=40,
        report_to="none",
        ddp_find_unused_parameters=False,
        use_cpu=True,
        seed=SEED + rank,
        data_seed=SEED,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=BagOfContexts(),
        args=arguments,
        train_dataset=train_set,
        eval_dataset=test_set,
        compute_metrics=accuracy,
    )
    trainer.train()
    final = trainer.evaluate()
    if rank == 0:
        print(f"accuracy {final['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
