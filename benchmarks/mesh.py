"""Steps of a model cut by paceline along tensor, beside the same model with torch's hand-written plan, in turns.

    python benchmarks/mesh.py [--width 512 --layers 4 --batch 4 --length 128 --turns 4 --steps 6]

Two CPU ranks over gloo. The hand-written plan is torch's own way (parallelize_module with ColwiseParallel and
RowwiseParallel; the attention's code works on local shapes), as torchtitan writes it. Printed are the seconds of a step
in each turn, their ratio, and what a rank holds of weights, gradients and AdamW's state beside the arithmetic.
"""

import argparse
import copy
import multiprocessing
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 512


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
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(layers))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_hand(model: Model) -> Model:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, plan = init_device_mesh("cpu", (dist.get_world_size(),)), dict[str, object]()
    for number in range(len(model.blocks)):
        plan |= {f"blocks.{number}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {f"blocks.{number}.{name}": RowwiseParallel() for name in ("out", "down")}
    return parallelize_module(model, mesh, plan)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum(getattr(t, "to_local", lambda t=t: t)().nbytes for t in tensors)


def rank(number: int, size: int, store: str, asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=number, world_size=size)
    from paceline import World
    from paceline.mesh import Mesh
    from paceline.tensor.cut import cut_along_tensor
    from paceline.worker.world import on_mesh

    world = on_mesh(World(number, size, number, size, torch.device("cpu"), "gloo"), Mesh({"tensor": size}))
    torch.manual_seed(0)
    whole = Model(asked.width, asked.layers)
    ours, theirs = copy.deepcopy(whole), by_hand(copy.deepcopy(whole))
    cuts = cut_along_tensor(ours, world, lambda _: {"embedding": "whole", "head": "whole"}).cuts
    words = torch.randint(WORDS, (asked.batch, asked.length))
    models = {"paceline": ours, "by hand": theirs}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()}

    def steps(name: str, count: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            models[name].zero_grad()
            F.cross_entropy(models[name](words).flatten(0, 1), words.flatten()).backward()
            optimizers[name].step()
        dist.barrier()
        return (time.perf_counter() - began) / count

    for name in models:
        steps(name, 2)
    turns = [{name: steps(name, asked.steps) for name in models} for _ in range(asked.turns)]
    if number == 0:
        for turn in turns:
            print("  ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in turn.items()))
        ratios = [turn["paceline"] / turn["by hand"] for turn in turns]
        print(f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        elements = sum((cuts[n].shape if n in cuts else p.shape).numel() for n, p in whole.named_parameters())
        found = held(ours, optimizers["paceline"])
        print(f"a rank holds {found / 1e6:.2f} MB, 4 tensors of its weights are {elements * 16 / 1e6:.2f} MB")
        print(f"by hand it holds {held(theirs, optimizers['by hand']) / 1e6:.2f} MB")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in {"width": 512, "layers": 4, "batch": 4, "length": 128, "turns": 4, "steps": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = multiprocessing.get_context("spawn")
        ranks = [made.Process(target=rank, args=(number, 2, f"{folder}/store", asked)) for number in range(2)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()


if __name__ == "__main__":
    main()
