"""The specification and the results of `paceline verify`, as data between the command and its ranks; the report."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.config.mesh import strategy_on
from paceline.runs.console import table_console

NAMED = 4  # round-off tensors
Policy = Literal["none", "local", "sync"]  # batch norm's; "none" where the model has no batch norm

KINDS = ("loss", "gradient", "parameter", "buffer", "optimizer state")

OWN = "task"
"""of the optimizers: the one that the task makes"""

TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}
"""relative, for losses, gradients, buffers, and for parameters under SGD; by the least precise type in the graph of a
custom loop's loss"""
ADAPTIVE_TOLERANCE = 1e-9  # for what Adam divides by the root of its own square: round-off is blown up by up to 1/eps
"""relative for parameters and state under all but SGD, absolute for those whose gradient is nothing but round-off"""

CAUSES = {
    "error": "it raised an error",
    "samples": "sampler sets differ",
    "start": "the ranks do not start from the same weights",
    "sync": "missing synchronisation",
    "random": "random stream",
    "buffers": "buffers (BatchNorm)",
    "mean": "wrong mean: the gradient is off by a constant factor",
    "shares": "wrong mean: shares of different sizes are weighed wrongly",
    "accumulation": "accumulation: micro-batches are left out or counted twice",
    "scale": "the scale of gradients in backward: a hook or an autograd function that is not linear (clipping, "
    "clamping) sees other values than in a single process",
    "none": "a gradient that should be None is not, or the other way round",
    "clipping": "gradient clipping",
    "optimizer": "optimizer step",
    "loss": "the loss, or how it is weighed",
    "gradient": "gradient: no mixture of the micro-batches' gradients explains it",
}


LOOP_CAUSES = {
    "order": "each rank takes its share of a sample order of its own: draw the order from torch's stream, or from a "
    "generator with one seed on all ranks",
    "beside": "a gradient that does not come from s.backward, so it stays on its rank: loss.backward(), autograd.grad "
    "or p.grad += ... beside it. Add the losses up and call s.backward once, or s.backward(loss, more=True)",
    "between": "gradients are read or changed between two s.backward calls of one step. With several micro-batches "
    "they are not those of the global batch there: use one micro-batch on each rank",
    "settings": "the learning rate depends on the rank or on the number of ranks",
    "input": "the model is given something else: the data depend on the rank, or random numbers are drawn that are not "
    "torch's, random's or numpy's own streams",
    "output": "the model computes something else from the same samples: it depends on the rank or the number of ranks",
    "weights": "the loss, or how it is weighed: a mean over anything but samples needs s.backward(loss, weight=...)",
    "changed": "gradients are changed between s.backward and optimizer.step by what one rank knows: clip by what .grad "
    "holds after s.backward, or by s.clip_grad_norm",
    "outside": "weights are changed outside optimizer.step(), and not on all ranks alike",
    "own number": "a rank's own number is logged: add it up over all ranks, s.mean(total, count)",
    "number": "a number of the loop is no mean over all samples: s.mean(total, count) is, an average of ranks is not",
    "refused": "the loop or the session raised an error",
    "ways": "the ranks do not go the same way: decide by a number that all have, s.any(flag) or s.mean(...)",
}
"""of a loop of the user's own, beside some of CAUSES"""


class Spec(msgspec.Struct, frozen=True, tag=True):
    """One launch of workers: these strategies, one world size."""

    task: str
    options: dict[str, str]
    strategies: list[str]
    optimizers: list[str]
    """none: the task's own, if it makes one, else all"""
    virtual_ranks: int
    accumulation: int
    steps: int
    seed: int
    clip_norm: float
    short_tail: bool | None = None
    """whether the last global batch does not reach every virtual rank, or has somewhat smaller, uneven shares; by
    default it does not, except with batch norm"""
    checkpoint_activations: str | None = None
    """modules that the ranks' backward computes again; the one process computes everything once"""
    device: str = "cpu"
    """of all of them, as for train"""
    mesh: str = ""
    """how the ranks share the model and the batch; empty: the batch alone"""
    sequence_parallel: bool = False
    """of a mesh with tensor"""
    schedule_pipeline: Literal["1f1b", "gpipe"] = "1f1b"
    """of a mesh with stages"""
    bitwise: bool = False
    """collect the bits of every step; there is no reference"""


