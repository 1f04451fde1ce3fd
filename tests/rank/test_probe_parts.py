"""What the hooks' listeners make of a script's steps: phases, marks and findings in a box."""

import gc
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rendered import rendered

from paceline.protocol.evidence import Phase
from paceline.protocol.marks import (
    TABLES,
    NamesWriter,
    ReplicaFingerprint,
    parse_fingerprints,
    read_findings,
    read_fingerprint_bytes,
    read_tensor_and_call_names,
)
from paceline.protocol.status_page import StatusPage, make_status_page, read_counters
from paceline.rank.probes import ScriptHooks
from paceline.rank.probes.faults import (
    BatchTracker,
    NonFiniteGradientDetector,
    StepAnomalyDetector,
    SwallowedExceptionDetector,
)
from paceline.rank.probes.replicas import FingerprintWriter
from paceline.rank.probes.steps import PhaseTracker


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusPage]:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch sets it where an optimizer is made
    made = StatusPage(make_status_page(0))
    yield made
    made.close()


def marked(page: StatusPage) -> list[ReplicaFingerprint]:
    return parse_fingerprints(read_fingerprint_bytes(page.descriptor))


def words(page: StatusPage, since: int = 0) -> list[str]:
    return [one.text for one in read_findings(page.descriptor)][since:]


class Loading:
    """The iterator of a loader."""


class Optimizer:
    """Any optimizer."""


def test_steps_are_those_of_the_optimizer_that_steps_most_and_each_event_is_a_phase(page: StatusPage) -> None:
    other, phases = Optimizer(), PhaseTracker(page)
    optimizer = Optimizer()
    seen: list[Phase] = []
    for event, told in (
        ("on_batch_requested", (None,)), ("on_batch_received", (None, None)), ("on_forward_begin", (None, (), {})),
        ("on_buffers_broadcast", (None,)), ("on_buffers_received", (None,)),
        ("on_forward_end", (None, None)), ("on_backward_begin", (None,)), ("on_backward_end", ()),
        ("on_step_begin", (optimizer,)), ("on_step_end", (optimizer,)),
    ):  # fmt: skip
        getattr(phases, event)(*told)
        seen.append(read_counters(page.descriptor).phase)
    own = Phase.USER
    forward = [Phase.FORWARD, Phase.SYNC, Phase.FORWARD]
    assert seen == [Phase.DATA, own, *forward, own, Phase.BACKWARD, own, Phase.OPTIMIZER, own]
    for _ in range(3):
        phases.on_step_end(other)
    counters = read_counters(page.descriptor)
    assert counters.step == phases.done == 3
    optimizer = Optimizer()  # of a second stage
    for _ in range(3):
        phases.on_step_end(optimizer)
    assert phases.done == 5


def test_an_exception_by_which_a_rank_is_freed_is_no_progress(page: StatusPage) -> None:
    phases = PhaseTracker(page)
    phases.on_backward_begin(None)
    page.put("released", 1)
    before = read_counters(page.descriptor).progress_values
    phases.on_exception("backward", LOST)
    assert read_counters(page.descriptor).progress_values == before


def test_optimizers_that_follow_each_other_are_all_marked_and_their_steps_go_on(page: StatusPage) -> None:
    prints, model = FingerprintWriter(page, NamesWriter(page)), torch.nn.Linear(2, 2)
    for _ in range(TABLES + 1):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(3):
            prints.on_step_end(optimizer)
        del optimizer
        gc.collect()
    assert {one.optimizer_step for one in marked(page) if not one.table_index} > {1, 2, 3}
    assert max(one.optimizer_step for one in marked(page)) == 3 * (TABLES + 1) - TABLES
    assert {one.table_index for one in marked(page)} == {*range(TABLES)}


