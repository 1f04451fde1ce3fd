"""The page of a run is whole, says what is missing, and nothing in a hostile run becomes markup or code in it."""

import base64
import hashlib
import html.parser
import json
import re
from pathlib import Path

import pytest
from tests.rendered import rendered
from tests.report.folders import make_run

from paceline.cli import report
from paceline.errors import UsageError
from paceline.report.figures import make_diagrams
from paceline.report.page import render_html, results_table
from paceline.report.run import read_run
from paceline.runs.events import SampleIndices
from paceline.runs.writers import EventWriter

EVIL = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)> \x1b[31mred\x1b]0;title\x07 \"' {{ 7 * 7 }} \u2028"
)


class Elements(html.parser.HTMLParser):
    """Every element with its attributes, and the scripts' text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def made(*folders: Path) -> tuple[str, Elements]:
    runs = [read_run(folder) for folder in folders]
    text = render_html(runs, "paceline report", make_diagrams(runs[0]) if len(runs) == 1 else ())
    return text, Elements(text)


def texts(svg: str) -> list[str]:
    return [text for text in re.findall(">([^<>]+)<", svg) if text.strip()]


def test_only_the_two_scripts_of_the_page_may_run_and_nothing_is_fetched(tmp_path: Path) -> None:
    _, page = made(make_run(tmp_path / "run"))
    policy = next(a["content"] or "" for tag, a in page.found if tag == "meta" and "http-equiv" in a)
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    ours = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts[1:]]
    assert allowed == ours
    assert "default-src 'none'" in policy
    sources = [
        a
        for tag, a in page.found
        if tag in ("script", "link", "img", "iframe", "object") and ("src" in a or "href" in a)
    ]
    assert not sources


def test_a_hostile_run_is_inert(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "evil<b>", notices=(EVIL, "x" * 2_000_000), hosts=(EVIL, "n2"))
    (folder / "config.toml").write_text(f"task = {json.dumps(EVIL)}\nstrategy = '<i>'\n[run]\nepochs = 1\n")
    with (folder / "events-0.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","step":99,"epoch":0,"loss":NaN}\n{"kind":"evaluated","step":5,"metrics":{"')
        file.write(b'<b>":1e999},"seconds":0}\n\xff\xfe\n{"kind":"notice","text":')
    text, page = made(folder)
    assert [tag for tag, a in page.found if tag == "img" or any(name.startswith("on") for name in a)] == []
    assert len(page.scripts) == 3  # data, plotly, ours
    assert json.loads(page.scripts[0])["name"] == "evil<b>"
    assert "\x1b" not in text and "49" not in re.findall(r"red.{0,40}", text)
    assert len(text) < 6_000_000


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "config.toml").write_text("no toml at all")
    (folder / "events-1.jsonl").unlink()
    (folder / "events-1.jsonl").mkdir()
    text, _ = made(folder)
    assert "config.toml: " in text and "events-1.jsonl: " in text
    assert 'data-figure="loss"' in text


@pytest.mark.parametrize("kind", ["clocks that jump", "an older paceline", "running", "only a launch"])
def test_odd_folders_are_shown_as_far_as_they_go(kind: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    events = (folder / "events-0.jsonl").read_text()
    if kind == "clocks that jump":
        jumps = iter(range(10**6))
        text = re.sub(r'"unix_time":[0-9.]+', lambda m: f'"unix_time":{(-1) ** next(jumps) * 1e12}', events)
        (folder / "events-0.jsonl").write_text(text)
    elif kind == "an older paceline":
        (folder / "events-0.jsonl").write_text(re.sub(r',"phase_seconds":\{[^}]*\}', "", events))
    elif kind == "running":
        (folder / "summary.json").unlink()
        (folder / "events-0.jsonl").write_text(events[: len(events) // 2])
    else:
        for path in [*folder.glob("events-*"), *folder.glob("*.json"), folder / "config.toml"]:
            path.unlink()
    _, page = made(folder)
    assert len(page.scripts) == 3


def test_several_runs_are_compared(tmp_path: Path) -> None:
    text, page = made(make_run(tmp_path / "one"), make_run(tmp_path / "two", seed=7, exchange=0.02))
    figures = json.loads(page.scripts[0])["figures"]
    assert [trace["name"] for trace in figures["loss"]["traces"]] == ["one", "two"]
    cells = re.findall("<td[^>]*>([^<]*)", text)
    assert cells[cells.index("seed") :][:3] == ["seed", "0", "7"]
    assert cells.count("strategy") == 1  # among the results, and not among what differs


def test_figures_of_long_runs_are_thinned_and_keep_their_extremes(tmp_path: Path) -> None:
    _, page = made(make_run(tmp_path / "run", steps=3000))
    [loss] = json.loads(page.scripts[0])["figures"]["loss"]["traces"]
    assert len(loss["y"]) <= 600
    assert (loss["y"][0], loss["x2"][-1]) == (2.0, 3000)


def test_the_command_writes_into_the_run_and_over_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = make_run(tmp_path / "runs" / "one"), make_run(tmp_path / "runs" / "two")
    assert report.main([str(one), "--explain"]) == 0
    assert str(one / "report.html") in capsys.readouterr().out
    assert report.main(["one"]) == 0  # a page of its own may be written again
    assert report.main([str(one), str(two)]) == 0
    assert (tmp_path / "report.html").is_file()
    (tmp_path / "mine.html").write_text("<p>mine")
    for words, told in (
        (["one", "-o", "mine.html"], "is not a report"),
        (["one", "-o", "nowhere/page.html"], "does not exist"),
        (["three"], "three"),
        (["one"] * 17, "name 1 to 16 runs"),
        (["one", "runs/one"], "specified twice"),
        (["one", "two", "--explain"], "of one run"),
    ):
        with pytest.raises(UsageError, match=re.escape(told)):
            report.main(words)
    assert (tmp_path / "mine.html").read_text() == "<p>mine"


def test_the_drawings_show_this_run(tmp_path: Path) -> None:
    found = make_diagrams(read_run(make_run(tmp_path / "run", ranks=3)))
    stages, step, samples = (Elements(one.svg).found for one in found)
    assert [tag for tag, _ in stages].count("path") == 4 * 3
    rendered(texts(found[0].svg))
    phases = [a for tag, a in step if tag == "rect" and a["height"] == "30"]
    assert len(phases) == 3 * 5
    widths = {a["class"]: float(a["width"] or 0) for a in phases}
    assert widths["f-blue edge-on"] / widths["f-sky edge-on"] == pytest.approx(2, abs=0.01)
    assert len([a for tag, a in samples if tag == "rect"]) == 3
    assert all(f"v{rank}: rank {rank}" in found[2].svg for rank in range(3))


@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_the_stages_are_those_of_the_strategy(strategy: str, tmp_path: Path) -> None:
    rendered(texts(make_diagrams(read_run(make_run(tmp_path / "run", strategy=strategy)))[0].svg))


def test_one_rank_exchanges_nothing(tmp_path: Path) -> None:
    found = make_diagrams(read_run(make_run(tmp_path / "run", ranks=1, strategy="single")))
    rendered(texts(found[0].svg))
    assert not [a for _, a in Elements(found[1].svg).found if a.get("height") == "7"]


def test_a_collective_ends_where_it_was_needed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ranks=2)
    for path in folder.glob("events-*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for one in records:
            if one["kind"] == "traced":
                data, forward, backward, optimizer, sync = one["phases"]
                optimizer[1], sync[1] = optimizer[1] + sync[2], optimizer[1]
                one["phases"] = [data, forward, backward, sync, optimizer]
                begins = backward[1]
                late = [[f"<img src={n}>", begins + n / 1000, -1.0, 5000] for n in range(2)]  # their ends were not seen
                one["calls"] = [*late, ["totals of the step", begins, 0.001, 72]]
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
    svg = next(one.svg for one in make_diagrams(read_run(folder)) if one.title.startswith("Step "))
    assert "img" not in {tag for tag, _ in Elements(svg).found}
    rects = [a for tag, a in Elements(svg).found if tag == "rect"]
    calls = [a for a in rects if a["height"] == "7"]
    assert [a["class"] for a in calls] == ["f-red edge-on", "f-red edge-on", "f-yellow edge-on"] * 2
    assert len({a["y"] for a in calls[:3]}) == 2
    sync = next(a for a in rects if a["class"] == "f-grey edge-on")
    ends = [float(a["x"] or 0) + float(a["width"] or 0) for a in (*calls[:2], sync)]
    assert ends == pytest.approx([ends[2]] * 3, abs=0.2)


def test_samples_of_virtual_ranks_are_listed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ranks=2)
    for rank in range(2):
        with EventWriter(folder / f"events-{rank}.jsonl") as writer:
            writer.write(SampleIndices(1, 0, rank, 0, [10 * rank + n for n in range(9)]))
    svg = make_diagrams(read_run(folder))[2].svg
    assert "v1: rank 1; 10, 11, 12, 13, 14, 15</title>" in svg


def test_unequal_numbers_of_virtual_ranks_are_in_the_results(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ranks=2)
    assert not [row for row in results_table([read_run(folder)]).rows if "virtual" in row[0]]
    for rank, (usual, share) in enumerate((("[0,1]", "[0,3]"), ("[1,2]", "[3,4]"))):
        path = folder / f"events-{rank}.jsonl"
        path.write_text(path.read_text().replace(f'"share":{usual}', f'"share":{share}'))
    assert ["virtual ranks of each rank", "3, 1"] in results_table([read_run(folder)]).rows
