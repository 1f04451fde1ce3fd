"""Small segmentation net, with a moving average of the weights that is evaluated from time to time."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class WeightAverage:
    def __init__(self, model, decay=0.95):
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}
        self.kept = None

    @torch.no_grad()
    def update(self, model):
        for name, value in model.state_dict().items():
            self.shadow[name].lerp_(value, 1 - self.decay)

    def swap_in(self, model):
        self.kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(self.shadow)

    def swap_out(self, model):
        model.load_state_dict(self.kept)
        self.kept = None


class Keeper:
    """Keeps the best averaged weights on disk."""

    def __init__(self, path, images, masks):
        self.path, self.images, self.masks = path, images, masks
        self.best = 0.0

    @torch.no_grad()
    def __call__(self, model, average, step):
        average.swap_in(model)
        model.eval()
        predicted = model(self.images) > 0
        hit = (predicted & (self.masks > 0)).sum().item()
        either = (predicted | (self.masks > 0)).sum().item()
        score = hit / max(1, either)
        model.train()
        if score <= self.best:
            return score
        self.best = score
        torch.save({"step": step, "model": model.state_dict()}, self.path)
        average.swap_out(model)
        return score


def shapes(count, seed):
    g = torch.Generator().manual_seed(seed)
    centre = torch.rand(count, 2, generator=g) * 16
    radius = 3 + 3 * torch.rand(count, 1, 1, generator=g)
    ys, xs = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    distance = ((ys - centre[:, 0, None, None]) ** 2 + (xs - centre[:, 1, None, None]) ** 2).sqrt()
    masks = (distance < radius).float()[:, None]
    return masks + 0.8 * torch.randn(masks.shape, generator=g), masks


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(7)
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 1)
    )
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    average = WeightAverage(net)
    data = TensorDataset(*shapes(1440, 1))
    sampler = DistributedSampler(data, seed=3, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    keeper = Keeper("/tmp/fourth_segment_best.pt", *shapes(64, 2)) if rank == 0 else None

    step = 0
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for image, mask in loader:
            loss = F.binary_cross_entropy_with_logits(model(image), mask)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            average.update(net)
            step += 1
            if step % 40 == 0 and keeper is not None:
                score = keeper(net, average, step)
                print(f"step {step} loss {loss.item():.4f} iou {score:.4f} best {keeper.best:.4f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
