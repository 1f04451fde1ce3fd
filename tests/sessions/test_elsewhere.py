"""A share of a tensor that is cut over ranks does not pass for the whole. More of it is in test_wrong.py."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.errors import ended_with, raises
from tests.run_ranks import run_ranks
from tests.run_script import run_script

from paceline.errors import UsageError
from paceline.sessions.sharded_tensors import ShardedGradientPlaceholder, forbid_shard_conversions, local_shard

ASKED = ("float(cut.sum())", "bool(cut.sum())", "cut.sum().item()", "cut.tolist()", "pickle.dumps(cut)")
SCRIPT = """
import torch
import paceline
s = paceline.session(strategy="fsdp")
net = torch.nn.Linear(3, 2)
whole = float(net(torch.ones(2, 3)).sum())
model, optimizer = s.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
try:
    float(model.weight.sum())
    raise SystemExit("a rank's share has passed for the whole")
except Exception as error:
    assert "full_tensor" in str(error), error
with s.evaluating():
    assert s.main(lambda: float(model(torch.ones(2, 3)).sum())) == (whole if s.rank == 0 else None)
with torch.no_grad():
    for rows in s.loader(torch.ones(5, 3), global_batch=4):
        model(rows)
    for rows in s.loader(torch.ones(1, 3), global_batch=4):
        model(rows)
"""


def of_two(rank: int, size: int) -> tuple[list[str], float, list[float]]:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    forbid_shard_conversions()
    group = dist.group.WORLD
    assert group is not None
    cut = distribute_tensor(torch.arange(4.0), DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    told: list[str] = []
    for asked in ASKED:
        try:
            eval(asked, {"cut": cut, "pickle": pickle})
        except UsageError as error:
            told.append(str(error))
    return told, float(cut.sum().full_tensor()), local_shard(cut).tolist()


def test_what_stands_for_a_gradient_refuses_all_but_its_shape() -> None:
    standing = ShardedGradientPlaceholder.of(torch.ones(2, 3))
    assert standing.shape == (2, 3)
    with raises("sharded-gradient-used"):
        standing.sum()


@pytest.mark.slow
def test_a_number_of_a_tensor_that_is_cut_is_refused_and_the_whole_is_not(tmp_path: Path) -> None:
    for rank, (told, whole, share) in enumerate(run_ranks(of_two, 2, tmp_path)):
        assert len(told) == len(ASKED) and all("tensor.full_tensor()" in words for words in told)
        assert (whole, share) == (6.0, [[0.0, 1.0], [2.0, 3.0]][rank])


@pytest.mark.slow
def test_one_rank_alone_evaluates_the_whole_model_and_too_few_samples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = run_script(2, tmp_path / "mine.py", cwd=tmp_path)
    ended_with(done, "too-few-samples-to-evaluate")
