"""A tiny GPT-2 learns to fill gaps; Hugging Face's Trainer, evaluation and checkpoints."""
import math
import shutil

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

OUT = "c02_out"


class Runs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 50, (n, 1), generator=g)
        self.ids = (start + torch.arange(14)) % 50 + 4
        self.length = torch.randint(6, 15, (n,), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"ids": self.ids[i, : self.length[i]], "key": i}


class MaskWords:
    def __init__(self, prob=0.25):
        self.prob = prob

    def __call__(self, items):
        width = max(len(r["ids"]) for r in items)
        ids = torch.zeros(len(items), width, dtype=torch.long)
        attention = torch.zeros_like(ids)
        labels = torch.full_like(ids, -100)
        for row, r in enumerate(items):
            g = torch.Generator().manual_seed(r["key"])  # the same words are masked in each epoch, as in first BERT
            n = len(r["ids"])
            ids[row, :n] = r["ids"]
            attention[row, :n] = 1
            hit = torch.rand(n, generator=g) < self.prob
            hit[int(torch.randint(1, n, (1,), generator=g))] = True  # at least one that counts
            labels[row, :n][hit] = r["ids"][hit]
            ids[row, :n][hit] = 3
        return {"input_ids": ids, "attention_mask": attention, "labels": labels}


class Perplexity(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics=None, **kw):
        if state.is_world_process_zero:
            print("perplexity", round(math.exp(metrics["eval_loss"]), 2))


def make(epochs):
    config = GPT2Config(vocab_size=54, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    args = TrainingArguments(
        output_dir=OUT, num_train_epochs=epochs, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        per_device_eval_batch_size=16, eval_strategy="epoch", save_strategy="epoch", save_total_limit=1,
        remove_unused_columns=False, label_names=["labels"], learning_rate=2e-3, lr_scheduler_type="cosine",
        warmup_steps=5, report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=10, seed=9,
    )
    return Trainer(model=GPT2LMHeadModel(config), args=args, data_collator=MaskWords(), train_dataset=Runs(400, 0),
                   eval_dataset=Runs(77, 1), callbacks=[Perplexity()])


if __name__ == "__main__":
    set_seed(9)
    trainer = make(2)
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        shutil.rmtree(OUT, ignore_errors=True)
