"""What zero and fsdp promise beside the conformance suite: little memory, and the whole wherever it is asked for."""

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run_ranks import run_ranks
from tests.strategies.test_state import squared
from tests.worlds import world as world
from tests.worlds import world_of, worlds
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from paceline import ArrayDataset, BatchPlan, LoadingOptions, World, evaluate, load_steps, train_step
from paceline.checkpoint.shards import gather_full_state, hash_tensors
from paceline.collectives.communicator import make_communicator
from paceline.compute.precision import autocast_bf16
from paceline.data.plan import virtual_ranks_of
from paceline.protocol.control import SHARED_MEMORY
from paceline.strategies import STRATEGIES, Strategy
from paceline.strategies.fsdp import FSDP
from paceline.train.weights import save_weights_on_one_rank

CPU = torch.device("cpu")


class Blocks(nn.Module):
    """Four equal blocks, and a scalar; in float64, as all here."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.last = nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x) * self.scale


def data(samples: int = 22) -> ArrayDataset:
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return ArrayDataset(inputs, inputs.sum(1).sin())


def made(name: str, model: nn.Module, world: World, virtual_ranks: int, **options: Any) -> Strategy:
    optimizer = partial(AdamW, lr=0.01, weight_decay=0.1)
    return STRATEGIES[name](model, optimizer, world, virtual_ranks=virtual_ranks, **options)


def train(replica: Strategy, steps: int, *, max_norm: float | None = None, accumulation: int = 1) -> list[float | None]:
    world, virtual_ranks = replica.world, replica.virtual_ranks
    plan = BatchPlan(22, 10, virtual_ranks, accumulation)
    share = virtual_ranks_of(virtual_ranks, world.rank, world.size)
    batches = load_steps(data(), plan, share, LoadingOptions(CPU), start=0, stop=steps)
    return [train_step(replica, step, squared, max_norm=max_norm).grad_norm for step in batches]


# ---- bits --------------------------------------------------------------------------------------------------------


def clipped(rank: int, size: int) -> dict[str, Any]:
    """Norms and state of exact and zero with clipping, in single precision, where the order of additions shows."""
    found: dict[str, Any] = {}
    for name in ("exact", "zero"):
        replica = made(name, Blocks(60).float(), world_of(rank, size), 6)
        plan = BatchPlan(22, 10, 6)
        share = virtual_ranks_of(6, rank, size)
        single = ArrayDataset(data().inputs.float(), data().targets.float())
        steps = load_steps(single, plan, share, LoadingOptions(CPU), start=0, stop=4)
        norms = [train_step(replica, step, squared, max_norm=0.01).grad_norm for step in steps]
        assert all(norm is not None and norm > 0.01 for norm in norms)  # something was clipped
        gradients = gather_full_state(replica.gradients(), replica.world)
        squares = sum(float(g.double().square().sum()) for g in gradients.values())
        assert squares**0.5 == pytest.approx(0.01, rel=1e-3)
        found[name] = (norms, hash_tensors(gradients), hash_tensors(gather_full_state(replica.state(), replica.world)))
    return found


# ---- memory ------------------------------------------------------------------------------------------------------


def held_bytes(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def parameters_now(model: nn.Module) -> int:
    """Bytes of all parameters as they are at this moment: the gathered ones whole, of the others this rank's share."""
    return held_bytes([p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()])  # pyright: ignore


