"""The loader: the plan's samples, in its order, with augmentation that belongs to the sample."""

import gc
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.errors import raises
from torch.utils.data import Dataset, TensorDataset

from paceline.data.arrays import ArrayDataset
from paceline.data.loader import LoadingOptions, PrefetchTrigger, load_steps, prefetch, prefetch_to_device
from paceline.data.plan import BatchPlan, virtual_ranks_of
from paceline.data.workers import SLOTS_OF_A_LOADER, SeededSampleDataset, explain_lost_workers
from paceline.errors import TrainingError
from paceline.protocol.evidence import LOADER_KILLED
from paceline.protocol.status_page import StatusPage, make_status_page, read_counters, read_loader_workers

CPU = torch.device("cpu")
PLAN = BatchPlan(23, 8, virtual_ranks=2, accumulation=2, seed=3)


class Noisy(Dataset):
    """Sample i is i plus noise from all three random streams."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        noise = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *noise]), index


def noisy(inputs, draw):
    return torch.cat([inputs, draw(2), draw(1)], 1)


def batches(dataset, *, workers=0, share=range(2), stop=6, collate=None, plan=PLAN):
    return list(load_steps(dataset, plan, share, LoadingOptions(CPU, workers, collate), start=0, stop=stop))


def test_transform_of_array_datasets_sees_batches():
    data = ArrayDataset(torch.arange(23.0), torch.arange(23), lambda x: x * 2)
    assert data[5] == (10.0, 5)
    assert torch.equal(data.gather(torch.tensor([1, 3]))[0], torch.tensor([2.0, 6.0]))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "dataset",
    [Noisy(), ArrayDataset(torch.arange(23.0).reshape(23, 1), torch.arange(23), augment=noisy)],
    ids=["samples", "arrays"],
)
def test_augmentation_belongs_to_epoch_and_sample_not_to_the_worker_rank_or_batch(dataset):
    def by_sample(steps):
        return {(b.work.epoch, int(x[0])): x[1:].tolist() for step in steps for b in step for x in b.inputs}

    alone = by_sample(batches(dataset))
    assert by_sample(batches(dataset, workers=2)) == alone
    assert by_sample(batches(dataset, plan=BatchPlan(23, 1, seed=3), share=range(1), stop=46)) == alone
    ranks = [by_sample(batches(dataset, share=virtual_ranks_of(2, rank, 2))) for rank in range(2)]
    assert {**ranks[0], **ranks[1]} == alone
    assert len({tuple(v) for v in alone.values()}) == len(alone) == 2 * 23  # each epoch draws anew


def test_loading_leaves_the_random_streams_alone():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    batches(Noisy())
    after = float(torch.rand(())), random.random(), float(np.random.rand())
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert after == (float(torch.rand(())), random.random(), float(np.random.rand()))


def test_a_rank_without_a_share_gets_a_stand_in():
    plan = BatchPlan(1, 4, virtual_ranks=2)
    data = TensorDataset(torch.zeros(1, 1), torch.zeros(1))
    (step,) = load_steps(data, plan, range(1, 2), LoadingOptions(CPU), start=0, stop=1)
    assert [b.work.is_counted for b in step] == [False]
    assert step[0].inputs.shape == (1, 1)


@pytest.mark.parametrize("items", [[(torch.zeros(1), 1, 2)] * 23, [torch.zeros(3)] * 23, ["ab"] * 23])
def test_items_that_are_no_pairs_are_refused(items):
    with raises("not-pairs"):
        batches(items)


def test_nested_items_stay_nested():
    step = batches([({"a": torch.ones(2), "b": (torch.ones(1), i)}, i) for i in range(23)])[0][0]
    assert step.inputs["a"].shape == (2, 2)
    assert torch.equal(step.inputs["b"][1], step.work.indices)


def test_own_collate():
    def collate(samples):
        return torch.stack([s[0] for s in samples]) + 100, torch.tensor([s[1] for s in samples])

    step = batches([(torch.tensor(float(i)), i) for i in range(23)], collate=collate)[0][0]
    assert torch.equal(step.inputs, step.work.indices + 100.0)


# ---- what the box shows ------------------------------------------------------------------------------------------


class Odd(Dataset):
    """Sample 13 waits for a file, or ends its process."""

    def __init__(self, released=None):
        self.released = released

    def __len__(self):
        return 23

    def __getitem__(self, index):
        if index == 13:
            while self.released and not self.released.exists():
                time.sleep(0.01)
            if not self.released:
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1), index


@pytest.fixture
def page():
    descriptor = make_status_page(0)
    page = StatusPage(descriptor)
    yield page
    page.close()
    os.close(descriptor)


def once(dataset, page, *, evaluates=False):
    loading = LoadingOptions(CPU, 2, page=page, evaluates=evaluates)
    return list(load_steps(dataset, PLAN, range(2), loading, start=0, stop=3))


@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "evaluation"])
def test_the_box_shows_which_sample_a_process_hangs_in_and_that_it_is_waited_for(page, tmp_path, evaluates):
    # the main thread forks: processes that another thread has forked have died of SIGSEGV now and then
    seen = []

    def look():
        deadline = time.monotonic() + 30
        try:
            while not (found := [w for w in read_loader_workers(page.descriptor) if w.busy and w.item == 13]):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            while not page.get("loading"):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            seen.extend(found)
        finally:
            (tmp_path / "go").touch()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        once(Odd(tmp_path / "go"), page, evaluates=evaluates)
    finally:
        thread.join()
    (hanging,) = seen
    assert hanging.epoch == 0 and hanging.number // SLOTS_OF_A_LOADER == int(evaluates)
    assert os.getpid() != hanging.pid
    assert not page.get("loading")
    assert not any(worker.busy for worker in read_loader_workers(page.descriptor))
    assert read_counters(page.descriptor).step == 0


LOSING = """
import json, os, sys
import tests.data.test_loader as here
from paceline.errors import TrainingError

