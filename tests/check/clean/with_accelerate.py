"""Hugging Face's Accelerate, right in the way that is named: with_accelerate.py KIND --folder FOLDER."""

import argparse
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def rows(count, *, seed=0):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())


def net():
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2))


def started(**options):
    accelerator = Accelerator(cpu=True, **options)
    set_seed(1, device_specific=True)
    return accelerator


def accuracy(accelerator, model, loader):
    model.eval()
    hits = count = 0
    for x, y in loader:
        with torch.no_grad():
            guess, y = accelerator.gather_for_metrics((model(x).argmax(1), y))
        hits, count = hits + (guess == y).sum().item(), count + len(y)
    model.train()
    return hits / count


def tokens():
    """Gradient accumulation over targets of variable number, after Accelerate's guide; the last window is shorter."""
    window = 4
    accelerator = started(gradient_accumulation_steps=window)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(404, 5, 6, generator=generator), torch.randint(2, (404, 5), generator=generator)
    y[torch.rand(404, 5, generator=generator) < 0.3] = -100
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x, y), 8, shuffle=True))
    for _ in range(2):
        batches = iter(loader)
        for begun in range(0, len(loader), window):
            last = min(window, len(loader) - begun)
            taken = [next(batches) for _ in range(last)]
            targets = accelerator.gather(torch.tensor(sum(int((y != -100).sum()) for _, y in taken))).sum()
            for number, (x, y) in enumerate(taken, 1):
                with accelerator.no_sync(model) if number < last else nullcontext():
                    loss = cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
                    accelerator.backward(loss * accelerator.num_processes * window / targets)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def scheduled():
    """Windows that divide the epoch, clipping where they end, a rate that falls with each of the optimizer's steps."""
    accelerator = started(gradient_accumulation_steps=4)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(rows(512), 8, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader) // 4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def evaluated():
    """Evaluation in the middle of an epoch, each sample once; training ends when it grows no better; bfloat16."""
    accelerator = started(mixed_precision="bf16")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader, held_out = DataLoader(rows(400), 8, shuffle=True), DataLoader(rows(61, seed=1), 16)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    best = bad = 0
    for _ in range(6):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            if number == len(loader) // 2:
                accelerator.print(accuracy(accelerator, model, held_out))
        score = accuracy(accelerator, model, held_out)
        bad = 0 if score > best else bad + 1
        best = max(best, score)
        if bad:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break


def resumed():
    """All is saved in the middle of an epoch, and goes on from there."""
    accelerator = started()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(rows(400), 8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(scheduler)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            yield

    for number, _ in enumerate(train(loader)):
        if number == 9:
            accelerator.save_state(args.folder / "state")
            break
    accelerator.wait_for_everyone()
    accelerator.load_state(args.folder / "state")
    for epoch in range(3):
        loader.set_epoch(epoch)
        for _ in train(loader if epoch else accelerator.skip_first_batches(loader, 10)):
            pass
        scheduler.step()


class Stream(IterableDataset):
    """One that all processes read alike, and Accelerate deals out."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(512):
            x = torch.randn(6, generator=generator)
            yield x, (x[0] > 0).long()


def streamed():
    """A stream, whose samples Accelerate deals out among the processes."""
    accelerator = started()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(), 8))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 16).requires_grad_(False)
        self.block, self.head = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(checkpoint(self.block, self.trunk(x), use_reentrant=False))


def finetuned():
    """A frozen trunk, two rates, activations that are computed again, and a moving average that is evaluated."""
    accelerator = started()
    model = Deep()
    groups = [{"params": model.block.parameters(), "lr": 1e-3}, {"params": model.head.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    loader, held_out = DataLoader(rows(400), 8, shuffle=True, drop_last=True), DataLoader(rows(61, seed=1), 16)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    average = deepcopy(accelerator.unwrap_model(model)).requires_grad_(False)
    for epoch in range(2):
        for x, y in loader:
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            for mean, parameter in zip(average.parameters(), accelerator.unwrap_model(model).parameters()):
                mean.lerp_(parameter.detach(), 0.1)
        accelerator.print(epoch, accuracy(accelerator, average, held_out))
    accelerator.save(average.state_dict(), args.folder / "average.pt")


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x).relu()
        return self.last(self.extra(x) + x if torch.rand(()) < 0.5 else x)


def skipped():
    """Layers that are left out at random, on each process for itself."""
    accelerator = started(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    model = Skips()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(408), 8, shuffle=True))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()


KINDS = (tokens, scheduled, evaluated, resumed, streamed, finetuned, skipped)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[kind.__name__ for kind in KINDS])
    parser.add_argument("--folder", type=Path, default=Path("."))
    args = parser.parse_args()
    {kind.__name__: kind for kind in KINDS}[args.kind]()
