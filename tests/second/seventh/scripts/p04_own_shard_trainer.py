import os
import tempfile
from datetime import timedelta

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

torch.set_num_threads(1)


class Table(Dataset):
    """Rows of a table, a column with the customer's group, and a target of three classes."""

    def __init__(self, rows=6400, columns=16):
        rng = np.random.default_rng(6)
        self.x = rng.normal(size=(rows, columns)).astype("float32")
        self.group = rng.integers(0, 12, size=rows)
        w = rng.normal(size=(columns, 3))
        self.y = (self.x @ w + 0.5 * rng.normal(size=(rows, 3))).argmax(1)
        self.keep = np.arange(rows)

    def only(self, mask):
        out = object.__new__(Table)
        out.__dict__.update(self.__dict__)
        out.keep = self.keep[mask]
        return out

    def __len__(self):
        return len(self.keep)

    def __getitem__(self, i):
        i = self.keep[i]
        return {"features": self.x[i], "group": int(self.group[i]), "labels": int(self.y[i])}


class TableConfig(PretrainedConfig):
    model_type = "toy-table"


class TableModel(PreTrainedModel):
    config_class = TableConfig

    def __init__(self, config):
        super().__init__(config)
        self.group = nn.Embedding(12, 8)
        self.body = nn.Sequential(nn.Linear(24, 128), nn.GELU(), nn.Linear(128, 3))
        self.post_init()

    def forward(self, features, group, labels=None):
        logits = self.body(torch.cat([features, self.group(group)], dim=1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def load_training_rows(table):
    worker = int(os.environ.get("RANK", 0))
    workers = int(os.environ.get("WORLD_SIZE", 1))
    return table.only(np.arange(len(table)) % workers == worker)


def main():
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="table-"),
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        logging_steps=100,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_drop_last=True,
        ddp_find_unused_parameters=False,
        ddp_timeout=int(timedelta(minutes=5).total_seconds()),
        seed=17,
    )
    torch.manual_seed(0)
    rows = load_training_rows(Table())
    trainer = Trainer(model=TableModel(TableConfig()), args=args, train_dataset=rows)
    output = trainer.train()
    if trainer.is_world_process_zero():
        print(f"rows {len(rows)}, steps {output.global_step}, loss {output.training_loss:.3f}")


if __name__ == "__main__":
    main()
