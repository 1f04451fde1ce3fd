"""Beats of an ECG, normal or not. Validation is by patient: every rank has patients of its own."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def beats(count, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 2, (count,), generator=g)
    t = torch.linspace(0, 1, 64)
    centre = 0.5 + 0.05 * torch.randn(count, 1, generator=g)
    wave = torch.exp(-((t - centre) ** 2) / (0.002 + 0.002 * label[:, None]))
    return TensorDataset((wave + 0.4 * torch.randn(count, 64, generator=g))[:, None], label)


class Validation:
    """Accuracy, sensitivity and loss on the patients that were held out."""

    patients = {101: 90, 102: 35, 103: 150, 104: 21, 105: 64}

    def __init__(self, rank, world):
        self.world = world
        mine = sorted(self.patients)[rank::world]
        self.loaders = [DataLoader(beats(self.patients[p], p), batch_size=32) for p in mine]

    @torch.no_grad()
    def run(self, model):
        model.eval()
        outputs, labels = [], []
        for loader in self.loaders:
            for wave, label in loader:
                outputs.append(model(wave))
                labels.append(label)
        model.train()
        outputs, labels = torch.cat(outputs), torch.cat(labels)
        scores = {
            "accuracy": (outputs.argmax(1) == labels).float().mean(),
            "loss": F.cross_entropy(outputs, labels),
        }
        for value in scores.values():
            dist.all_reduce(value)
        return {name: (value / self.world).item() for name, value in scores.items()}


class Trainer:
    def __init__(self):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.manual_seed(21)
        net = nn.Sequential(
            nn.Conv1d(1, 16, 7, stride=2), nn.GroupNorm(4, 16), nn.SiLU(),
            nn.Conv1d(16, 16, 5, stride=2), nn.GroupNorm(4, 16), nn.SiLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 2),
        )
        self.model = DDP(net)
        data = Subset(beats(1600, 1), range(1536))
        self.sampler = DistributedSampler(data, seed=5, drop_last=True)
        self.loader = DataLoader(data, batch_size=8, sampler=self.sampler, drop_last=True)
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=5e-4)
        self.validation = Validation(self.rank, self.world)
        self.best = 0.0

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for wave, label in self.loader:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(self.model(wave), label)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            scores = self.validation.run(self.model.module)
            if self.rank == 0:
                print(f"epoch {epoch} " + " ".join(f"{k} {v:.4f}" for k, v in scores.items()), flush=True)
                if scores["accuracy"] > self.best:
                    self.best = scores["accuracy"]
                    torch.save(self.model.module.state_dict(), "/tmp/fourth_ecg_best.pt")
            dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer().fit(6)
    dist.destroy_process_group()
