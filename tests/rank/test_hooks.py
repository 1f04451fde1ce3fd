"""Hooks on a script that nobody changed: each is called in its place, and the script stays the same."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.run_ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline.rank.probes import ScriptHooks, ScriptListener, wrap_function
from paceline.rank.sites import CodeOwner, code_owner, short_filename


class Heard(ScriptListener):
    def __init__(self) -> None:
        self.events: list[str] = []


def heard(name: str) -> Any:
    def event(self: Heard, *told: Any) -> None:
        self.events.append(f"{name} {told[0]}" if name == "on_exception" else name)

    return event


for name in vars(ScriptListener):
    if not name.startswith("_"):
        setattr(Heard, name, heard(name))


def trained(model: Any, data: list[Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in data:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    return [float(p.detach().sum()) for p in model.parameters()]


def loop(rank: int, size: int, num_workers: int, hooked: bool) -> list[Any]:
    listener, complaints = Heard(), list[BaseException]()
    if hooked:
        ScriptHooks(complaints.append).add_listeners(listener).install()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), 2, num_workers=num_workers, persistent_workers=num_workers > 0)
    assert isinstance(loader, DataLoader)
    weights = [trained(model, loader) for _ in range(2)]  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3))
    dist.barrier()
    return [weights, listener.events, [repr(c) for c in complaints]]


STEP = [
    "on_batch_received", "on_forward_begin", "on_forward_end", "on_backward_begin", "on_backward_end", "on_step_begin",
    "on_step_end",
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_event_is_told_in_its_place_and_the_bits_stay(tmp_path: Path, num_workers: int) -> None:
    (plain, none, _), *_ = run_ranks(loop, 2, tmp_path, num_workers, False)
    (weights, events, complaints), *_ = run_ranks(loop, 2, tmp_path, num_workers, True)
    assert (weights, none, complaints) == (plain, [], [])
    drawn = [e for e in events if e == "on_indices_drawn"]
    assert len(drawn) == 4
    epoch = ["on_epoch_begin", *(["on_batch_requested", *STEP] * 2), "on_batch_requested", "on_epoch_end"]
    assert [e for e in events if e != "on_indices_drawn"] == [
        "on_torch_imported", "on_replica_created", *epoch, *epoch, "on_forward_begin", "on_exception forward",
    ]  # fmt: skip


class BrokenAtTheEnd(ScriptListener):
    def on_step_end(self, optimizer: Any) -> None:
        raise RuntimeError("a fault of ours")


class Counting(ScriptListener):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, optimizer: Any) -> None:
        self.steps += 1


def dismissed(rank: int, size: int) -> list[Any]:
    first, second, broken, complaints = Counting(), Counting(), BrokenAtTheEnd(), list[BaseException]()
    hooks = ScriptHooks(complaints.append).add_listeners(broken, first).add_listeners(second).install()
    trained(torch.nn.Linear(2, 1), [(torch.ones(1, 2),)])
    hooks.remove_listeners(broken, first)
    trained(torch.nn.Linear(2, 1), [(torch.ones(1, 2),)])
    return [first.steps, second.steps, len(complaints)]


def test_one_reader_goes_and_the_other_stays_and_a_fault_of_one_is_none_of_another(tmp_path: Path) -> None:
    assert run_ranks(dismissed, 1, tmp_path) == [[1, 2, 1]]


class Old:
    """What a user's line calls in torch."""

    def step(self, *, level: int = 2) -> None:
        """Warns of its caller, or of whose caller that is."""
        warnings.warn("old", FutureWarning, stacklevel=level)


def calls_it(level: int) -> None:
    Old().step(level=level)


@pytest.mark.parametrize(("level", "function"), [(2, calls_it), (3, None)])
def test_a_hook_is_passed_over(monkeypatch: pytest.MonkeyPatch, level: int, function: object) -> None:
    assert torch.compiler is sys.modules["torch.compiler"]
    monkeypatch.setattr(Old, "step", Old.step)  # put back at the end
    wrap_function(Old, "step", after=lambda *_, **__: None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        calls_it(level)
        here = sys._getframe().f_lineno - 1
    line = here if function is None else calls_it.__code__.co_firstlineno + 1
    assert [(one.filename, one.lineno) for one in found] == [(__file__, line)]


def test_its_lines_are_still_ours() -> None:
    code = ScriptHooks.install.__code__.co_filename
    wrap_function(Old, "step")
    file = Old.step.__code__.co_filename
    assert file != code and (short_filename(file), code_owner(file)) == (short_filename(code), CodeOwner.NOBODY)
