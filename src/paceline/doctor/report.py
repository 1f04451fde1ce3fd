"""Runs all checks and reports them: a line for each, with how to fix what is wrong; or the same as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from paceline.doctor import checks, checks_network
from paceline.doctor.check import Check, checked, duration, rate
from paceline.doctor.messages import LinkSpeed
from paceline.doctor.survey import Survey, usable_addresses
from paceline.errors import plural
from paceline.guard.sentences import printable

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "-": "dim"}


def run_checks(survey: Survey) -> Iterator[Check]:
    """All checks of the survey, in the order in which they are reported."""
    several = len(survey.wanted.hosts) > 1
    yield checks.logins(survey)
    if not survey.facts:
        return
    yield checks.software(survey)
    yield checks.resources(survey)
    if survey.wanted.mesh:
        yield checks.mesh_layout(survey)
    if any(one.gpus for one in survey.facts.values()):
        yield checked("gpus", checks.cards(survey), checks.gpus(survey))
    if several:
        right = "each host's name means that host, on all of them"
        yield checked("names", right, checks_network.host_names(survey))
        ways = f"all {len(survey.reach)} ways between {len(survey.facts)} hosts are open"
        yield checked("network", ways, checks_network.pairs(survey))
        yield checks_network.interfaces(survey)
        yield checks.clocks(survey)
        yield Check("strangers", checks.STRANGERS)
    writable = f"{survey.wanted.run_dir} can be written to{', and all hosts see it' if several else ''}"
    yield checked("run folder", writable, checks.run_folder(survey))
    yield checks.disk_room(survey)
    if survey.wanted.quick:
        return
    yield checks.data(survey)
    if several:
        yield checks_network.link_speeds(survey)
    yield checks.gradients(survey)


def print_checks(console: Console, survey: Survey, checks: Sequence[Check]) -> None:
    """For people."""
    for check in checks:
        verdict = check.verdict
        line = Text.assemble(
            (f"{verdict:8}", STYLES[verdict]), f"{check.name:12}", "" if check.findings else check.summary
        )
        for number, finding in enumerate(check.findings):
            if number:
                line.append(f"\n{'':20}")
            line.append(f"{finding.host}: {printable(finding.what)}\n{'':20}-> {printable(finding.remedy)}")
        console.print(line, soft_wrap=True)
    if len(survey.links) > 2:
        console.print(_table(survey), soft_wrap=True)
    counts = [sum(f.severity == kind for check in checks for f in check.findings) for kind in ("error", "warning")]
    console.print(f"{plural(counts[0], 'error')}, {plural(counts[1], 'warning')}, {survey.seconds:.1f} s")


def as_json(survey: Survey, checks: Sequence[Check]) -> bytes:
    """For programs: the checks with their verdicts and findings, and the measured numbers behind them."""
    chosen = usable_addresses(survey.facts, survey.reach)
    found: dict[str, Any] = {
        "errors": sum(finding.severity == "error" for check in checks for finding in check.findings),
        "checks": [{"verdict": check.verdict, **msgspec.to_builtins(check)} for check in checks],
        "interfaces": chosen,
        "seconds": survey.seconds,
        "clock_offset_seconds": survey.clock_offsets,
        "reach": [{"from": a, "to": b, "addresses": found} for (a, b), found in survey.reach.items()],
        "links": [{"from": a, "to": b, **msgspec.to_builtins(one)} for (a, b), one in survey.links.items()],
        "rehearsal": survey.rehearsed,
        "facts": survey.facts,
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2)


def _table(survey: Survey) -> str:
    hosts = [host for host in survey.wanted.hosts if host in survey.facts]
    rows = [["from \\ to", *hosts]]
    for source in hosts:
        rows.append([source, *(_cell(survey.links.get((source, target))) for target in hosts)])
    wide = 2 + max(len(cell) for row in rows for cell in row)
    lines = ["".join(cell.ljust(wide) for cell in row).rstrip() for row in rows]
    return "\n".join(lines)


def _cell(link: LinkSpeed | None) -> str:
    if link is None or link.reason != "ok":
        return "-"
    return f"{rate(link.bytes_per_second)} {duration(link.round_trip_seconds)}"
