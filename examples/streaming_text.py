"""A small language model over bytes, from a stream of text files that have no number of samples.

python examples/streaming_text.py                                        # a world of one
paceline launch --nproc 2 -- examples/streaming_text.py                  # two ranks, the same result
paceline launch --nproc 2 -- examples/streaming_text.py --run runs/text  # killed? start it again: it goes on mid-file
"""

import argparse
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import paceline

LENGTH = 32


class Text(IterableDataset[Tensor]):
    """The bytes of files in pieces of LENGTH + 1, the files in another order in each epoch; it says where it stands."""

    def __init__(self, files: list[Path]) -> None:
        self.files, self.epoch, self.file, self.place = files, 0, 0, 0

    @property
    def num_shards(self) -> int:
        """The files: of these each virtual rank may have its own."""
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> "Text":
        return Text(self.files[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        order = random.Random(self.epoch).sample(self.files, len(self.files))  # the same on every rank
        while self.file < len(order):
            text = order[self.file].read_bytes()
            while self.place + LENGTH < len(text):
                piece = text[self.place : self.place + LENGTH + 1]
                self.place += LENGTH
                yield torch.tensor(list(piece))
            self.file, self.place = self.file + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"file": self.file, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.file, self.place = state["file"], state["place"]


class Model(nn.Module):
    """The next byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.body, self.out = nn.Embedding(256, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.token(tokens))[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--run")
    parser.add_argument("--split", action="store_true", help="each virtual rank reads files of its own")
    args = parser.parse_args()
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]  # a text that every Python has
    torch.manual_seed(0)
    with paceline.session(args.run, resume=bool(args.run), virtual_ranks=4, checkpoint_every=50) as s:
        model, optimizer = s.prepare(Model(), lambda p: torch.optim.AdamW(p, lr=3e-3))
        train = s.loader(Text(files[:-2]), global_batch=16, split=args.split)
        for _ in s.epochs(100):
            for pieces in train:
                if s.step == args.steps:
                    break
                optimizer.zero_grad()
                loss = F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
                s.backward(loss)
                optimizer.step()
            if s.step == args.steps:
                break
        model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for pieces in s.loader(Text(files[-2:]), global_batch=64):
                total += F.cross_entropy(
                    model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten(), reduction="sum"
                ).item()
                count += LENGTH * len(pieces)
        s.log(loss=s.mean(total, count))


if __name__ == "__main__":
    main()