def test_every_element_is_marked_within_some_steps_and_one_bit_makes_another_mark(page: StatusPage) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(70, 80), torch.nn.Linear(80, 90))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prints = FingerprintWriter(page, NamesWriter(page))
    for _ in range(40):
        prints.on_step_end(optimizer)
    first = marked(page)
    names = read_tensor_and_call_names(page.descriptor).tensors[str(first[0].layout)]
    assert {part for mark in first for part in mark.tensor_indices} == {*range(len(names))}
    assert set(names) == {f"parameter {n}" for n in range(4)}
    assert all(names[mark.tensor_indices[-1]] == "parameter 3" for mark in first)  # the last part is in each
    usual = dict(itertools.chain.from_iterable(zip(mark.tensor_indices, mark.hashes, strict=True) for mark in first))
    model[1].weight.data.view(torch.int32)[89, 79] ^= 1
    for _ in range(40):
        prints.on_step_end(optimizer)
    found = [
        pair
        for mark in marked(page)
        if mark.optimizer_step > 40
        for pair in zip(mark.tensor_indices, mark.hashes, strict=True)
    ]
    assert {names[part] for part, value in found if value != usual[part]} == {"parameter 2"}


def test_what_ranks_may_rightly_have_apart_is_not_marked(page: StatusPage) -> None:
    model = torch.nn.Linear(3, 3)
    model.weight = torch.nn.Parameter(torch.ones(3, 6)[:, ::2])  # not dense
    FingerprintWriter(page, NamesWriter(page)).on_step_end(torch.optim.SGD(model.parameters(), lr=0.1))
    assert marked(page) == []
    plain = torch.optim.SGD(torch.nn.Linear(3, 3).parameters(), lr=0.1)
    page.put("uneven", 1)
    FingerprintWriter(page, NamesWriter(page)).on_step_end(plain)
    assert marked(page) == []
    page.put("uneven", 0)
    FingerprintWriter(page, NamesWriter(page)).on_step_end(plain)
    assert len(marked(page)) == 1


def test_a_mark_has_the_settings_of_its_step_added_up_over_parameter_groups(page: StatusPage) -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": decay} for decay in (0.25, 0.5)]
    optimizer = torch.optim.AdamW(groups, lr=0.5, betas=(0.75, 0.99))
    FingerprintWriter(page, NamesWriter(page)).on_step_end(optimizer)
    assert marked(page)[0].settings == (1.0, 0.75, 0.0, 1.5)


def trained(
    page: StatusPage, x: torch.Tensor, *, apply: bool = True, found_inf: Any = None, hides: bool = False
) -> list[tuple[int, bool, str]]:
    model, steps = torch.nn.Linear(3, 1), PhaseTracker(page)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finite = NonFiniteGradientDetector(page, steps, BatchTracker())
    for batch in (torch.ones(2, 3), x):
        optimizer.zero_grad()
        loss = model(batch).sum()
        finite.on_backward_begin(loss)
        loss.backward()
        if hides:
            model.weight.grad = torch.nan_to_num(model.weight.grad, 0.0)  # pyright: ignore[reportArgumentType]
        if apply or bool(loss.isfinite()):
            if found_inf is not None:
                optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            finite.on_step_begin(optimizer)
            vars(optimizer).pop("found_inf", None)
            optimizer.step()
            steps.on_step_end(optimizer)
    return [(one.step, one.own, one.text) for one in read_findings(page.descriptor)]


def test_only_what_is_not_finite_and_applied_is_told_with_its_line(page: StatusPage) -> None:
    bad = torch.full((2, 3), float("nan"))
    assert trained(page, torch.ones(2, 3)) == []
    assert trained(page, bad, apply=False) == []  # the script skips the step itself
    assert trained(page, bad, found_inf=torch.zeros(1)) == [], "GradScaler has looked"
    for hides, text in ((True, "loss of nan"), (False, "loss was nan")):
        step, own, found = trained(page, bad, hides=hides)[-1]
        assert (step, own) == (2, True) and text in found and Path(__file__).name in found


