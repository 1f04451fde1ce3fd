"""Steps whose gradients a closure computes: events in their places, and NaN in a closure is that of the right rank."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run_ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.protocol.facts import OptimizerStep, ScriptFacts
from paceline.protocol.marks import read_findings
from paceline.protocol.status_page import StatusPage, make_status_page
from paceline.rank.check.loaders import LoaderRecorder
from paceline.rank.check.steps import StepRecorder
from paceline.rank.probes import ScriptHooks, ScriptListener
from paceline.rank.probes.faults import BatchTracker, NonFiniteGradientDetector, StepAnomalyDetector
from paceline.rank.probes.steps import PhaseTracker

pytestmark = pytest.mark.sample(3)


class Heard(ScriptListener):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_backward_end(self) -> None:
        self.events.append("backward")

    def on_step_begin(self, optimizer: Any) -> None:
        self.events.append("begins")

    def on_step_end(self, optimizer: Any) -> None:
        self.events.append("ended")


class Own(torch.optim.SGD):
    """Calls its closure itself, and its base's step without it."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Deaf(torch.optim.SGD):
    """Never calls its closure."""

    def step(self, closure: Any = None) -> Any:
        return None


class Sharp(torch.optim.SGD):
    """SAM: the closure is called at other parameters than those that are changed."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        away = [0.01 * one.grad for one in parameters]
        for one, far in zip(parameters, away, strict=True):
            one.add_(far)
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        for one, far in zip(parameters, away, strict=True):
            one.sub_(far + 0.01 * one.grad)
        return loss


MAKE: dict[str, Callable[..., Any]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "own": partial(Own, lr=0.1),
    "deaf": partial(Deaf, lr=0.1),
    "SAM": partial(Sharp, lr=0.1),
    "L-BFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=2),
    "longer L-BFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=4),
}


def told(rank: int, size: int, how: str) -> list[str]:
    """A step with a closure that fails and one that does not, and a step without."""
    heard = Heard()
    ScriptHooks(print).add_listeners(heard).install()
    model = torch.nn.Linear(2, 1)
    MAKE["SGD"](model.parameters())  # torch calls hooks in the step of each class that was made
    optimizer = MAKE.get(how, MAKE["SGD"])(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).pow(2).sum()
        loss.backward()
        return loss

    def fails() -> torch.Tensor:
        raise ValueError("a bad batch")

    if how == "fails":
        with pytest.raises(ValueError, match="a bad batch"):
            optimizer.step(fails)
    if how == "keyword":
        optimizer.step(closure=closure)
    elif how == "without":
        closure()
        optimizer.step()
    elif how == "none":
        closure()
        optimizer.step(None)
    else:
        assert (optimizer.step(closure) is None) == (how == "deaf")
    return heard.events


PLAIN = ["backward", "begins", "ended"]
EVENTS = {
    "place": PLAIN, "own": PLAIN, "keyword": PLAIN, "without": PLAIN, "none": PLAIN, "fails": PLAIN, "deaf": PLAIN[1:],
    "L-BFGS": ["backward", "begins", "backward", "ended"],
}  # fmt: skip


@pytest.mark.parametrize("how", EVENTS)
def test_a_step_begins_when_its_closure_has_computed_the_gradients(how: str, tmp_path: Path) -> None:
    assert run_ranks(told, 1, tmp_path, how) == [EVENTS[how]]


def looked_on() -> StatusPage:
    """The box of this process, in which its steps and what is not finite are noted from now on."""
    page = StatusPage(make_status_page(0))
    steps, batches = PhaseTracker(page), BatchTracker()
    ScriptHooks(print).add_listeners(
        batches, NonFiniteGradientDetector(page, steps, batches), StepAnomalyDetector(page, steps), steps
    ).install()
    return page


Found = tuple[str, int, bool, str]  # kind, step, own, words


def findings(page: StatusPage) -> list[Found]:
    found = [(one.kind, one.step, one.own, one.text) for one in read_findings(page.descriptor)]
    page.close()
    return found


def nan_in_step_3(rank: int, size: int, name: str, bad_call: int, micro_batches: int) -> list[Found]:
    """Five steps with a closure each; in the third one this call of it has a NaN on rank 1. What is found there."""
    page = looked_on()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = MAKE[name](model.parameters())
    for step in range(5):
        calls = 0

        def closure(step: int = step) -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = torch.zeros(())
            for _ in range(micro_batches):
                x = torch.full((2, 3), float("nan") if (step, calls, rank) == (2, bad_call, 1) else 1.0 + step)
                loss = (model(x) - rank).pow(2).mean()
                loss.backward()
            return loss

        if name == "SAM":
            closure()
        optimizer.step(closure)
    return findings(page)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "bad_call", "micro_batches"),
    [
        ("SGD", 1, 1),
        ("SGD", 1, 3),
        ("own", 1, 1),
        ("L-BFGS", 1, 1),
        ("longer L-BFGS", 3, 1),
        ("SAM", 1, 1),
        ("SAM", 2, 1),
    ],
)
def test_nan_in_a_closure_is_told_of_its_rank_at_its_step_and_line(
    name: str, bad_call: int, micro_batches: int, tmp_path: Path
) -> None:
    (other,), (own,) = run_ranks(nan_in_step_3, 2, tmp_path, name, bad_call, micro_batches)
    assert tuple(other) == ("not finite", 3, False, "") and tuple(own[:3]) == ("not finite", 3, True)
    assert "loss was nan" in own[3] and Path(__file__).name in own[3] and " in closure" in own[3]


def nan_under_fsdp2(rank: int, size: int) -> list[Found]:
    """Five steps of sharded parameters; in the third one, rank 1's data are NaN. What is found there."""
    page = looked_on()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    for module in (model[0], model):
        fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x = torch.full((2, 3), float("nan") if (step, rank) == (2, 1) else 1.0 + step)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    return findings(page)


