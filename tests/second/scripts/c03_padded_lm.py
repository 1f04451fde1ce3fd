"""Tiny causal language model on sentences of unequal lengths, with the Trainer on two ranks."""
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

torch.set_num_threads(1)

VOCAB, PAD, EOS, LONGEST = 64, 0, 1, 30


class Sentences(Dataset):
    """Words follow each other by a fixed table; a word of eight is dropped anew each time a sentence is read."""

    def __init__(self, n, seed, drop=0.0, reader=0):
        rng = np.random.default_rng(seed)
        table = np.random.default_rng(0).integers(2, VOCAB, (VOCAB, 3))
        self.rows, self.drop = [], drop
        self.dice = torch.Generator().manual_seed(7000 + reader)
        for _ in range(n):
            row = [int(rng.integers(2, VOCAB))]
            for _ in range(int(rng.integers(3, LONGEST - 2))):
                row.append(int(table[row[-1], rng.choice(3, p=[0.7, 0.2, 0.1])]))
            self.rows.append(row + [EOS])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = torch.tensor(self.rows[i])
        return {"input_ids": row, "labels": torch.where(torch.rand(len(row), generator=self.dice) < self.drop, -100, row)}


def pad(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids, labels = torch.full((len(rows), width), PAD), torch.full((len(rows), width), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = row["input_ids"]
        labels[i, : len(row["labels"])] = row["labels"]
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def best_word(logits, labels):
    return logits.argmax(-1)


def compute_metrics(prediction):
    guess, truth = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    kept = truth != -100
    return {"next_word": float((guess == truth)[kept].mean()), "words": int(kept.sum())}


class Diary(TrainerCallback):
    """Rank 0 writes down every evaluation; the other only counts them."""

    def __init__(self, folder):
        self.folder, self.evaluations = folder, 0

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.evaluations += 1
        if state.is_world_process_zero:
            (self.folder / f"evaluation-{self.evaluations}.json").write_text(json.dumps(metrics))


def main():
    folder = Path(tempfile.mkdtemp(prefix="padded-lm-"))
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        seed=14,
        num_train_epochs=4,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        gradient_accumulation_steps=3,
        average_tokens_across_devices=True,
        max_grad_norm=1.0,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=40,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_drop_last=False,
        ddp_find_unused_parameters=False,
    )
    set_seed(14)
    config = GPT2Config(vocab_size=VOCAB, n_positions=LONGEST + 2, n_embd=48, n_layer=2, n_head=2, bos_token_id=EOS, eos_token_id=EOS, pad_token_id=PAD, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model,
        args,
        train_dataset=Sentences(2000, seed=1, drop=0.125, reader=args.process_index),
        eval_dataset=Sentences(301, seed=2),
        data_collator=pad,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=best_word,
        callbacks=[Diary(folder)],
    )
    trainer.train()
    final = trainer.evaluate(Sentences(301, seed=3))
    if trainer.is_world_process_zero():
        print({key: value for key, value in final.items() if "runtime" not in key and "second" not in key}, flush=True)


if __name__ == "__main__":
    main()
