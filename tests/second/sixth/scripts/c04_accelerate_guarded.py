"""Regression of yields from rare events with Accelerate: weighted sampling, averaged weights, and batches left out by all."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, Sampler

torch.set_num_threads(1)


class Yields(Dataset):
    def __init__(self, count, seed, damaged=()):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 10, generator=g)
        self.y = (self.x[:, 0] * self.x[:, 1] + self.x[:, 2]).exp().clamp(max=20)
        self.rare = self.y > 5
        for i in damaged:
            self.x[i, 3] = float("inf")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class RareFirst(Sampler):
    """Draws with replacement, rare samples four times as often; another draw in each epoch, the same on all ranks."""

    def __init__(self, rare, length, seed):
        self.weights = 1.0 + 3.0 * rare.double()
        self.length, self.seed, self.epoch = length, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.length

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from torch.multinomial(self.weights, self.length, replacement=True, generator=g).tolist()


def net():
    return nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1), nn.Flatten(0))


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    errors = []
    for x, y in loader:
        errors.append(accelerator.gather_for_metrics((model(x) - y).abs()))
    errors = torch.cat(errors)
    return errors.mean().item(), len(errors)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(14)
    train = Yields(2000, 1, damaged=(300, 1250))
    sampler = RareFirst(train.rare, 1280, seed=60)
    loader = DataLoader(train, batch_size=8, sampler=sampler, drop_last=True)
    held_out = DataLoader(Yields(333, 2), batch_size=32)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    average = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.98))

    best, left_out = float("inf"), 0
    for epoch in range(6):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.smooth_l1_loss(model(x), y)
            # one rank's bad batch is left out by all
            good = accelerator.gather(loss.detach().isfinite().reshape(1)).all().item()
            if not good:
                left_out += 1
                continue
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            average.update_parameters(accelerator.unwrap_model(model))
        error, count = evaluate(accelerator, average, held_out)
        accelerator.print(f"epoch {epoch} error {error:.4f} of {count}, left out {left_out}", flush=True)
        if error < best:
            best = error
            if accelerator.is_main_process:
                torch.save(average.module.state_dict(), "/tmp/fourth_yields.pt")
            accelerator.wait_for_everyone()
    if not best < float("inf"):
        raise SystemExit("nothing was learned")
    accelerator.end_training()


if __name__ == "__main__":
    main()
