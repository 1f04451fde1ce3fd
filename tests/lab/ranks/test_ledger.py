"""Histories of kills and resumes are simulated and written as a run writes them; then one thing is falsified."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.errors import raises
from tests.rendered import rendered

from paceline.cli.ledger import main
from paceline.config.settings import DataConfig, TrainConfig, config_to_toml
from paceline.data.plan import BatchPlan, fingerprint_indices, virtual_ranks_of
from paceline.errors import UsageError
from paceline.lab.ranks.ledger import LedgerReport, check_sample_use
from paceline.runs.events import Ended, Event, RolledBack, SampleIndices, Started, Step, UnloggedRanks
from paceline.runs.writers import EventWriter, merge_consecutive_steps

Place = tuple[int, int, int]
"""(which start, step, rank)"""


@dataclass
class Start:
    """One incarnation, as it told and as it ended."""

    attempt: int
    generation: int
    world_size: int
    told_begin: int
    ended: bool = False
    torn: set[int] = field(default_factory=set)  # ranks killed while they wrote a line


@dataclass
class History:
    """What was really used, and whose update of each step is part of the final weights."""

    plan: BatchPlan
    recorded: bool = False
    thinned: int = 0  # how often old steps were put together
    starts: list[Start] = field(default_factory=list)
    used: dict[Place, list[int]] = field(default_factory=dict)
    shares: dict[Place, tuple[int, int]] = field(default_factory=dict)
    copies: dict[Place, int] = field(default_factory=dict)
    left_out: set[Place] = field(default_factory=set)
    back: dict[int, tuple[int, int]] = field(default_factory=dict)  # start -> from which step back to which
    owner: dict[int, int] = field(default_factory=dict)  # step -> which start

    def begin(self, world_size: int, begin: int, attempt: int, generation: int = 0) -> None:
        self.starts.append(Start(attempt, generation, world_size, begin))
        self.owner = {step: start for step, start in self.owner.items() if step <= begin}

    def step(self, step: int, ranks: set[int] | None = None) -> None:
        """The newest start does `step`; if only some ranks live to write it down, it is in nobody's weights."""
        number, size = len(self.starts) - 1, self.starts[-1].world_size
        epoch, k = divmod(step - 1, self.plan.steps_per_epoch)
        for rank in range(size) if ranks is None else ranks:
            share = virtual_ranks_of(self.plan.virtual_ranks, rank, size)
            self.shares[number, step, rank] = (share[0], share[-1] + 1)
            self.used[number, step, rank] = torch.cat([self.plan.indices(epoch, k, v) for v in share]).tolist()
        if ranks is None:
            self.owner[step] = number

    def places(self) -> list[Place]:
        """All lines that count."""
        return [place for place in self.used if self.owner.get(place[1]) == place[0]]

    def write(self, folder: Path) -> None:
        for number, start in enumerate(self.starts):
            for rank in range(start.world_size):
                path = folder / f"events-{rank}.jsonl"
                with EventWriter(path) as writer:
                    for event in self._events(number, start, rank):
                        writer.write(event)
                if rank in start.torn:
                    with path.open("ab") as file:
                        file.write(b'{"kind":"step","step":7,"ep')

        for rank in range(
            self.starts[-1].world_size if self.thinned else 0
        ):  # the others' files are not written any more
            path = folder / f"events-{rank}.jsonl"
            for part in range(self.thinned):  # ranks do so at times of their own
                lines = [line for line in path.read_bytes().split(b"\n") if line]
                half = max(0, len(lines) - rank - 1) * (part + 2) // (part + 3)
                path.write_bytes(
                    b"".join(
                        line + b"\n" for line in [*merge_consecutive_steps(lines[:half], lines[half:]), *lines[half:]]
                    )
                )

    def _events(self, number: int, start: Start, rank: int) -> Iterator[Event]:
        n, per_epoch = self.plan.num_samples, self.plan.steps_per_epoch
        yield Started(
            start.attempt, rank, start.world_size, "host", 1, "cpu", 0.0,
            generation=start.generation, start_step=start.told_begin, num_samples=n, steps_per_epoch=per_epoch,
        )  # fmt: skip
        steps = sorted(step for at, step, of in self.used if (at, of) == (number, rank))
        last, to = self.back.get(number, (0, 0))
        before = [step for step in steps if step <= last]
        for step in [*before, None, *(step for step in before if step > to), *(step for step in steps if step > last)]:
            if step is None:
                if last:
                    yield RolledBack(last, to)
                continue
            place = (number, step, rank)
            used, epoch = self.used[place], (step - 1) // per_epoch
            told = f"{fingerprint_indices(torch.tensor(used, dtype=torch.int64)):x}"
            line = Step(step, epoch, 1.0, 9, 0.1, 0.1, 0.0, 0.0, None, self.shares[place], len(used), told,
                        skipped=place in self.left_out)  # fmt: skip
            yield from [line] * self.copies.get(place, 1)
            if self.recorded and used:
                yield SampleIndices(step, epoch, self.shares[place][0], 0, used[::-1])
        if start.ended:
            yield Ended(max(steps, default=start.told_begin), 0.0)

    def audit(self) -> LedgerReport:
        with TemporaryDirectory() as folder:
            self.write(Path(folder))
            return check_sample_use(Path(folder), lambda num_samples: replace(self.plan, num_samples=num_samples))


