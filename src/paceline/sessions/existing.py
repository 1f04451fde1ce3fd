"""An existing DataLoader, taken over: its data, its collate function, its own order of batches."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from paceline.data.plan import BatchPlan
from paceline.errors import UsageError
from paceline.sums import gather_words
from paceline.worker.world import World


@dataclass(frozen=True)
class OwnOrder(BatchPlan):
    """The batches of one epoch in an order of the user's own, dealt to virtual ranks as ever."""

    own_order = True
    batches: tuple[Tensor, ...] = ()

    @property
    def steps_per_epoch(self) -> int:
        """How many batches it has."""
        return len(self.batches) or 1

    def global_indices(self, epoch: int, step: int) -> Tensor:
        """(n,) int64: the samples of batch `step`, in whichever epoch this order was drawn for."""
        del epoch
        return self.batches[step]


def check_taken(loader: DataLoader[Any]) -> None:
    """Refuse what cannot be taken over.

    Raises:
        UsageError: names it, and what to do.
    """
    odd = {
        "batch_size=None: its dataset gives whole batches": loader.batch_sampler is None,
        "worker_init_fn (randomness is seeded by a sample's number; what a process needs, a file that is open say, "
        "the dataset can make when it is first asked for a sample)": loader.worker_init_fn is not None,
        "in_order=False": not getattr(loader, "in_order", True),
    }
    if found := [words for words, so in odd.items() if so]:
        raise UsageError(
            f"s.loader(DataLoader(...)) cannot take over {', '.join(found)}. Give it the dataset itself: "
            "s.loader(dataset, global_batch=...)"
        )


def own_collate(loader: DataLoader[Any]) -> Any:
    """Its function from samples to a batch; None for torch's own."""
    return None if loader.collate_fn is default_collate else loader.collate_fn


def own_workers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Its settings for its processes, but their number."""
    return {
        "timeout": loader.timeout,
        "prefetch_factor": loader.prefetch_factor,
        "multiprocessing_context": loader.multiprocessing_context,
    }


def keeps_order(loader: DataLoader[Any]) -> bool:
    """Whether it gives its samples as they lie."""
    return isinstance(loader.sampler, SequentialSampler)


def covers_all(loader: DataLoader[Any]) -> bool:
    """Whether an epoch has each of its samples once, as far as its kind of sampler tells."""
    return isinstance(loader.sampler, SequentialSampler) or (
        isinstance(loader.sampler, RandomSampler)
        and not loader.sampler.replacement
        and len(loader.sampler) == len(loader.dataset)  # pyright: ignore[reportArgumentType]
    )


def streams(loader: DataLoader[Any]) -> dict[str, str]:
    """Where the random streams stand from which its order is drawn, as JSON."""
    own = loader.generator
    found = {"torch": _text(torch.get_rng_state())}
    return found if own is None else found | {"generator": _text(own.get_state())}


def draw_order(loader: DataLoader[Any], world: World, put_back: dict[str, str] | None) -> tuple[list[Tensor], Any]:
    """An epoch's batches of indices, the same on all ranks, and the streams as they stood before (a collective).

    Drawn as DataLoader itself would, by each rank, from the streams of rank 0: so a single-device script keeps its
    order. `put_back`: the streams as they stood when this epoch was first drawn, to draw it again after a resume.
    """
    found = put_back if put_back is not None else gather_words(streams(loader), world)[0]
    torch.set_rng_state(_state(found["torch"]))
    if loader.generator is not None and "generator" in found:
        loader.generator.set_state(_state(found["generator"]))
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # DataLoader's seed of its processes
    return [torch.tensor(batch, dtype=torch.int64) for batch in _drawn(loader)], found


def _drawn(loader: DataLoader[Any]) -> Iterator[Any]:
    assert loader.batch_sampler is not None
    return iter(loader.batch_sampler)


def _text(state: Tensor) -> str:
    return base64.b85encode(state.numpy().tobytes()).decode()


def _state(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b85decode(text)), dtype=torch.uint8)