def test_an_exception_is_told_if_the_script_steps_on_and_once(page: StatusPage) -> None:
    steps, optimizer = PhaseTracker(page), torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    swallowed = SwallowedExceptionDetector(page, steps)
    for _ in range(2):
        try:
            raise ValueError("a bad batch")
        except ValueError as error:
            swallowed.on_exception("forward", error)
        steps.on_step_end(optimizer)
        swallowed.on_step_end(optimizer)
    (told,) = read_findings(page.descriptor)
    assert told.kind == "swallowed" and told.step == 1
    assert told.text.startswith("ValueError in") and told.text.endswith("a bad batch")
    assert Path(__file__).name in told.text


class DistBackendError(RuntimeError): ...


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5525")
OTHER_SIZE = RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4")


@pytest.mark.parametrize("error", [LOST, OTHER_SIZE, DistBackendError("NCCL error: unhandled system error")])
@pytest.mark.parametrize("where", ["backward", "forward", "collective"])
def test_a_collective_that_failed_is_told_when_the_script_steps_on_and_when_it_ends(
    page: StatusPage, where: str, error: Exception
) -> None:
    for last in (True, False):
        steps, optimizer = PhaseTracker(page), torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        swallowed = SwallowedExceptionDetector(page, steps)
        before = len(read_findings(page.descriptor))
        swallowed.on_exception(where, error)
        swallowed.on_exception(where, error)
        assert len(read_findings(page.descriptor)) == before  # the error may still end the script
        if last:
            swallowed.on_script_succeeded()
        else:
            steps.on_step_end(optimizer)
            swallowed.on_step_end(optimizer)
        told = read_findings(page.descriptor)[-1]
        assert len(read_findings(page.descriptor)) == before + 1
        assert (told.kind, told.step, told.last) == ("collective", 0 if last else 1, last)


def test_what_was_swallowed_last_is_told_at_the_end_and_no_error_of_a_collective_that_was_not_begun(
    page: StatusPage,
) -> None:
    swallowed = SwallowedExceptionDetector(page, PhaseTracker(page))
    swallowed.on_exception("collective", RuntimeError("ProcessGroupGloo does not support reduce_scatter"))
    swallowed.on_script_succeeded()
    assert not read_findings(page.descriptor)
    swallowed.on_exception("forward", ValueError("a bad batch"))
    swallowed.on_script_succeeded()
    swallowed.on_script_succeeded()
    (told,) = read_findings(page.descriptor)
    assert (told.kind, told.last) == ("swallowed", True)


def told_of_steps(page: StatusPage, windows: Sequence[int], *, of: str, evaluated: int = 0) -> list[str]:
    """What is told of steps with so many batches and one backward, or with one batch and so many backwards."""
    optimizer, stale = Optimizer(), StepAnomalyDetector(page, PhaseTracker(page))
    before, training = len(words(page)), Loading()
    for number, count in enumerate(windows):
        for _ in range(evaluated * (number % 20 == 19)):
            stale.on_batch_received(Loading(), None)
        for _ in range(count if of == "batches" else 1):
            stale.on_batch_received(training, None)
        for _ in range(count if of == "backwards" else 1):
            stale.on_backward_begin(None)
        stale.on_step_begin(optimizer)
    return words(page, before)


def test_a_batch_that_is_skipped_is_told_where_each_step_before_had_as_many(page: StatusPage) -> None:
    for usual in ([1] * 40, [4, 4, 4, 2] * 10, [1, 2] * 20, [0] * 40):
        assert told_of_steps(page, usual, of="batches") == []
    assert told_of_steps(page, [1] * 40, of="batches", evaluated=7) == []  # batches of a different loader
    rendered(told_of_steps(page, [1] * 20 + [2] + [1] * 20 + [2], of="batches"))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_reader_that_reads_ahead_has_more_before_the_first_step_of_each_pass(
    page: StatusPage, persistent: bool
) -> None:
    """As the process that deals out batches with Accelerate: the others have none that would do the same."""

    def told(first: Sequence[int], *, ahead: int = 2) -> list[str]:
        optimizer, stale = Optimizer(), StepAnomalyDetector(page, PhaseTracker(page))
        before, batches = len(words(page)), Loading()
        for extra in first:
            batches = batches if persistent else Loading()
            stale.on_epoch_begin(batches)
            for number in range(20):
                for _ in range((ahead + extra) * (not number) + 2 * (number < 19)):
                    stale.on_batch_received(batches, None)
                stale.on_backward_begin(None)
                stale.on_step_begin(optimizer)
        return words(page, before)

    assert told([0] * 4) == told([0] * 4, ahead=0) == []
    (skipped,) = told([0, 0, 1, 0])
    assert skipped.startswith("skipped a batch")