@st.composite
def histories(draw, last_batch="keep") -> History:
    num_samples, virtual_ranks = draw(st.integers(8, 40)), draw(st.integers(1, 5))
    global_batch = draw(st.integers(4, min(12, num_samples)))
    plan = BatchPlan(num_samples, global_batch, virtual_ranks, seed=7, last_batch=last_batch)
    history = History(plan, recorded=draw(st.booleans()), thinned=draw(st.integers(0, 3)))
    total, done, attempt, generation = plan.steps_per_epoch * draw(st.integers(1, 3)), 0, 1, 0
    for is_last in [False] * draw(st.integers(0, 3)) + [True]:
        begin = draw(st.integers(0, done))  # the newest checkpoint, or one before it
        done = total if is_last and draw(st.booleans()) else draw(st.integers(begin, total))
        history.begin(draw(st.integers(1, plan.virtual_ranks)), begin, attempt, generation)
        start = history.starts[-1]
        for step in range(begin + 1, done + 1):
            history.step(step)
        if done > begin and draw(st.booleans()):
            to = draw(st.integers(begin, done - 1))
            history.back[len(history.starts) - 1] = draw(st.integers(to + 1, done)), to
        start.ended = done == total
        if not start.ended:  # killed: some ranks may have come further than others
            history.step(done + 1, draw(st.sets(st.integers(0, start.world_size - 1), max_size=start.world_size - 1)))
            start.torn = draw(st.sets(st.integers(0, start.world_size - 1)))
        attempt, generation = (attempt, generation + 1) if draw(st.booleans()) else (attempt + 1, 0)
    assume(history.owner)
    skipped = draw(st.sets(st.integers(1, total), max_size=3))
    history.left_out = {place for place in history.used if place[1] in skipped}
    return history


def named(findings: list[str]) -> set[int]:
    """The steps that findings are about."""
    steps: set[int] = set()
    for finding in findings:
        if match := re.match(r"steps? (\d+)(?: to (\d+))?: ", finding):
            steps |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return steps


# ---- what is right is clean --------------------------------------------------------------------------------------

few = settings(max_examples=40, deadline=None)


@few
@given(histories() | histories("drop") | histories("pad"))
def test_every_history_of_kills_and_resumes_is_clean(history):
    found = history.audit()
    assert found.findings == []
    last = max(history.owner)
    assert [epoch.steps for epoch in found.epochs] == [
        min(found.steps_per_epoch, last - done) for done in range(0, last, found.steps_per_epoch)
    ]
    for number, told in enumerate(found.incarnations):
        steps = {step for start, step, _ in history.used if start == number}
        counted = sum(history.owner.get(step) == number for step in steps)
        last, to = history.back.get(number, (0, 0))
        assert (told.counted, told.thrown_away) == (counted, len(steps) - counted + last - to)
    left_out = {step for start, step, _ in history.left_out if history.owner.get(step) == start}
    notes = [note for note in found.notes if "skipped" in note]
    assert [int(n) for note in notes for n in re.findall(r"\d+", note)[1:]] == sorted(left_out)


@few
@given(histories())
def test_samples_are_counted(history):
    for epoch in history.audit().epochs:
        done = history.plan.global_batch * epoch.steps
        used = min(done, history.plan.num_samples)
        assert (epoch.once, epoch.never, epoch.repeatedly) == (used, history.plan.num_samples - used, 0)


