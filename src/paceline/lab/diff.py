"""The request, the comparison and the report of `paceline diff` (no torch here)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.errors import UsageError, first_few
from paceline.runs.console import print_text, table_console
from paceline.runs.events import Step, event_files, read_events

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


class Recorded(msgspec.Struct, frozen=True):
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


class Request(msgspec.Struct, frozen=True):
    run: str
    first: int
    last: int
    script: str = ""
    arguments: tuple[str, ...] = ()
    device: Literal["auto", "cpu", "cuda", "xpu"] | None = None
    trust: bool = False
    fetch: int | None = None  # the position of a record whose tensor is wanted


class Recording(msgspec.Struct):
    records: list[Recorded] = []
    losses: dict[int, float | None] = {}  # by step; null in JSON for a loss that is not finite
    hardware: dict[str, Any] = {}
    error: str = ""  # why the steps could not be repeated


class Difference(msgspec.Struct):
    settings: Settings
    loss_step: int | None = None  # the first step with another loss; None: there is none
    losses: tuple[float | None, float | None] = (None, None)
    first: Recorded | None = None  # the first tensor that differs
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


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Settings:
    """The entries that differ; those of the hardware by the names in it."""
    a, b = ({**table, **(table.get("hardware") or {})} for table in (ours, theirs))
    for table in (a, b):
        table["task"] = str(table.get("task")).rpartition("/")[2]  # the folder may be another
    names = [name for name in {**a, **b} if name not in ("hardware", "unbroken", "init_sha256")]
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def first_difference(ours: Sequence[Recorded], theirs: Sequence[Recorded]) -> tuple[int, int] | None:
    """The positions of the first record that differs, in both recordings; -1 if one has no such record."""
    known = {record.key: position for position, record in enumerate(theirs)}
    for position, record in enumerate(ours):
        other = known.get(record.key, -1)
        if other < 0 or theirs[other].digest != record.digest:
            return position, other
    keys = {record.key for record in ours}
    return next(((-1, n) for n, record in enumerate(theirs) if record.key not in keys), None)


def probable_cause(first: Recorded | None, settings: Settings, not_reproduced: Sequence[str]) -> str:
    """The setting that explains the first difference, or a key of EXPLANATIONS; empty without a difference."""
    if first is None:
        found = [name for name in (*COMPUTE, *settings) if name in settings]
        return (found or ["not reproduced"])[0] if not_reproduced else ""
    names, otherwise = CAUSES.get(first.kind, OF_MODULES)
    of_task = [name for name in settings if name.startswith("task_arg.")] if first.kind != "learning rate" else []
    return next((name for name in (*names, *of_task) if name in settings), otherwise)


def print_difference(result: Difference, names: tuple[str, str]) -> None:
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


def _first_lines(result: Difference) -> Iterable[str]:
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


def _cause_text(result: Difference) -> str:
    if result.cause in result.settings:
        a, b = map(_short, result.settings[result.cause])
        kind = "another kernel: " if result.cause in TORCH_FACTS else ""
        return f"{kind}{result.cause} is {a} in A, {b} in B"
    return f"{result.cause}: {EXPLANATIONS.get(result.cause, '')}"


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
