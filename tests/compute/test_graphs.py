"""CUDA graphs: refused without a GPU; on one, replayed to the results of the model itself."""

import pytest
import torch
from tests.compute.models import Convolutions
from tests.errors import raises
from torch import nn

from paceline.compute import graphs
from paceline.compute.graphs import MAX_GRAPHS, graph_model
from paceline.errors import TrainingError
from paceline.strategies.buffers import uncounted


def test_they_are_refused_on_the_cpu():
    with raises("cuda-graphs-on-cpu"):
        graph_model(nn.Linear(2, 2), torch.device("cpu"))


def test_no_stand_in_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    monkeypatch.setattr(graphs, "_recorded", lambda model, forward, args: (recorded.append(len(args[0])), forward)[1])
    model = nn.Linear(2, 2)
    graph_model(model, torch.device("cuda"))
    with uncounted(model, [*model.parameters()]):
        model(torch.ones(1, 2))
    assert recorded == []
    model(torch.ones(3, 2))
    assert recorded == [3]


@pytest.mark.gpu
def test_gradients_accumulate_over_replays_as_over_calls():
    torch.manual_seed(0)
    plain, graphed = Convolutions().cuda(), Convolutions().cuda()
    graphed.load_state_dict(plain.state_dict())
    graph_model(graphed, torch.device("cuda"))
    for _ in range(3):
        for model in (plain, graphed):
            model.zero_grad(set_to_none=True)
        for _ in range(2):  # the second replay must not overwrite what the first gave
            x = torch.randn(4, 1, 12, 12, device="cuda")
            for model in (plain, graphed):
                model(x).square().sum().backward()
        for (name, a), b in zip(plain.named_parameters(), graphed.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=name)
    for a, b in zip(plain.buffers(), graphed.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_shapes_that_keep_changing_are_refused():
    model = nn.Linear(2, 2).cuda()
    graph_model(model, torch.device("cuda"))
    with raises("cuda-graphs-too-many", raised=TrainingError):
        for size in range(1, MAX_GRAPHS + 2):
            model(torch.ones(size, 2, device="cuda"))
