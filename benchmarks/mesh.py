"""Steps of a model that ranks share, by paceline and by hand, in turns: `python benchmarks/mesh.py`, `make bench-mesh`.

Two CPU ranks over gloo train a small GPT with AdamW, along tensor and in two stages. By hand is torch's own way, as
torchtitan writes it: parallelize_module with ColwiseParallel and RowwiseParallel, the attention's code on local shapes;
PipelineStage and Schedule1F1B, each stage a module of its own. Both take the same batch again and again; ours is the
whole step of a training, with its losses, counts and checks. Turns go A B A B; the ratios are written down,
what a rank holds of weights, gradients and AdamW's state beside the arithmetic, and the bytes that it sends, as counted
by torch's recorder and the guard, beside those of the textbook's formula.
"""

import argparse
import copy
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from paceline import ArrayDataset, Task, World
from paceline.config.mesh import resolve_mesh
from paceline.data.loader import LoadingOptions, load_steps
from paceline.data.plan import BatchPlan
from paceline.lab.ranks.memory import SentBytesCounter
from paceline.rank.guard import HangGuard
from paceline.rank.world import create_mesh_groups
from paceline.strategies import STRATEGIES, Strategy
from paceline.train.parallelism import ParallelConfig, parallelize_model
from paceline.train.step import TaskSteps

WORDS, RANKS, HEADS = 512, 2, 8
LR = 1e-4
BATCH = 4  # samples of a micro-batch


