"""`paceline verify --mesh`: equal to one process where all is right; each planted bug is found, and named."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from tests.run_ranks import RankFailedError, run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline import World
from paceline.lab.ranks.verify import verify
from paceline.lab.verify import CaseResult, VerifySpec
from paceline.parallel import context, dtensor, dtensor_mode, layers, tensor, tensor_plan
from paceline.parallel.dtensor import LayerCommunication, full_tensor
from paceline.strategies import model_parallel

pytestmark = pytest.mark.sample(3)

HERE, EXAMPLES = Path(__file__).parent, Path(__file__).parents[2] / "examples"
GPT = f"{HERE}/models.py:task"


def verified(
    rank: int,
    size: int,
    tasks: Sequence[str],
    mesh: str,
    strategies: list[str],
    bug: str = "",
    steps: int = 2,
    sequence: bool = False,
) -> list[CaseResult]:
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    found: list[CaseResult] = []
    for task in tasks:
        spec = VerifySpec(task, {}, strategies, ["adamw"], 3, 2, steps, 0, 1.0, mesh=mesh, sequence_parallel=sequence)
        with patch.object(*BUGS[bug][:3]) if bug else patch("os.sep"):  # the latter changes nothing of ours
            found += verify(spec, world).results
    return found


def check(results: Sequence[CaseResult]) -> None:
    assert results
    for result in results:
        assert result.passed, f"{result.case}: {result.finding or result.not_run}"
        assert max(result.errors["loss"], result.errors["gradient"]) <= 1e-12


@pytest.mark.ranks
def test_two_ranks_along_tensor_equal_one_process(tmp_path: Path) -> None:
    check(run_ranks(verified, 2, tmp_path, [GPT], "tensor=2", ["single", "fsdp"])[0])


@pytest.mark.ranks
@pytest.mark.needs("transformers")
def test_sequences_that_are_shared_from_the_first_layer_to_the_last_equal_one_process(tmp_path: Path) -> None:
    tasks = [GPT, f"{HERE}/models.py:hugging_face", f"{EXAMPLES}/own_transformer.py:task"]
    check(run_ranks(verified, 2, tmp_path, tasks, "context=2", ["single", "fsdp"])[0])


@pytest.mark.ranks
def test_a_weight_of_a_block_that_is_used_outside_of_it_is_an_error_under_fsdp_with_context(tmp_path: Path) -> None:
    encoder = [f"{HERE}/models.py:encoder"]  # no repeated layers: its embedding is a block of its own
    (result,) = run_ranks(verified, 2, tmp_path, encoder, "context=2", ["fsdp"])[0]
    assert result.finding is not None and "(32, 16) is used outside" in result.finding.detail


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("transformers")
def test_sequences_that_are_cut_between_layers_equal_one_process(tmp_path: Path) -> None:
    tasks = [GPT, f"{HERE}/models.py:hugging_face", f"{EXAMPLES}/own_transformer.py:task"]
    check(run_ranks(verified, 2, tmp_path, tasks, "tensor=2", ["single"], "", 2, True)[0])


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2,tensor=2", "shard=2,tensor=2"])
def test_meshes_equal_one_process(tmp_path: Path, mesh: str) -> None:
    tasks = [GPT, f"{HERE}/models.py:hugging_face", f"{EXAMPLES}/own_task.py:task"]
    strategies = ["fsdp"] if "shard" in mesh else ["single"] if mesh == "tensor=2" else ["bucketed", "fsdp"]
    size = 2 if mesh == "tensor=2" else 4
    check(run_ranks(verified, size, tmp_path, tasks, mesh, strategies, "", 4, timeout=1500)[0])
    if "shard" not in mesh:  # it uses its embedding's weight by hand, which fsdp cannot
        own = [f"{EXAMPLES}/own_transformer.py:task"]
        check(run_ranks(verified, size, tmp_path, own, mesh, strategies[:1], "", 4, timeout=1500)[0])


# ---- planted bugs ------------------------------------------------------------------------------------------------

RIGHT_SHARD, RIGHT_VOCABULARY, RIGHT_SUM = (
    tensor_plan.even_shard,
    layers.shard_vocabulary,
    model_parallel.sum_over_ranks,
)


def _bias_on_each_rank(module: Any, comm: Any) -> None:
    def forward(self: Any, x: Any) -> Tensor:
        return comm.reduce_output(F.linear(comm.shard_input(x), self.weight, self.bias))

    layers.replace_forward(module, forward)


def _own_dropout(input: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    local = F.dropout(input.to_local(), p, training)
    return DTensor.from_local(local, input.device_mesh, input.placements)


Bug = tuple[Any, str, Any, set[str]]
"""(whose, what, in its place, causes that a report may name)"""
OWN_DROPOUT: Bug = (dtensor_mode, "dropout", _own_dropout, {"loss", "random", "sync"})
ALL_ADD_LOSSES: Bug = (
    World,
    "is_replica_leader",
    True,
    {"loss", "samples", "mean"},
)  # every rank along tensor, to the totals
BUGS: dict[str, Bug] = {
    "a row-wise layer's sum is missing": (
        LayerCommunication, "reduce_output", lambda self, part, bias=None: part if bias is None else part + bias,
        {"loss", "gradient"},
    ),
    "a column-wise layer's sum in backward is missing": (
        LayerCommunication, "gather_input", lambda self, inputs: full_tensor(inputs), {"sync", "gradient"},
    ),
    "a bias counts on each rank": (layers, "shard_rowwise", _bias_on_each_rank, {"loss", "gradient"}),
    "queries, keys and values are cut as one": (
        tensor_plan, "even_shard", lambda shape, dim, world, parts=(): RIGHT_SHARD(shape, dim, world),
        {"loss", "gradient", "error"},
    ),
    "each rank draws its own dropout": OWN_DROPOUT,
    "a rank looks up its neighbour's words": (
        layers, "shard_vocabulary", lambda module, comm, first: RIGHT_VOCABULARY(module, comm, first + 1),
        {"loss", "gradient"},
    ),
    "the ranks' weights are drawn apart": (tensor, "broadcast_module", lambda model: None, {"start"}),
    "each rank clips by its own norm": (
        model_parallel, "sum_over_ranks", lambda total, name, group: total, {"clipping"},
    ),
    "what all hold counts twice in the norm": (
        model_parallel, "sum_over_ranks", lambda total, name, group: 2 * RIGHT_SUM(total, name, group), {"clipping"},
    ),
    "losses are added up over ranks that share them": ALL_ADD_LOSSES,
}  # fmt: skip


# what the comparison with the whole model's loss, before the first step, stops already
REFUSED = {
    "a bias counts on each rank", "a rank looks up its neighbour's words", "the ranks' weights are drawn apart",
    "ranks do not exchange places for heads",
}  # fmt: skip


OF_CONTEXT: dict[str, Bug] = {
    "a weight's gradient is of this rank's places": (context, "PARTIAL", dtensor.REPLICATED, {"gradient", "sync"}),
    "ranks do not exchange places for heads": (
        dtensor.dist, "all_to_all_single", lambda got, sent, group: got.copy_(sent), {"loss", "gradient"},
    ),
    "gradients are not exchanged back": (  # forward is right; backward each rank keeps what it has
        dtensor._AllToAll, "backward", staticmethod(lambda ctx, g: (g.view(g.shape), None, None, None, None)),
        {"gradient", "sync", "error"},
    ),
    "each rank draws its own dropout": OWN_DROPOUT,
    "losses are added up over ranks that share them": ALL_ADD_LOSSES,
}  # fmt: skip
OF_TENSOR = [*BUGS]
BUGS |= OF_CONTEXT


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.needs("transformers")
@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("mesh", "bug"), [*(("tensor=2", bug) for bug in OF_TENSOR), *(("context=2", bug) for bug in OF_CONTEXT)]
)
def test_planted_bugs_are_found_and_named(tmp_path: Path, mesh: str, bug: str) -> None:
    task = GPT if mesh == "tensor=2" else f"{HERE}/models.py:hugging_face"
    try:
        (result,) = run_ranks(verified, 2, tmp_path, [task], mesh, ["single"], bug, 1)[0]
    except RankFailedError as refused:
        assert bug in REFUSED and "check_same_loss" in str(refused)
        return
    assert result.finding is not None, f"{bug}: not found"
    assert result.finding.cause in BUGS[bug][3], result.finding