# ---- and what is wrong is found, with its step -------------------------------------------------------------------

Falsify = Callable[[History, st.DataObject], int]
"""Change one thing; return the step that it belongs to."""


def some_line(history: History, data: st.DataObject, *, ranks: int = 1, used: int = 1) -> Place:
    """A line that counts, of an incarnation of so many ranks at least, that used so many samples at least."""
    fits = [p for p in history.places() if history.starts[p[0]].world_size >= ranks and len(history.used[p]) >= used]
    assume(fits)
    return data.draw(st.sampled_from(sorted(fits)))


def sample_dropped(history: History, data: st.DataObject) -> int:
    place = some_line(history, data)
    history.used[place].pop()
    return place[1]


def sample_doubled(history: History, data: st.DataObject) -> int:
    place = some_line(history, data)
    history.used[place].append(history.used[place][0])
    return place[1]


def samples_exchanged(history: History, one: Place, other: Place) -> None:
    a, b = history.used[one], history.used[other]
    assume(a and b and a[-1] != b[-1])
    a[-1], b[-1] = b[-1], a[-1]


def samples_exchanged_between_ranks(history: History, data: st.DataObject) -> int:
    start, step, rank = some_line(history, data, ranks=2)
    samples_exchanged(history, (start, step, rank), (start, step, (rank + 1) % history.starts[start].world_size))
    return step


def samples_exchanged_between_steps(history: History, data: st.DataObject) -> int:
    one, other = some_line(history, data), some_line(history, data)
    assume(one[1] != other[1])
    history.thinned = 0  # of steps that were put together only what they used together is known
    samples_exchanged(history, one, other)
    return one[1]


def line_removed(history: History, data: st.DataObject) -> int:
    place = some_line(history, data)
    is_end = place[0] == len(history.starts) - 1 and place[1] == max(history.owner)
    assume(not is_end or history.starts[-1].ended)  # else it was the first rank to be killed, for all that one can know
    history.copies[place] = 0
    return place[1]


def line_repeated(history: History, data: st.DataObject) -> int:
    place = some_line(history, data)
    history.copies[place] = 2
    return place[1]


def share_overlaps(history: History, data: st.DataObject) -> int:
    place = some_line(history, data, ranks=2)
    a, b = history.shares[place]
    history.shares[place] = (a - 1, b) if a else (a, b + 1)
    return place[1]


def left_out_by_one_rank(history: History, data: st.DataObject) -> int:
    place = some_line(history, data, ranks=2)
    history.left_out ^= {place}
    return place[1]


def begin_too_early(history: History, data: st.DataObject) -> int:
    number = some_line(history, data)[0]
    assume(history.starts[number].told_begin > 0)
    history.starts[number].told_begin -= 1
    return history.starts[number].told_begin + 1


def begin_too_late(history: History, data: st.DataObject) -> int:
    number = some_line(history, data)[0]
    history.starts[number].told_begin += 1
    return history.starts[number].told_begin


@pytest.mark.parametrize(
    "falsify",
    [
        sample_dropped, sample_doubled, samples_exchanged_between_ranks, samples_exchanged_between_steps, line_removed,
        line_repeated, share_overlaps, left_out_by_one_rank, begin_too_early, begin_too_late,
    ],
)  # fmt: skip
def test_one_thing_falsified_is_found_at_its_step(falsify: Falsify):
    @settings(max_examples=25, deadline=None)
    @given(histories(), st.data())
    def law(history: History, data: st.DataObject) -> None:
        step = falsify(history, data)
        assert step in named(history.audit().findings)

    law()


# ---- by hand -----------------------------------------------------------------------------------------------------

PLAN = BatchPlan(num_samples=20, global_batch=6, virtual_ranks=3, seed=0)  # 4 steps an epoch


def resumed(plan: BatchPlan = PLAN) -> History:
    """Two epochs: 2 ranks do 5 steps, 3 ranks go on after step 3 until they are killed, 1 rank after step 6."""
    history = History(plan)
    for world_size, begin, end, attempt, generation in ((2, 0, 5, 1, 0), (3, 3, 7, 1, 1), (1, 6, 8, 2, 0)):
        history.begin(world_size, begin, attempt, generation)
        for step in range(begin + 1, end + 1):
            history.step(step)
    history.starts[-1].ended = True
    return history


