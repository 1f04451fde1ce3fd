"""A Hugging Face BERT (random weights, bytes for tokens) that tells code from prose, by transformers' Trainer.

torchrun --nproc-per-node 2 examples/from/trainer_before.py
"""

import argparse
import os
from pydoc_data.topics import topics

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

LENGTH = 24


def examples(count):
    with open(os.__file__, "rb") as file:
        code = file.read()
    prose = " ".join(topics.values()).encode()
    for number in range(count):
        text = (code, prose)[number % 2]
        tokens = torch.tensor(list(text[number * 7 : number * 7 + LENGTH]))
        yield {"input_ids": tokens, "labels": torch.tensor(number % 2)}


def accuracy(predicted):
    return {"accuracy": (predicted.predictions.argmax(1) == predicted.label_ids).mean()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--folder", default="runs/bert")
    args = parser.parse_args()
    everything = [*examples(args.samples)]
    train_set, test_set = everything[: -args.samples // 5], everything[-args.samples // 5 :]

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    arguments = TrainingArguments(
        args.folder, num_train_epochs=args.epochs, per_device_train_batch_size=8, per_device_eval_batch_size=64,
        learning_rate=1e-3, weight_decay=0.01, warmup_steps=0.1, lr_scheduler_type="linear", eval_strategy="epoch",
        save_strategy="epoch", report_to="none", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=train_set, eval_dataset=test_set, compute_metrics=accuracy)
    trainer.train()
    trainer.save_model(f"{args.folder}/model")


if __name__ == "__main__":
    main()
