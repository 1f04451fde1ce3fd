"""A small language model over bytes: accumulation, clipping, a learning rate per step."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

LENGTH, ACCUMULATE = 32, 4
loading = DataLoaderConfiguration(split_batches=True)
accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, dataloader_config=loading)


class Model(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.token, self.place = nn.Embedding(256, 32), nn.Embedding(LENGTH, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, 256)

    def forward(self, tokens):
        hidden = self.token(tokens) + self.place.weight
        ahead = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
        return self.out(self.body(hidden, mask=ahead))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--save", default="lm.pt")
    args = parser.parse_args()
    set_seed(1, device_specific=True)
    with open(os.__file__, "rb") as file:  # a text that every Python has
        text = torch.tensor(list(file.read()))[: args.samples * LENGTH + 1]
    samples = (len(text) - 1) // LENGTH
    rows = TensorDataset(text[: samples * LENGTH].view(-1, LENGTH), text[1 : samples * LENGTH + 1].view(-1, LENGTH))
    loader = DataLoader(rows, batch_size=8, shuffle=True, drop_last=True)

    model = Model(args.dropout).to(torch.float64 if args.double else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = CosineAnnealingLR(optimizer, args.epochs * len(loader) // ACCUMULATE)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for epoch in range(args.epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), args.save)


if __name__ == "__main__":
    main()
