"""Wrapped functions are what they were, and ranks that call alike have one hash."""

import inspect
import re
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.collectives.odd_model import over_torch
from tests.collectives.one_backward import one_backward
from tests.rank.guard_ranks import calls
from tests.run_ranks import run_ranks
from torch import nn

from paceline.collectives.sum_tree import LeafPartition
from paceline.rank.collective_recorder import GroupRecord
from paceline.rank.guard import HangGuard


def asymmetric(rank: int, world_size: int) -> None:
    """Everything in which ranks may rightly differ, and a difference between the orders of two groups."""
    guard = HangGuard.of_process()
    x = torch.ones(4)
    dist.broadcast(x, src=1)
    dist.gather(x, [torch.empty(4) for _ in range(world_size)] if rank == 0 else None)
    dist.scatter(x, [torch.ones(4)] * world_size if rank == 0 else None)
    dist.reduce(x, 0)
    sent = [1, 3] if rank == 0 else [2, 1]
    received = [1, 2] if rank == 0 else [3, 1]
    dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent)
    dist.all_gather_object([None] * world_size, "word" * (rank + 1))
    others = [torch.empty(3), torch.empty(3)]
    dist.all_gather(others, torch.ones(3))
    dist.monitored_barrier()
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    dist.all_reduce(x)
    assert guard.ledger.last_ordered_calls() == []


def orders(rank: int, world_size: int) -> dict[str, int]:
    guard = HangGuard.of_process().watch_torch()
    every, one = dist.new_group(), dist.new_group([0])
    found = {"nothing": guard.ledger.take_order_hash()}
    asymmetric(rank, world_size)
    found["asymmetric"] = guard.ledger.take_order_hash()
    found["nothing again"] = guard.ledger.take_order_hash()
    dist.all_reduce(torch.ones(3))
    found["one"] = guard.ledger.take_order_hash()
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    found["two"] = guard.ledger.take_order_hash()
    a = dist.all_reduce(torch.ones(3), group=every if rank else None, async_op=True)
    b = dist.all_reduce(torch.ones(3), group=None if rank else every, async_op=True)
    assert a is not None and b is not None
    a.wait(), b.wait()
    found["groups in another order, from other lines"] = guard.ledger.take_order_hash()
    for group in (every, None) if rank else (None, every):
        dist.all_reduce(torch.ones(3), group=group, async_op=True)
    found["groups in another order"] = guard.ledger.take_order_hash()
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=one)
    found["a group of some"] = guard.ledger.take_order_hash()
    assert guard.ledger.last_ordered_calls() == []
    named = [torch.ones(3), torch.ones(3)]
    for name, tensor in zip(("loss", "accuracy"), named, strict=True):
        tensor.__dict__["collective"] = name
    for tensor in reversed(named) if rank else named:
        dist.all_reduce(tensor)
    found["swapped"] = guard.ledger.take_order_hash()
    found["swapped, in words"] = calls(guard.ledger.last_ordered_calls())  # type: ignore[assignment]
    if rank:
        dist.all_reduce(torch.ones(2))
    else:
        dist.all_reduce(torch.ones(2))
    found["another line"] = guard.ledger.take_order_hash()
    for _ in range(300):
        dist.all_reduce(torch.ones(1))
    found["many"] = guard.ledger.take_order_hash()
    assert len(guard.ledger.last_ordered_calls()) == 256 and guard.ledger.last_ordered_calls()[-1].done
    return found


def test_ranks_that_call_alike_have_one_hash_and_others_have_not(tmp_path: Path) -> None:
    zero, one = run_ranks(orders, 2, tmp_path)
    alike = {name for name in zero if zero[name] == one[name]}
    swapped = {"swapped", "swapped, in words", "another line", "groups in another order, from other lines"}
    assert set(zero) - alike == swapped
    numbers = [value for name, value in zero.items() if isinstance(value, int) and name != "nothing again"]
    assert all(0 <= number < 2**52 for number in numbers)
    assert zero["nothing"] == zero["nothing again"] == zero["a group of some"]
    assert len(set(numbers)) == len(numbers) - 1
    assert [call.split()[2] for call in zero["swapped, in words"]] == ["loss", "accuracy"]
    assert [call.split()[2] for call in one["swapped, in words"]] == ["accuracy", "loss"]