box = here.StatusPage(here.make_status_page(0))
try:
    with here.explain_lost_workers(box, 3):
        here.once(here.Odd(), box)
except TrainingError as error:
    lost = next(worker for worker in here.read_loader_workers(box.descriptor) if worker.item == 13)
    print(json.dumps([lost.number, lost.pid, error.code, error.fields]), flush=True)
os._exit(0)
"""


def test_a_killed_process_is_named_with_its_sample():
    # In a process of its own: torch raises from its handler of SIGCHLD, wherever the main thread is.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", LOSING], capture_output=True, text=True, check=True, env=env)
    number, pid, code, fields = json.loads(run.stdout)
    assert (code, fields["rank"], fields["pid"], fields["number"]) == ("loader-process-lost", 3, pid, f" {number}")
    assert "sample 13 of epoch 1" in fields["item"]
    assert LOADER_KILLED.search(fields["reason"])  # by which the agent knows that a restart may help


def test_a_process_that_dies_while_its_batch_is_fetched_is_named(monkeypatch):
    looks = iter(range(3))  # the connection breaks before the kernel reports the end of the process

    def lost():
        if next(looks) == 2:
            raise RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed. ")

    with pytest.raises(ConnectionResetError), explain_lost_workers(StatusPage(make_status_page(0)), 3):
        raise ConnectionResetError("of something else")
    monkeypatch.setattr(torch._C, "_error_if_any_worker_fails", lost)
    with (
        raises("loader-process-lost", raised=TrainingError, rank=3, pid=5),
        explain_lost_workers(StatusPage(make_status_page(0)), 3),
    ):
        raise ConnectionResetError("104")


def test_an_error_that_is_none_of_a_process_passes():
    with pytest.raises(RuntimeError, match="mine"), explain_lost_workers(StatusPage(make_status_page(0)), 0):
        raise RuntimeError("mine")


def test_samples_go_to_spawned_processes_without_the_box(page):
    samples = pickle.loads(pickle.dumps(SeededSampleDataset(Noisy(), 0, page)))
    assert samples[0, 5][1] == 5


class Event:
    """As one of CUDA's: it must not be deleted in a forked process."""

    def __init__(self, told: Path) -> None:
        self.itself, self.told, self.pid = self, told, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            self.told.write_text("deleted")


