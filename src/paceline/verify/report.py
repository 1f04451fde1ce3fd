"""The verdict as a table: one line a case, the largest difference of each kind, and what explains a failure."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from paceline.runs.console import table_console
from paceline.verify.spec import (
    ADAPTIVE_TOLERANCE,
    CAUSES,
    KINDS,
    LOOP_CAUSES,
    TOLERANCES,
    Bits,
    BitsReport,
    Result,
    Spec,
    VerifyReport,
)  # fmt: skip

NAMED = 4  # round-off tensors


def print_report(spec: Spec | None, reports: Sequence[VerifyReport]) -> bool:
    """Print everything; return whether nothing failed and anything was run. No spec: of a loop."""
    console = table_console()
    results = [result for report in reports for result in report.results]
    largest = reports[-1]
    if spec:
        console.print(
            f"{spec.task} in float64, {spec.steps} steps: global batch {largest.global_batch} = {spec.virtual_ranks} "
            f"virtual ranks x {spec.accumulation} micro-batches (uneven), {largest.samples} samples, ranks start from "
            f"different seeds, gradients clipped to norm {spec.clip_norm:g}"
        )
    console.print(_table(results))
    for note in sorted({note for report in reports for note in report.notes}):
        console.print(f"note: {note}")
    for strategy, reason in sorted({(r.case.way, r.not_run) for r in results if r.not_run}):
        console.print(f"not run: {strategy}: {reason}")
    _print_round_off(console, results)
    failed = [r for r in results if r.finding]
    for result in failed:
        if (finding := result.finding) is not None:
            where = f", first in {finding.tensor}" if finding.tensor else ""
            console.print(f"{result.case}: step {finding.step + 1}{where}", style="bold", markup=False)
            console.print(f"  likely cause: {(CAUSES | LOOP_CAUSES)[finding.cause]}. {finding.detail}", markup=False)
    tolerance = TOLERANCES[largest.precision]
    adaptive = f"{ADAPTIVE_TOLERANCE:.0e}" if largest.precision == "float64" else "two learning rates per step more"
    console.print(
        f"allowed: {tolerance:.0e} of the largest magnitude of its kind; what AdamW divides by its own size {adaptive}"
    )
    ran = sum(1 for r in results if not r.not_run)
    told = f"{len(failed)} of {ran} cases DIFFER from one process" if failed else f"all {ran} cases equal one process"
    console.print(told if ran else "nothing was run")
    return not failed and ran > 0


def print_bits(spec: Spec | None, reports: Sequence[BitsReport]) -> bool:
    """Print one digest for each world size; return whether they are all the same."""
    console = table_console()
    first = reports[0]
    if spec:
        console.print(
            f"{spec.task} in float32, {spec.steps} steps: global batch {first.global_batch} = {spec.virtual_ranks} "
            f"virtual ranks x {spec.accumulation} micro-batches (uneven), {first.samples} samples, gradients clipped "
            f"to norm {spec.clip_norm:g}"
        )
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
    told = f"{len(differ)} DIFFER" if differ else f"bit-identical: one digest per optimizer on {sizes} processes"
    console.print(told)
    return not differ


def _first_difference(bits: Bits, yardstick: Bits) -> str:
    """Where two runs part, in words; empty if nowhere."""
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