class Repeating(BatchPlan):
    """A broken plan: sample 0 is never used, another one twice."""

    def global_indices(self, epoch: int, step: int) -> torch.Tensor:
        """As it should be, but for one sample."""
        indices = super().global_indices(epoch, step)
        return torch.where(indices == 0, 1, indices)


def test_an_epoch_is_judged_without_the_plan():
    broken = Repeating(PLAN.num_samples, PLAN.global_batch, PLAN.virtual_ranks)
    found = resumed(broken).audit()
    assert [finding.split(":")[0] for finding in found.findings] == ["epoch 0", "epoch 1"]
    assert (found.epochs[0].once, found.epochs[0].never, found.epochs[0].repeatedly) == (18, 1, 1)


def test_another_plan_is_found_at_every_step():
    history = resumed()
    history.plan, plan = replace(PLAN, seed=1), history.plan
    found = history.audit()
    assert named(found.findings) == set(range(1, 9))
    assert not any(finding.startswith("epoch") for finding in found.findings)  # each sample was used once all the same
    assert found.epochs[0].once is None
    history.plan = plan
    assert history.audit().findings == []


def test_recorded_samples_tell_what_was_used_instead():
    history = resumed()
    history.recorded = True
    place = (0, 1, 0)
    missed, history.used[place][0] = history.used[place][0], history.used[place][1]
    found = history.audit()
    assert (found.epochs[0].once, found.epochs[0].never, found.epochs[0].repeatedly) == (18, 1, 1), missed
    assert any("did not record" in finding for finding in found.findings)


def test_a_last_step_that_only_some_ranks_logged_ends_the_run_without_a_finding():
    history = resumed()
    history.starts[-1].ended = False
    history.begin(2, 8, 2, 1)
    history.step(9)
    history.step(10)
    history.copies[3, 10, 1] = 0
    found = history.audit()
    assert found.findings == []
    rendered(found.notes)
    history.starts[-1].ended = True  # it went on to the end: its line is missing
    assert named(history.audit().findings) == {10}


def test_a_rank_killed_between_a_step_and_its_samples_is_no_finding(tmp_path):
    history = resumed()
    history.recorded, history.starts[-1].ended = True, False
    history.write(tmp_path)
    file = tmp_path / "events-0.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    found = check_sample_use(tmp_path, lambda n: PLAN)
    assert (found.findings, found.epochs[-1].steps) == ([], 3)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("thinned", [0, 2])
@pytest.mark.parametrize("absent", [{1}, {1, 2}, {0, 2}])
@pytest.mark.parametrize("steps", [(3,), (2, 3), (1, 2, 3)])
def test_a_rank_that_another_vouches_for_had_what_the_plan_gives_to_nobody_else(
    tmp_path: Path, steps: tuple[int, ...], absent: set[int], thinned: int, recorded: bool
) -> None:
    """Killed between the sum of the gradients and the record; the state after that step was saved by another.

    Or lost with its host, and with what that had not yet written to the file system that all see.
    """
    history = History(PLAN, recorded=recorded, thinned=thinned)
    for begin in (0, 3):
        history.begin(3, begin, 1, begin)
        for step in range(begin + 1, begin + 4):
            history.step(step)
    history.starts[-1].ended = True
    for rank in absent:
        for step in steps:
            del history.used[0, step, rank]
    history.write(tmp_path)
    assert named(check_sample_use(tmp_path, lambda n: PLAN).findings) >= {3}
    file = tmp_path / f"events-{min({0, 1, 2} - absent)}.jsonl"
    lines, words = file.read_bytes().split(b"\n"), msgspec.json.encode(UnloggedRanks(3, sorted(absent)))
    at = max(number for number, line in enumerate(lines) if b'"started"' in line)
    file.write_bytes(b"\n".join([*lines[:at], words, *lines[at:]]))
    found = check_sample_use(tmp_path, lambda n: PLAN)
    assert found.findings == []
    when = "step 3" if len(steps) == 1 else f"steps {steps[0]} to 3"
    assert any(note.startswith(f"{when}: rank") and "before recording" in note for note in found.notes)


