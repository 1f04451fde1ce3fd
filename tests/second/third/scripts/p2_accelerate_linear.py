"""Fine-tune a small text classifier with Accelerate and a linear schedule with warm-up."""

import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

VOCABULARY, LENGTH, LABELS = 400, 32, 4


class Classifier(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, LABELS)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)).mean(1))


def make_split(count, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(LABELS, (count,), generator=g)
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=g)
    hinted = torch.rand(count, LENGTH, generator=g) < 0.2
    return TensorDataset(torch.where(hinted, labels[:, None] * 10 + ids % 10, ids), labels)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=4)
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--warmup_ratio", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    torch.set_num_threads(1)

    train_set, test_set = make_split(3840, seed=1), make_split(640, seed=2)
    train_loader = DataLoader(train_set, batch_size=args.per_device_train_batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=32)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

    steps_per_epoch = math.ceil(len(train_set) / args.per_device_train_batch_size)
    max_train_steps = args.num_train_epochs * steps_per_epoch
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=int(args.warmup_ratio * max_train_steps),
        num_training_steps=max_train_steps,
    )

    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    for epoch in range(args.num_train_epochs):
        model.train()
        for ids, labels in train_loader:
            loss = nn.functional.cross_entropy(model(ids), labels)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        right = total = 0
        for ids, labels in test_loader:
            with torch.no_grad():
                predicted = model(ids).argmax(-1)
            predicted, labels = accelerator.gather_for_metrics((predicted, labels))
            right += (predicted == labels).sum().item()
            total += len(labels)
        accelerator.print(f"epoch {epoch}: accuracy {right / total:.4f}, lr {lr_scheduler.get_last_lr()[0]:.2e}")

    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
