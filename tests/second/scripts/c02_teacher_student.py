"""Self-distillation under DDP: two views, a slowly moving teacher, tail windows, one file of states per rank."""
import contextlib
import copy
import logging
import math
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("distill")
WINDOW = 6


def samples(count=2048, width=48):
    g = torch.Generator().manual_seed(13)
    centers = torch.randn(10, width, generator=g)
    y = torch.randint(10, (count,), generator=g)
    x = centers[y] + 0.8 * torch.randn(count, width, generator=g)
    x[torch.rand(count, width, generator=g) < 0.03] = math.nan
    return TensorDataset(x, y)


class Net(nn.Module):
    def __init__(self, width=48, out=32):
        super().__init__()
        self.fill = nn.Parameter(torch.zeros(width))
        self.body = nn.Sequential(nn.Linear(width, 192), nn.LayerNorm(192), nn.GELU(), nn.Linear(192, out))
        self.classes = nn.Linear(out, 10)

    def forward(self, x):
        z = self.body(torch.where(x.isnan(), self.fill, x))
        return z, self.classes(z)


def view(x):
    x = x + 0.2 * torch.randn_like(x)
    return x.masked_fill(torch.rand_like(x) < 0.1, math.nan)


@torch.no_grad()
def follow(teacher, student, keep):
    for slow, fast in zip(teacher.parameters(), student.parameters()):
        slow.lerp_(fast, 1 - keep)


def publish(message):
    try:
        raise ConnectionRefusedError(f"no tracker for {message!r}")
    except OSError as error:
        log.debug("not published: %s", error)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    student = DDP(Net())
    teacher = copy.deepcopy(student.module).requires_grad_(False).eval()
    folder = Path(tempfile.gettempdir()) / "distill-states"
    folder.mkdir(exist_ok=True)
    torch.manual_seed(900 + rank)
    sampler = DistributedSampler(data := samples(), seed=2)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    heads = torch.optim.SGD(student.module.classes.parameters(), lr=0.05)
    rest = torch.optim.AdamW([p for n, p in student.named_parameters() if "classes" not in n], lr=1e-3)

    done = 0
    for epoch in range(20):
        sampler.set_epoch(epoch)
        left = len(loader)
        for step, (x, y) in enumerate(loader):
            size = min(WINDOW, left - step + step % WINDOW)
            last = step % WINDOW == size - 1
            with contextlib.ExitStack() as stack:
                if not last:
                    stack.enter_context(student.no_sync())
                z, logits = student(view(x))
                with torch.no_grad():
                    target, _ = teacher(view(x))
                loss = F.cross_entropy(logits, y) + 1 - F.cosine_similarity(z, target).mean()
                (loss / size).backward()
            if last:
                heads.step()
                rest.step()
                heads.zero_grad()
                rest.zero_grad()
                done += 1
                follow(teacher, student.module, keep=min(0.99, 1 - 1 / (done + 1)))
        torch.save({"rng": torch.get_rng_state(), "epoch": epoch}, folder / f"rank{rank}.pt")
        shown = loss.detach().clone()
        dist.all_reduce(shown, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        if rank == 0:
            shown = shown if dist.get_backend() == "nccl" else shown / world
            publish({"epoch": epoch, "loss": shown.item()})
            print(f"epoch {epoch} loss {shown.item():.4f} steps {done}", flush=True)
            torch.save(student.module.state_dict(), folder / "student.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
