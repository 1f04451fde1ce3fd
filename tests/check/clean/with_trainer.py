"""Hugging Face's Trainer, right in the way that is named: with_trainer.py KIND --folder FOLDER."""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

SIZE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def arguments(**options):
    usual = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "save_strategy": "no"}
    fixed = {"output_dir": str(args.folder / "out"), "use_cpu": True, "report_to": [], "disable_tqdm": True}
    return TrainingArguments(**(usual | fixed | options))


class Rows(Dataset):
    def __init__(self, count, *, seed=0):
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": (self.x[index, 0] > 0).long()}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1)), nn.Linear(16, 2)

    def forward(self, x, labels=None):
        logits = self.head(self.trunk(x))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Texts(Dataset):
    """Sequences of unequal lengths."""

    def __init__(self, count, *, seed=0):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
        self.texts = [torch.randint(4, 40, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index]


def padded(texts):
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids == 0, -100)}


def masked(texts):
    batch = padded(texts)
    drawn = torch.rand(batch["input_ids"].shape) * batch["attention_mask"]
    hidden = torch.zeros_like(drawn).scatter(1, drawn.topk(2).indices, 1).bool()  # as many in each text
    batch["labels"] = batch["input_ids"].masked_fill(~hidden, -100)
    batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 1)
    return batch


def language():
    """A language model: padding that does not count, windows, a shorter last one, bfloat16, checkpointed layers."""
    settings = arguments(
        gradient_accumulation_steps=4, bf16=True, gradient_checkpointing=True, max_grad_norm=0.5, warmup_steps=3
    )
    model = LlamaForCausalLM(LlamaConfig(**SIZE))
    Trainer(model, settings, train_dataset=Texts(404), data_collator=padded).train()


def masks():
    """Masks that are drawn in loader processes, which the Trainer seeds for each rank; evaluation by its loss."""
    settings = arguments(dataloader_num_workers=1, eval_strategy="epoch", lr_scheduler_type="cosine")
    model = BertForMaskedLM(BertConfig(**SIZE))
    Trainer(model, settings, train_dataset=Texts(400), eval_dataset=Texts(61, seed=1), data_collator=masked).train()


def stopped():
    """Evaluation in the middle of epochs, on a number of samples that does not divide; the best weights are kept."""
    settings = arguments(
        num_train_epochs=5, eval_strategy="steps", save_strategy="steps", eval_steps=10, save_steps=10,
        load_best_model_at_end=True, metric_for_best_model="accuracy", save_total_limit=1,
    )  # fmt: skip

    def compute_metrics(told):
        return {"accuracy": float(np.mean(told.predictions.argmax(-1) == told.label_ids))}

    trainer = Trainer(
        Classifier(), settings, train_dataset=Rows(400), eval_dataset=Rows(61, seed=1),
        compute_metrics=compute_metrics, callbacks=[EarlyStoppingCallback(2)],
    )  # fmt: skip
    trainer.train()
    trainer.log({"after": trainer.evaluate()["eval_accuracy"]})


def resumed():
    """A training that ends in the middle of an epoch, and goes on from its checkpoint."""
    settings = {"save_strategy": "steps", "save_steps": 10}
    Trainer(Classifier(), arguments(max_steps=10, **settings), train_dataset=Rows(400)).train()
    trainer = Trainer(Classifier(), arguments(**settings), train_dataset=Rows(400))
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model(str(args.folder / "last"))


def groups():
    """A frozen trunk; an optimizer with two rates and a schedule of the script's own; a loss of its own."""
    model = Classifier()
    model.trunk.requires_grad_(False)
    rates = [{"params": [model.head.weight]}, {"params": [model.head.bias], "lr": 0.1, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(rates, lr=0.01)
    settings = arguments(max_steps=40, ddp_find_unused_parameters=False, ddp_broadcast_buffers=False)

    class Smoothed(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            output = model(**inputs)
            loss = cross_entropy(output["logits"], inputs["labels"], label_smoothing=0.1)
            return (loss, output) if return_outputs else loss

    both = optimizer, get_cosine_schedule_with_warmup(optimizer, 5, 40)
    Smoothed(model, settings, train_dataset=Rows(400), optimizers=both).train()


class Stream(IterableDataset):
    """One that all ranks read alike, and the Trainer deals out."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            x = torch.randn(6, generator=generator)
            yield {"x": x, "labels": (x[0] > 0).long()}


def streamed():
    """A stream, read by each rank, of which the Trainer gives it its share."""
    settings = arguments(
        max_steps=30, accelerator_config={"dispatch_batches": False}, gradient_accumulation_steps=2, optim="sgd"
    )
    Trainer(Classifier(), settings, train_dataset=Stream()).train()


KINDS = (language, masks, stopped, resumed, groups, streamed)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[kind.__name__ for kind in KINDS])
    parser.add_argument("--folder", type=Path, default=Path("."))
    args = parser.parse_args()
    torch.manual_seed(0)
    {kind.__name__: kind for kind in KINDS}[args.kind]()
