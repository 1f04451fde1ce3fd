"""The specification, the results and the report of `paceline verify`."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.config.mesh import format_strategy
from paceline.runs.console import table_console

MAX_NAMED = 4  # tensors in a message
BatchNormPolicy = Literal["none", "local", "sync"]  # of batch norm; "none": the model has no batch norm

KINDS = ("loss", "gradient", "parameter", "buffer", "optimizer state")

TASK_OPTIMIZER = "task"  # the name of the optimizer that the task creates

TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}
"""Relative tolerance for losses, gradients, buffers, and parameters with SGD, by the least precise type in the graph
of the loss."""
ADAPTIVE_TOLERANCE = 1e-9
"""Relative tolerance for parameters and state with other optimizers, absolute if the gradient is only round-off. Adam
divides by the root of the squared gradient, which amplifies round-off by up to 1/eps."""

CAUSES = {
    "error": "an error was raised",
    "samples": "sampler sets differ",
    "start": "the ranks do not start from the same weights",
    "sync": "missing synchronisation",
    "random": "random stream",
    "buffers": "buffers (BatchNorm)",
    "mean": "wrong mean: the gradient is off by a constant factor",
    "shares": "wrong mean: portions of different sizes have wrong weights",
    "accumulation": "accumulation: micro-batches are skipped or counted twice",
    "scale": "the scale of gradients in backward: a hook or an autograd function that is not linear (clipping, "
    "clamping) sees other values than in a single process",
    "none": "a gradient is None, but not on one process, or the reverse",
    "clipping": "gradient clipping",
    "optimizer": "optimizer step",
    "loss": "the loss, or its weights",
    "gradient": "gradient: no combination of the micro-batches' gradients explains it",
}


LOOP_CAUSES = {
    "order": "each rank uses a different sample order: draw the order from torch's default generator, or from one "
    "with the same seed on all ranks",
    "beside": "a gradient that does not come from s.backward stays on its rank, for example from loss.backward(), "
    "autograd.grad or p.grad += ... Add the losses and call s.backward once, or call s.backward(loss, more=True)",
    "between": "the loop reads or changes gradients between two s.backward calls of one step. With several "
    "micro-batches these are not the gradients of the global batch: use one micro-batch per rank",
    "settings": "the learning rate depends on the rank or on the number of ranks",
    "input": "the model gets different inputs: the data depend on the rank, or the loop draws random numbers from "
    "generators other than the default ones of torch, random and numpy",
    "output": "the outputs of the model differ for the same samples: it depends on the rank or the number of ranks",
    "weights": "the loss, or its weight: if the loss is not a mean over samples, use s.backward(loss, weight=...)",
    "changed": "the loop changes gradients between s.backward and optimizer.step by values of one rank: clip the .grad "
    "that s.backward leaves, or use s.clip_grad_norm",
    "outside": "the loop changes weights outside optimizer.step(), differently on different ranks",
    "own number": "the loop logs a number of one rank: use s.mean(total, count), which covers all ranks",
    "number": "a logged number is not a mean over all samples, but perhaps a mean of ranks: use s.mean(total, count)",
    "refused": "the loop or the session raised an error",
    "ways": "ranks take different branches: decide by a number that all ranks have, s.any(flag) or s.mean(...)",
}
"""Causes in a custom loop, in addition to some of CAUSES."""


class VerifySpec(msgspec.Struct, frozen=True, tag=True):
    task: str
    options: dict[str, str]
    strategies: list[str]
    optimizers: list[str]  # empty: the task's optimizer if it creates one, otherwise all
    virtual_ranks: int
    accumulation: int
    steps: int
    seed: int
    clip_norm: float
    short_tail: bool | None = None
    """Whether the last global batch is too small for some virtual ranks, or only has smaller, uneven portions. Default:
    too small, except with batch norm."""
    checkpoint_activations: str | None = None
    """Modules whose activations the ranks recompute in backward. The single process recomputes nothing."""
    device: str = "cpu"
    mesh: str = ""  # empty: data parallelism only
    sequence_parallel: bool = False
    schedule_pipeline: Literal["1f1b", "gpipe"] = "1f1b"
    bitwise: bool = False  # collect the bits of every step, and compare with no reference


class LoopCase(msgspec.Struct, frozen=True):
    """One run of a loop: in float64, or (`exact`) unchanged with its randomness, to compare bits."""

    virtual_ranks: int
    exact: bool
    strategy: str = ""  # empty: the strategy of the loop
    plain: bool = False  # the reference: one process with `loss.backward()` and the whole global batch at once


class LoopSpec(msgspec.Struct, frozen=True, tag=True):
    target: str  # file.py:function or module:function
    words: list[str]  # the arguments of the loop in sys.argv
    cases: list[LoopCase]
    virtual_ranks: int
    steps: int
    seed: int
    device: str = "cpu"


class StrategyCase(msgspec.Struct, frozen=True):
    strategy: str
    world_size: int
    batchnorm: BatchNormPolicy
    optimizer: str
    mesh: str = ""

    @property
    def strategy_text(self) -> str:
        return format_strategy(self.strategy, self.mesh)

    def __str__(self) -> str:
        norm = "" if self.batchnorm == "none" else f", {self.batchnorm} batch norm"
        return f"{self.strategy_text} on {self.world_size}{norm}, {self.optimizer}"


class Divergence(msgspec.Struct, frozen=True):
    step: int
    cause: str  # a key of CAUSES or LOOP_CAUSES
    tensor: str
    detail: str


class CaseResult(msgspec.Struct, frozen=True):
    case: StrategyCase
    errors: dict[str, float]
    round_off: list[str]
    round_off_error: float
    finding: Divergence | None = None
    not_run: str | None = None

    @property
    def passed(self) -> bool:
        return self.finding is None and self.not_run is None


class VerifyReport(msgspec.Struct, frozen=True):
    world_size: int
    global_batch: int
    samples: int
    results: list[CaseResult]
    notes: list[str]
    precision: str = "float64"  # a key of TOLERANCES


class StepDigests(msgspec.Struct, frozen=True):
    loss: str  # hexadecimal, as the norm
    grad_norm: str
    gradients: str  # SHA-256 of the gradients that the optimizer used
    parameters: str  # SHA-256 after the step


class StrategyDigests(msgspec.Struct, frozen=True):
    strategy: str
    optimizer: str
    weights: str  # SHA-256 of weights and merged buffers
    state: str  # SHA-256 of parameters, the buffers of every virtual rank, and the optimizer state
    steps: list[StepDigests]
    ranks_agree: bool


class DigestReport(msgspec.Struct, frozen=True):
    world_size: int
    global_batch: int
    samples: int
    bits: list[StrategyDigests]
    holds_for: dict[str, Any]


def print_report(spec: VerifySpec | None, reports: Sequence[VerifyReport]) -> bool:
    """Print the differences of all cases. Return whether at least one ran and none failed. A loop has no `spec`."""
    console = table_console()
    results = [result for report in reports for result in report.results]
    largest = reports[-1]
    if spec:
        console.print(_title(spec, largest, "float64", ", ranks start from different seeds"))
    console.print(_table(results))
    for note in sorted({note for report in reports for note in report.notes}):
        console.print(f"note: {note}")
    for strategy, reason in sorted({(r.case.strategy_text, r.not_run) for r in results if r.not_run}):
        console.print(f"not run: {strategy}: {reason}")
    _print_round_off(console, results)
    failed = [r for r in results if r.finding]
    for result in failed:
        if finding := result.finding:
            suffix = f", first in {finding.tensor}" if finding.tensor else ""
            console.print(f"{result.case}: step {finding.step + 1}{suffix}", style="bold", markup=False)
            console.print(f"  likely cause: {(CAUSES | LOOP_CAUSES)[finding.cause]}. {finding.detail}", markup=False)
    tolerance = TOLERANCES[largest.precision]
    adaptive = f"{ADAPTIVE_TOLERANCE:.0e}" if largest.precision == "float64" else "plus two learning rates per step"
    console.print(
        f"allowed: {tolerance:.0e} of the largest magnitude of its kind; state and parameters with AdamW {adaptive}"
    )
    count = sum(1 for r in results if not r.not_run)
    differing = f"{len(failed)} of {count} cases DIFFER from one process"
    outcome = differing if failed else f"all {count} cases equal one process"
    console.print(outcome if count else "nothing was run")
    return not failed and count > 0


def compare_and_print_digests(spec: VerifySpec | None, reports: Sequence[DigestReport]) -> bool:
    """Print one digest for each world size. Return whether all digests are the same. A loop has no `spec`."""
    console = table_console()
    first = reports[0]
    if spec:
        console.print(_title(spec, first, "float32"))
    table = Table("optimizer", "strategy", "processes", "weights", "whole state", "result", title="SHA-256")
    expected = {bits.optimizer: bits for bits in reversed(first.bits)}
    differ: list[str] = []
    for optimizer in expected:
        for report in reports:
            for bits in (b for b in report.bits if b.optimizer == optimizer):
                difference = _first_difference(bits, expected[optimizer])
                outcome = "[bold red]DIFFERS[/]" if difference else "[green]same[/]"
                cells = (optimizer, bits.strategy, str(report.world_size), bits.weights[:16], bits.state[:16], outcome)
                table.add_row(*cells)
                if difference:
                    differ.append(f"{bits.strategy} on {report.world_size}, {optimizer}: {difference}")
    console.print(table)
    for line in differ:
        console.print(line, style="bold", markup=False)
    conditions = first.holds_for
    if spec:
        console.print(
            f"holds for {spec.virtual_ranks} virtual ranks, global batch {first.global_batch}, 1 thread per rank, "
            f"torch {conditions['torch']}, {conditions['processor']} ({conditions['capability']})",
            markup=False,
        )
    sizes = ", ".join(str(report.world_size) for report in reports)
    equal = f"bit-identical: one digest per optimizer on {sizes} processes"
    console.print(f"{len(differ)} DIFFER" if differ else equal)
    return not differ


def _title(spec: VerifySpec, report: VerifyReport | DigestReport, precision: str, suffix: str = "") -> str:
    return (
        f"{spec.task} in {precision}, {spec.steps} steps: global batch {report.global_batch} = {spec.virtual_ranks} "
        f"virtual ranks x {spec.accumulation} micro-batches (uneven), {report.samples} samples{suffix}, gradients "
        f"clipped to norm {spec.clip_norm:g}"
    )


def _first_difference(bits: StrategyDigests, expected: StrategyDigests) -> str:
    if not bits.ranks_agree:
        return "its ranks differ from each other"
    for number, (got, want) in enumerate(zip(bits.steps, expected.steps, strict=True), 1):
        for field in ("loss", "gradients", "grad_norm", "parameters"):  # the norm follows from the gradients
            if getattr(got, field) != getattr(want, field):
                return f"first in step {number}: {field} {getattr(got, field)[:24]}, not {getattr(want, field)[:24]}"
    if bits.weights != expected.weights:
        return "buffers"
    return "" if bits.state == expected.state else "the optimizer state, or the buffers of a virtual rank"


def _table(results: Sequence[CaseResult]) -> Table:
    columns = ("processes", "strategy", "batch norm", "optimizer", *KINDS, "result")
    table = Table(*columns, title="largest difference from one process")
    for result in results:
        case = result.case
        cells = [_cell(result.errors.get(kind)) for kind in KINDS]
        outcome = "not run" if result.not_run else "[green]equal[/]" if result.passed else "[bold red]DIFFERS[/]"
        norm = "-" if case.batchnorm == "none" else case.batchnorm
        table.add_row(str(case.world_size), case.strategy_text, norm, case.optimizer, *cells, outcome)
    return table


def _print_round_off(console: Console, results: Sequence[CaseResult]) -> None:
    names = sorted({name for r in results for name in r.round_off})
    if names:
        worst = max(r.round_off_error for r in results)
        ellipsis = ", ..." if len(names) > MAX_NAMED else ""
        console.print(
            f"round-off tensors: {len(names)}, whose gradient is 0 except for rounding (amplified unless SGD): "
            f"{', '.join(names[:MAX_NAMED])}{ellipsis}; "
            f"largest difference {worst:.1e}, allowed {ADAPTIVE_TOLERANCE:.0e}"
        )


def _cell(error: float | None) -> str:
    return "-" if error is None else "0" if error == 0 else f"{error:.1e}"
