"""Data held as tensors or arrays: the same batches as sample by sample, whatever holds them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from paceline.data.arrays import ArrayDataset, SampleRandomNumbers, batch_gatherer, on_device
from paceline.data.fingerprint import data_fingerprint
from paceline.data.loader import LoadingOptions, load_steps
from paceline.data.plan import BatchPlan

CPU = torch.device("cpu")
PLAN = BatchPlan(23, 8, virtual_ranks=2, accumulation=2, seed=3)
ROWS = np.arange(23 * 6, dtype=np.float32).reshape(23, 2, 3)
LABELS = np.arange(23)


def batches(dataset, plan=PLAN, share=range(2), stop=6):
    return [b for step in load_steps(dataset, plan, share, LoadingOptions(CPU), start=0, stop=stop) for b in step]


def mapped(folder, array):
    path = folder / "rows.npy"
    np.save(path, array)
    return np.load(path, mmap_mode="r")


def test_tensors_arrays_and_mapped_files_give_the_same_batches(tmp_path):
    expected = batches([(torch.from_numpy(row), label) for row, label in zip(ROWS, LABELS, strict=True)])
    held = (torch.from_numpy(ROWS), ROWS, mapped(tmp_path, ROWS), ROWS[:, ::-1][:, ::-1])
    datasets = [ArrayDataset(rows, LABELS) for rows in held]
    for dataset in (*datasets, TensorDataset(torch.from_numpy(ROWS), torch.from_numpy(LABELS))):
        for a, b in zip(batches(dataset), expected, strict=True):
            assert torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)
            assert torch.equal(a.targets, a.work.indices) and a.inputs.is_contiguous()


def test_a_batch_is_a_copy_and_a_mapped_file_stays_as_it_is(tmp_path):
    rows = mapped(tmp_path, ROWS)
    for held in (rows, ROWS.copy(), torch.from_numpy(ROWS.copy())):
        batch = ArrayDataset(held, LABELS).gather(torch.tensor([3, 1]))[0]
        batch.fill_(7)
        assert float(held[3, 0, 0]) == 18.0


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (np.array(["a", "b"]), "dtype <U1"),
        (np.array([1, 2], dtype=">f4"), r"dtype >f4\. .*astype\('float32'\)"),
        (np.array([None, 1]), "dtype object"),
        (np.zeros(3), "3 inputs but 2 targets"),
    ],
)
def test_rows_that_torch_does_not_know_are_refused_when_the_dataset_is_made(rows, words):
    with pytest.raises(ValueError, match=words):
        ArrayDataset(rows, np.zeros(2))


def test_a_subset_of_held_data_is_gathered_too():
    inner = ArrayDataset(ROWS, LABELS, lambda x: x * 2)
    subset = Subset(Subset(inner, [22, 5, 7, 9, 1]), [4, 0, 1])
    gather = batch_gatherer(subset)
    inputs, targets = gather(torch.tensor([1, 0]), SampleRandomNumbers(0, 0))
    assert targets.tolist() == [22, 1] and torch.equal(inputs[0], torch.from_numpy(ROWS[22]) * 2)

    class Own(TensorDataset):
        """May have a __getitem__ of its own."""

    assert batch_gatherer(Subset(Own(torch.zeros(2)), [0])) is None


def test_equal_data_have_equal_fingerprints_however_they_are_held(tmp_path):
    held = [ArrayDataset(rows, LABELS) for rows in (torch.from_numpy(ROWS), ROWS, mapped(tmp_path, ROWS))]
    held.append(TensorDataset(torch.from_numpy(ROWS), torch.from_numpy(LABELS)))
    prints = [data_fingerprint(dataset, LoadingOptions(CPU)) for dataset in held]
    assert all(one == prints[0] for one in prints)
    other = ROWS.copy()
    other[22, 1, 2] += 1
    assert data_fingerprint(ArrayDataset(other, LABELS), LoadingOptions(CPU)) != prints[0]


# ---- random numbers of a whole batch -----------------------------------------------------------------------------


def test_draws_are_uniform_and_independent():
    numbers = SampleRandomNumbers(5, 2).make_draw_function(torch.arange(20_000), CPU)(3)
    draw = SampleRandomNumbers(5, 2).make_draw_function(torch.arange(20_000), CPU)
    assert torch.equal(torch.cat([draw(2), draw(1)], 1), numbers)  # each call goes on
    more = SampleRandomNumbers(5, 3).make_draw_function(torch.arange(20_000), CPU)(3)
    columns = torch.cat([numbers, more], 1)
    assert numbers.dtype == torch.float32 and numbers.shape == (20_000, 3)
    assert float(columns.min()) >= 0 and float(columns.max()) < 1
    assert torch.allclose(columns.mean(0), torch.tensor(0.5), atol=0.01)
    assert torch.allclose(columns.var(0), torch.tensor(1 / 12), atol=0.002)
    off = torch.corrcoef(columns.t()) - torch.eye(6)
    assert float(off.abs().max()) < 0.03
    assert float(torch.corrcoef(torch.stack([numbers[:-1, 0], numbers[1:, 0]]))[0, 1].abs()) < 0.03


# ---- on the device -----------------------------------------------------------------------------------------------


def test_for_the_cpu_and_for_what_is_not_held_nothing_changes():
    for dataset in (ArrayDataset(ROWS, LABELS), [(1, 2)]):
        assert on_device(dataset, CPU) is dataset
    other = [(1, 2)]
    assert on_device(other, torch.device("meta"), free_bytes=1 << 30) is other


def test_what_does_not_fit_stays_where_it_is():
    dataset = ArrayDataset(ROWS, LABELS)
    size = ROWS.nbytes + LABELS.nbytes
    meta = torch.device("meta")  # has no memory, but is another device
    assert on_device(dataset, meta, free_bytes=size - 1) is dataset
    assert on_device(dataset, meta, free_bytes=size, collate=list) is dataset  # which gets samples on the CPU
    moved = on_device(dataset, meta, free_bytes=size)
    assert moved.inputs.device == moved.targets.device == meta
    held = on_device(TensorDataset(torch.zeros(4)), meta, free_bytes=size)
    assert type(held) is TensorDataset and held.tensors[0].device == meta


def test_what_training_needs_is_not_taken_by_data(monkeypatch):
    dataset, meta = ArrayDataset(ROWS, LABELS), torch.device("meta")
    size = ROWS.nbytes + LABELS.nbytes
    module = SimpleNamespace(mem_get_info=lambda _: (4 * size + 100, 1 << 30))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert on_device(dataset, meta, reserved=100).inputs.device == meta
    assert on_device(dataset, meta, reserved=101) is dataset


def test_a_transform_that_needs_the_cpu_keeps_the_data_there():
    dataset = ArrayDataset(ROWS, LABELS, lambda inputs: torch.from_numpy(inputs.numpy() * 2))
    assert on_device(dataset, torch.device("meta"), free_bytes=1 << 30) is dataset


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_of_the_cpu():
    dataset = ArrayDataset(ROWS, LABELS, lambda x: x * 2)
    gpu = torch.device("cuda")
    for there in (dataset, on_device(dataset, gpu), [*dataset]):
        steps = load_steps(there, PLAN, range(2), LoadingOptions(gpu), start=0, stop=6)
        for a, b in zip((b for step in steps for b in step), batches(dataset), strict=True):
            assert (
                a.inputs.is_cuda and torch.equal(a.inputs.cpu(), b.inputs) and torch.equal(a.targets.cpu(), b.targets)
            )
