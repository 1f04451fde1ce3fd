"""Which optimizers and steps belong to what all ranks train together: on made-up replicas, in one process."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from paceline.protocol.marks import NamesWriter, parse_fingerprints, read_findings, read_fingerprint_bytes
from paceline.protocol.status_page import StatusPage, make_status_page, read_counters
from paceline.rank.probes.faults import StepAnomalyDetector
from paceline.rank.probes.replicas import FingerprintWriter
from paceline.rank.probes.steps import StepCounter, SyncedOptimizerDetector

pytestmark = pytest.mark.sample(3)


class Replica:
    """As much of a DistributedDataParallel as is asked of it."""

    process_group = None
    require_backward_grad_sync = True

    def __init__(self) -> None:
        self.module = nn.Linear(2, 2)


class Rank:
    """The listeners of one, as `install_script_probes` has them, and what a script does."""

    def __init__(self, page: StatusPage) -> None:
        self.page, self.collectives = page, 0
        self.joint = SyncedOptimizerDetector(lambda: self.collectives)
        self.counted = StepCounter(page, self.joint)
        self.stale, self.prints = (
            StepAnomalyDetector(page, self.counted),
            FingerprintWriter(page, NamesWriter(page), self.joint),
        )

    def replica(self) -> Replica:
        made = Replica()
        self.joint.on_replica_created(made)
        return made

    def step(self, optimizer: Any, ddp: Replica | None = None, *, backwards: int = 1, collectives: int = 0) -> None:
        if ddp is not None:
            self.joint.on_forward_begin(ddp, (), {})
        for _ in range(backwards):
            self.joint.on_backward_begin(None)
            self.stale.on_backward_begin(None)
        self.collectives += collectives
        self.joint.on_step_begin(optimizer)
        self.stale.on_step_begin(optimizer)
        for one in (self.joint, self.stale, self.counted, self.prints):
            one.on_step_end(optimizer)

    @property
    def counts(self) -> tuple[int, int]:
        """Steps that are compared, and those before them."""
        read = read_counters(self.page.descriptor)
        return read.step - read.alone, read.alone

    @property
    def marked(self) -> set[tuple[int, int]]:
        """Tables and numbers."""
        return {
            (one.table_index, one.optimizer_step)
            for one in parse_fingerprints(read_fingerprint_bytes(self.page.descriptor))
        }


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [0, 1])
    page = StatusPage(make_status_page(0))
    yield Rank(page)
    page.close()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_only_steps_of_a_replica_count_whatever_a_rank_trains_before_and_beside(rank: Rank) -> None:
    for _ in range(50):
        rank.step(before := sgd(nn.Linear(3, 3)))
        rank.step(before)
    assert rank.counts[0] > 50  # no evidence of joint training yet
    ddp = rank.replica()
    optimizer, probe = sgd(ddp.module), sgd(nn.Linear(3, 3))
    for _ in range(20):
        rank.step(optimizer, ddp)
        for _ in range(7):
            rank.step(probe)
    assert rank.counts[0] == 20
    assert not read_findings(rank.page.descriptor)
    rank.step(optimizer, backwards=0)
    assert rank.counts[0] == 21


def test_gradients_averaged_by_hand_are_known_by_collectives_before_most_steps(rank: Rank) -> None:
    optimizer, probe = sgd(nn.Linear(2, 2)), sgd(nn.Linear(3, 3))
    for _ in range(30):
        rank.step(optimizer, collectives=2)
    for _ in range(100):
        rank.step(probe)
    rank.step(optimizer, collectives=1)
    rank.step(optimizer)
    assert rank.counts == (32, 0)
    assert not read_findings(rank.page.descriptor)


def test_copies_of_a_replicas_parameters_are_joint_as_they_step_after_its_forwards(rank: Rank) -> None:
    ddp = rank.replica()
    master = sgd(nn.Linear(2, 2))
    for _ in range(10):
        rank.step(master, ddp)
    assert rank.counts == (10, 0)


@pytest.mark.parametrize("how", ["the same", "new", "without DDP"])
def test_steps_past_ddp_after_steps_through_it_do_not_count_and_are_not_marked(rank: Rank, how: str) -> None:
    ddp: Replica | None = rank.replica()
    assert ddp is not None
    inner = ddp.module
    optimizer = sgd(inner)
    for _ in range(9):
        rank.step(optimizer, ddp)
    before = rank.marked
    assert before
    optimizer = sgd(inner) if how == "new" else optimizer
    if how == "without DDP":
        ddp = None
        rank.joint._forwards.clear()  # pyright: ignore[reportPrivateUsage]
        gc.collect()
    for _ in range(5):
        rank.step(optimizer)
    assert rank.counts == (9, 0) and rank.marked == before
    (told,) = read_findings(rank.page.descriptor)
    assert (told.kind, told.step) == ("left", 9)
    if ddp is not None:
        rank.step(optimizer, ddp)
        assert rank.counts[0] == 10 if how == "the same" else 9


def test_who_never_trains_through_ddp_is_marked_from_the_start(rank: Rank) -> None:
    ddp = rank.replica()
    optimizer = sgd(ddp.module)
    for _ in range(4):
        rank.step(optimizer)
    assert rank.counts == (4, 0) and {number for _, number in rank.marked} == {1, 2, 3, 4}


def test_optimizers_of_replicas_have_the_same_tables_and_numbers_with_and_without_probes_beside_them(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def marked_by(probes: int) -> set[tuple[int, int]]:
        page = StatusPage(make_status_page(0))
        one = Rank(page)
        kept: list[Any] = []
        for _ in range(3):
            ddp = one.replica()
            optimizer = sgd(ddp.module)
            kept += [ddp, optimizer]
            for _ in range(5):
                one.step(optimizer, ddp)
            for _ in range(probes):
                probe = sgd(nn.Linear(3, 3))
                kept.append(probe)
                for _ in range(40):
                    one.step(probe)
        replicas = {
            (mark.table_index, mark.optimizer_step)
            for mark in parse_fingerprints(read_fingerprint_bytes(page.descriptor))
            if mark.flags & 1 << 8
        }
        page.close()
        return replicas

    assert marked_by(0) == marked_by(2) != set()