def test_the_log_of_a_whole_rank_lost_is_a_finding(tmp_path):
    resumed().write(tmp_path)
    (tmp_path / "events-1.jsonl").unlink()
    findings = check_sample_use(tmp_path, lambda n: PLAN).findings
    rendered(findings)


def test_a_start_that_no_earlier_one_reached_is_a_finding():
    history = resumed()
    for step in (2, 3):
        for rank in (0, 1):
            del history.used[0, step, rank]
    history.used = {place: used for place, used in history.used.items() if place[0] > 0 or place[1] < 3}
    findings = history.audit().findings
    assert named(findings) >= {2, 3}
    del history.starts[0]
    history.used = {(start - 1, step, rank): used for (start, step, rank), used in history.used.items() if start}
    history.shares = {(start - 1, step, rank): share for (start, step, rank), share in history.shares.items()}
    rendered([*findings, *history.audit().findings])


def test_ranks_that_disagree_are_a_finding(tmp_path):
    resumed().write(tmp_path)
    file = tmp_path / "events-1.jsonl"
    text = file.read_text()
    findings: list[str] = []
    for old, new in (
        ('"start_step":3', '"start_step":2'),
        ('"world_size":3', '"world_size":2'),
        ('"num_samples":20', '"num_samples":19'),
        ('"generation":1', '"generation":0'),
    ):
        assert old in text
        file.write_text(text.replace(old, new))
        findings += [text for text in check_sample_use(tmp_path, lambda n: PLAN).findings if text.startswith("attempt")]
    rendered(findings)


# ---- the command -------------------------------------------------------------------------------------------------


def run_folder(folder: Path, history: History) -> Path:
    plan = history.plan
    data = DataConfig(
        accumulation=plan.accumulation, global_batch=plan.global_batch, virtual_ranks=plan.virtual_ranks,
        last_batch=plan.last_batch,
    )  # fmt: skip
    (folder / "config.toml").write_text(config_to_toml(TrainConfig(task="t", data=data)))
    history.write(folder)
    return folder


def test_the_verdict_of_a_clean_run(tmp_path, capsys):
    folder = run_folder(tmp_path, resumed())
    assert main([str(folder), "--json", str(tmp_path / "audit.json")]) == 0
    rendered(capsys.readouterr().out.splitlines()[-1])
    written = msgspec.json.decode((tmp_path / "audit.json").read_bytes(), type=LedgerReport)
    assert written == check_sample_use(folder, lambda n: PLAN)


@pytest.mark.parametrize("steps", [2, 6])
def test_the_verdict_of_a_run_that_is_not_over(tmp_path, capsys, steps):
    history = History(PLAN)
    history.begin(1, 0, 1)
    for step in range(1, steps + 1):
        history.step(step)
    folder = run_folder(tmp_path, history)
    assert main([str(folder)]) == 0
    verdicts = [capsys.readouterr().out.splitlines()[-1]]
    with EventWriter(folder / "events-0.jsonl") as writer:  # resumed from a checkpoint, and not yet as far again
        writer.write(Started(2, 0, 1, "host", 1, "cpu", 0.0, start_step=steps - 1, num_samples=20, steps_per_epoch=4))
    main([str(folder)])
    rendered([*verdicts, capsys.readouterr().out.splitlines()[-1]])


@pytest.mark.parametrize("last_batch", ["drop", "pad"])
def test_the_verdict_where_the_tail_is_not_kept(tmp_path, capsys, last_batch):
    history = History(replace(PLAN, last_batch=last_batch))
    history.begin(3, 0, 1)
    for step in range(1, 8):
        history.step(step)
    assert main([str(run_folder(tmp_path, history))]) == 0
    rendered(capsys.readouterr().out.splitlines()[-1])


def test_a_finding_is_exit_code_1(tmp_path, capsys):
    history = resumed()
    history.used[1, 5, 2].pop()
    assert main([str(run_folder(tmp_path, history))]) == 1
    rendered(capsys.readouterr().out.splitlines()[-2:])


def test_a_run_that_did_no_step_proves_nothing(tmp_path, capsys):
    history = History(PLAN)
    history.begin(2, 0, 1)
    assert main([str(run_folder(tmp_path, history))]) == 1
    assert "nothing to check" in capsys.readouterr().out