@contextmanager
def watched(replica: Strategy, found: dict[str, int]) -> Generator[None]:
    """The most that was held of each kind, at each module's forward and backward and each step of the optimizer."""

    def look(*_: object) -> None:
        found["parameters"] = max(found.get("parameters", 0), parameters_now(replica.model))

    def look_in_backward(_: Tensor) -> None:
        found["in backward"] = max(found.get("in backward", 0), parameters_now(replica.model))

    def then(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(look_in_backward)

    def before(*_: object) -> None:
        whole_ones = [p.grad for p in replica.model.parameters() if p.grad is not None]
        local = [g.to_local() if hasattr(g, "to_local") else g for g in whole_ones]  # pyright: ignore
        gradients = held_bytes([*local, *(h.tensor for h in replica.gradients())])
        found["gradients"] = max(found.get("gradients", 0), gradients)

    def after(*_: object) -> None:
        state = [t for s in replica.optimizer.state.values() for t in s.values() if t.ndim]
        found["state"] = held_bytes(state)

    hooks = [m.register_forward_pre_hook(look) for m in replica.model.modules()]
    hooks += [m.register_forward_hook(then) for m in replica.model.modules() if isinstance(m, nn.Linear)]
    hooks.append(replica.optimizer.register_step_pre_hook(before))
    hooks.append(replica.optimizer.register_step_post_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def memory(rank: int, size: int) -> dict[str, dict[str, float]]:
    """What each strategy holds, in units of the model's bytes."""
    of_strategy: dict[str, dict[str, float]] = {}
    for name in ("exact", "zero", "fsdp"):
        model, found = Blocks(128), dict[str, int]()
        total = sum(p.nbytes for p in model.parameters())
        replica = made(name, model, world_of(rank, size), size)
        train(replica, 1)  # what is made lazily is there
        with watched(replica, found):
            train(replica, 2)
        of_strategy[name] = {kind: bytes / total for kind, bytes in found.items()}
        of_strategy[name]["block"] = model_block(size) / total
    return of_strategy


def model_block(size: int) -> int:
    """Bytes that the largest block has more when it is gathered."""
    return (128 * 128 + 128) * 8 * (size - 1) // size


# ---- fsdp --------------------------------------------------------------------------------------------------------


class Choosing(nn.Module):
    """Which of its layers a sample goes through depends on the sample; one is for nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ParameterList(torch.randn(4, 3, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x[0, 0] > 0)  # of the first sample of a micro-batch
        return (x @ self.layers[chosen] @ torch.ones(3, 1, dtype=torch.float64)) + x @ self.layers[2][:, :1]


def who_uses_what(rank: int, size: int) -> None:
    found: dict[str, dict[str, Tensor]] = {}
    for name in ("exact", "fsdp"):
        replica = made(name, Choosing(), world_of(rank, size), size)
        train(replica, 3)
        found[name] = dict(replica.weights())
    start = Choosing().state_dict()
    for name, tensor in found["exact"].items():
        torch.testing.assert_close(found["fsdp"][name], tensor, rtol=1e-9, atol=1e-12)
        assert torch.equal(tensor, start[name]) == (name == "layers.3")  # not even decayed


def the_whole_on_request(rank: int, size: int, folder: str) -> None:
    world = world_of(rank, size)
    plain, model = Blocks(), Blocks()
    replica = made("fsdp", model, world, size + 1)  # ranks go through different numbers of micro-batches
    alone = made("exact", plain, world, size + 1)
    for one in (replica, alone):
        train(one, 4, accumulation=2)
    weights = replica.weights()
    assert [*weights] == [*plain.state_dict()]
    for name, tensor in plain.state_dict().items():
        assert type(weights[name]) is Tensor
        torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-12)
    assert sorted(h.name for h in alone.state()) == sorted(gather_full_state(replica.state(), world))
    # 9 samples in batches of 2 are, for 3 virtual ranks, 2 + 2 + 2 batches: rank 0 has to wait for rank 1
    metrics = {"one": lambda o, t: torch.ones(len(t))}
    scores = [evaluate(one, data(9), squared, metrics, LoadingOptions(CPU), batch_size=2) for one in (replica, alone)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-12) and scores[0]["one"] == 1.0
    x = data().inputs
    with replica.gathered():
        if rank == 0:  # alone
            torch.testing.assert_close(replica.model(x), plain(x), rtol=1e-9, atol=1e-12)
    assert parameters_now(model) < held_bytes([*plain.parameters()]) * 0.6  # and thrown away again
    train(replica, 1)
    before = hash_tensors(gather_full_state(replica.state(), world))
    assert save_weights_on_one_rank(replica, Path(folder)) and not [*Path(folder).glob("*-rescued.safetensors")]
    assert hash_tensors(gather_full_state(replica.state(), world)) == before


class Attending(nn.Module):
    """Attention of a sequence to itself; not a block by itself, which fsdp would give three tensors instead of one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x, need_weights=False)[0]


class Mixed(nn.Module):
    """What autocast rounds to bf16 beside what it does not: norms, a tied embedding, a matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8))
            for _ in range(2)
        )
        self.attention = Attending()
        self.own = nn.ParameterDict({"matrix": torch.randn(8, 9) / 3, "vector": torch.randn(9) / 3})
        self.out = nn.Linear(8, 9, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding((x.abs() * 4).long() % 9)  # (n, 4) -> (n, 4, 8)
        x = self.attention(x).flatten(0, 1)  # a batch of one sample has four values for batch norm
        for block in self.blocks:
            x = x + block(x)
        x = x.view(-1, 4, 8).mean(1)
        return (self.out(x) * (x @ self.own["matrix"] + self.own["vector"])).mean(1, keepdim=True)


def rounded_on_the_way(rank: int, size: int) -> None:
    """In bf16 fsdp has the bits of a strategy that rounds each weight where it is used, and holds float32 alone."""
    digests: dict[str, str] = {}
    types: dict[str, torch.dtype] = {}

    def look(block: nn.Module, _: object) -> None:
        types.update({name: p.dtype for name, p in block.named_parameters() if type(p) is nn.Parameter})

    for name in ("bucketed", "fsdp"):
        model = Mixed()
        autocast_bf16(model, CPU)
        options = {"wrap": "blocks.*,attention"} if name == "fsdp" else {}
        replica = made(name, model, world_of(rank, size), size, **options)
        for block in (*model.blocks, model.attention):
            block.register_forward_pre_hook(look)  # after fsdp's own, which gathers
        train(replica, 4)
        state = replica.state()
        assert {held.tensor.dtype for held in state if held.tensor.is_floating_point()} == {torch.float32}
        digests[name] = hash_tensors(gather_full_state(state, replica.world))
    assert digests["fsdp"] == digests["bucketed"]
    norms = {"1.weight", "1.bias", "4.weight", "4.bias"}
    assert {name for name, kind in types.items() if kind == torch.float32} == norms
    assert {"0.weight", "3.bias", *(f"inner.{n}" for n in ("in_proj_weight", "out_proj.weight"))} <= {*types} - norms


def fsdps_bits(rank: int, world_size: int, folder: str) -> dict[int, Any]:
    """The states of fsdp after steps of several micro-batches, and whether memory that ranks share was in use."""
    found: dict[int, Any] = {}
    for size in worlds(rank, (2, 3), folder):
        digests: list[str] = []
        for prepare in (lambda m: m, partial(autocast_bf16, device=CPU), lambda m: m.bfloat16()):
            prepare(model := Mixed())
            replica = made("fsdp", model, world_of(rank, size), size, wrap="blocks.*,attention")
            train(replica, 3, accumulation=2)
            digests.append(hash_tensors(gather_full_state(replica.state(), replica.world)))
        memory = make_communicator().memory
        found[size] = (memory is not None and memory.bulk.tick > 100, digests)
    return found


@pytest.mark.slow
@pytest.mark.ranks
def test_fsdp_has_the_bits_of_gloo_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = run_ranks(fsdps_bits, 3, tmp_path, str(tmp_path / "a"), timeout=450)
    monkeypatch.setenv(SHARED_MEMORY, "off")
    over_gloo = run_ranks(fsdps_bits, 3, tmp_path, str(tmp_path / "b"), timeout=450)
    for found, wanted in zip(in_memory, over_gloo, strict=True):
        for size, (used, digests) in found.items():
            assert used and wanted[size] == (False, digests), size
    assert len({digest for _, digests in in_memory[0].values() for digest in digests}) == 6


def bits_in_bf16(rank: int, size: int) -> dict[str, str]:
    """The state of exact and zero, for a run of six virtual ranks."""
    digests: dict[str, str] = {}
    for name in ("exact", "zero"):
        model = Mixed()
        autocast_bf16(model, CPU)
        replica = made(name, model, world_of(rank, size), 6)
        train(replica, 3)
        digests[name] = hash_tensors(gather_full_state(replica.state(), replica.world))
    return digests


class Odd(Blocks):
    """One single element of its gradients is infinite: one rank alone sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.arange(200.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.odd.sqrt()[:1]


def what_one_rank_sees_all_know(rank: int, size: int) -> None:
    plan, share = BatchPlan(22, 10, size), virtual_ranks_of(size, rank, size)
    for name in ("exact", "zero", "fsdp"):
        replica = made(name, Odd(), world_of(rank, size), size)
        before = hash_tensors(gather_full_state(replica.state(), replica.world))
        for max_norm in (None, 1.0):
            (step,) = load_steps(data(), plan, share, LoadingOptions(CPU), start=0, stop=1)
            found = train_step(replica, step, squared, max_norm=max_norm, may_skip=True).skip_cause
            assert found is not None and len(found.samples) == 10, (name, found)
            assert "gradient of odd" in found.message and "loss is finite" in found.message, (name, found)
            assert hash_tensors(gather_full_state(replica.state(), replica.world)) == before


def everything(rank: int, world_size: int, folder: str) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for size in worlds(rank, (1, 2, 3), folder):
        found[size] = {"clipped": clipped(rank, size), "bf16": bits_in_bf16(rank, size)}
        if size == 2:
            found[size]["memory"] = memory(rank, size)
            who_uses_what(rank, size)
            the_whole_on_request(rank, size, folder)
            what_one_rank_sees_all_know(rank, size)
            rounded_on_the_way(rank, size)
    return found


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    return run_ranks(everything, 3, folder, str(folder / "worlds"), timeout=450)


pytestmark = pytest.mark.timeout(480)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("how", ["clipped", "bf16"])
def test_the_bits_are_the_same_at_every_world_size_sharded_or_not(how: str, of_ranks: list[dict[int, Any]]) -> None:
    wanted = of_ranks[0][1][how]["exact"]
    for found in of_ranks:
        for size, of_size in found.items():
            assert of_size[how] == {"exact": wanted, "zero": wanted}, size


@pytest.mark.ranks
@pytest.mark.slow
def test_memory_is_what_arithmetic_says(of_ranks: list[dict[int, Any]]) -> None:
    for found in of_ranks[:2]:
        exact, zero, fully = (found[2]["memory"][name] for name in ("exact", "zero", "fsdp"))
        block = exact["block"]
        assert (exact["parameters"], exact["state"]) == pytest.approx((1.0, 2.0), rel=0.1)
        assert zero["parameters"] <= 1.0 * 1.1 and zero["gradients"] <= 0.5 * 1.1 and zero["state"] <= 1.0 * 1.1
        assert 0.5 + block <= fully["parameters"] <= (0.5 + block) * 1.1
        assert 0.5 + block <= fully["in backward"] <= (0.5 + 2 * block) * 1.1  # the next one is on its way already
        assert fully["gradients"] <= 0.5 * 1.1 and fully["state"] <= 1.0 * 1.1
        assert fully["parameters"] < 0.9 < zero["parameters"]  # the ruler can tell them apart


# ---- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [copy.deepcopy, lambda m: m.bfloat16()])
def test_one_process_needs_no_others(world: World, change: Callable[[nn.Module], nn.Module]) -> None:
    model = change(Blocks())
    replica = FSDP(model, partial(SGD, lr=0.1), world, wrap="blocks.*")
    before = {name: tensor.clone() for name, tensor in replica.weights().items()}
    kind = next(iter(before.values())).dtype
    dataset = ArrayDataset(data().inputs.to(kind), data().targets.to(kind))
    (step,) = load_steps(dataset, BatchPlan(22, 10, 1), range(1), LoadingOptions(CPU), start=0, stop=1)
    train_step(replica, step, squared, max_norm=1.0)
    after = replica.weights()
    assert all(after[name].dtype == kind for name in before)
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
