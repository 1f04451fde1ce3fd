"""Tags tokens with a small BERT; Hugging Face Trainer, model from a config, sentences from a grammar."""
import argparse
import random

import numpy as np
import torch
from datasets import Dataset
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments, set_seed

TAGS = ["O", "NAME", "PLACE", "AMOUNT"]
PARTS = {"NAME": range(10, 60), "PLACE": range(60, 110), "AMOUNT": range(110, 140), "O": range(140, 400)}


def sentence(rng):
    ids, tags = [], []
    for _ in range(rng.randint(4, 60)):
        tag = rng.choices(TAGS, (6, 1, 1, 1))[0]
        token = rng.choice(PARTS[tag])
        if rng.random() < 0.15:
            token = rng.randrange(10, 400)
        ids.append(token)
        tags.append(TAGS.index(tag))
    return {"input_ids": ids, "labels": tags}


def make_split(n, seed):
    rng = random.Random(seed)
    return Dataset.from_list([sentence(rng) for _ in range(n)])


class Collator:
    def __init__(self, pad=0, ignore=-100, multiple=8):
        self.pad, self.ignore, self.multiple = pad, ignore, multiple

    def __call__(self, rows):
        longest = max(len(r["input_ids"]) for r in rows)
        longest = -(-longest // self.multiple) * self.multiple

        def fill(values, by):
            return values + [by] * (longest - len(values))

        return {
            "input_ids": torch.tensor([fill(r["input_ids"], self.pad) for r in rows]),
            "attention_mask": torch.tensor([fill([1] * len(r["input_ids"]), 0) for r in rows]),
            "labels": torch.tensor([fill(r["labels"], self.ignore) for r in rows]),
        }


def scores(prediction):
    guess = np.argmax(prediction.predictions, axis=-1)
    hits = guess == prediction.label_ids
    per_sentence = hits.sum(-1) / hits.shape[-1]
    return {"token_accuracy": float(per_sentence.mean())}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=float, default=2)
    p.add_argument("--train-size", type=int, default=2560)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=5e-4)
    p.add_argument("--output", default="tagger")
    args = p.parse_args()
    torch.set_num_threads(1)
    set_seed(7)

    config = BertConfig(vocab_size=400, hidden_size=96, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=192, max_position_embeddings=64, num_labels=len(TAGS))
    model = BertForTokenClassification(config)
    training = TrainingArguments(
        output_dir=args.output,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=32,
        learning_rate=args.lr,
        warmup_steps=20,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=50,
        metric_for_best_model="token_accuracy",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        ddp_find_unused_parameters=False,
        dataloader_drop_last=False,
        seed=7,
    )
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=make_split(args.train_size, seed=1),
        eval_dataset=make_split(320, seed=2),
        data_collator=Collator(),
        compute_metrics=scores,
    )
    trainer.train()
    final = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"token accuracy {final['eval_token_accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
