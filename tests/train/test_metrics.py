"""Metrics that are no means over samples: the same as those of one process, and of scikit-learn on the whole."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import raises
from tests.run_ranks import run_ranks
from tests.worlds import world_of
from torch import Tensor, nn
from torch.optim import SGD

from paceline import LoadingOptions, Metric, evaluate
from paceline.collectives.control import all_gather_tensors
from paceline.data.arrays import ArrayDataset
from paceline.errors import UsageError
from paceline.strategies import STRATEGIES
from paceline.train.metrics import collect_metric_states, compute_metrics, compute_over_ranks, make_accumulators

CPU = torch.device("cpu")
SAMPLES = 101  # on 3 ranks: 34, 34 and 33


def data(samples: int = SAMPLES) -> ArrayDataset:
    drawn = torch.Generator().manual_seed(4)
    inputs = torch.randn(samples, 5, generator=drawn, dtype=torch.float64)
    return ArrayDataset(inputs, (inputs[:, 0] + torch.randn(samples, generator=drawn) > 0.3).long())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(5, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).softmax(1)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def score(outputs: Tensor) -> Tensor:
    return outputs[:, 1]


def counts(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    found, there = outputs.argmax(1) == 1, targets == 1
    return {"both": (found & there).sum(), "either": int(found.sum() + there.sum())}


def f1(total: Any) -> Tensor:
    return 2 * total["both"] / total["either"]


def rows(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"score": score(outputs), "target": targets}


def area(everything: Any) -> float:
    """Of the ROC curve, by its definition: how often a positive scores higher than a negative."""
    yes, no = (everything["score"][everything["target"] == one] for one in (1, 0))
    return float((yes[:, None] > no[None]).double().mean())


def first_rows(everything: Any) -> dict[str, Tensor]:
    return {"first": everything["score"][0], "last": everything["score"][-1]}


OWN: dict[str, Any] = {
    "accuracy": lambda o, t: (o.argmax(1) == t).double(),
    "f1": Metric(counts, f1),
    "auc": Metric(rows, area, combine="concatenate"),
    "rows": Metric(rows, first_rows, combine="concatenate"),
    "highest": Metric(lambda o, t: score(o).max(), float, combine=torch.maximum),
    "sum": Metric(lambda o, t: score(o).sum(), float),
    "made": lambda: Metric(counts, f1),
}  # fmt: skip


def evaluated(
    rank: int, size: int, metrics: Any, virtual_ranks: int, strategy: str = "exact", samples: int = SAMPLES
) -> dict[str, float]:
    metrics = metrics() if callable(metrics) else metrics
    make = partial(SGD, lr=0.1)
    replica = STRATEGIES[strategy](Net(), make, world_of(rank, size), virtual_ranks=virtual_ranks)
    return evaluate(replica, data(samples), loss, metrics, LoadingOptions(CPU), batch_size=8)


def own(rank: int, size: int, virtual_ranks: int, strategy: str = "exact", samples: int = SAMPLES) -> dict[str, float]:
    return evaluated(rank, size, OWN, virtual_ranks, strategy, samples)


def expected() -> dict[str, float]:
    """From the whole data at once."""
    inputs, targets = data().inputs, data().targets
    assert isinstance(inputs, Tensor) and isinstance(targets, Tensor)
    outputs = Net()(inputs).detach()
    found = f1({name: torch.as_tensor(count).double() for name, count in counts(outputs, targets).items()})
    return {
        "loss": float(loss(outputs, targets).mean()), "accuracy": float((outputs.argmax(1) == targets).double().mean()),
        "f1": float(found), "made": float(found), "auc": area(rows(outputs, targets)),
        "rows/first": float(score(outputs)[0]), "rows/last": float(score(outputs)[-1]),
        "highest": float(score(outputs).max()), "sum": float(score(outputs).sum()),
    }  # fmt: skip


def alone(metrics: Any, virtual_ranks: int, samples: int = SAMPLES) -> dict[str, float]:
    """What `evaluate` does with the parts of the data, without any process group."""
    whole, found = data(samples), make_accumulators(loss, metrics, CPU)
    for v in range(virtual_ranks):
        for indices in filter(len, torch.arange(samples)[v::virtual_ranks].split(8)):
            inputs, targets = whole.gather(indices)
            for tally in found.values():
                tally.add(v, Net()(inputs).detach(), targets)
    return compute_metrics(found, [collect_metric_states(found)], samples, virtual_ranks)


@pytest.mark.parametrize("virtual_ranks", [1, 3, 8])
def test_metrics_are_those_of_the_whole(virtual_ranks: int) -> None:
    assert alone(OWN, virtual_ranks) == pytest.approx(expected(), rel=1e-14)


def test_more_virtual_ranks_than_samples() -> None:
    found = alone({"f1": OWN["f1"], "rows": OWN["rows"]}, 5, samples=2)
    outputs = Net()(data(2).inputs)
    assert [found["rows/first"], found["rows/last"]] == score(outputs).tolist()


@pytest.fixture
def scikit_learn(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):  # its import sets them
        monkeypatch.setenv(name, "True")
    return pytest.importorskip("sklearn.metrics", reason="needs scikit-learn: pip install -e '.[metrics]'")


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_f1_and_auc_over_3_ranks_are_scikit_learns(tmp_path: Path, scikit_learn: Any) -> None:
    everywhere = [run_ranks(own, size, tmp_path, 6) for size in (2, 3)]
    assert all(found == alone(OWN, 6) for ranks in everywhere for found in ranks)  # bit for bit
    found = everywhere[1][0]
    assert found == pytest.approx(expected(), rel=1e-14)
    outputs, targets = Net()(data().inputs).detach(), data().targets
    truth = {
        "f1": scikit_learn.f1_score(targets, outputs.argmax(1)),
        "auc": scikit_learn.roc_auc_score(targets, score(outputs)),
    }
    print({name: (found[name], float(value)) for name, value in truth.items()})
    assert {name: found[name] for name in truth} == pytest.approx(truth, rel=1e-14)


def shares(rank: int, size: int) -> list[dict[str, float]]:
    return [own(rank, size, 5, strategy, samples) for strategy, samples in SHARES]


SHARES = (("fsdp", SAMPLES), ("fsdp", 17), ("exact", 2))


@pytest.mark.slow
def test_stand_ins_and_empty_shares_count_for_nothing(tmp_path: Path) -> None:
    first, *others = run_ranks(shares, 3, tmp_path)
    assert all(found == first for found in others)
    for found, (_, samples) in zip(first, SHARES, strict=True):
        assert found == pytest.approx(alone(OWN, 5, samples), rel=1e-14)


def torchmetrics_ones() -> dict[str, Any]:
    tm: Any = pytest.importorskip("torchmetrics", reason="needs torchmetrics: pip install -e '.[metrics]'")
    c, two = tm.classification, {"task": "multiclass", "num_classes": 2}

    class Of(tm.Metric):
        """Metrics of numbers, from (outputs, targets)."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.inner.update(score(outputs), targets.double())

        def compute(self) -> Any:
            return self.inner.compute()

        def reset(self) -> None:
            self.inner.reset()

    class Highest(tm.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("value", torch.tensor(-math.inf), dist_reduce_fx="max")

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.value = torch.maximum(self.value, outputs.max().float())

        def compute(self) -> Tensor:
            return self.value

    return {
        "f1": tm.F1Score(**two, average="macro"),
        "made": partial(tm.Accuracy, **two),
        "auc": c.MulticlassAUROC(num_classes=2),  # keeps all scores
        "each": tm.Recall(**two, average="none"),
        "together": tm.MetricCollection([tm.Precision(**two, average="macro"), tm.Recall(**two, average="macro")]),
        "composed": tm.F1Score(**two, average="macro") + c.MulticlassAUROC(num_classes=2),
        "pearson": Of(tm.PearsonCorrCoef().set_dtype(torch.float64)),  # states that are stacked, not added up
        "inside": Of(tm.MinMaxMetric(tm.MeanSquaredError())),
        "highest": Highest(),
    }


def by_themselves() -> dict[str, float]:
    """torchmetrics alone, on the whole data in batches."""
    found: dict[str, float] = {}
    inputs, targets = data().inputs, data().targets
    for name, metric in torchmetrics_ones().items():
        metric = metric() if isinstance(metric, partial) else metric
        for indices in torch.arange(SAMPLES).split(8):
            metric.update(Net()(inputs[indices]).detach(), targets[indices])
        result = metric.compute()
        if isinstance(result, dict):
            found |= {f"{name}/{part}": float(value) for part, value in result.items()}
        else:
            found |= {f"{name}/{i}": float(v) for i, v in enumerate(result)} if result.ndim else {name: float(result)}
    return found


@pytest.mark.slow
@pytest.mark.needs("torchmetrics")
@pytest.mark.parametrize("virtual_ranks", [1, 4])
def test_torchmetrics_objects_are_taken_as_they_are(virtual_ranks: int) -> None:
    given = torchmetrics_ones()
    found = alone(given, virtual_ranks)
    assert {k: v for k, v in found.items() if k != "loss"} == pytest.approx(by_themselves(), rel=1e-6)
    assert len(found) == 14 and not given["f1"].update_called  # the given ones are copied


def everything_of_torchmetrics(rank: int, size: int) -> Any:
    """In a task, under two strategies; and in a loop of one's own."""
    found = [evaluated(rank, size, torchmetrics_ones, 4, strategy) for strategy in ("exact", "fsdp")]
    return [*found, of_a_loop(rank, size)]


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.needs("torchmetrics")
def test_torchmetrics_over_3_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    wanted, here = by_themselves(), alone(torchmetrics_ones(), 4)
    for exact, sharded, loop in run_ranks(everything_of_torchmetrics, 3, tmp_path, timeout=300):
        assert exact == here  # bit for bit
        assert sharded == pytest.approx(here, rel=1e-6)
        plain = ("f1", "made", "auc", "composed", "pearson", "highest")
        assert {name: loop[name] for name in plain} == pytest.approx({name: wanted[name] for name in plain}, rel=1e-6)
        assert float(loop["together"]["MulticlassRecall"]) == pytest.approx(wanted["together/MulticlassRecall"])
        assert loop["each"].tolist() == pytest.approx([wanted["each/0"], wanted["each/1"]])


@pytest.mark.needs("torchmetrics")
def test_a_mean_of_states_is_right_or_refused() -> None:
    import torchmetrics

    class Mean(torchmetrics.Metric):
        def __init__(self, fixed: bool) -> None:
            super().__init__()
            self.fixed = fixed
            self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.value = torch.tensor(3.0) if self.fixed else targets.double().mean()

        def compute(self) -> Tensor:
            return self.value

    assert alone({"fixed": Mean(True)}, 3)["fixed"] == 3.0
    with raises("metric-averaged", name="Mean.value"):
        alone({"mean": Mean(False)}, 3)


WRONG: list[tuple[Any, str, str]] = [
    (Metric(rows, lambda total: total, combine="concatenate"), "metric-not-a-number", "tensor of shape (9, 1)"),
    (Metric(counts, lambda total: "good"), "metric-not-a-number", "str"),
    (lambda: 3, "metric-called-without", "int"),
    (lambda o, t: (o.argmax(1) == t).float().mean(), "metric-of-batch", ""),
]


@pytest.mark.parametrize(("metric", "code", "kind"), WRONG, ids=["table", "word", "made", "mean"])
def test_what_is_no_number_is_refused(metric: Any, code: str, kind: str) -> None:
    if isinstance(metric, Metric) and metric.combine == "concatenate":
        metric = Metric(lambda o, t: {"score": score(o)[:, None]}, metric.compute, combine="concatenate")
    with raises(code) as caught:
        alone({"m": metric}, 2, samples=9)
    assert caught.value.fields.get("kind", "") == kind


def test_a_metric_that_fails_is_named() -> None:
    with pytest.raises(KeyError) as found:
        alone({"f1": Metric(counts, lambda total: total["bth"])}, 2)
    assert "metric 'f1'" in found.value.__notes__[0]
    assert math.isnan(alone({"f1": Metric(counts, lambda total: math.nan)}, 2)["f1"])
    for wrong in ({"combine": "mean"}, {"update": 3}):
        with raises("metric-combine" if "combine" in wrong else "metric-not-a-function"):
            Metric(**{"update": counts, "compute": f1, **wrong})  # pyright: ignore[reportArgumentType]


def gathered(rank: int, size: int) -> Any:
    kinds = [torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
    mine = {
        "kinds": [torch.arange(rank + 1).to(kind) for kind in kinds],
        "deep": [[rank, {"tensor": torch.full((2, rank, 3), 0.1)}], "word", None],
        "number": torch.tensor(rank / 3),
        "column": torch.arange(6.0).reshape(2, 3)[:, rank],
    }
    return all_gather_tensors(mine if rank != 1 else {}, world_of(rank, size), "test")


def test_tensors_of_any_kind_and_shape_come_as_they_were(tmp_path: Path) -> None:
    assert all_gather_tensors([1], world_of(0, 1), "test") == [[1]]
    for first, nothing, last in run_ranks(gathered, 3, tmp_path):
        assert nothing == {} and first["deep"][1:] == ["word", None]
        assert [t.dtype for t in last["kinds"]] == [t.dtype for t in first["kinds"]]
        assert [t.real.tolist() for t in last["kinds"]] == [[0, 1, 2], [0, 1, 2], [False, True, True], *[[0, 1, 2]] * 2]
        assert last["deep"][0][0] == 2 and last["deep"][0][1]["tensor"].shape == (2, 2, 3)
        assert torch.equal(last["number"], torch.tensor(2 / 3)) and last["column"].tolist() == [2.0, 5.0]


def of_a_loop(rank: int, size: int) -> Any:
    found, world = dict[str, Any](), world_of(rank, size)
    inputs, targets = data().inputs, data().targets
    for name, metric in torchmetrics_ones().items():
        metric = metric() if isinstance(metric, partial) else metric
        for indices in torch.arange(SAMPLES).split(40):  # of the last batch of 21 each rank has 7; of 1, one rank
            mine = indices[rank::size]
            metric.update(Net()(inputs[mine]).detach(), targets[mine])
        before = metric.update_count if hasattr(metric, "update_count") else None
        found[name] = compute_over_ranks(metric, world)
        assert before is None or metric.update_count == before  # it stays as it is
    for wrong in (3, torchmetrics_ones()["f1"]):
        with pytest.raises(UsageError if rank == 0 else Exception):
            compute_over_ranks(wrong, world)
    return {name: float(v) if isinstance(v, Tensor) and v.ndim == 0 else v for name, v in found.items()}
