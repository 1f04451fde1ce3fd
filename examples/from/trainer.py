"""A Hugging Face BERT (random weights, bytes for tokens) that tells code from prose, in a loop of its own.

paceline launch --nproc 2 -- examples/from/trainer.py
"""

import argparse
import os
from pydoc_data.topics import topics

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import paceline

LENGTH = 24


def examples(count):
    with open(os.__file__, "rb") as file:
        code = file.read()
    prose = " ".join(topics.values()).encode()
    for number in range(count):
        text = (code, prose)[number % 2]
        tokens = torch.tensor(list(text[number * 7 : number * 7 + LENGTH]))
        yield {"input_ids": tokens, "labels": torch.tensor(number % 2)}


def groups(model):
    plain = {name for name, _ in model.named_parameters() if name.endswith("bias") or "LayerNorm" in name}
    for names, decay in (({*dict(model.named_parameters())} - plain, 0.01), (plain, 0.0)):
        yield {"params": [p for name, p in model.named_parameters() if name in names], "weight_decay": decay}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--folder", default="runs/bert")
    args = parser.parse_args()
    everything = [*examples(args.samples)]
    train_set, test_set = everything[: -args.samples // 5], everything[-args.samples // 5 :]

    s = paceline.session(args.folder, resume=True, strategy="exact", virtual_ranks=2)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW([*groups(model)], lr=1e-3)
    train, test = s.loader(train_set, batch_size=8), s.loader(test_set, batch_size=64)
    steps = args.epochs * len(train)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, scheduler = s.prepare(model, optimizer, scheduler)
    for _ in s.epochs(args.epochs):
        model.train()
        for batch in train:
            s.backward(model(**batch).loss)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        hits, loss = 0, 0.0
        with torch.no_grad():
            for batch in test:
                outputs = model(**batch)
                hits += (outputs.logits.argmax(1) == batch["labels"]).sum().item()
                loss += outputs.loss.item() * len(batch["labels"])
        hits, loss = s.sum(hits, loss)
        s.log(accuracy=hits / len(test_set), loss=loss / len(test_set))
    s.main(model.save_pretrained, f"{args.folder}/model", True, s.weights(model))


if __name__ == "__main__":
    main()
