"""What a hostile neighbour or a careless user puts into a run's folder ends neither in a traceback nor in a page of
hundreds of megabytes, and nothing is written where a link leads.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.errors import raises
from tests.report.folders import make_run

from paceline.cli.report import main as report
from paceline.cli.report import trace, trace_events
from paceline.errors import UsageError
from paceline.report import run as reading
from paceline.report.figures import make_diagrams
from paceline.report.log_analysis import LogAnalyzer
from paceline.report.page import render_html
from paceline.report.run import read_run
from paceline.runs.console import sparkline
from paceline.runs.events import decode_event
from paceline.runs.machine import decode_record
from paceline.runs.reading import read_lines

MOST_PAGE_BYTES = 6_000_000


def edit(folder: Path, kind: str, **changed: Any) -> Path:
    """Give all records of a kind, of all ranks, other values; without any, leave them out."""
    for path in folder.glob("events-*.jsonl"):
        records = [json.loads(line) for line in read_lines(path)]
        records = [{**one, **changed} if one["kind"] == kind else one for one in records]
        kept = [json.dumps(one) for one in records if changed or one["kind"] != kind]
        path.write_text("\n".join(kept) + "\n")
    return folder


HUGE = 10**4000
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nobody says that it started": ("started", {}),
    "no step, but steps in detail": ("step", {}),
    "shapes beyond all numbers": ("anatomy", {"parameters": [["w", [2**62] * 1000, 2**63 - 1]]}),
    "a shape of thousands of digits": ("anatomy", {"parameters": [["w", [HUGE], 1]]}),
    "a million virtual ranks": ("step", {"share": [0, 1_000_000]}),
    "virtual ranks that every rank has": ("step", {"share": [0, 290]}),
    "times from the ends of all floats": ("step", {"unix_time": 1e308, "seconds": 1e308}),
    "times as far apart as can be": ("step", {"unix_time": -1e12, "seconds": 1e12}),
    "steps that went backwards": ("step", {"seconds": -1e11, "phase_seconds": {"sync": -1e11}}),
    "the largest counts": ("step", {"samples": 2**63 - 1, "consumed": 2**63 - 1, "epoch": 2**63 - 1}),
    "losses as large as can be": ("step", {"loss": 1e308, "grad_norm": -1e308, "lr": 5e-324}),
    "many collectives": ("traced", {"calls": [["c", 0.0, 0.1, 5]] * 1000}),
    "many phases": ("traced", {"phases": [["p", 0.0, 0.1]] * 1000}),
}


@pytest.mark.parametrize("case", CASES)
def test_odd_numbers_end_in_a_page_that_is_not_large(case: str, tmp_path: Path) -> None:
    kind, changed = CASES[case]
    folder = edit(make_run(tmp_path / "run", steps=12, notices=("hello",)), kind, **changed)
    run = read_run(folder)
    assert len(render_html([run], "", make_diagrams(run)).encode()) < MOST_PAGE_BYTES
    assert b"NaN" not in msgspec.json.encode([*trace_events(run)])
    analyzer = LogAnalyzer("run")
    analyzer.add_run(folder)
    msgspec.json.encode(analyzer.result)


@pytest.mark.parametrize("threads", ['"many"', "[1]", "{}"])
def test_threads_that_are_no_number_are_not_counted(threads: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=12)
    (folder / "summary.json").unlink()
    (folder / "environment.json").write_text(f'{{"threads_per_rank": {threads}}}')
    render_html([read_run(folder)], "")


@pytest.mark.parametrize("number", ["-1", "1" * 400, str(2**63)])
def test_a_record_with_a_size_that_is_none_is_left_out(number: str) -> None:
    machine = '{"kind":"machine","unix_time":1,"host":"n","cores":1,"cores_busy":1,"memory_total_bytes":1,'
    saved = '{"kind":"checkpointed","step":1,"failure":"","stall_seconds":0,"write_seconds":0,'
    assert decode_record(f'{machine}"memory_bytes":{number}}}'.encode()) is None
    assert decode_event(f'{saved}"size_bytes":{number}}}'.encode()) is None


def test_a_curve_over_all_floats_is_drawn() -> None:
    assert len(sparkline([-1.7e308, 1.7e308, math.inf], 10)) == 2


def test_of_what_a_hostile_run_holds_only_so_much_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", steps=12)
    with (folder / "events-0.jsonl").open("a") as file:
        start = next(line for line in read_lines(folder / "events-0.jsonl") if b'"started"' in line).decode()
        file.write(f"{start}\n" * 5000)
        notice = json.dumps({"kind": "notice", "text": "x" * 100_000})
        file.write(f"{notice}\n" * 10)
    run = read_run(folder)
    assert run.first_rank_log is not None
    assert len(run.first_rank_log.start_events) < 2500 and not any(
        len(str(event)) > 50_000 for _, event in run.first_rank_log.events
    )
    monkeypatch.setattr(reading, "MAX_BYTES", 2000)
    run = read_run(folder)
    assert any(one.startswith("events-0.jsonl:") for one in run.unreadable_parts)


@pytest.mark.parametrize("command", [report, trace])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_the_folder_leads_the_page_nowhere(
    command: Any, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, thesis = make_run(tmp_path / "run", steps=12), tmp_path / "thesis"
    link = folder / ("report.html" if command is report else "trace.json")
    link.symlink_to(thesis)
    if there:
        thesis.write_text("thesis")
    monkeypatch.chdir(folder)
    try:
        command(["."])
    except UsageError as refused:
        assert "already exists" in str(refused)
    assert thesis.read_text() == "thesis" if there else not os.path.lexists(thesis)


@pytest.mark.parametrize("command", [report, trace])
def test_a_name_does_not_steer_the_terminal(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "\x1b[2Jrun", steps=12)
    monkeypatch.chdir(tmp_path)
    command([folder.name, *(["-o", f"{folder.name}.json"] if command is trace else [])])
    assert "run" in (shown := capsys.readouterr().out) and "\x1b" not in shown


@pytest.mark.parametrize("command", [report, trace])
def test_a_pipe_or_device_is_not_replaced(command: Any, tmp_path: Path) -> None:
    folder, pipe = make_run(tmp_path / "run", steps=12), tmp_path / "pipe"
    os.mkfifo(pipe)
    with raises("out-not-a-file"):
        command([str(folder), "-o", str(pipe), *(["--overwrite"] if command is trace else [])])