class Collecting(Noisy):
    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)


def test_loader_processes_collect_nothing_of_what_was_garbage_before(tmp_path: Path) -> None:
    gc.disable()  # it shall still be there
    try:
        Event(tmp_path / "told")
        assert batches(Collecting(), workers=1, stop=1)
    finally:
        gc.enable()
    assert not (tmp_path / "told").exists()


def test_garbage_that_is_alive_when_loader_processes_start_is_collected_later(tmp_path: Path) -> None:
    gc.freeze()  # as a preloader, before it forks the rank
    alive = Event(tmp_path / "told")
    gone = weakref.ref(alive)
    assert batches(Noisy(), workers=1, stop=1)
    del alive
    gc.collect()
    assert gone() is None and gc.isenabled()


# ---- ahead of the step ---------------------------------------------------------------------------------------------


def counting(number, log):
    for i in range(number):
        log.append(f"begin {i}")
        yield torch.tensor([i])


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_each_is_begun_before_the_one_before_it_is_handed_out(number):
    log = []
    source = counting(number, log)
    for i, item in enumerate(prefetch(lambda: next(source), int)):
        assert item == i
        log.append(f"use {i}")
    uses = [log.index(f"use {i}") for i in range(number)]
    assert uses == sorted(uses) and len(log) == 2 * number
    for i in range(number - 1):
        assert log.index(f"begin {i + 1}") < uses[i]
        assert i + 2 >= number or uses[i] < log.index(f"begin {i + 2}")  # one ahead, not more


def test_an_error_of_the_source_comes_through():
    def source():
        yield 1
        raise OSError("disk")

    items = source()
    with pytest.raises(OSError, match="disk"):
        list(prefetch(lambda: next(items), int))
    items = source()
    ahead = prefetch(lambda: next(items), int)
    assert next(ahead) == 1  # what was there before it is not lost
    with pytest.raises(OSError, match="disk"):
        next(ahead)


def test_on_the_cpu_a_batch_is_made_when_it_is_asked_for():
    log = []
    batches = prefetch_to_device(counting(3, log), torch.device("cpu"))
    assert int(next(batches)) == 0 and log == ["begin 0"]


def test_a_step_says_when_the_items_of_the_next_one_are_begun():
    log, ahead, num_next = [], PrefetchTrigger(), 2
    things = counting(7, log)
    items = prefetch(lambda: next(things), int, ahead, lambda: num_next)
    assert [next(items), next(items)] == [0, 1] and len(log) == 2  # not before the step is launched
    ahead.start_batches()
    assert log[2:] == ["begin 2", "begin 3"]
    ahead.start_batches()  # they are begun already
    assert len(log) == 4
    assert [next(items) for _ in range(3)] == [2, 3, 4] and len(log) == 5
    ahead.start_batches()
    assert log[5:] == ["begin 5", "begin 6"] and list(items) == [5, 6]
    ahead.start_batches()  # of data that have ended


def test_what_goes_wrong_in_a_step_ahead_is_raised_when_it_is_due():
    def source():
        yield from (1, 2)
        raise OSError("disk")

    things, ahead = source(), PrefetchTrigger()
    items = prefetch(lambda: next(things), int, ahead, lambda: 2)
    assert [next(items), next(items)] == [1, 2]
    ahead.start_batches()  # the step that is under way is not disturbed
    with pytest.raises(OSError, match="disk"):
        next(items)


def test_data_that_are_left_are_not_loaded_any_more():
    log, ahead = [], PrefetchTrigger()
    things = counting(5, log)
    items = prefetch(lambda: next(things), int, ahead, lambda: 2)
    assert next(items) == 0
    items.close()
    ahead.start_batches()
    assert log == ["begin 0"]
