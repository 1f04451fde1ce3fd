"""The requests, the comparison and the reports of `paceline replay` and `paceline diff` (no torch here)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from rich.table import Table
from rich.text import Text

from paceline.errors import UsageError, first_few, plural
from paceline.runs.console import print_text, remove_control_characters, table_console
from paceline.runs.events import Started, Step, event_files, read_events

if TYPE_CHECKING:
    from paceline.config.settings import TrainConfig

EXPECTED = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}
"""The largest relative difference of a loss that rounding explains, by precision."""
MAX_NAMED = 5


class ReplayRequest(msgspec.Struct, frozen=True):
    step: int
    without: frozenset[int] = frozenset()  # dataset indices of samples to leave out
    find_nonfinite: bool = False
    pdb: bool = False
    check: bool = False  # also repeat the steps up to the next checkpoint, and compare every tensor


class LoggedStep(msgspec.Struct, frozen=True):
    attempt: int
    world_size: int
    loss: float | None = None  # None: the step failed, or is merged with other steps
    fingerprint: int | None = None  # of the samples on all ranks; None: not known
    why_not: str = ""  # why `loss` is not known
    skipped: bool = False  # whether the step changed no parameters


@dataclass(frozen=True)
class ReplaySource:
    """The run to repeat, with its settings for one process, and its log of the step."""

    run_dir: Path
    config: "TrainConfig"
    logged: LoggedStep
    environment: Mapping[str, Any]  # the content of environment.json; empty for a session
    trust: bool


class SampleLoss(msgspec.Struct, frozen=True):
    """The loss of a sample, by its index in the dataset."""

    loss: float
    index: int
    virtual_rank: int
    micro_batch: int


class NonFiniteValue(msgspec.Struct, frozen=True):
    """The first value that is not finite."""

    module: str  # the module that has computed it; "loss" for the loss function
    kind: str  # the class of the module
    gradient_of: str = ""  # the module whose output has this gradient; empty if the value is an output
    virtual_rank: int = 0
    samples: tuple[int, ...] = ()
    cause: str = ""  # "input", or the name of a parameter of the module, that is not finite either; else empty

    def __str__(self) -> str:
        where = f"virtual rank {self.virtual_rank}, samples {first_few([*map(str, self.samples)], MAX_NAMED)}"
        if self.gradient_of:
            return f"first value that is not finite: the gradient of the output of {self.gradient_of}, {where}; " + (
                f"the backward of {self.module} has computed it"
            )
        cause = f"its {self.cause} is not finite either" if self.cause else "its input and its parameters are finite"
        return f"first value that is not finite: the output of {self.module} ({self.kind}), {where}; {cause}"


class ReplayResult(msgspec.Struct):
    """The result of a replay. JSON has null for a number that is not finite."""

    step: int
    start: int  # the step of the checkpoint from which the steps were repeated; 0: from the start
    logged: float | None
    loss: float | None = None
    grad_norm: float | None = None  # of all gradients, before clipping
    expected: float = 0.0  # the largest relative difference of the losses that is expected; 0: they have the same bits
    reasons: list[str] = []  # why the bits are not guaranteed
    samples: list[SampleLoss] = []  # the worst first
    unknown_losses: str = ""  # why the losses of samples are not known
    layers: dict[str, float] = {}  # the gradient norm of each layer, before clipping
    nonfinite: NonFiniteValue | None = None
    failure: str = ""  # why the step changed no parameters
    without: list[int] = []
    contradiction: str = ""  # a difference from the log other than that of the loss
    checkpoint: int | None = None  # the step of the checkpoint with which the state was compared
    digest: str = ""  # of the state after that step, if it equals the checkpoint
    differing: list[str] = []  # tensors that differ from that checkpoint

    @property
    def agrees(self) -> bool:
        """Whether nothing differs more than expected."""
        if self.without:
            return True
        if self.contradiction or self.differing:
            return False
        if self.logged is None or self.loss is None:
            return self.logged is None
        return self.loss == self.logged or abs(self.loss - self.logged) <= self.expected * abs(self.logged)


def read_logged_step(run_dir: Path, step: int, *, ended: bool) -> LoggedStep:
    """What the ranks of the run have logged of `step`. `ended`: the run has ended without an error."""
    steps_by_start: dict[tuple[int, int], dict[int, tuple[Started, Step]]] = {}
    latest, last = None, 0
    for path in event_files(run_dir).values():
        started = None
        for event in read_events(path):
            if isinstance(event, Started):
                started, latest = event, event
            elif isinstance(event, Step) and started is not None:
                last = max(last, event.step)
                if event.step - event.steps < step <= event.step:
                    steps_by_start.setdefault((started.attempt, started.generation), {})[started.rank] = started, event
    if latest is None:
        raise UsageError(code="replay-without-events", run_dir=run_dir)
    if not 1 <= step <= last + (not ended):  # a run can end with an error within the step after the last logged one
        raise UsageError(code="replay-no-such-step", value=step, last=last, most=last + (not ended), run_dir=run_dir)
    if not steps_by_start:
        return LoggedStep(
            latest.attempt, latest.world_size, why_not="the run has not logged it: it failed in this step"
        )
    by_rank = steps_by_start[max(steps_by_start)]
    started, logged = by_rank[min(by_rank)]
    if logged.steps > 1:
        return LoggedStep(
            started.attempt, started.world_size, why_not="the run has merged it with other steps in its log"
        )
    steps = [event for _, event in by_rank.values()]
    is_known = len(steps) == started.world_size and all(event.fingerprint for event in steps)
    samples = sum(int(event.fingerprint, 16) for event in steps) % 2**64 if is_known else None
    known = (started.attempt, started.world_size, None if logged.skipped else logged.loss, samples)
    return LoggedStep(*known, "the run has skipped it" if logged.skipped else "", logged.skipped)


def print_replay(result: ReplayResult, top: int, *, find_nonfinite: bool) -> None:
    console = table_console()
    say = partial(print_text, console)
    begin = f"the checkpoint of step {result.start}" if result.start else "the start"
    say(f"step {result.step}, repeated on one process from {begin}")
    if result.samples:
        table = Table("loss", "sample", "virtual rank", "micro-batch", title="loss per sample, worst first")
        for sample in result.samples[:top]:
            cells = (f"{sample.loss:.6g}", sample.index, sample.virtual_rank, sample.micro_batch)
            table.add_row(*map(str, cells), style="" if math.isfinite(sample.loss) else "bold")
        console.print(table)
        finite = [sample.loss for sample in result.samples if math.isfinite(sample.loss)]
        middle = f"; median {median(finite):.6g}" if finite else ""
        say(f"{plural(len(result.samples), 'sample')}{middle}")
    elif result.unknown_losses:
        say(f"loss per sample: {result.unknown_losses}")
    if result.layers:
        table = Table("layer", "gradient norm", title="gradient norm per layer, before clipping")
        for name, norm in result.layers.items():
            table.add_row(
                Text(remove_control_characters(name)), f"{norm:.6g}", style="" if math.isfinite(norm) else "bold"
            )
        console.print(table)
    for line in filter(None, (result.failure, result.nonfinite)):
        say(str(line), "bold")
    if find_nonfinite and result.nonfinite is None:
        say("all outputs of modules, all losses and all gradients of outputs are finite")
    for line in _verdict(result):
        say(line, "" if result.agrees else "bold")


def _verdict(result: ReplayResult) -> list[str]:
    lines: list[str] = []
    loss = "not known" if result.loss is None else repr(result.loss)
    if result.without:
        before = "" if result.logged is None else f"; with them {result.logged!r}"
        return [f"loss without {plural(len(result.without), 'sample')}: {loss}{before}"]
    if result.contradiction:
        lines.append(result.contradiction)
    if result.reasons:
        lines.append(f"the bits are not guaranteed: {'; '.join(result.reasons)}")
        lines.append(f"expected: a relative difference of the loss up to {result.expected:g}")
    if result.loss is not None and result.logged is not None:
        difference = abs(result.loss - result.logged) / max(abs(result.logged), 1e-300)
        same = "the same bits" if result.loss == result.logged else f"a relative difference of {difference:.2g}"
        lines.append(f"loss {loss}, logged {result.logged!r}: {same}")
    else:
        lines.append(f"loss {loss}, logged: {'none' if result.logged is None else repr(result.logged)}")
    if result.checkpoint is not None and result.differing:
        named = first_few(result.differing, MAX_NAMED)
        lines.append(f"the state after step {result.checkpoint} differs from its checkpoint in {named}")
    elif result.checkpoint is not None:
        lines.append(f"the state after step {result.checkpoint} equals its checkpoint: sha256 {result.digest}")
    if not result.agrees and not result.reasons:
        lines.append("the code, the data or a library has changed since, or an operation is not deterministic")
    return lines


Kind = Literal[
    "state before", "samples", "input", "output", "loss", "gradient of output", "gradient", "learning rate",
    "applied gradient", "state after",
]  # fmt: skip
Settings = dict[str, tuple[Any, Any]]
"""The settings that differ, with their values in A and B."""
SEED, DATA = ("seed",), ("data", "global_batch", "virtual_ranks", "accumulation", "last_batch")
ENVIRONMENT = ("threads_per_rank", "torch", "libraries", "processor", "capability", "driver", "float32", "device")
MODEL = ("task", "stem", "batchnorm", "init_from")
RATE = ("lr", "schedule", "warmup_steps", "lr_scaling", "lr_base_batch", "make_schedule", "steps", "epochs")
UPDATE = ("optimizer", "make_optimizer", "weight_decay", "momentum", "ema")
COMPUTE = ("precision", *ENVIRONMENT)
CAUSES: dict[Kind, tuple[tuple[str, ...], str]] = {
    "state before": ((*SEED, *MODEL, *ENVIRONMENT), "initial weights"),
    "samples": ((*SEED, *DATA), "data order"),
    "input": ((*DATA, *SEED, *ENVIRONMENT), "data"),
    "learning rate": (RATE, "learning rate"),
    "applied gradient": (("clip_norm", *ENVIRONMENT), "gradient clipping"),
    "state after": ((*UPDATE, *COMPUTE), "optimizer"),
}
"""For each kind of first difference: the settings that explain it, the likeliest first; and the cause without one."""
OF_MODULES = (*COMPUTE, *MODEL), "code"  # for the other kinds
EXPLANATIONS = {
    "initial weights": "the runs start from different weights: the model's code, or its random numbers",
    "data order": "the runs use different samples in this step: the order of samples, or their number",
    "data": "the samples have the same indices but other values: the data, or their augmentation",
    "code": "the settings, parameters and inputs are the same: the code of this module, or a kernel",
    "learning rate": "the settings are the same: a schedule, or code that sets the learning rate",
    "gradient clipping": "code changes the gradients between backward and the update",
    "optimizer": "the gradients and settings are the same: the code of the optimizer, or of a callback",
    "not reproduced": "a replay does not repeat the logged loss: the code, the data or a library has changed since",
}
TORCH_FACTS = ("torch", "libraries", "capability", "driver", "float32")


class TensorRecord(msgspec.Struct, frozen=True):
    """A digest of one tensor of a step, at its place in the order of execution."""

    step: int
    kind: Kind
    name: str
    digest: str
    place: tuple[int, int, int] = (0, 0, 0)  # virtual rank, micro-batch, and number of the call within it
    samples: tuple[int, ...] = ()  # for the kind "samples": their dataset indices

    @property
    def key(self) -> tuple[int, str, str, tuple[int, int, int]]:
        return self.step, self.kind, self.name, self.place

    def __str__(self) -> str:
        where = "" if self.kind.startswith(("state", "applied", "learning")) else (
            f" (virtual rank {self.place[0]}, micro-batch {self.place[1]})"
        )  # fmt: skip
        return f"step {self.step}, {self.kind} {self.name}{where}"


class RecordRequest(msgspec.Struct, frozen=True):
    run: str
    first: int
    last: int
    script: str = ""
    arguments: tuple[str, ...] = ()
    device: Literal["auto", "cpu", "cuda", "xpu"] | None = None
    trust: bool = False
    fetch: int | None = None  # the position of a record whose tensor is wanted


class StepRecording(msgspec.Struct):
    records: list[TensorRecord] = []
    losses: dict[int, float | None] = {}  # by step; null in JSON for a loss that is not finite
    hardware: dict[str, Any] = {}
    error: str = ""  # why the steps could not be repeated


class RunDifference(msgspec.Struct):
    settings: Settings
    loss_step: int | None = None  # the first step with another loss; None: there is none
    losses: tuple[float | None, float | None] = (None, None)
    first: TensorRecord | None = None  # the first tensor that differs
    only_in: str = ""  # "A" or "B", if the other run has no such tensor
    largest: float | None = None  # the largest absolute difference of its elements
    elements: int = 0  # how many of them differ
    samples: list[int] = []  # the dataset indices of the rows that differ
    not_reproduced: list[str] = []  # the runs whose logged loss the replay does not repeat
    only_weights: bool = False  # whether no step differs in the log, but the final weights do
    cause: str = ""  # a setting that differs, or a key of EXPLANATIONS


def read_steps(run_dir: Path) -> dict[int, Step]:
    """The steps that the first rank has logged, by number. Of repeated steps the last one counts."""
    for path in event_files(run_dir).values():
        if steps := {event.step: event for event in read_events(path) if isinstance(event, Step)}:
            return steps
    raise UsageError(code="diff-no-steps", run_dir=run_dir)


def first_different_step(ours: Mapping[int, Step], theirs: Mapping[int, Step]) -> int | None:
    """The first step in both logs with another loss, gradient norm or learning rate; None if there is none."""
    common = sorted({*ours} & {*theirs})
    if not common:
        raise UsageError(code="diff-no-common-step", last_a=max(ours), last_b=max(theirs))
    has_norm = all(steps[common[0]].grad_norm is not None for steps in (ours, theirs))  # only one of them may clip

    def logged(step: Step) -> tuple[object, ...]:
        return step.loss, step.skipped, step.lr, step.grad_norm if has_norm else None

    step = next((n for n in common if logged(ours[n]) != logged(theirs[n])), None)
    if step is not None and max(ours[step].steps, theirs[step].steps) > 1:
        raise UsageError(code="diff-merged-steps", first=step - ours[step].steps + 1, last=step)
    return step


def differing_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Settings:
    """The entries that differ; those of the hardware by the names in it."""
    a, b = ({**table, **(table.get("hardware") or {})} for table in (ours, theirs))
    for table in (a, b):
        table["task"] = str(table.get("task")).rpartition("/")[2]  # the folder may be another
    names = [name for name in {**a, **b} if name not in ("hardware", "unbroken", "init_sha256")]
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def first_difference(ours: Sequence[TensorRecord], theirs: Sequence[TensorRecord]) -> tuple[int, int] | None:
    """The positions of the first record that differs, in both recordings; -1 if one has no such record."""
    known = {record.key: position for position, record in enumerate(theirs)}
    for position, record in enumerate(ours):
        other = known.get(record.key, -1)
        if other < 0 or theirs[other].digest != record.digest:
            return position, other
    keys = {record.key for record in ours}
    return next(((-1, n) for n, record in enumerate(theirs) if record.key not in keys), None)


def probable_cause(first: TensorRecord | None, settings: Settings, not_reproduced: Sequence[str]) -> str:
    """The setting that explains the first difference, or a key of EXPLANATIONS; empty without a difference."""
    if first is None:
        causes = [name for name in (*COMPUTE, *settings) if name in settings]
        return (causes or ["not reproduced"])[0] if not_reproduced else ""
    names, otherwise = CAUSES.get(first.kind, OF_MODULES)
    of_task = [name for name in settings if name.startswith("task_arg.")] if first.kind != "learning rate" else []
    return next((name for name in (*names, *of_task) if name in settings), otherwise)


def print_run_difference(result: RunDifference, names: tuple[str, str]) -> None:
    say = partial(print_text, table_console())
    say(f"A: {names[0]}\nB: {names[1]}")
    for name, (a, b) in result.settings.items():
        say(f"{'environment' if name in ENVIRONMENT else 'setting'} {name}: {_short(a)} in A, {_short(b)} in B")
    if result.loss_step is None:
        say("no step differs: all losses have the same bits")
        if result.only_weights:
            say("the final weights differ, in buffers or in parameters that these losses do not depend on", "bold")
        return
    a, b = result.losses
    say(f"first step that differs in the log: step {result.loss_step}, loss {a!r} in A, {b!r} in B")
    if result.not_reproduced:
        say(f"the replay does not repeat the logged loss of {' and '.join(result.not_reproduced)}")
    for line in _first_lines(result):
        say(line, "bold")
    say(f"probable cause: {_cause_text(result)}", "bold")


def _first_lines(result: RunDifference) -> Iterable[str]:
    if result.first is None:
        yield "both replays have the same bits here"
        return
    if result.only_in:
        yield f"first difference: only run {result.only_in} has {result.first}"
        return
    yield f"first difference: {result.first}"
    if result.largest is not None:
        size = "not finite" if math.isnan(result.largest) else f"{result.largest:.3g}"
        yield f"{result.elements} elements differ, the largest difference is {size}"
    if result.samples:
        yield f"only in the samples {first_few([*map(str, result.samples)], 8)}"


def _cause_text(result: RunDifference) -> str:
    if result.cause in result.settings:
        a, b = map(_short, result.settings[result.cause])
        kind = "another kernel: " if result.cause in TORCH_FACTS else ""
        return f"{kind}{result.cause} is {a} in A, {b} in B"
    return f"{result.cause}: {EXPLANATIONS.get(result.cause, '')}"


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
