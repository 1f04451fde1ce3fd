"""The run, the request and the report of `paceline replay` (no torch here)."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table
from rich.text import Text

from paceline.checkpoint.format import DamagedCheckpoint, read_manifest
from paceline.checkpoint.manager import Checkpoints
from paceline.errors import UsageError, first_few, plural
from paceline.runs.console import print_text, remove_controls, table_console
from paceline.runs.events import Started, Step, event_files, read_events
from paceline.runs.folder import CHECKPOINTS

if TYPE_CHECKING:
    from paceline.config.settings import TrainConfig

EXPECTED = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}
"""The largest relative difference of a loss that rounding explains, by precision."""
MAX_NAMED = 5


class Request(msgspec.Struct, frozen=True):
    step: int
    without: frozenset[int] = frozenset()  # dataset indices of samples to leave out
    find_nonfinite: bool = False
    pdb: bool = False
    check: bool = False  # also repeat the steps up to the next checkpoint, and compare every tensor


class Logged(msgspec.Struct, frozen=True):
    attempt: int
    world_size: int
    loss: float | None = None  # None: the step failed, or is merged with other steps
    fingerprint: int | None = None  # of the samples on all ranks; None: not known
    why_not: str = ""  # why `loss` is not known
    skipped: bool = False  # whether the step changed no parameters


@dataclass(frozen=True)
class Source:
    """The run to repeat, with its settings for one process, and its log of the step."""

    run_dir: Path
    config: "TrainConfig"
    logged: Logged
    environment: Mapping[str, Any]  # the content of environment.json; empty for a session
    trust: bool

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.run_dir / CHECKPOINTS, trust=self.trust)

    def definition(self) -> Mapping[str, Any]:
        """The definition of the attempt in its first checkpoint. Without one, it has only the hardware."""
        for _, path in reversed(self.checkpoints.entries()):
            with suppress(DamagedCheckpoint):
                manifest = read_manifest(path, trust=self.trust)
                if manifest.attempt == self.logged.attempt:
                    return manifest.definition
        return {"hardware": self.environment.get("bits_hold_for")}


class SampleLoss(msgspec.Struct, frozen=True):
    """The loss of a sample, by its index in the dataset."""

    loss: float
    index: int
    virtual_rank: int
    micro_batch: int


class NonFinite(msgspec.Struct, frozen=True):
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


class Replayed(msgspec.Struct):
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
    nonfinite: NonFinite | None = None
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


def read_log(run_dir: Path, step: int, *, ended: bool) -> Logged:
    """What the ranks of the run have logged of `step`. `ended`: the run has ended without an error."""
    found: dict[tuple[int, int], dict[int, tuple[Started, Step]]] = {}
    latest, last = None, 0
    for path in event_files(run_dir).values():
        started = None
        for event in read_events(path):
            if isinstance(event, Started):
                started, latest = event, event
            elif isinstance(event, Step) and started is not None:
                last = max(last, event.step)
                if event.step - event.steps < step <= event.step:
                    found.setdefault((started.attempt, started.generation), {})[started.rank] = started, event
    if latest is None:
        raise UsageError(code="replay-without-events", run_dir=run_dir)
    if not 1 <= step <= last + (not ended):  # a run can end with an error within the step after the last logged one
        raise UsageError(code="replay-no-such-step", value=step, last=last, most=last + (not ended), run_dir=run_dir)
    if not found:
        return Logged(latest.attempt, latest.world_size, why_not="the run has not logged it: it failed in this step")
    by_rank = found[max(found)]
    started, logged = by_rank[min(by_rank)]
    if logged.steps > 1:
        return Logged(started.attempt, started.world_size, why_not="the run has merged it with other steps in its log")
    steps = [event for _, event in by_rank.values()]
    is_known = len(steps) == started.world_size and all(event.fingerprint for event in steps)
    samples = sum(int(event.fingerprint, 16) for event in steps) % 2**64 if is_known else None
    known = (started.attempt, started.world_size, None if logged.skipped else logged.loss, samples)
    return Logged(*known, "the run has skipped it" if logged.skipped else "", logged.skipped)


def print_replay(result: Replayed, top: int, *, find_nonfinite: bool) -> None:
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
            table.add_row(Text(remove_controls(name)), f"{norm:.6g}", style="" if math.isfinite(norm) else "bold")
        console.print(table)
    for line in filter(None, (result.failure, result.nonfinite)):
        say(str(line), "bold")
    if find_nonfinite and result.nonfinite is None:
        say("all outputs of modules, all losses and all gradients of outputs are finite")
    for line in _verdict(result):
        say(line, "" if result.agrees else "bold")


def _verdict(result: Replayed) -> list[str]:
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
        lines.append(f"loss {loss}, logged {result.logged!r}: {_difference(result.loss, result.logged)}")
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


def _difference(loss: float, logged: float) -> str:
    if loss == logged:
        return "the same bits"
    return f"a relative difference of {abs(loss - logged) / max(abs(logged), 1e-300):.2g}"