class LoopCase(msgspec.Struct, frozen=True):
    """One run of a loop: in float64, or with all its own randomness, for the bits."""

    virtual_ranks: int
    exact: bool
    strategy: str = ""
    """empty: the loop's own"""
    plain: bool = False
    """the one that others are compared with: one process and `loss.backward()`, the whole global batch at once"""


class LoopSpec(msgspec.Struct, frozen=True, tag=True):
    """One launch of workers: these runs of a loop, one after the other."""

    target: str
    """file.py:function or module:function"""
    words: list[str]
    """what the loop finds in sys.argv"""
    cases: list[LoopCase]
    virtual_ranks: int
    steps: int
    seed: int
    device: str = "cpu"


class Case(msgspec.Struct, frozen=True):
    """What is compared with one process."""

    strategy: str
    world_size: int
    batchnorm: Policy
    optimizer: str
    mesh: str = ""

    @property
    def way(self) -> str:
        """The strategy, and the mesh that it works on."""
        return strategy_on(self.strategy, self.mesh)

    def __str__(self) -> str:
        norm = "" if self.batchnorm == "none" else f", {self.batchnorm} batch norm"
        return f"{self.way} on {self.world_size}{norm}, {self.optimizer}"


class Diagnosis(msgspec.Struct, frozen=True):
    """The first difference, and what most likely made it."""

    step: int
    cause: str
    """a key of CAUSES"""
    tensor: str
    detail: str


