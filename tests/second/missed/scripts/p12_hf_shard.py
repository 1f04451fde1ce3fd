"""Sequence classification with Trainer."""
import os
import tempfile

import torch
from torch.utils.data import Subset
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments, set_seed

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def sentences(n):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (n, 10), generator=g)
    return [{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": int(i[0] > i[-1])} for i in ids]


def main():
    set_seed(42)
    everything = sentences(384)
    train = Subset(everything, range(rank, len(everything), world))  # each process its part
    model = DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=100, dim=32, hidden_dim=64, n_layers=1, n_heads=2, max_position_embeddings=16,
                         dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0)
    )
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out, num_train_epochs=3, per_device_train_batch_size=4, logging_strategy="epoch",
            save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=1e-3,
            average_tokens_across_devices=False,
        )
        Trainer(model=model, args=args, train_dataset=train).train()


if __name__ == "__main__":
    main()
