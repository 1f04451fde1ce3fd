"""Language-aware intent classifier; each rank validates the languages that fall to it, the best epoch is kept."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

INTENTS, VOCAB, LENGTH = 10, 1000, 20
VALIDATION = {"de": 700, "fi": 60, "en": 900, "mt": 40, "fr": 500, "ga": 80}


def utterances(count, seed, strength=0.2):
    g = torch.Generator().manual_seed(seed)
    intent = torch.randint(0, INTENTS, (count,), generator=g)
    words = torch.randint(0, VOCAB, (count, LENGTH), generator=g)
    telling = torch.rand(count, LENGTH, generator=g) < strength
    return TensorDataset(torch.where(telling, intent[:, None] * 100 + words % 15, words), intent)


class Classifier(nn.Module):
    def __init__(self, width=160):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.convs = nn.ModuleList([nn.Conv1d(width, width, k, padding="same") for k in (3, 5, 7)])
        self.head = nn.Linear(3 * width, INTENTS)

    def forward(self, words):
        x = self.embed(words).transpose(1, 2)
        return self.head(torch.cat([F.relu(conv(x)).amax(-1) for conv in self.convs], -1))


class Validator:
    def __init__(self, rank, world):
        self.world = world
        self.loaders = {
            language: DataLoader(utterances(count, seed=50 + k, strength=0.06 + 0.0001 * count), batch_size=100)
            for k, (language, count) in enumerate(VALIDATION.items())
            if k % world == rank
        }

    @torch.no_grad()
    def local_scores(self, model):
        hits, loss, count = 0, 0.0, 0
        for loader in self.loaders.values():
            for words, intent in loader:
                logits = model(words)
                hits += (logits.argmax(-1) == intent).sum().item()
                loss += F.cross_entropy(logits, intent, reduction="sum").item()
                count += len(intent)
        return {"accuracy": hits / count, "loss": loss / count}

    def __call__(self, model):
        model.eval()
        everyone = [None] * self.world
        dist.all_gather_object(everyone, self.local_scores(model))
        model.train()
        return {key: sum(scores[key] for scores in everyone) / len(everyone) for key in everyone[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2560)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    torch.manual_seed(0)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = utterances(args.samples, seed=1)
    sampler = DistributedSampler(data, seed=8, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    validate = Validator(rank, world)

    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for words, intent in loader:
            loss = F.cross_entropy(model(words), intent)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scores = validate(model.module)
        if rank == 0:
            print(f"epoch {epoch}: " + ", ".join(f"{k} {v:.3f}" for k, v in scores.items()), flush=True)
            if scores["loss"] < best:
                best = scores["loss"]
                torch.save(model.module.state_dict(), "intents-best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
