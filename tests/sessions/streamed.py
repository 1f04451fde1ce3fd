"""A loop over a stream that is killed or fails: python streamed.py FOLDER KIND [STEP HOW]."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import paceline

SAMPLES, SIZE = 70, 8
SHARDS = (13, 4, 9, 10, 7, 11, 9, 7)  # 70 in all; in 6 parts no two are alike


def sample(number: int) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(number)
    # the draw is one of the sample's own stream, wherever it is read
    return torch.randn(6, generator=generator) + 0.1 * torch.randn(6), number % 3


class Counted(IterableDataset[Any]):
    """Has no state: its position is counted."""

    reads = 0

    def __init__(self, numbers: list[int], length: int = SAMPLES) -> None:
        self.numbers, self.length = numbers, length

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers[: self.length]:
            Counted.reads += 1
            yield sample(number)


class Stateful(Counted):
    """Says where it stands; and where `late`, one sample late."""

    def __init__(self, numbers: list[int], late: bool = False) -> None:
        super().__init__(numbers)
        self.at, self.late = 0, late

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.numbers):
            Counted.reads += 1
            found = sample(self.numbers[self.at])
            self.at += not self.late
            yield found
            self.at += self.late

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Sharded(Counted):
    """Shards of other lengths."""

    def __init__(self, shards: list[list[int]]) -> None:
        super().__init__([number for shard in shards for number in shard])
        self.shards, self.num_shards = shards, len(shards)

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.shards[index::num_shards])


class StatefulShards(Sharded, Stateful):
    def __init__(self, shards: list[list[int]]) -> None:
        Sharded.__init__(self, shards)
        self.at, self.late = 0, False

    def shard(self, num_shards: int, index: int) -> StatefulShards:
        return StatefulShards(self.shards[index::num_shards])


class Failing(Counted):
    def __iter__(self) -> Iterator[Any]:
        for number, found in enumerate(super().__iter__()):
            if number == 4 * SIZE + 3:
                raise ValueError("damaged")
            yield found


def hugging_face(folder: Path, buffer: int) -> Any:
    from datasets import load_dataset

    folder.mkdir(exist_ok=True)
    for shard in range(4):
        lines = [json.dumps({"number": number}) for number in range(SAMPLES)[shard::4]]
        path = folder / f"{shard}.jsonl"
        if not path.exists():
            path.with_suffix(f".{os.getpid()}").write_text("\n".join(lines))
            path.with_suffix(f".{os.getpid()}").rename(path)
    files = sorted(str(path) for path in folder.glob("*.jsonl"))
    found = load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache"))
    return found.shuffle(seed=3, buffer_size=buffer) if buffer else found


def webdataset(folder: Path) -> Any:
    wds: Any = importlib.import_module("webdataset")

    folder.mkdir(exist_ok=True)
    for shard in range(4):
        path = folder / f"{shard}.tar"
        if not path.exists():
            with wds.TarWriter(str(path.with_suffix(f".{os.getpid()}"))) as tar:
                for number in range(SAMPLES)[shard::4]:
                    tar.write({"__key__": f"{number:03}", "cls": number})
            path.with_suffix(f".{os.getpid()}").rename(path)
    files = sorted(str(path) for path in folder.glob("*.tar"))
    found = wds.WebDataset(files, shardshuffle=4, detshuffle=True, seed=3, nodesplitter=None)
    return found.shuffle(12, rng=random).decode().map(lambda one: sample(one["cls"]))


def stream(kind: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    numbers, rank = list(range(SAMPLES)), int(os.environ.get("RANK", "0"))
    cuts = [sum(SHARDS[:at]) for at in range(len(SHARDS) + 1)]
    shards = [numbers[a:b] for a, b in pairwise(cuts)]
    found: dict[str, Any] = {
        "counted": lambda: (Counted(numbers), {}),
        "loader": lambda: (DataLoader(Counted(numbers), batch_size=SIZE), {}),
        "process": lambda: (Counted(numbers), {"num_workers": 1}),
        "stateful": lambda: (Stateful(numbers), {}),
        "late": lambda: (Stateful(numbers, late=True), {}),
        "drop": lambda: (Stateful(numbers), {"last_batch": "drop", "num_workers": 1}),
        "accumulated": lambda: (Counted(numbers), {"accumulation": 2}),
        "split": lambda: (Sharded(shards), {"split": True}),
        "split-stateful": lambda: (StatefulShards(shards), {"split": True, "num_workers": 1}),
        "hf": lambda: (hugging_face(folder, 0), {"collate": of_numbers}),
        "hf-split": lambda: (hugging_face(folder, 0), {"collate": of_numbers, "split": True}),
        "hf-shuffled": lambda: (hugging_face(folder, 12), {"collate": of_numbers}),
        "wds": lambda: (webdataset(folder), {}),
        "fails": lambda: (Failing(numbers), {}),
        "by-rank": lambda: (Counted(numbers[rank::2]), {}),
        "by-chance": lambda: (Counted(random.Random(os.getpid()).sample(numbers, SAMPLES)), {}),
        "uneven": lambda: (Counted(numbers, SAMPLES - 9 * rank), {}),
    }
    return found[kind]()


def of_numbers(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate([sample(one["number"]) for one in samples])


def main() -> None:
    folder, kind, step, how = [*sys.argv[1:], None, None][:4]
    assert folder and kind
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    virtual_ranks = 3 if kind == "hf-split" else 6
    with paceline.session(folder, resume=True, strategy="exact", virtual_ranks=virtual_ranks, checkpoint_every=2) as s:
        model, optimizer = s.prepare(net, lambda p: torch.optim.AdamW(p, lr=1e-2))
        data, options = stream(kind, Path(folder).parent / "files")
        if not isinstance(data, DataLoader):
            options["global_batch"] = SIZE
        train = s.loader(data, **options)
        for _ in s.epochs(2):
            for x, y in train:
                if step and s.step == int(step) and s.rank == s.size - 1:
                    if how == "raise":
                        raise RuntimeError("mine")
                    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)
                optimizer.zero_grad()
                s.backward(F.cross_entropy(model(x), y))
                optimizer.step()
        s.print(f"reads {Counted.reads}")


if __name__ == "__main__":
    main()