def test_a_thread_that_an_exception_ends_is_told_at_once_and_python_says_it_too(
    page: StatusPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[object] = []
    monkeypatch.setattr(threading, "excepthook", others.append)
    complaints: list[BaseException] = []
    ScriptHooks(complaints.append).add_listeners(SwallowedExceptionDetector(page, PhaseTracker(page))).install()

    def read() -> None:
        raise OSError("a broken record")

    for _ in range(2):
        thread = threading.Thread(target=read, name="reader")
        thread.start()
        thread.join()
    (told,) = read_findings(page.descriptor)
    assert told.kind == "thread" and "thread reader" in told.text and "OSError" in told.text
    assert Path(__file__).name in told.text and told.text.endswith("a broken record")
    assert len(others) == 2 and not complaints


def test_what_a_script_does_now_and_then_is_none_of_a_steps_own_work(
    page: StatusPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic_ns()]
    monkeypatch.setattr("paceline.protocol.status_page.time.monotonic_ns", lambda: now[0])
    phases, optimizer = PhaseTracker(page), torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    page.enter(Phase.USER)
    for step in range(20):
        now[0] += 60_000_000_000 if step == 15 else 20_000_000  # an evaluation of a minute
        phases.on_step_begin(optimizer)
        phases.on_step_end(optimizer)
    assert page.spent_ns[Phase.USER] < 1_000_000_000 < 59_000_000_000 < page.spent_ns[Phase.EVALUATE]


def test_a_step_without_backward_is_told_where_each_before_had_one(page: StatusPage) -> None:
    optimizer, other = Optimizer(), Optimizer()
    stale = StepAnomalyDetector(page, PhaseTracker(page))
    for number in range(40):
        if number not in (3, 30, 35):
            stale.on_backward_begin(None)
        stale.on_step_begin(optimizer)
        stale.on_step_begin(other)  # one backward for both
        told = words(page)
        assert len(told) == (number >= 30), number
    rendered(told)


def test_a_step_that_is_left_out_is_told_where_each_backward_before_had_one(page: StatusPage) -> None:
    for usual in ([1] * 40, [4, 4, 4, 2] * 10, [1, 2] * 20, [4] * 20 + [2] + [4] * 20):
        assert told_of_steps(page, usual, of="backwards") == []
    rendered(told_of_steps(page, [1] * 20 + [2] + [1] * 20 + [2], of="backwards"))


@pytest.mark.parametrize(("same_from", "zeros"), [(None, False), (20, False), (20, True)])
def test_a_batch_that_comes_again_and_again_is_told(page: StatusPage, same_from: int | None, zeros: bool) -> None:
    ddp, phases = torch.nn.Linear(3, 3), PhaseTracker(page)
    stale, mask = StepAnomalyDetector(page, phases), torch.ones(4, 3)
    for number in range(80):
        x = torch.full((4, 3), float(number if same_from is None else min(number, same_from))) + torch.arange(3)
        if zeros and number >= 20:
            x = torch.zeros(4, 3)  # its reader fills up
        stale.on_forward_begin(ddp, (x,), {"mask": mask})
        stale.on_forward_begin(ddp, (torch.zeros(1),), {})  # a second micro-batch
        phases.on_step_end(ddp)
    assert len(words(page)) == (same_from is not None)
    assert all("step 25" in found for found in words(page))
