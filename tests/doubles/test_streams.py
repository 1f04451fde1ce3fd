"""Batches on a separate stream: steps wait for them, and their memory is not freed too early."""

from collections.abc import Callable, Generator, Iterable, Iterator

import pytest
import torch
from tests.doubles.streams import Event, Recorder, Stream
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from paceline.data import loader
from paceline.data.loader import LoadingOptions, PrefetchTrigger, load_planned_batches, load_steps, prefetch_to_device
from paceline.data.plan import BatchPlan, MicroBatchPlan

CUDA = torch.device("cuda")
BATCHES = 5


def batches() -> Iterator[dict[str, Tensor]]:
    for number in range(BATCHES):
        yield {"inputs": torch.full((3,), float(number)), "targets": torch.full((2, 2), number)}


def consumed(recorder: Recorder, ahead: PrefetchTrigger | None) -> list[float]:
    """Each batch is read and freed before the next one is requested."""
    found: list[float] = []
    on_device: Generator[dict[str, Tensor]] = prefetch_to_device(batches(), CUDA, ahead, lambda: 1)
    for batch in on_device:
        total = batch["inputs"].sum() + batch["targets"].sum()
        found.append(float(total))
        if ahead is not None:
            ahead.start_batches()
        del batch
    return found


@pytest.mark.parametrize("ahead", [None, PrefetchTrigger()], ids=["by itself", "when a step says so"])
def test_every_batch_has_arrived_before_it_is_read_and_is_kept_until_then(ahead: PrefetchTrigger | None) -> None:
    with Recorder() as recorder:
        assert consumed(recorder, ahead) == [7.0 * number for number in range(BATCHES)]
    assert recorder.copies == 2 * BATCHES
    assert recorder.races == []


@pytest.mark.parametrize("ahead", [None, PrefetchTrigger()], ids=["by itself", "when a step says so"])
def test_events_are_reused(ahead: PrefetchTrigger | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Event]()
    with Recorder() as recorder:
        monkeypatch.setattr(torch.cuda, "Event", lambda: made.append(Event()) or made[-1])
        consumed(recorder, ahead)
    assert len(made) <= 2 and recorder.races == []


@pytest.mark.parametrize(
    ("owner", "name", "without", "race"),
    [
        (Stream, "wait_event", lambda self, event: None, ("read too early", 0, 1)),
        (loader, "tensors", lambda batch: (), ("freed too early", 1, 0)),  # no record_stream
        (Tensor, "pin_memory", lambda self: self, ("host waits",)),
    ],
)
def test_without_it_a_race_is_seen(
    owner: object, name: str, without: Callable[..., object], race: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, without)
    with Recorder() as recorder:
        consumed(recorder, None)
    assert {*recorder.races} == {race}


no_accelerator = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")


class Items(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([index]), index


@no_accelerator
@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("virtual_ranks", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("workers", [0, 1, "arrays"])
def test_every_step_of_several_epochs_gets_its_own_batches(
    workers: int | str, accumulation: int, virtual_ranks: int, evaluates: bool
) -> None:
    # the last step of an epoch has one sample, so it has fewer micro-batches than the next step
    plan = BatchPlan(21, 4, virtual_ranks, accumulation, last_batch="keep")
    dataset = TensorDataset(torch.arange(21)[:, None], torch.arange(21)) if workers == "arrays" else Items()
    loading = LoadingOptions(CUDA, workers if isinstance(workers, int) else 0, evaluates=evaluates)
    with Recorder() as recorder:
        steps, stop = 0, 2 * plan.steps_per_epoch
        for micro_batches in load_steps(dataset, plan, range(virtual_ranks), loading, start=0, stop=stop):
            assert {batch.work.step + plan.steps_per_epoch * batch.work.epoch for batch in micro_batches} == {steps}
            for batch in micro_batches:
                assert torch.equal(batch.inputs[:, 0], batch.work.indices)
            steps += 1
            loading.ahead.start_batches()
    assert steps == stop and recorder.races == []


@no_accelerator
@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "evaluation"])
def test_one_step_is_drawn_ahead_and_its_random_numbers_are_kept(evaluates: bool) -> None:
    drawn = list[float]()

    def steps(sizes: Iterable[int]) -> Iterator[list[MicroBatchPlan]]:
        for step, size in enumerate(sizes):
            drawn.append(float(torch.rand(())))
            yield [MicroBatchPlan(0, step, 0, part, torch.tensor([step, part])) for part in range(size)]

    torch.manual_seed(1)
    expected, loading = [float(torch.rand(())) for _ in range(5)], LoadingOptions(CUDA, evaluates=evaluates)
    torch.manual_seed(1)
    with Recorder():
        for step, _ in enumerate(load_planned_batches(Items(), steps([3, 1, 1, 3, 1]), 0, loading)):
            assert len(drawn) == min(step + 2, 5)
            loading.ahead.start_batches()
    assert drawn == expected
