"""A model that is cut along tensor: the losses, gradients and random numbers of one process; refused in words."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parallel.models import GPT, HUGGING_FACE, OWN, Encoder, loss, sentences
from tests.run_ranks import run_ranks
from torch import Tensor, nn

from paceline import World
from paceline.checkpoint.shards import (
    ShardFileSource,
    gather_full_state,
    make_shard_layout,
    read_shard_file_metadata,
    select_shards_to_save,
    serialize_shard_file,
)
from paceline.config.mesh import Mesh
from paceline.errors import UsageError
from paceline.parallel.tensor_plan import find_tensor_parallel_plan, shards_by_name
from paceline.rank.world import create_mesh_groups
from paceline.strategies import STRATEGIES
from paceline.strategies.model_parallel import WholeModelView

CPU = torch.device("cpu")
EVERYTHING = {**OWN, **HUGGING_FACE}


def world_of(rank: int, size: int, mesh: str) -> World:
    return create_mesh_groups(World(rank, size, rank, size, CPU, "gloo"), Mesh.parse(mesh))


def one_step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor], float, Tensor]:
    """Losses, gradients, the random number that follows, and what it gives in eval mode."""
    words, targets = sentences("train")[:3]
    torch.manual_seed(7)
    model.train()
    model.zero_grad()
    losses, _ = loss(model(words), targets)
    losses.sum().backward()
    after = float(torch.rand(1))
    model.eval()
    with torch.no_grad():
        seen = model(words)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return losses.detach(), gradients, after, getattr(seen, "logits", seen)


def compare(got: Any, want: Any, part: Callable[[str, Tensor], Tensor] = lambda _, whole: whole) -> tuple[float, bool]:
    """The largest difference of losses, gradients and outputs; whether the random number that follows is the same."""
    pairs = [(got[0], want[0]), (got[3], want[3]), *((got[1][n], part(n, g)) for n, g in want[1].items())]
    return max(float((a - b).abs().max()) for a, b in pairs), got[2] == want[2]


def bytes_of_sums(model: torch.nn.Module, ranks: int, forward: Callable[[], object]) -> int:
    """What a rank would hand to sums over ranks in a step, as the forward of the whole model shows."""
    sent, last = 0, None

    def seen(way: str, _: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal sent, last
        if way not in ("rowwise", "vocabulary") and args[0] is not last and args[0].requires_grad:
            sent, last = sent + args[0].nbytes, args[0]  # the sum of its gradient, once for queries, keys and values
        if way in ("rowwise", "vocabulary", "heads"):
            sent += (output[0] if isinstance(output, tuple) else output).nbytes

    plan = find_tensor_parallel_plan(model, ranks)
    hooks = [model.get_submodule(name).register_forward_hook(partial(seen, one.style)) for name, one in plan.items()]
    forward()
    for hook in hooks:
        hook.remove()
    return sent


def differences(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    from paceline.parallel.tensor import apply_tensor_parallel

    world, found = world_of(rank, size, f"tensor={size}"), dict[str, Any]()
    for name in names:
        torch.manual_seed(0)
        model = EVERYTHING[name]().double()
        want = one_step(model)
        words = sentences("train")[:3][0]
        expected = bytes_of_sums(model, size, lambda: model(words))  # noqa: B023 - called here
        sharding = apply_tensor_parallel(model, world)
        got = one_step(model)
        before = sum(sharding.sent.values())
        model.train()(words)
        shards = sharding.shards
        found[name] = (
            *compare(got, want, lambda n, g: shards[n].extract_shard(g) if n in shards else g),  # noqa: B023 - called here
            sum(p.numel() for p in model.parameters()),
            sorted({layer.style for layer in sharding.plan.values()}),
            expected / (sum(sharding.sent.values()) - before),
        )
    return found


@pytest.mark.ranks
def test_own_models_compute_what_one_process_does(tmp_path: Path) -> None:
    for name, (error, same_stream, parameters, ways, ratio) in run_ranks(differences, 2, tmp_path, [*OWN])[1].items():
        assert error < 1e-13 and same_stream and ratio == 1, (name, error, same_stream, ratio)
        assert parameters < 0.55 * sum(p.numel() for p in OWN[name]().parameters()), name
        assert ways == ["colwise", "heads" if name == "encoder" else "qkv", "rowwise", "vocabulary"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("transformers")
def test_models_of_hugging_face_do_so_too(tmp_path: Path) -> None:
    by_name = run_ranks(differences, 2, tmp_path, [*HUGGING_FACE])[1]
    for name, (error, same_stream, _, _, ratio) in by_name.items():
        assert error < 1e-13 and same_stream and ratio == 1, (name, error, same_stream, ratio)
    assert by_name["gpt2"][3] == ["colwise", "qkv", "rowwise", "vocabulary"]


# ---- plans -------------------------------------------------------------------------------------------------------


def found_by_one(rank: int, size: int, fails: bool) -> tuple[str, str]:
    """What is raised where rank 1 alone cannot compute with the cut model, or gets another loss."""
    from paceline.parallel.tensor import apply_tensor_parallel

    asked: list[int] = []

    def probe() -> float:
        asked.append(1)
        if len(asked) == 1 or rank == 0:
            return 1.0
        if fails:
            raise RuntimeError("4711 cannot be shared")
        return 2.0

    try:
        apply_tensor_parallel(GPT(), world_of(rank, size, "tensor=2"), None, probe)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.ranks
@pytest.mark.parametrize(("fails", "words"), [(True, "4711 cannot be shared"), (False, "a loss of 2")])
def test_what_one_rank_alone_finds_is_told_by_it_and_ends_all(tmp_path: Path, fails: bool, words: str) -> None:
    first, second = run_ranks(found_by_one, 2, tmp_path, fails)
    assert first == ("ReportedByPeer", "rank 1 failed")
    assert second[0] == "UsageError" and words in second[1]


def ways(model: nn.Module, ranks: int, asked: Mapping[str, str] | None = None) -> dict[str, str]:
    return {name: layer.style for name, layer in find_tensor_parallel_plan(model, ranks, asked).items()}


def test_pairs_are_found_by_their_shapes_and_the_rest_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.LayerNorm(4), nn.GRU(4, 4), nn.Linear(4, 3))
    assert ways(model, 2) == {"0": "colwise", "2": "rowwise"}


def test_a_task_may_say_otherwise() -> None:
    found = ways(GPT(), 2, {"attn.*": "whole", "mlp.0": "whole", "mlp.3": "rowwise"})
    assert found == {"mlp.3": "rowwise", "wte": "vocabulary", "head": "colwise"}
    # what shares its weight with a layer that stays whole stays whole, too
    assert ways(GPT(), 2, {"head": "whole"}).keys().isdisjoint({"head", "wte"})


@pytest.mark.parametrize(
    ("model", "ranks", "asked", "words"),
    [
        (GPT(heads=1), 2, None, r"attn.0 \(Attention\) has 1 head, which 2 ranks cannot split.*Choose tensor from: 1"),
        (Encoder(), 4, None, r"looks \(MultiheadAttention\) has 2 heads"),
        (nn.GRU(4, 4), 2, None, "found no layer of this model that it can shard"),
        (GPT(), 2, {"mlp.7": "colwise"}, "no module matches 'mlp.7'"),
        (GPT(), 2, {"mlp.0": "columns"}, "Choose from: colwise, rowwise, qkv, heads, vocabulary, whole"),
        (GPT(), 2, {"norm": "rowwise"}, r"norm is a LayerNorm, which cannot be sharded as rowwise"),
        (GPT(), 3, {"*": "whole", "mlp.0": "colwise"}, "tensor=3 does not divide its dimension 0"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_words(model: nn.Module, ranks: int, asked: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_tensor_parallel_plan(model, ranks, asked)


# ---- state -------------------------------------------------------------------------------------------------------


def test_parts_of_all_ranks_are_saved_as_whole_tensors(tmp_path: Path) -> None:
    """Rows, columns and three shares of one weight; each rank reads its part out of what all have saved."""
    from paceline.checkpoint.shards import SlicedSource
    from paceline.checkpoint.state import TensorShard

    torch.manual_seed(0)
    model = Encoder()
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    files: list[tuple[Path, Any]] = []
    cuts = [
        shards_by_name(model, find_tensor_parallel_plan(model, 2), World(rank, 2, rank, 2, CPU, "gloo"))
        for rank in range(2)
    ]
    for rank, own in enumerate(cuts):
        held = [
            piece
            for name, cut in own.items()
            for piece in cut.split_into_full_ranges(TensorShard(name, cut.extract_shard(wanted[name])))
        ]
        places = make_shard_layout(held)
        buffer = torch.zeros(places.total_bytes, dtype=torch.uint8)
        serialize_shard_file(buffer, places, {})
        path = tmp_path / str(rank)
        path.write_bytes(buffer.numpy().tobytes())
        meta = read_shard_file_metadata(path)
        assert meta is not None
        files.append((path, meta[1]))
    source = ShardFileSource(files)
    assert any(piece.count > 1 for _, pieces in files for piece in pieces)
    for name, cut in cuts[1].items():
        tensor = source.tensor(name)
        assert tensor is not None
        assert torch.equal(tensor, wanted[name])
        middle = source.tensor(name, 3, 11)
        assert middle is not None
        assert torch.equal(middle, wanted[name].flatten()[3:11])
        part = SlicedSource(source, cuts[1]).tensor(name)
        assert part is not None
        assert torch.equal(part, cut.extract_shard(wanted[name]))


def state_of_parts(rank: int, size: int) -> Any:
    """What all ranks together save of a model on a mesh, and its weights, beside the whole ones."""
    from paceline.parallel.tensor import apply_tensor_parallel

    found: list[Any] = []
    for mesh, strategy in (("data=2,tensor=2", "bucketed"), ("data=2,tensor=2", "fsdp"), ("shard=2,tensor=2", "fsdp")):
        world = world_of(rank, size, mesh)
        torch.manual_seed(0)
        model = GPT()
        wanted = {name: p.detach().clone() for name, p in model.state_dict().items()}
        shards = apply_tensor_parallel(model, world).shards
        replica = STRATEGIES[strategy](model, lambda p: torch.optim.AdamW(p), world.data)
        replica.join(WholeModelView(model, world, shards), world)
        held = replica.state()
        together = gather_full_state(held, world)
        weights = replica.weights()
        same = all(torch.equal(weights[name], value) for name, value in wanted.items())
        same &= all(torch.equal(together[f"model/{name}"], wanted[name]) for name, _ in GPT().named_parameters())
        found.append((same, sum(one.tensor.numel() for one in select_shards_to_save(held, rank, size))))
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_of_a_mesh_hold_the_whole_model_once(tmp_path: Path) -> None:
    by_rank = run_ranks(state_of_parts, 4, tmp_path)
    elements = sum(p.numel() for p in GPT().parameters())
    for found in zip(*by_rank, strict=True):
        assert all(same for same, _ in found)
        assert sum(saved for _, saved in found) == elements
