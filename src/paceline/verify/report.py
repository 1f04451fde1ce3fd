"""The verdict as a table: one line a case, the largest difference of each kind, and what explains a failure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from paceline.verify.spec import ADAPTIVE_TOLERANCE, CAUSES, TOLERANCE, Case, Finding, Report, Spec

KINDS = ("loss", "gradient", "parameter", "buffer", "optimizer state")


def print_report(spec: Spec, reports: Sequence[Report]) -> bool:
    """Print everything; return whether nothing failed and anything was run."""
    console = Console(width=None if Console().is_terminal else 132, highlight=False)
    largest = reports[-1]
    console.print(
        f"{spec.task} in float64, {spec.steps} steps: global batch {largest.global_batch} = {spec.virtual_ranks} virtual "
        f"ranks x {spec.accumulation} micro-batches (uneven), {largest.samples} samples, ranks start from different "
        f"seeds, gradients clipped to norm {spec.clip_norm:g}"
    )
    table = Table("processes", "strategy", "batch norm", "optimizer", *KINDS, "verdict", title="largest difference from one process")
    for report in reports:
        for result in report.results:
            case = result.case
            cells = [_cell(result.errors.get(kind)) for kind in KINDS]
            verdict = "not run" if result.not_run else "[green]equal[/]" if result.passed else "[bold red]DIFFERS[/]"
            norm = "-" if case.batchnorm == "none" else case.batchnorm
            table.add_row(str(case.world_size), case.strategy, norm, case.optimizer, *cells, verdict)
    console.print(table)
    results = [result for report in reports for result in report.results]
    for note in sorted({note for report in reports for note in report.notes}):
        console.print(f"note: {note}")
    for case, reason in sorted({(r.case.strategy, r.not_run) for r in results if r.not_run}):
        console.print(f"not run: {case}: {reason}")
    round_off = sorted({name for r in results if r.round_off and r.case.optimizer == "adamw" for name in r.round_off})
    if round_off:
        worst = max(r.round_off_error for r in results)
        console.print(
            f"round-off tensors ({len(round_off)}; their gradient is rounding's rest of 0, which AdamW blows up): largest "
            f"absolute difference {worst:.1e}, allowed {ADAPTIVE_TOLERANCE:.0e}: {', '.join(round_off[:4])}"
            + (", ..." if len(round_off) > 4 else "")
        )
    failed = [r for r in results if r.finding]
    for result in failed:
        if result.finding:
            _print_finding(console, result.case, result.finding)
    ran = [r for r in results if not r.not_run]
    console.print(
        f"allowed: {TOLERANCE:.0e} of the largest magnitude of its kind; for parameters and state under AdamW {ADAPTIVE_TOLERANCE:.0e}"
    )
    if failed:
        console.print(f"{len(failed)} of {len(ran)} cases DIFFER from one process")
    else:
        console.print(f"all {len(ran)} cases equal one process")
    return not failed and bool(ran)


def _print_finding(console: Console, case: Case, finding: Finding) -> None:
    where = f", first in {finding.tensor}" if finding.tensor else ""
    console.print(f"[bold]{case}[/]: step {finding.step + 1}{where}", markup=True)
    console.print(f"  likely cause: {CAUSES[finding.cause]}. {finding.detail}", markup=False)


def _cell(error: float | None) -> str:
    return "" if error is None else "0" if error == 0 else f"{error:.1e}"
