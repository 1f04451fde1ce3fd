"""The report of `paceline doctor`: a line per check, with the fix of each finding; or the same as JSON."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from paceline.doctor.rules import findings, hosts_of, rate
from paceline.doctor.survey import Survey
from paceline.errors import plural
from paceline.guard.sentences import printable
from paceline.host.facts import Facts, Finding

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "-": "dim"}


class Check(msgspec.Struct, frozen=True):
    """One question: `summary` is the answer if all is well, `findings` what is wrong."""

    verdict: str  # error, warning, ok, or - if it could not be answered
    name: str
    summary: str
    findings: tuple[Finding, ...] = ()


def run_checks(survey: Survey) -> list[Check]:
    """All checks of the survey, in the order of the report."""
    found = findings(survey)
    several = len(survey.wanted.hosts) > 1
    checks: list[Check] = []
    for name, (needs_several, summarise) in SUMMARIES.items():
        summary = summarise(survey) if survey.hosts or name == "hosts" else ""
        wrong = tuple(found.get(name, ()))
        if (several or not needs_several) and (summary or wrong):
            verdict = wrong[0].severity if wrong else "-" if summary.startswith("not ") else "ok"
            checks.append(Check(verdict, name, summary, wrong))
    return checks


def bandwidth(survey: Survey) -> tuple[float, float]:
    """The slowest link's bytes per second, and the longest round trip in seconds; 0 if not measured."""
    trips = [[one.round_trip_seconds for one in links.values() if not one.error] for links in survey.reach.values()]
    slowest = min((one.bytes_per_second for one in survey.links.values()), default=0.0)
    return slowest, max((min(trip) for trip in trips if trip), default=0.0)


def _versions(facts: Facts) -> str:
    return f"Python {facts.python}, " + ", ".join(f"{name} {version}" for name, version in facts.packages.items())


def _ports(survey: Survey) -> str:
    met = [f"{host.name} {one.address} ({one.interface})" for host in hosts_of(survey) if (one := host.usable())]
    return f"all {len(survey.reach)} connections between {len(survey.hosts)} hosts are open: {', '.join(met)}"


def _bandwidth(survey: Survey) -> str:
    if survey.wanted.quick:
        return ""
    slowest, round_trip = bandwidth(survey)
    told = f"{rate(slowest)} on the slowest of {len(survey.links)} links, round trip {1e3 * round_trip:.2g} ms"
    return told if survey.links else "not measured: no connection is open"


SUMMARIES: dict[str, tuple[bool, Callable[[Survey], str]]] = {
    # check: whether it needs several hosts, and its answer if all is well
    "hosts": (False, lambda s: f"answered: {', '.join(s.hosts) or 'none'}"),
    "software": (False, lambda s: _versions(next(iter(s.hosts.values())).facts)),
    "resources": (False, lambda s: "; ".join(sorted({
        f"{plural(h.workers, 'worker')} x {plural(h.threads, 'thread')} on {plural(h.facts.cores, 'core')}"
        for h in hosts_of(s)}))),
    "gpus": (False, lambda s: "; ".join(f"{host.name}: {len(host.facts.gpus)} x {host.facts.gpus[0].name}"
                                        for host in hosts_of(s) if host.facts.gpus)),
    "names": (True, lambda _: "each host's name means that host, on all of them"),
    "ports": (True, _ports),
    "clocks": (True, lambda s: f"all within {max(map(abs, s.clock_offsets.values()), default=0):.2g} s"),
    "run folder": (False, lambda s: f"{s.wanted.run_dir} can be written to; seen by {', '.join(s.folder)}"),
    "disk": (False, lambda s: f"at least {min(one.disk_free for one in s.hosts.values()) / 1e9:.3g} GB free"),
    "bandwidth": (True, _bandwidth),
}  # fmt: skip


def print_checks(console: Console, survey: Survey, checks: Sequence[Check]) -> None:
    """Print a line per check, and the number of errors and warnings."""
    for check in checks:
        summary = "" if check.findings else check.summary
        line = Text.assemble((f"{check.verdict:8}", STYLES[check.verdict]), f"{check.name:12}", summary)
        for number, finding in enumerate(check.findings):
            line.append(f"\n{'':20}" if number else "")
            line.append(f"{finding.host}: {printable(finding.what)}\n{'':20}-> {printable(finding.remedy)}")
        console.print(line, soft_wrap=True)
    counts = [sum(f.severity == kind for check in checks for f in check.findings) for kind in ("error", "warning")]
    console.print(f"{plural(counts[0], 'error')}, {plural(counts[1], 'warning')}, {survey.seconds:.1f} s")


def as_json(survey: Survey, checks: Sequence[Check]) -> bytes:
    """The checks with their verdicts and findings, and the facts and numbers behind them."""
    found: dict[str, Any] = {
        "errors": sum(finding.severity == "error" for check in checks for finding in check.findings),
        "checks": checks,
        "seconds": survey.seconds,
        "clock_offset_seconds": survey.clock_offsets,
        "ports": [{"from": a, "to": b, "addresses": links} for (a, b), links in survey.reach.items()],
        "bandwidth": dict(zip(("bytes_per_second", "round_trip_seconds"), bandwidth(survey), strict=True)),
        "facts": {name: one.facts for name, one in survey.hosts.items()},
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2)
