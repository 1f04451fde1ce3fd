"""A Hugging Face BERT (random weights, bytes for tokens) that tells code from prose.

Two groups of parameters, warm-up, and the model's own loss.
"""

import argparse
import os
import this

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

LENGTH = 24
fabric = Fabric()


def examples(count):
    with open(os.__file__, "rb") as file:
        code = file.read()
    prose = this.s.encode() * (len(code) // len(this.s) + 1)
    for number in range(count):
        text = (code, prose)[number % 2]
        tokens = torch.tensor(list(text[number * 7 : number * 7 + LENGTH]))
        yield {"input_ids": tokens, "labels": torch.tensor(number % 2)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--save", default="classifier.pt")
    args = parser.parse_args()
    torch.manual_seed(1 + fabric.global_rank)
    loader = DataLoader([*examples(args.samples)], batch_size=16 // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)

    config = BertConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout,
    )  # fmt: skip
    model = BertForSequenceClassification(config).to(torch.float64 if args.double else torch.float32)
    plain = [p for name, p in model.named_parameters() if name.endswith("bias") or "LayerNorm" in name]
    known = {id(p) for p in plain}
    decayed = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    steps = args.epochs * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer = fabric.setup(model, optimizer)
    model.train()
    for epoch in range(args.epochs):
        for batch in loader:
            outputs = model(**batch)
            fabric.backward(outputs.loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {outputs.loss.item():.4f}")
    fabric.save(args.save, model.state_dict())


if __name__ == "__main__":
    main()