class Block(nn.Module):
    """Attention and an MLP; the code fits whole and local shapes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.each = width // heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.one(x)
        q, k, v = (f(y).view(batch, length, -1, self.each).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.two(x))))


class Model(nn.Module):
    """The part of a language model that is cut by both: blocks between an embedding and a head that stay whole."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.blocks = nn.ModuleList(Block(width, HEADS) for _ in range(layers))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Side:
    """One of the two that take turns."""

    step: Callable[[], object]
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def held(self) -> int:
        """Bytes of weights, gradients and optimizer state on this rank."""
        tensors = [*self.model.parameters(), *(p.grad for p in self.model.parameters() if p.grad is not None)]
        tensors += [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return sum(getattr(t, "to_local", lambda t=t: t)().nbytes for t in tensors)


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """As a tutorial has it."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def tensor_by_hand(model: Model, words: Tensor) -> Side:
    """The blocks' linear layers in pairs; the embedding and the head stay whole."""

    mesh, plan = init_device_mesh("cpu", (RANKS,)), dict[str, ParallelStyle]()
    for number in range(len(model.blocks)):
        plan |= {f"blocks.{number}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {f"blocks.{number}.{name}": RowwiseParallel() for name in ("out", "down")}
    cut = parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(cut.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        for one in words.chunk(words.shape[0] // BATCH):
            (mean_loss(cut(one), one) * len(one) / len(words)).backward()
        optimizer.step()

    return Side(step, cut, optimizer)


def pipeline_by_hand(model: Model, words: Tensor) -> Side:
    """Half of the blocks each."""

    number, half = dist.get_rank(), len(model.blocks) // 2
    parts = [model.embedding, *model.blocks[:half]] if number == 0 else [*model.blocks[half:], model.head]
    part = nn.Sequential(*parts)
    stage = PipelineStage(part, number, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, words.shape[0] // BATCH, loss_fn=mean_loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        if number == 0:
            schedule.step(words)
        else:
            schedule.step(target=words, losses=[])
        optimizer.step()

    return Side(step, part, optimizer)


def ours(model: Model, words: Tensor, mesh: str, base: World) -> tuple[Side, Strategy, list[str]]:
    """As `paceline train --mesh` prepares and takes a step."""

    world = create_mesh_groups(base, resolve_mesh(mesh, RANKS))

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")

    task = Task(lambda: model, lambda _: ArrayDataset(words, words), losses,
                parallelize=lambda _: {"embedding": "whole", "head": "whole"})  # fmt: skip
    data, loading = task.make_dataset("train"), LoadingOptions(world.device, 0, None)
    plan = BatchPlan(len(words), len(words), 1, len(words) // BATCH, 0)
    sharing = parallelize_model(task, model, data, loading, plan, world, ParallelConfig())
    replica = sharing.make_strategy(STRATEGIES["bucketed"], model, lambda p: torch.optim.AdamW(p, lr=LR), world, 1)
    replica.model.train()
    (batch,) = load_steps(data, plan, range(1), loading, start=0, stop=1)
    steps = TaskSteps(replica, task.loss)
    return Side(lambda: steps.take_step(batch), replica.model, replica.optimizer), replica, list(sharing.notices)


def arithmetic(model: Model, mesh: str, asked: argparse.Namespace) -> tuple[float, float]:
    """(bytes of weights, gradients and two moments on one rank, bytes sent in a step), by formula."""
    elements, activation = sum(p.numel() for p in model.parameters()), 4 * BATCH * asked.length * asked.width
    if mesh.startswith("pipeline"):
        return elements * 16 / RANKS, asked.microbatches * activation  # the mean of all ranks
    weights = (name for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2)
    cut = {*weights, *(f"blocks.{n}.{name}.bias" for n in range(asked.layers) for name in ("q", "k", "v", "up"))}
    shared = sum(p.numel() for name, p in model.named_parameters() if name in cut)
    each = 4 * 2 * (RANKS - 1) / RANKS * activation  # sums of a block: two forward, two backward; each by a ring
    return (elements - shared + shared / RANKS) * 16, asked.microbatches * asked.layers * each


def rank(number: int, store: str, asked: argparse.Namespace) -> None:
    """Race on this rank; rank 0 writes down what came out."""
    torch.set_num_threads(1)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "4096"

    guard = HangGuard.of_process()
    guard.watch_torch()
    dist.init_process_group("gloo", store=FileStore(store, RANKS), rank=number, world_size=RANKS)
    base = World(number, RANKS, number, RANKS, torch.device("cpu"), "gloo")
    torch.manual_seed(0)
    whole = Model(asked.width, asked.layers)
    words = torch.randint(WORDS, (BATCH * asked.microbatches, asked.length))
    found: dict[str, object] = {}
    for mesh, by_hand in {"tensor=2": tensor_by_hand, "pipeline=2": pipeline_by_hand}.items():
        mine, replica, told = ours(copy.deepcopy(whole), words, mesh, base)
        sides = {"paceline": mine, "by hand": by_hand(copy.deepcopy(whole), words)}

        def seconds(name: str, count: int, sides: dict[str, Side] = sides) -> float:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(count):
                sides[name].step()
            dist.barrier()
            return (time.perf_counter() - began) / count

        for name in sides:
            seconds(name, 3)
        turns = [{name: seconds(name, asked.steps) for name in sides} for _ in range(asked.turns)]
        traffic = SentBytesCounter(guard.page, replica.world, replica.pipeline)
        mine.step()
        gathered = [None] * RANKS
        dist.all_gather_object(gathered, (mine.held(), sides["by hand"].held(), traffic.sent_bytes() or 0.0))
        held, hand, sent = zip(*gathered, strict=True)
        ratios = sorted(turn["by hand"] / turn["paceline"] for turn in turns)
        state, volume = arithmetic(whole, mesh, asked)
        in_stages = mesh.startswith("pipeline")
        most = sum(held) / RANKS if in_stages else max(held)
        found[mesh] = {
            "ms a step": {name: statistics.median(turn[name] for turn in turns) * 1e3 for name in sides},
            "speed beside by hand": {"min": ratios[0], "median": statistics.median(ratios), "max": ratios[-1]},
            "held MB of each rank": [one / 1e6 for one in held],
            "held MB by hand": [one / 1e6 for one in hand],
            "held beside arithmetic": most / state,
            "sent MB a step, counted": [one / 1e6 for one in sent],
            "sent beside arithmetic": sum(sent) / RANKS / volume,
            "told at the start": told,
        }
    if number == 0:
        about = {"torch": str(torch.__version__), "python": platform.python_version(), "cores": os.cpu_count()}
        text = json.dumps({**about, **vars(asked), **found, "out": None}, indent=2)
        print(text)
        if asked.out:
            Path(asked.out).write_text(text + "\n")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = {"width": 512, "layers": 4, "length": 128, "microbatches": 4, "turns": 10, "steps": 3}
    for name, value in usual.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = multiprocessing.get_context("spawn")
        ranks = [made.Process(target=rank, args=(number, f"{folder}/store", asked)) for number in range(RANKS)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
    return max(abs(one.exitcode or 0) for one in ranks)


if __name__ == "__main__":
    raise SystemExit(main())
