"""`paceline verify --mesh`: equal to one process where all is right; each planted bug is found, and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from paceline.proofs.verify.worker import verify
from paceline.verify.spec import Result, Spec

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
) -> list[Result]:
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    found: list[Result] = []
    for task in tasks:
        spec = Spec(task, {}, strategies, ["adamw"], 3, 2, steps, 0, 1.0, mesh=mesh, sequence_parallel=sequence)
        with patch.object(*BUGS[bug][0]()) if bug else patch("os.sep"):  # the latter changes nothing of ours
            found += verify(spec, world).results
    return found


def check(results: Sequence[Result]) -> None:
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
    assert result.finding is not None and "a weight (32, 16) is used outside its layer" in result.finding.detail


@pytest.mark.ranks
@pytest.mark.needs("transformers")
def test_sequences_that_are_cut_between_layers_equal_one_process(tmp_path: Path) -> None:
    tasks = [GPT, f"{HERE}/models.py:hugging_face", f"{EXAMPLES}/own_transformer.py:task"]
    check(run_ranks(verified, 2, tmp_path, tasks, "tensor=2", ["single"], "", 2, True)[0])


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2,tensor=2", "shard=2,tensor=2"])
def test_meshes_equal_one_process(tmp_path: Path, mesh: str) -> None:
    tasks = [GPT, f"{HERE}/models.py:hugging_face", f"{EXAMPLES}/own_task.py:task"]
    strategies = ["fsdp"] if "shard" in mesh else ["single"] if mesh == "tensor=2" else ["bucketed", "fsdp"]
    size = 2 if mesh == "tensor=2" else 4
    check(run_ranks(verified, size, tmp_path, tasks, mesh, strategies, "", 4, timeout=500)[0])
    if "shard" not in mesh:  # it uses its embedding's weight by hand, which fsdp cannot
        own = [f"{EXAMPLES}/own_transformer.py:task"]
        check(run_ranks(verified, size, tmp_path, own, mesh, strategies[:1], "", 4, timeout=500)[0])


# ---- planted bugs ------------------------------------------------------------------------------------------------


def _not_summed() -> Any:
    from paceline.tensor.transfers import Local

    return Local, "summed", lambda self, part, bias=None: part if bias is None else part + bias


def _gradient_not_summed() -> Any:
    from paceline.tensor.transfers import Local
    from paceline.tensor.view import made_whole

    return Local, "taken", lambda self, inputs: made_whole(inputs)


def _bias_on_each_rank() -> Any:
    from paceline.tensor import layers

    def rowwise(module: Any, local: Any) -> None:
        def forward(self: Any, x: Any) -> Tensor:
            return local.summed(F.linear(local.share(x), self.weight, self.bias))

        layers.subclassed(module, forward=layers.apart(forward))

    return layers, "rowwise", rowwise


def _three_in_one() -> Any:
    """Queries, keys and values are cut as if they were one."""
    from paceline.tensor import plan

    right = plan.cut_of
    return plan, "cut_of", lambda shape, dim, world, parts=(): right(shape, dim, world)


def _own_dropout() -> Any:
    from paceline.tensor import view

    def dropout(input: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        local = F.dropout(input.to_local(), p, training)
        return DTensor.from_local(local, input.device_mesh, input.placements)

    return view, "dropout", dropout


def _other_words() -> Any:
    from paceline.tensor import layers

    right = layers.vocabulary
    return layers, "vocabulary", lambda module, local, first: right(module, local, first + 1)


def _not_broadcast() -> Any:
    from paceline.tensor import cut

    return cut, "broadcast_module", lambda model: None


def _norm_of_part() -> Any:
    from paceline.strategies import parts

    return parts.dist, "all_reduce", _leave_norm_out(parts.dist.all_reduce)


def _leave_norm_out(right: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if vars(tensor).get("collective") != "norm of the gradients":
            return right(tensor, *args, **kwargs)
        return None

    return all_reduce


def _norm_twice() -> Any:
    """Every rank counts what all of them hold."""
    from paceline.strategies import parts

    right = parts.dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = right(tensor, *args, **kwargs)
        if vars(tensor).get("collective") == "norm of the gradients":
            tensor *= 2
        return result

    return parts.dist, "all_reduce", all_reduce


def _all_add_losses() -> Any:
    """Every rank along tensor adds its losses to the totals."""
    from paceline.rank import world

    return world.World, "leads", True


BUGS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "a row-wise layer's sum is missing": (_not_summed, {"loss", "gradient"}),
    "a column-wise layer's sum in backward is missing": (_gradient_not_summed, {"sync", "gradient"}),
    "a bias counts on each rank": (_bias_on_each_rank, {"loss", "gradient"}),
    "queries, keys and values are cut as one": (_three_in_one, {"loss", "gradient", "error"}),
    "each rank draws its own dropout": (_own_dropout, {"loss", "random", "sync"}),
    "a rank looks up its neighbour's words": (_other_words, {"loss", "gradient"}),
    "the ranks' weights are drawn apart": (_not_broadcast, {"start"}),
    "each rank clips by its own norm": (_norm_of_part, {"clipping"}),
    "what all hold counts twice in the norm": (_norm_twice, {"clipping"}),
    "losses are added up over ranks that share them": (_all_add_losses, {"loss", "samples", "mean"}),
}


# what the comparison with the whole model's loss, before the first step, stops already
REFUSED = {
    "a bias counts on each rank", "a rank looks up its neighbour's words", "the ranks' weights are drawn apart",
    "ranks do not exchange places for heads",
}  # fmt: skip


def _of_own_places() -> Any:
    from paceline.tensor import context, exchange

    return context, "SUMMANDS", exchange.EVERYWHERE


def _places_for_heads_wrong() -> Any:
    from paceline.tensor import exchange

    return exchange.dist, "all_to_all_single", lambda got, sent, group: got.copy_(sent)


def _back_by_own_places() -> Any:
    """Forward is right: heads for places; backward each keeps what it has."""
    from paceline.tensor import exchange

    return exchange._Exchange, "backward", staticmethod(lambda ctx, g: (g.view(g.shape), None, None, None, None))


OF_CONTEXT: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "a weight's gradient is of this rank's places": (_of_own_places, {"gradient", "sync"}),
    "ranks do not exchange places for heads": (_places_for_heads_wrong, {"loss", "gradient"}),
    "gradients are not exchanged back": (_back_by_own_places, {"gradient", "sync", "error"}),
    "each rank draws its own dropout": (_own_dropout, {"loss", "random", "sync"}),
    "losses are added up over ranks that share them": (_all_add_losses, {"loss", "samples", "mean"}),
}
OF_TENSOR = [*BUGS]
BUGS |= OF_CONTEXT


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.needs("transformers")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("mesh", "bug"),
    [*(("tensor=2", bug) for bug in OF_TENSOR), *(("context=2", bug) for bug in OF_CONTEXT)],
)
def test_planted_bugs_are_found_and_named(tmp_path: Path, mesh: str, bug: str) -> None:
    task = GPT if mesh == "tensor=2" else f"{HERE}/models.py:hugging_face"
    try:
        (result,) = run_ranks(verified, 2, tmp_path, [task], mesh, ["single"], bug, 1)[0]
    except RankFailedError as refused:
        assert bug in REFUSED and "in compare_losses" in str(refused)
        return
    assert result.finding is not None, f"{bug}: not found"
    assert result.finding.cause in BUGS[bug][1], result.finding