def test_what_is_no_run_is_refused(tmp_path):
    with raises("ledger-no-run", what="is not a folder"):
        main([str(tmp_path / "missing")])
    with raises("ledger-no-run", what="has no config.toml"):
        main([str(tmp_path)])
    run_folder(tmp_path, History(PLAN))
    with raises("ledger-no-events"):
        main([str(tmp_path)])
    with pytest.raises(UsageError, match="does not exist"):
        main([str(tmp_path), "--json", str(tmp_path / "missing" / "audit.json")])


# ---- numbers that no run has written -----------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("samples", "per_epoch", "size", "steps", "code", "fields"),
    [
        (3_000_000_000, 10, 1, [1], "ledger-samples-implausible", {"samples": 3_000_000_000}),
        (10_000_000, 1, 1, [1, 9000], "ledger-samples-implausible", {"epochs": 9002}),
        (100, 10, 1, [2**60], "ledger-steps-implausible", {"logged": 1}),
        (100, 10, 1_000_000, [1], None, {}),  # a world of a million ranks, of which one has logged
    ],
)
def test_what_would_take_for_ever_to_judge_is_refused(tmp_path, samples, per_epoch, size, steps, code, fields):
    with EventWriter(tmp_path / "events-0.jsonl") as writer:
        writer.write(Started(1, 0, size, "n1", 1, "cpu", 0.0, num_samples=samples, steps_per_epoch=per_epoch))
        for step in steps:
            writer.write(Step(step, 0, 1.0, 64, 0.1, 0.1, 0.0, 1.0, consumed=samples, share=(0, 1_000_000)))

    def plan(number: int) -> BatchPlan:
        return BatchPlan(number, global_batch=max(1, number // per_epoch), virtual_ranks=1_000_000)

    if code is None:
        assert check_sample_use(tmp_path, plan).findings
        return
    with raises(code, **fields):
        check_sample_use(tmp_path, plan)


def test_a_hosts_name_does_not_steer_the_terminal(tmp_path, capsys):
    (tmp_path / "config.toml").write_text(
        config_to_toml(TrainConfig(task="mnist-cnn", data=DataConfig(global_batch=10, virtual_ranks=1)))
    )
    with EventWriter(tmp_path / "events-0.jsonl") as writer:
        writer.write(Started(1, 0, 1, "\x1b[2J[/bold]n1", 1, "cpu", 0.0, num_samples=100, steps_per_epoch=10))
        writer.write(Step(1, 0, 1.0, 10, 0.1, 0.1, 0.0, 1.0, consumed=10, share=(0, 1)))
    main([str(tmp_path)])
    shown = capsys.readouterr().out
    assert "[/bold]n1" in shown and "\x1b" not in shown


@pytest.mark.parametrize(
    ("parts", "second", "told"),
    [
        (1, [4, 5], None),
        (1, [3, 4], "epoch 0: 0 samples of the stream were skipped, 1 repeated"),
        (1, [5, 6], "epoch 0: 1 samples of the stream were skipped, 0 repeated"),
        (2, [4, 6, 8], None),  # part 1 has ended before part 0
        (2, [6, 8], "epoch 0: 1 samples of the stream were skipped, 0 repeated"),
    ],
)
def test_a_streams_samples_are_judged_by_their_numbers(tmp_path, capsys, parts, second, told):
    shape = DataConfig(global_batch=4, virtual_ranks=2, last_batch="drop")
    (tmp_path / "config.toml").write_text(config_to_toml(TrainConfig(task="mine", data=shape)))
    with EventWriter(tmp_path / "events-0.jsonl") as writer:
        writer.write(Started(1, 0, 1, "host", 1, "cpu", 0.0, own_order=True, stream_parts=parts))
        for step, used in ((1, [0, 1, 2, 3]), (2, second)):
            hashed = f"{fingerprint_indices(torch.tensor(used)):016x}"
            writer.write(SampleIndices(step, 0, 0, 0, used))
            writer.write(Step(step, 0, 1.0, len(used), 0.1, 0.1, 0.0, 0.0, None, (0, 2), len(used), hashed))
        writer.write(Ended(2, 0.0))
    assert main([str(tmp_path)]) == (told is not None)
    clean = f"each sample taken from the stream was used exactly once, {4 + len(second)} in 1 epoch"
    assert (told or clean) in capsys.readouterr().out.replace("\n", " ")
