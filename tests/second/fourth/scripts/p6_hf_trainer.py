"""Trains a DistilBERT-like classifier with the Hugging Face Trainer and keeps the best weights of the run."""

import argparse
import csv
import os

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

LABELS, VOCAB, LENGTH = 4, 500, 32


def reviews(count, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, LABELS, count)
    tokens = rng.integers(1, VOCAB, (count, LENGTH))
    telling = rng.random((count, LENGTH)) < 0.12
    tokens = np.where(telling, labels[:, None] * 100 + tokens % 20 + 1, tokens)
    mask = np.ones_like(tokens)
    return Dataset.from_dict(
        {"input_ids": tokens.tolist(), "attention_mask": mask.tolist(), "labels": labels.tolist()}
    )


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class KeepBest(TrainerCallback):
    """Saves the weights whenever the evaluation improves, and a table of all evaluations."""

    def __init__(self, folder):
        self.folder, self.best, self.table = folder, 0.0, []
        os.makedirs(folder, exist_ok=True)

    def on_evaluate(self, args, state, control, metrics=None, model=None, **kwargs):
        score = metrics["eval_accuracy"]
        self.table.append({"step": state.global_step, "accuracy": score, "loss": metrics["eval_loss"]})
        with open(os.path.join(self.folder, "scores.csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(self.table[0]))
            writer.writeheader()
            writer.writerows(self.table)
        if score >= self.best:
            self.best = score
            weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
            torch.save(weights, os.path.join(self.folder, "best.pt"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--reviews", type=int, default=1280)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--out", default="reviews-run")
    args = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(13)
    config = DistilBertConfig(
        vocab_size=VOCAB, dim=128, hidden_dim=384, n_layers=3, n_heads=4, max_position_embeddings=LENGTH, num_labels=LABELS
    )
    settings = TrainingArguments(
        output_dir=args.out,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=32,
        learning_rate=args.lr,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
        ddp_find_unused_parameters=False,
        dataloader_drop_last=False,
        seed=13,
    )
    trainer = Trainer(
        model=DistilBertForSequenceClassification(config),
        args=settings,
        train_dataset=reviews(args.reviews, seed=1),
        eval_dataset=reviews(256, seed=2),
        compute_metrics=accuracy,
        callbacks=[KeepBest(os.path.join(args.out, "best"))],
    )
    trainer.train()


if __name__ == "__main__":
    main()