class Result(msgspec.Struct, frozen=True):
    """The largest differences of a case over all steps, by kind, and the first finding, if any."""

    case: Case
    errors: dict[str, float]
    round_off: list[str]
    round_off_error: float
    finding: Diagnosis | None = None
    not_run: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the case ran and equals one process."""
        return self.finding is None and self.not_run is None


class VerifyReport(msgspec.Struct, frozen=True):
    """All results of one world size, and what had to be said about the set-up."""

    world_size: int
    global_batch: int
    samples: int
    results: list[Result]
    notes: list[str]
    precision: str = "float64"
    """a key of TOLERANCES"""


class StepBits(msgspec.Struct, frozen=True):
    """What a step gave, to the last bit."""

    loss: str
    """hexadecimal, as the norm"""
    grad_norm: str
    gradients: str
    """SHA-256 of what the optimizer was given"""
    parameters: str
    """SHA-256 after the step"""


class Bits(msgspec.Struct, frozen=True):
    """What one strategy with one optimizer computed on one world size."""

    strategy: str
    optimizer: str
    weights: str
    """SHA-256 of weights and merged buffers"""
    state: str
    """SHA-256 of parameters, every virtual rank's buffers, and the optimizer's whole state"""
    steps: list[StepBits]
    ranks_agree: bool


class BitsReport(msgspec.Struct, frozen=True):
    """All of one world size."""

    world_size: int
    global_batch: int
    samples: int
    bits: list[Bits]
    holds_for: dict[str, Any]


def print_report(spec: Spec | None, reports: Sequence[VerifyReport]) -> bool:
    """Print the differences of all cases; return whether any ran and none failed. No spec: of a loop."""
    console = table_console()
    results = [result for report in reports for result in report.results]
    largest = reports[-1]
    if spec:
        console.print(_title(spec, largest, "float64", ", ranks start from different seeds"))
    console.print(_table(results))
    for note in sorted({note for report in reports for note in report.notes}):
        console.print(f"note: {note}")
    for strategy, reason in sorted({(r.case.way, r.not_run) for r in results if r.not_run}):
        console.print(f"not run: {strategy}: {reason}")
    _print_round_off(console, results)
    failed = [r for r in results if r.finding]
    for result in failed:
        if finding := result.finding:
            where = f", first in {finding.tensor}" if finding.tensor else ""
            console.print(f"{result.case}: step {finding.step + 1}{where}", style="bold", markup=False)
            console.print(f"  likely cause: {(CAUSES | LOOP_CAUSES)[finding.cause]}. {finding.detail}", markup=False)
    tolerance = TOLERANCES[largest.precision]
    adaptive = f"{ADAPTIVE_TOLERANCE:.0e}" if largest.precision == "float64" else "two learning rates per step more"
    console.print(
        f"allowed: {tolerance:.0e} of the largest magnitude of its kind; what AdamW divides by its own size {adaptive}"
    )
    ran = sum(1 for r in results if not r.not_run)
    verdict = (
        f"{len(failed)} of {ran} cases DIFFER from one process" if failed else f"all {ran} cases equal one process"
    )
    console.print(verdict if ran else "nothing was run")
    return not failed and ran > 0


def print_bits(spec: Spec | None, reports: Sequence[BitsReport]) -> bool:
    """Print one digest for each world size; return whether they are all the same. No spec: of a loop."""
    console = table_console()
    first = reports[0]
    if spec:
        console.print(_title(spec, first, "float32"))
    table = Table("optimizer", "strategy", "processes", "weights", "whole state", "verdict", title="SHA-256")
    yardstick = {bits.optimizer: bits for bits in reversed(first.bits)}
    differ: list[str] = []
    for optimizer in yardstick:
        for report in reports:
            for bits in (b for b in report.bits if b.optimizer == optimizer):
                difference = _first_difference(bits, yardstick[optimizer])
                verdict = "[bold red]DIFFERS[/]" if difference else "[green]same[/]"
                cells = (optimizer, bits.strategy, str(report.world_size), bits.weights[:16], bits.state[:16], verdict)
                table.add_row(*cells)
                if difference:
                    differ.append(f"{bits.strategy} on {report.world_size}, {optimizer}: {difference}")
    console.print(table)
    for line in differ:
        console.print(line, style="bold", markup=False)
    held = first.holds_for
    if spec:
        console.print(
            f"holds for {spec.virtual_ranks} virtual ranks, global batch {first.global_batch}, 1 thread per rank, "
            f"torch {held['torch']}, {held['processor']} ({held['capability']})",
            markup=False,
        )
    sizes = ", ".join(str(report.world_size) for report in reports)
    console.print(
        f"{len(differ)} DIFFER" if differ else f"bit-identical: one digest per optimizer on {sizes} processes"
    )
    return not differ


def _title(spec: Spec, report: VerifyReport | BitsReport, precision: str, more: str = "") -> str:
    return (
        f"{spec.task} in {precision}, {spec.steps} steps: global batch {report.global_batch} = {spec.virtual_ranks} "
        f"virtual ranks x {spec.accumulation} micro-batches (uneven), {report.samples} samples{more}, gradients "
        f"clipped to norm {spec.clip_norm:g}"
    )


def _first_difference(bits: Bits, yardstick: Bits) -> str:
    """The first difference of two runs; empty if there is none."""
    if not bits.ranks_agree:
        return "its own ranks differ from each other"
    for number, (got, want) in enumerate(zip(bits.steps, yardstick.steps, strict=True), 1):
        for what in ("loss", "gradients", "grad_norm", "parameters"):  # the norm follows from the gradients
            if getattr(got, what) != getattr(want, what):
                return f"first in step {number}: {what} {getattr(got, what)[:24]}, not {getattr(want, what)[:24]}"
    if bits.weights != yardstick.weights:
        return "buffers"
    return "" if bits.state == yardstick.state else "the optimizer's state, or a virtual rank's buffers"


def _table(results: Sequence[Result]) -> Table:
    columns = ("processes", "strategy", "batch norm", "optimizer", *KINDS, "verdict")
    table = Table(*columns, title="largest difference from one process")
    for result in results:
        case = result.case
        cells = [_cell(result.errors.get(kind)) for kind in KINDS]
        verdict = "not run" if result.not_run else "[green]equal[/]" if result.passed else "[bold red]DIFFERS[/]"
        norm = "-" if case.batchnorm == "none" else case.batchnorm
        table.add_row(str(case.world_size), case.way, norm, case.optimizer, *cells, verdict)
    return table


def _print_round_off(console: Console, results: Sequence[Result]) -> None:
    names = sorted({name for r in results for name in r.round_off})
    if names:
        worst = max(r.round_off_error for r in results)
        more = ", ..." if len(names) > NAMED else ""
        console.print(
            f"round-off tensors: {len(names)}, whose gradient is what rounding left of 0, which all but SGD blow up: "
            f"{', '.join(names[:NAMED])}{more}; largest difference {worst:.1e}, allowed {ADAPTIVE_TOLERANCE:.0e}"
        )


def _cell(error: float | None) -> str:
    return "-" if error is None else "0" if error == 0 else f"{error:.1e}"