def wrapped_and_plain(rank: int, world_size: int) -> dict[str, list[str]]:
    names = ["all_reduce", "broadcast", "all_gather", "barrier", "send", "recv", "all_to_all_single", "reduce_scatter"]
    plain = {name: getattr(dist, name) for name in names}

    def errors() -> list[str]:
        wrong: list[Any] = [
            lambda: dist.all_reduce(),
            lambda: dist.all_reduce("no tensor"),
            lambda: dist.all_reduce(torch.ones(2), opp=3),
            lambda: dist.all_gather([torch.ones(2)], torch.ones(2, dtype=torch.int64)),
            lambda: dist.broadcast(torch.ones(2), src=99),
            lambda: dist.send(torch.ones(2), dst=rank),
            lambda: dist.all_reduce_coalesced([]),
            lambda: type("Own", (dist.Work,), {})().wait(timedelta(seconds=0.01)),  # has no wait but torch's
        ]
        return [_error(call) for call in wrong]

    before, early = errors(), dist.isend
    guard = HangGuard.of_process().watch_torch()
    for name, function in plain.items():
        now = getattr(dist, name)
        assert now is not function and now is getattr(dist.distributed_c10d, name)
        assert inspect.signature(now) == inspect.signature(function) and now.__name__ == name
        assert now.__doc__ == function.__doc__ and inspect.unwrap(now) is inspect.unwrap(function)
    told: list[BaseException] = []
    guard.attach_probes(lambda: None, None, told.append)
    after = errors()
    assert "Operation timed out!" in str(told[-1]) and any("rank: 99" in str(error) for error in told)
    total = torch.full((2,), float(rank + 1))
    assert dist.all_reduce(total) is None and total.tolist() == [3.0, 3.0]
    work = dist.all_reduce(tensor=total, op=dist.ReduceOp.MAX, async_op=True)
    assert isinstance(work, dist.Work) and work.wait()
    assert (dist.recv(total, 0) if rank else dist.send(total, 1)) in (0, None)
    requests = dist.batch_isend_irecv(
        [dist.P2POp(early, total, 1 - rank), dist.P2POp(dist.irecv, torch.ones(2), 1 - rank)]
    )
    for request in requests:
        request.wait()
    dist.all_reduce(total)
    done = [op for _, op in guard.page.recent_ops() if op.seq == 3 or op.is_message]
    return {"before": before, "after": after, "ring": calls(done)}


def _error(call: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as error:
            return re.sub("0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error}")
    return "none"


def test_wrappers_change_neither_signature_nor_result_nor_error(tmp_path: Path) -> None:
    zero, one = run_ranks(wrapped_and_plain, 2, tmp_path)
    for rank in (zero, one):
        assert rank["before"] == rank["after"]
        assert sum(error == "none" for error in rank["before"]) == 0, rank["before"]
    assert "1 send [2]" in zero["ring"] and "1 recv [2]" in one["ring"]
    outputs = "".join(path.read_text() for path in tmp_path.glob("ranks-*/output-*"))
    assert "hang guard" not in outputs


def names(rank: int, world_size: int) -> dict[str, list[str]]:
    guard = HangGuard.of_process().watch_torch()
    found: dict[str, list[str]] = {}

    def taken() -> list[str]:
        guard.ledger.take_order_hash()
        calls = [f"{op.kind} {op.name}" for op in guard.ledger.last_ordered_calls()]
        return [call for call in calls if "layouts" not in call]  # which the ranks exchange once

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    reducer = over_torch(model, LeafPartition([(0, 1), (1, 2)], rank), bucket_bytes=50, in_order=False)
    with one_backward(reducer, rank, is_last=True):
        model(torch.ones(1, 4)).sum().backward()
    reducer.finish(2.0)
    found["reducer"] = taken()
    owned = [(0, 3), (3, 4)]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    tree = over_torch(model, LeafPartition(owned, rank))
    for leaf in range(*owned[rank]):
        with one_backward(tree, leaf, is_last=leaf in (2, 3)):
            model(torch.ones(1, 4)).sum().backward()
    tree.finish(4.0)
    found["tree"] = taken()
    return found


def test_our_own_collectives_have_names(tmp_path: Path) -> None:
    zero, one = run_ranks(names, 2, tmp_path)
    assert zero == one
    assert zero["reducer"][:2] == ["all_reduce bucket 0", "all_reduce bucket 1"]
    assert [kind.split()[0] for kind in zero["tree"]] == ["all_to_all_single", "all_gather_single"]
    assert all(call.endswith("bucket 0") for call in zero["tree"])


COMPILED = """
import torch
from paceline.rank.guard import HangGuard
guard = HangGuard.of_process().watch_torch()
import torch.distributed as dist, torch.distributed.nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def whole(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1
def broken(x):
    y = x * 2
    dist.broadcast(y, 0)
    return y + 1
for function, fullgraph in ((whole, True), (broken, False)):
    compiled = torch.compile(function, fullgraph=fullgraph, backend="eager")
    assert compiled(torch.ones(2)).tolist() == compiled(torch.ones(2)).tolist() == [3.0, 3.0]
print([op.kind for _, op in guard.page.recent_ops()])
x = torch.ones(2, requires_grad=True)
torch.distributed.nn.functional.all_reduce(x).sum().backward()
assert x.grad.tolist() == [1.0, 1.0]
"""


@pytest.mark.slow
def test_compiled_code_calls_collectives_as_without_the_wrappers() -> None:
    run = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=165)
    assert (run.returncode, run.stdout) == (0, "['broadcast', 'broadcast']\n"), run.stderr
    assert "Dynamo" not in run.stderr and "hang guard" not in run.stderr


def test_messages_and_calls_of_several_parts_do_not_count_among_the_collectives() -> None:
    group = GroupRecord("0", True, (0, 1), True, lambda: None)  # type: ignore[arg-type]
    group.composed_spans.extend([(3, 4, 1), (6, 8, 2)])  # a message was torch's 4; 7 and 8 were one call
    assert [group.to_own_sequence_number(number) for number in range(1, 11)] == [1, 2, 3, None, 4, 5, None, None, 7, 8]


def test_what_is_too_long_ago_has_no_number() -> None:
    group = GroupRecord("0", True, (0, 1), True, lambda: None)  # type: ignore[arg-type]
    group.composed_spans.extend((2 * n, 2 * n + 1, n) for n in range(1, 600))
    first = group.composed_spans[0][0]
    assert group.to_own_sequence_number(first) is None and group.to_own_sequence_number(first + 2) == first + 2 - (
        first // 2
    )
