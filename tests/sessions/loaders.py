"""A loop over a DataLoader with loader processes, length groups or packed texts: python loaders.py FOLDER KIND
[STEP RANK MILLISECONDS].

A FOLDER `plain` is the same loop in one process, without paceline. Each rank writes the samples of each step. Some
milliseconds after the beginning of a step a rank is killed; if negative, before it records the step.
"""

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import paceline
from paceline.train.records import RunRecorder

SAMPLES, SIZE, WORDS, EPOCHS, BLOCK = 61, 6, 11, 3, 7
IGNORED = -100


def text(number: int) -> list[int]:
    dice = random.Random(number)
    return [dice.randrange(WORDS) for _ in range(2 + dice.randrange(9))]


def sample(number: int) -> dict[str, Any]:
    return {"id": number, "input_ids": text(number)}


class Texts(Dataset[Any]):
    def __getitem__(self, number: int) -> dict[str, Any]:
        return sample(number)

    def __len__(self) -> int:
        return SAMPLES


class Opened(Texts):
    """Needs what `worker_init_fn` opens in each loader process."""

    table: list[dict[str, Any]] | None = None

    def __getitem__(self, number: int) -> dict[str, Any]:
        assert self.table is not None
        return self.table[number]


def open_table(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == worker and info.num_workers == 2 and isinstance(info.dataset, Opened)
    info.dataset.table = [sample(number) for number in range(SAMPLES)]


class Split(IterableDataset[Any]):
    """Splits itself by loader process, into parts of different lengths."""

    first, last = 0, SAMPLES

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(self.first, self.last):
            if min(number % (parts + 1), parts - 1) == part:
                yield sample(number)


class Bounds(Split):
    """Is split by `worker_init_fn`, as in the documentation of torch."""

    def __iter__(self) -> Iterator[Any]:
        yield from map(sample, range(self.first, self.last))


def split_bounds(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == worker
    share = -(-SAMPLES // info.num_workers)
    stream: Any = info.dataset
    stream.first, stream.last = worker * share, min((worker + 1) * share, SAMPLES)


class ShuffledSplit(IterableDataset[Any]):
    """Shuffles with the global random stream, and splits itself by loader process afterwards."""

    def __iter__(self) -> Iterator[Any]:
        info, numbers = get_worker_info(), [*range(SAMPLES)]
        random.shuffle(numbers)
        yield from map(sample, numbers if info is None else numbers[info.id :: info.num_workers])


class Unsplit(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from map(sample, range(SAMPLES))


class OwnGenerator(Texts):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.dice = random.Random(1)

    def __getitem__(self, number: int) -> dict[str, Any]:
        found = sample(number)
        self.dice.shuffle(found["input_ids"])
        return found


class Counting(IterableDataset[Any]):
    """Counts its epochs itself, and shuffles by this number."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)
        self.epoch += 1
        yield from map(sample, numbers)


class Blocks(IterableDataset[Any]):
    """Packs the texts into blocks of BLOCK tokens; the rest of a text begins the next block."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        tokens: list[int] = []
        for count, number in enumerate(range(part, SAMPLES, parts)):
            tokens += text(number)
            while len(tokens) >= BLOCK:
                yield {"id": part * 1000 + count, "input_ids": tokens[:BLOCK]}
                tokens = tokens[BLOCK:]
        if tokens:
            yield {"id": part * 1000 + 999, "input_ids": tokens}


class BatchesOfTokens:
    """A batch sampler: texts of similar length, at most 40 tokens in a batch."""

    def __init__(self) -> None:
        self.dice = random.Random(5)

    def __iter__(self) -> Iterator[list[int]]:
        numbers = sorted(range(SAMPLES), key=lambda n: (len(text(n)), self.dice.random()))
        batches: list[list[int]] = [[]]
        for number in numbers:
            if len(text(number)) * (len(batches[-1]) + 1) > 40:
                batches.append([])
            batches[-1].append(number)
        self.dice.shuffle(batches)
        yield from batches


def pack(numbers: list[int]) -> list[dict[str, Any]]:
    """Rows of whole texts, of at most 2 * BLOCK tokens."""
    rows: list[dict[str, Any]] = []
    for number in numbers:
        if not rows or len(rows[-1]["input_ids"]) + len(text(number)) > 2 * BLOCK:
            rows.append({"id": len(rows), "input_ids": []})
        rows[-1]["input_ids"] += text(number)
    return rows


def hugging_face(folder: Path) -> Any:
    from datasets import load_dataset

    folder.mkdir(exist_ok=True)
    for shard in range(3):
        lines = [json.dumps(sample(number)) for number in range(SAMPLES)[shard::3]]
        path = folder / f"{shard}.jsonl"
        if not path.exists():
            path.with_suffix(f".{os.getpid()}").write_text("\n".join(lines))
            path.with_suffix(f".{os.getpid()}").rename(path)
    files = sorted(str(path) for path in folder.glob("*.jsonl"))
    return load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache"))


def mapped() -> Any:
    from datasets import Dataset

    return Dataset.from_list([sample(number) for number in range(SAMPLES)])


def packed_texts(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """For `map(batched=True)`: two texts in a row."""
    ids, texts = rows["id"], rows["input_ids"]
    return {
        "id": ids[::2],
        "input_ids": [
            [*texts[at], *texts[at + 1]] if at + 1 < len(texts) else texts[at] for at in range(0, len(texts), 2)
        ],
    }


def padded(samples: list[Any]) -> dict[str, Tensor]:
    longest = max(len(one["input_ids"]) for one in samples)
    rows = [one["input_ids"] + [IGNORED] * (longest - len(one["input_ids"])) for one in samples]
    labels = torch.tensor(rows)
    return {"id": torch.tensor([one["id"] for one in samples]), "input_ids": labels.clamp(min=0), "labels": labels}


def grouped(**settings: Any) -> Any:
    """The sampler of transformers, which groups samples by length."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    return LengthGroupedSampler(SIZE, **settings)


def flattened(samples: list[Any]) -> dict[str, Any]:
    from transformers import DataCollatorWithFlattening

    batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": one["input_ids"]} for one in samples])
    return {**batch, "id": torch.tensor([one["id"] for one in samples])}


def loader(kind: str, files: Path) -> DataLoader[Any]:
    texts, lengths = Texts(), [len(text(number)) for number in range(SAMPLES)]
    of: dict[str, Any] = {
        "workers": lambda: (texts, {"shuffle": True, "num_workers": 2, "persistent_workers": True}),
        "init": lambda: (Opened(), {"shuffle": True, "num_workers": 2, "worker_init_fn": open_table}),
        "init-kept": lambda: (Opened(), {"shuffle": True, "num_workers": 2, "worker_init_fn": open_table,
                                         "persistent_workers": True}),
        "split": lambda: (Split(), {"num_workers": 3}),
        "split-1": lambda: (Split(), {"num_workers": 1}),
        "bounds": lambda: (Bounds(), {"num_workers": 2, "worker_init_fn": split_bounds}),
        "counting": lambda: (Counting(), {}),
        "counting-1": lambda: (Counting(), {"num_workers": 1}),
        "counting-kept": lambda: (Counting(), {"num_workers": 1, "persistent_workers": True}),
        "split-drop": lambda: (Split(), {"num_workers": 3, "drop_last": True}),
        "split-kept": lambda: (Split(), {"num_workers": 3, "persistent_workers": True}),
        "shuffled-split": lambda: (ShuffledSplit(), {"num_workers": 2}),
        "unsplit": lambda: (Unsplit(), {"num_workers": 2}),
        "own-generator": lambda: (OwnGenerator(), {}),
        "hf-many": lambda: (hugging_face(files), {"num_workers": 4}),
        "hf-shuffled": lambda: (hugging_face(files).shuffle(seed=3, buffer_size=9), {"num_workers": 2}),
        "hf-map": lambda: (mapped(), {"num_workers": 2, "sampler": grouped(dataset=mapped())}),
        "hf": lambda: (hugging_face(files), {}),
        "hf-workers": lambda: (hugging_face(files), {"num_workers": 2}),
        "length": lambda: (texts, {"sampler": grouped(lengths=lengths)}),
        "length-generator": lambda: (texts, {"num_workers": 2, "sampler": grouped(
            lengths=lengths, generator=torch.Generator().manual_seed(2))}),
        "tokens": lambda: (texts, {"batch_sampler": BatchesOfTokens(), "batch_size": 1}),
        "list": lambda: (texts, {"batch_sampler": [[0, 1, 2], [5, 4], [7, 8, 9, 10]], "batch_size": 1}),
        "packed": lambda: (pack([*range(SAMPLES)]), {"shuffle": True}),
        "flattened": lambda: (texts, {"shuffle": True, "collate_fn": flattened}),
        "blocks": lambda: (Blocks(), {}),
        "blocks-workers": lambda: (Blocks(), {"num_workers": 2}),
        "hf-packed": lambda: (hugging_face(files).map(packed_texts, batched=True, batch_size=6), {}),
        "hf-packed-workers": lambda: (hugging_face(files).map(packed_texts, batched=True, batch_size=6),
                                      {"num_workers": 2}),
    }  # fmt: skip
    data, more = of[kind.removeprefix("unweighted-")]()
    settings: dict[str, Any] = {"batch_size": SIZE, "collate_fn": padded, **more}
    return DataLoader(data, **settings)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 6, dtype=torch.float64), nn.Linear(6, WORDS, dtype=torch.float64)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words).tanh())


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The mean over the counted tokens, and their number."""
    labels = batch["labels"][:, 1:]
    logits = model(batch["input_ids"])[:, :-1]
    loss = F.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1), ignore_index=IGNORED)
    return loss, (labels != IGNORED).sum()


def plain(folder: Path, kind: str) -> None:
    model, batches = Model(), list[list[int]]()
    optimizer, train = torch.optim.SGD(model.parameters(), lr=0.3), loader(kind, folder.parent / "files")
    torch.manual_seed(1)
    for _ in range(EPOCHS):
        for batch in train:
            batches.append(sorted(batch["id"].tolist()))
            optimizer.zero_grad()
            loss_of(model, batch)[0].backward()
            optimizer.step()
    folder.mkdir(exist_ok=True)
    torch.save({"batches": batches, "weights": model.state_dict()}, folder / f"{kind}.pt")


def kill(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, kind, killed, victim, milliseconds = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:] or [-1, 0, 0])
    if folder.name == "plain":
        plain(folder, kind)
        return
    model = Model()
    with paceline.session(folder, resume=True, strategy="exact", virtual_ranks=3, checkpoint_every=2) as s:
        model, optimizer = s.prepare(model, lambda p: torch.optim.SGD(p, lr=0.3))
        train = s.loader(loader(kind, folder.parent / "files"))
        torch.manual_seed(1)
        seen = folder / f"seen-{os.getpid()}.jsonl"
        for _ in s.epochs(EPOCHS):
            for batch in train:
                if 0 <= killed <= s.step and s.rank == victim % s.size:
                    killed = -1
                    if milliseconds < 0:  # after the exchange of this step, before the rank records it
                        RunRecorder.log_step = kill
                    else:
                        threading.Timer(milliseconds / 1000, kill).start()
                if s.samples:
                    with seen.open("a") as file:
                        file.write(json.dumps([s.step, batch["id"].tolist()]) + "\n")
                optimizer.zero_grad()
                loss, weight = loss_of(model, batch)
                s.backward(loss, *([] if kind.startswith("unweighted-") else [weight]))
                optimizer.step()
        s.save(model, folder / "model.pt")


if __name__ == "__main__":
    main()
