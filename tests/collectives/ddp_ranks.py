"""The ranks of test_ddp.py: a small training with DDP and options, with and without gradients in shared memory."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.collectives.ddp import register_shared_memory_hook

STEPS = 7
Make = Callable[..., DistributedDataParallel]
OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "many buckets": {"bucket_cap_mb": 0.01},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "copied in batches": {"batched_grad_copy": True},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 80), nn.BatchNorm1d(80)
        self.middle, self.last, self.other = nn.Linear(80, 60), nn.Linear(60, 3), nn.Linear(80, 3)

    def forward(self, x: Tensor, short: bool = False) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.other(hidden) if short else self.last(self.middle(hidden).relu())


def plain(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **options)


def in_memory(module: nn.Module, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(module, **options)
    register_shared_memory_hook(ddp)
    return ddp


def bits(ddp: DistributedDataParallel) -> list[bytes]:
    grads = [p.grad for p in ddp.parameters() if p.grad is not None]
    return [t.detach().numpy().tobytes() for t in (*ddp.parameters(), *ddp.buffers(), *grads)]


def train(ddp: DistributedDataParallel, rank: int, steps: int = STEPS, *, tiny: float = 1.0) -> None:
    """Accumulates in every third step. If the model allows it, ranks use different parts of it."""
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        for is_last in (False, True) if step % 3 == 1 else (True,):
            x = torch.randn(5, 6, generator=generator)
            short = ddp.find_unused_parameters and (step + rank) % 3 == 0
            out = ddp(x, short)
            loss = out.square().sum()
            if not ddp.find_unused_parameters and not ddp.static_graph:
                loss = loss + 0 * sum(p.sum() for p in ddp.module.other.parameters())
            with nullcontext() if is_last else ddp.no_sync():
                (loss * tiny).backward()
        optimizer.step()


def by_option(make: Make, rank: int, option: str) -> list[bytes]:
    ddp = make(Net(), **OPTIONS[option])
    train(ddp, rank)
    return bits(ddp)


def tiny_gradients(make: Make, rank: int) -> list[bytes]:
    ddp = make(Net())
    train(ddp, rank, tiny=1e-43)
    return bits(ddp)


def uneven(make: Make, rank: int, initial: bool) -> list[bytes]:
    ddp = make(Net(), find_unused_parameters=True)
    with ddp.join(divide_by_initial_world_size=initial):
        train(ddp, rank, STEPS + rank)
    return bits(ddp)


def two_models(make: Make, rank: int) -> list[bytes]:
    torch.manual_seed(0)
    first, second = make(nn.Linear(6, 6).double()), make(nn.Linear(6, 2))
    for _ in range(STEPS):
        second(first(torch.full((3, 6), 1.0 + rank, dtype=torch.float64)).float()).sum().backward()
    first(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
    return bits(first) + bits(second)


def own_hook(make: Make, rank: int, builtin: bool) -> list[bytes]:
    ddp = make(Net(), find_unused_parameters=True)
    train(ddp, rank, 2)
    if builtin:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    else:
        ddp.register_comm_hook(None, fp16_compress_hook)
    train(ddp, rank)
    return bits(ddp)


def all_ways(rank: int, world_size: int) -> list[str]:
    whats: dict[str, tuple[Callable[..., list[bytes]], tuple[Any, ...]]] = {
        **{option: (by_option, (option,)) for option in OPTIONS},
        "tiny gradients": (tiny_gradients, ()),
        "uneven": (uneven, (True,)), "uneven, by those who are left": (uneven, (False,)),
        "two models": (two_models, ()),
        "a hook of the script's": (own_hook, (False,)), "a hook of torch's": (own_hook, (True,)),
    }  # fmt: skip
    del world_size
    return [name for name, (act, words) in whats.items() if act(plain, rank, *words) != act(in_memory, rank, *words)]
