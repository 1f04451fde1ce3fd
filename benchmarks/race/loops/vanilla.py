"""torch's DDP, DistributedSampler and DataLoader, as the tutorials write it; started by torchrun.

torchrun --nproc-per-node=2 vanilla.py WORK [--device cuda] [--workers N]
"""

from __future__ import annotations

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from race.gate import Gate
from race.samples import for_peers
from race.works import WORKS, mean_loss

LOG_EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    work, gate = WORKS[arguments.work], Gate()
    on_gpu = arguments.device == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    model = DistributedDataParallel(gate.hold(work.make_model().to(device)))
    optimizer = work.make_optimizer(model.parameters())
    criterion = gate.hear(mean_loss)
    dataset = for_peers(work, rank, world_size)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(
        dataset, batch_size=work.batch, sampler=sampler, num_workers=arguments.workers, pin_memory=on_gpu,
        persistent_workers=arguments.workers > 0,
    )  # fmt: skip
    model.train()
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.bf16):
                loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if step % LOG_EVERY == 0 and rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