@pytest.mark.ranks
def test_nan_under_fsdp2_is_told_of_its_rank_without_a_collective_of_our_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (other,), own = run_ranks(nan_under_fsdp2, 2, tmp_path)
    assert tuple(other) == ("not finite", 3, False, "") and tuple(own[0][:3]) == ("not finite", 3, True)
    assert "loss was nan" in own[0][3] and Path(__file__).name in own[0][3]
    assert "hang guard" not in capfd.readouterr().err


class Searching(torch.optim.SGD):
    """Tries a large step first, and a smaller one as long as the loss is not finite there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        again = torch.enable_grad()(closure)
        loss, (parameter,) = again(), self.param_groups[0]["params"]
        start, downhill, size = parameter.clone(), parameter.grad.clone(), 8.0
        while True:
            parameter.copy_(start - size * downhill)
            if again().isfinite():
                return loss
            size /= 2


def searched(rank: int, size: int) -> list[Found]:
    page = looked_on()
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = Searching([weight], lr=1.0)
    infinite = 0

    def closure() -> torch.Tensor:
        nonlocal infinite
        optimizer.zero_grad()
        loss = (weight.sqrt() - 1).pow(2).sum()  # NaN, and so its gradient, where the step is too large
        loss.backward()
        infinite += not bool(loss.isfinite())
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert infinite and bool(weight.isfinite())
    return findings(page)


def test_a_point_that_a_line_search_gives_up_is_nothing_to_tell(tmp_path: Path) -> None:
    assert run_ranks(searched, 1, tmp_path) == [[]]


def test_a_closure_that_is_called_more_often_than_before_leaves_no_step_out() -> None:
    page = StatusPage(make_status_page(0))
    optimizer, stale = type("Optimizer", (), {})(), StepAnomalyDetector(page, PhaseTracker(page))
    for number in range(40):
        stale.on_backward_begin(None)
        stale.on_step_begin(optimizer)
        for _ in range(4 + number // 20):
            stale.on_backward_begin(None)
        stale.on_step_end(optimizer)
    assert not read_findings(page.descriptor)
    page.close()


def windows_of_three(rank: int, size: int, how: str) -> list[OptimizerStep]:
    """Two epochs of 13 batches, as Lightning's Trainer goes: the last backward of a window is in the step's closure."""
    facts = ScriptFacts(rank, size, size, "n1", cores=2)
    loading = LoaderRecorder(facts)
    ScriptHooks(print).add_listeners(loading, StepRecorder(facts, loading)).install()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data: Any = torch.arange(26 * 3.0).reshape(26, 3) + rank
    loader = DataLoader(data, 2)
    for _ in range(2):
        for number, x in enumerate(loader, 1):
            last = number % 3 == 0 or number == len(loader)

            def closure(x: Any = x, last: bool = last, first: bool = number % 3 == 1) -> torch.Tensor:
                with nullcontext() if last else model.no_sync():
                    loss = model(x).pow(2).mean() / 3
                    if first:
                        optimizer.zero_grad()
                    loss.backward()
                if last and how == "clips in it":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                return loss

            if last and how != "without":
                optimizer.step(closure)
            else:
                closure()
                if last:
                    optimizer.step()
    return facts.steps


@pytest.mark.ranks
def test_a_window_whose_last_backward_is_in_a_closure_is_the_same_as_without(tmp_path: Path) -> None:
    first, second = run_ranks(windows_of_three, 2, tmp_path, "closure")
    assert [(one.backwards, one.forwards, one.synced) for one in first] == [*[(3, 3, 1)] * 4, (1, 1, 1)] * 2
    assert [one.gradients for one in first] == [one.gradients for one in second]  # after averaging
    assert all(abs(one.factors[0] - 1 / 3) < 1e-6 and not one.lost for one in first)
    plain, _ = run_ranks(windows_of_three, 2, tmp_path, "without")
    for one in (*first, *plain):
        one.site = ""
    assert first == plain
    clipped, _ = run_ranks(windows_of_three, 2, tmp_path, "clips in it")
    assert all(one.norm and one.limit == one.scaled == 1.0 for one in clipped)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.ones(3, 1))


class _PrefetchDataFetcher:
    """Named as Lightning's, which asks for one batch more where it cannot ask how many there are."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)


def taken(rank: int, size: int, data: Dataset[Any], ahead: bool) -> list[str]:
    """Which batch the script has, as a framework hands it on."""
    batches = BatchTracker()
    ScriptHooks(print).add_listeners(batches).install()
    fetched, had = iter(_PrefetchDataFetcher(DataLoader(data))), list[str]()
    following = next(fetched, None) if ahead else None
    for _ in range(3):
        if ahead:
            following = next(fetched, None)
        else:
            next(fetched)
        had.append(batches.current_batch_text())
    assert following is None
    return had


def test_the_batch_that_a_script_has_is_known_where_lightning_is_one_ahead(tmp_path: Path) -> None:
    assert run_ranks(taken, 1, tmp_path, Stream(), True) == [[f", batch {n} of epoch 1" for n in (1, 2, 3)]]
    sized: Any = torch.ones(3, 1)
    told = [f", batch {n} of epoch 1, samples {n - 1}" for n in (1, 2, 3)]
    assert run_ranks(taken, 1, tmp_path, sized, False) == [told]
