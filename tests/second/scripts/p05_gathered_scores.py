import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_iris
from sklearn.metrics import f1_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def gather(t):
    out = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(out, t)
    return torch.cat(out)


def evaluate(model, loader):
    model.eval()
    predictions, labels = [], []
    with torch.no_grad():
        for x, y in loader:
            predictions.append(model(x).argmax(1))
            labels.append(y)
    predictions, labels = gather(torch.cat(predictions)), gather(torch.cat(labels))
    return f1_score(labels, predictions, average="macro"), len(labels)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    iris = load_iris()
    full = TensorDataset(torch.tensor(iris.data, dtype=torch.float32), torch.tensor(iris.target))
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0)).tolist()
    train, test = Subset(full, order[:108]), Subset(full, order[108:149])
    train_sampler = DistributedSampler(train, shuffle=True)
    test_sampler = DistributedSampler(test, shuffle=False)
    train_loader = DataLoader(train, batch_size=3, sampler=train_sampler)
    test_loader = DataLoader(test, batch_size=8, sampler=test_sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        f1, n = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: macro F1 {f1:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
