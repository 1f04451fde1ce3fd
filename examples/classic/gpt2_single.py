"""A Hugging Face GPT-2 (random weights, bytes for tokens) that learns lines of Python.

Lines are of different lengths, so batches are padded, and the model's own loss is a mean over tokens.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

LENGTH = 64


def lines(count):
    with open(os.__file__, "rb") as file:  # a text that every Python has
        found = [torch.tensor(list(line[:LENGTH])) for line in file if len(line) > 8]
    return found[:count]


def padded(samples):
    tokens = pad_sequence(samples, batch_first=True)
    mask = pad_sequence([torch.ones_like(sample) for sample in samples], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def loss_in_double(logits, labels, **_):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--save", default="gpt2.pt")
    args = parser.parse_args()
    torch.manual_seed(1)
    loader = DataLoader(lines(args.samples), batch_size=16, shuffle=True, collate_fn=padded)

    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, resid_pdrop=args.dropout,
        embd_pdrop=args.dropout, attn_pdrop=args.dropout, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(torch.float64 if args.double else torch.float32)
    if args.double:
        model.loss_function = loss_in_double  # Hugging Face's computes in float32, whatever the model's type
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = args.epochs * len(loader)
    scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    model.train()
    for epoch in range(args.epochs):
        for batch in loader:
            outputs = model(**batch)
            outputs.loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {outputs.loss.item():.4f}")
    torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
