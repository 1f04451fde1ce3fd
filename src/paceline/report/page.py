"""The page of a run, or of several beside each other: one file of HTML that needs nothing else and asks nobody."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

import msgspec
from jinja2 import Environment
from markupsafe import Markup

from paceline.report.analysis import logged
from paceline.report.explain import Drawing
from paceline.report.figures import Figure, curves, devices, phases, waiting
from paceline.report.happened import breakdowns, happenings, learned, remedy, started_again, timeline
from paceline.report.run import WholeRun
from paceline.report.tables import (
    Table,
    exchange,
    held,
    ledger,
    moments,
    repeat,
    results,
    setting_differences,
    settings_tables,
    time_spent,
)
from paceline.report.why import Why, why
from paceline.runs.console import clean

COLOUR_OF = {"computing": "blue", "waiting for data": "orange", "waiting for the slowest rank": "red",
             "the exchange": "green", "between steps": "yellow", "not explained": "grey"}  # fmt: skip
MARK = "a page of paceline report"  # by which one is known, and may be written over
GOOD, BAD = ("done", "saved", "running", "queued"), ("failed", "lost", "cancelled")


@dataclass
class Section:
    """One part of the page."""

    id: str
    name: str
    figures: list[Figure] = field(default_factory=list[Figure])
    tables: list[Table] = field(default_factory=list[Table])
    texts: list[str] = field(default_factory=list[str])
    codes: list[str] = field(default_factory=list[str])
    drawings: list[Drawing] = field(default_factory=list[Drawing])

    def __bool__(self) -> bool:
        return bool(self.figures or self.tables or self.texts or self.codes or self.drawings)


def report_page(runs: Sequence[WholeRun], command: str, drawings: Sequence[Drawing] = ()) -> str:
    """The page of one run, or the comparison of several, as HTML.

    Args:
        runs: at least one.
        command: what it was made by.
        drawings: how it works, drawn from the run (`explain`).
    """
    whys = [why(run) for run in runs]
    body = [section for section in _sections(runs, whys, drawings) if section]
    figures = {figure.name: asdict(figure) for section in body for figure in section.figures}
    title = _title(runs[0]) if len(runs) == 1 else f"{len(runs)} runs compared"
    data = msgspec.json.encode({"name": runs[0].name if len(runs) == 1 else "compared", "figures": figures}).decode()
    plotly, js = _plotly(), _template("report.js")
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in (plotly, js)]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_template("report.html")).render(
        policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        title=title, command=command, mark=MARK,
        runs=[_head(run, found) for run, found in zip(runs, whys, strict=True)],
        sections=[(section.id, section.name) for section in body], body=body, css=Markup(_template("report.css")),
        data=Markup(data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")),
        plotly=Markup(plotly), js=Markup(js),
    )  # fmt: skip


def _sections(runs: Sequence[WholeRun], whys: Sequence[Why], drawings: Sequence[Drawing]) -> list[Section]:
    run, several = runs[0], len(runs) > 1
    learning = Section("learning", "Learning", [*curves(runs)])
    speed = [figure for figure in learning.figures if figure.name == "throughput"]
    learning.figures = [figure for figure in learning.figures if figure.name != "throughput"]
    if several:
        return [
            Section("compared", "Side by side", tables=[*results(runs), *setting_differences(runs)]),
            learning,
            Section("speed", "Speed", [*speed, *phases(runs)]),
        ]
    happened, (from_logs, sentence) = happenings(run), logged(run)
    learning.figures += from_logs
    learning.texts = [sentence] if sentence else []
    return [
        learning,
        Section("speed", "Speed", [*speed, *phases(runs), *waiting(run, whys[0].waits)],
                [*time_spent(run), *exchange(run)]),
        Section("explained", "How it works", drawings=[*drawings],
                texts=["Drawn from this very run: its times, its parameters, its ranks."] if drawings else []),
        Section("memory", "Memory", tables=[*held(run)]),
        Section("machines", "Machines", [*devices(run)]),
        Section("happened", "What happened", [*timeline(happened)], [*moments(happened)]),
        Section("samples", "Samples", tables=[*ledger(run)]),
        Section("repeat", "Repeat it", tables=[*settings_tables(run)], codes=[repeat(run)] if run.settings else []),
    ]  # fmt: skip


def _title(run: WholeRun) -> str:
    told = str(run.settings.get("task") or "").rpartition("/")[2]
    return f"{run.name}: {clean(told)[:80]}" if told and told not in run.name else run.name


def _head(run: WholeRun, found: Why) -> dict[str, Any]:
    tone = "good" if run.state in GOOD else "bad" if run.state in BAD else ""
    late = found.slowest if found.slow_phase == "data" else None
    names = {"waiting for data": "its own data", "waiting for the slowest rank": f"waiting for rank {late}'s data"}
    shares = [
        {
            "name": names.get(name, name) if late is not None else name,
            "percent": f"{share:.0%}" if share >= 0.01 else "<1%", "grow": f"{share:.4f}",
            "colour": "orange" if late is not None and "slowest" in name else COLOUR_OF[name],
        }
        for name, share in found.shares.items()
        if share > 0.004
    ]  # fmt: skip
    failed = run.state in BAD
    return {
        "name": run.name, "state": run.state or "unknown", "tone": tone, "shares": shares,
        "words": "" if failed and run.failures else run.words,
        "failed": breakdowns(run) if failed else [], "again": started_again(run),
        "learned": learned(run), "why": found.first,
        "advice": [*remedy(run), *found.advice] if failed else found.advice,
        "missing": run.missing, "tiles": [row[:2] for row in results([run])[0].rows],
        "shares_words": ", ".join(f"{share['name']} {share['percent']}" for share in shares),
    }  # fmt: skip


def _template(name: str) -> str:
    return (files("paceline.report") / "templates" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    """plotly's JavaScript, as its package brings it along; that ends no script of the page."""
    text = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return text.replace("</script", "<\\/script")
