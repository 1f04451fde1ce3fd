"""Token classification with Trainer and a padding collator; scored by accuracy of tags."""
import tempfile
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

VOCAB, TAGS = 50, 4


class Sentences(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 16, (n,), generator=g)
        self.items = [torch.randint(1, VOCAB, (int(l),), generator=g) for l in lengths]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return {"input_ids": self.items[i], "labels": self.items[i] % TAGS}


def collate(rows):
    width = max(len(r["input_ids"]) for r in rows)
    pad = lambda name: torch.stack([F.pad(r[name], (0, width - len(r[name]))) for r in rows])
    ids = pad("input_ids")
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": pad("labels")}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 16)
        self.out = nn.Linear(16, TAGS)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.out(self.emb(input_ids) * attention_mask[..., None])
        loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        loss = (loss * attention_mask).sum() / attention_mask.sum()
        if self.training:
            time.sleep(0.02)
        return {"loss": loss, "logits": logits}


def compute_metrics(prediction):
    tags = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((tags == prediction.label_ids).mean())}


def main():
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), num_train_epochs=4, per_device_train_batch_size=8,
        per_device_eval_batch_size=8, eval_strategy="epoch", logging_strategy="epoch",
        learning_rate=1e-2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )
    trainer = Trainer(model=Tagger(), args=args, data_collator=collate,
                      train_dataset=Sentences(640, 1), eval_dataset=Sentences(96, 2),
                      compute_metrics=compute_metrics)
    trainer.train()


if __name__ == "__main__":
    main()
