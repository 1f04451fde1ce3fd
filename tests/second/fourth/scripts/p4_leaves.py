"""Leaf disease classifier (small VGG with batch norm), trained and validated with Accelerate."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 5


def leaves(count, size, seed):
    prototypes = torch.randn(CLASSES, 3, size, size, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=g)
    brightness = 0.3 + 1.5 * torch.rand(count, 3, 1, 1, generator=g)
    images = (0.25 * prototypes[labels] + torch.randn(count, 3, size, size, generator=g)) * brightness + brightness
    return TensorDataset(images, labels)


def vgg(widths=(16, 32, 48)):
    layers, previous = [], 3
    for width in widths:
        layers += [
            nn.Conv2d(previous, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        previous = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(previous * 4, CLASSES))


class Experiment:
    def __init__(self, args):
        self.args = args
        ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[ddp])
        set_seed(args.seed)
        train = DataLoader(
            leaves(args.images, args.size, 1), batch_size=args.batch_size, shuffle=True, drop_last=True
        )
        val = DataLoader(leaves(320, args.size, 2), batch_size=40)
        model = vgg()
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
        self.model, self.optimizer, self.train, self.val = self.accelerator.prepare(model, optimizer, train, val)
        self.best = 0.0

    def fit_epoch(self):
        self.model.train()
        for images, labels in self.train:
            loss = F.cross_entropy(self.model(images), labels)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.inference_mode()
    def validate(self):
        self.model.eval()
        hits = seen = 0
        for images, labels in self.val:
            logits = self.model(images)
            logits, labels = self.accelerator.gather_for_metrics((logits, labels))
            hits += (logits.argmax(-1) == labels).sum().item()
            seen += labels.numel()
        return hits / seen

    def run(self):
        for epoch in range(self.args.epochs):
            self.fit_epoch()
            accuracy = self.validate()
            self.accelerator.print(f"epoch {epoch}: validation accuracy {accuracy:.3f}")
            if accuracy > self.best:
                self.best = accuracy
                if self.accelerator.is_main_process:
                    torch.save(self.accelerator.unwrap_model(self.model).state_dict(), self.args.out)
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--images", type=int, default=960)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", default="leaves-best.pt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    Experiment(args).run()


if __name__ == "__main__":
    main()
