"""`paceline verify --bitwise`: one digest for every world size, and a planted difference is found."""

from pathlib import Path

import msgspec
import pytest
import torch
from tests.errors import ended_with
from tests.run_ranks import run_ranks
from torch import nn

from paceline import ArrayDataset, Task
from paceline.collectives import sum_tree
from paceline.collectives.reducer import Reducer
from paceline.lab.ranks.verify import collect_bit_digests
from paceline.lab.verify import DigestReport, VerifySpec, compare_and_print_digests
from paceline.rank.world import World

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(270)]


class Zeros(nn.Linear):
    """Its weights after a step are the gradient alone: no bit of it is lost in a larger number."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def data(split: str) -> ArrayDataset:
    generator = torch.Generator().manual_seed(len(split))
    return ArrayDataset(torch.randn(60, 20, generator=generator), torch.randn(60, generator=generator))


task = Task(lambda: Zeros(20, 1), data, lambda outputs, targets: (outputs[:, 0] - targets).square())
SPEC = VerifySpec(
    task=f"{Path(__file__).resolve()}:task", options={}, strategies=["exact"], optimizers=["sgd"], virtual_ranks=4,
    accumulation=2, steps=3, seed=0, clip_norm=1.0,
)  # fmt: skip


@pytest.mark.slow
def test_the_command_prints_one_digest_for_all_world_sizes(paceline, tmp_path):
    run = paceline("verify", "mnist-cnn", "--bitwise", "--ranks", "1,2", "--steps", 2, "--strategies", "exact",
                   "--optimizers", "adamw", "--json", "bits.json")  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "bit-identical" in run.stdout and "DIFFERS" not in run.stdout
    reports = msgspec.json.decode((tmp_path / "bits.json").read_bytes(), type=list[DigestReport])
    assert [report.world_size for report in reports] == [1, 2]
    (one,), (two,) = (report.bits for report in reports)
    assert one == two and one.ranks_agree
    assert run.stdout.count(one.weights[:16]) == run.stdout.count(one.state[:16]) == 2
    assert len({step.parameters for step in one.steps}) == 2  # it was trained


@pytest.mark.slow
def test_strategies_that_promise_no_bits_are_refused(paceline):
    ended_with(paceline("verify", "mnist-cnn", "--bitwise", "--strategies", "exact,bucketed"), "verify-bitwise")


# ---- planted ------------------------------------------------------------------------------------------------------


def measured(rank: int, size: int) -> list[bytes]:
    """The report as it should be, with another order of additions, and with a rank that goes its own way."""
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    found = [collect_bit_digests(SPEC, world)]
    balanced = sum_tree.find_split_leaf
    sum_tree.find_split_leaf = lambda node: node[0] + 1  # as if that depended on the world size
    found.append(collect_bit_digests(SPEC, world))
    sum_tree.find_split_leaf = balanced
    if rank == 1:
        whole = Reducer.finish

        def finish(self: Reducer, total_weight: torch.Tensor) -> None:
            whole(self, total_weight)
            self._buckets[0][0].grad.view(-1)[0] += 1e-3

        Reducer.finish = finish
    found.append(collect_bit_digests(SPEC, world))
    return [msgspec.json.encode(report) for report in found]


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> list[DigestReport]:
    reports = run_ranks(measured, 2, tmp_path_factory.mktemp("planted"))[0]
    return [msgspec.json.decode(report, type=DigestReport) for report in reports]


def test_another_order_of_additions_is_found_in_the_first_step(planted, capsys):
    right, other, _ = planted
    assert compare_and_print_digests(SPEC, [right, right])
    assert "bit-identical" in capsys.readouterr().out
    assert not compare_and_print_digests(SPEC, [right, other])
    said = " ".join(capsys.readouterr().out.split())
    assert "DIFFERS" in said and "1 DIFFER" in said and "bit-identical" not in said
    got, want = other.bits[0].steps[0].gradients[:24], right.bits[0].steps[0].gradients[:24]
    assert f"gradients {got}, not {want}" in said and "exact on 2, sgd: " in said and "in step 1:" in said


def test_ranks_that_do_not_agree_are_found(planted, capsys):
    right, _, alone = planted
    assert right.bits[0].ranks_agree and not alone.bits[0].ranks_agree
    assert not compare_and_print_digests(SPEC, [alone])
    said = " ".join(capsys.readouterr().out.split())
    assert "exact on 2, sgd: " in said and "ranks differ" in said and "bit-identical" not in said
