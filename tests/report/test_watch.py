"""`paceline watch`: what it shows of runs that go on, are large, hostile, somebody else's, or over; and its keys."""

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests import warm
from tests.rendered import rendered
from tests.small_mnist import small_mnist as small_mnist
from textual.widgets import Static

from paceline.cli import live as command
from paceline.cli import main
from paceline.cli.run_state import NO_ACCESS
from paceline.protocol.evidence import LIVE, WATCHED_FILE, LiveSamples, Phase, RankSample
from paceline.report.live import FileTail, LiveReader, RankSnapshot, RunSnapshot
from paceline.report.watch_app import KeyActions, RankScreen, RankTable, WatchApp
from paceline.report.watch_lines import summary_line
from paceline.runs.console import format_duration, format_size, shorten, sparkline
from paceline.runs.events import Started, Step
from paceline.runs.machine import GpuUtilization, NodeUtilization, RankUtilization, node_log_name
from paceline.runs.summary import StatusReport
from paceline.runs.writers import EventWriter

HOSTILE = "[red]n1[/red]\x1b]0;owned\x07\x1b[2J\u202e[@click=app.quit]x[/]" + "A" * 5000
RUNNING = StatusReport(
    run_dir="runs/demo", state="running", task="mnist-cnn", strategy="bucketed", world_size=2, total_steps=100
)


def step(number: int, sync: float = 0.1, forward: float = 0.1) -> Step:
    phases = {"forward": forward, "sync": sync}
    return Step(number, 0, 1 / number, 64, 0.1, 0.2, 0.0, 1e9 + number, phase_seconds=phases, share=(8, 12))


def write_events(folder: Path, rank: int, steps: int, forward: float = 0.1) -> None:
    with EventWriter(folder / f"events-{rank}.jsonl") as writer:
        writer.write(Started(1, rank, 2, "n1", 1, "cpu", 1e9))
        for number in range(1, steps + 1):
            writer.write(step(number, forward=forward, sync=0.5 - forward))


def live_rank(rank: int, steps: int, forward: float) -> RankSample:
    spent = [0.0] * len(Phase)
    spent[Phase.FORWARD], spent[Phase.SYNC] = steps * forward, steps * (0.5 - forward)
    return RankSample(rank, "n1", 1, step=steps, phase=Phase.SYNC, phase_seconds=tuple(spent), own_virtual_ranks=3)


def say_live(attempt: Path, steps: int) -> None:
    ranks = tuple(live_rank(rank, steps, 0.4 if rank == 1 else 0.1) for rank in range(3))
    (attempt / LIVE).write_bytes(msgspec.json.encode(LiveSamples(float(steps), 0, ranks)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a start, that nobody works on."""
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "config.toml").write_text("")
    return tmp_path


def test_the_agents_word_counts_while_it_is_new_and_the_slow_rank_is_named(run: Path) -> None:
    write_events(run, 0, 5)
    attempt, reader = run / "attempt-1", LiveReader(run, may_ask=True)
    say_live(attempt, 10)
    assert not reader.read_snapshot(attempt).is_reported_by_agent  # it may be outdated
    for steps in (20, 30):
        say_live(attempt, steps)
        now = reader.read_snapshot(attempt)
    assert now.is_reported_by_agent
    assert [one.is_slowest for one in now.ranks] == [False, True, False]
    assert "rank 1 (n1) is slow" in now.slow_rank_message
    assert [round(one.waiting_fraction or 0, 2) for one in now.ranks] == [0.8, 0.2, 0.8]
    assert now.ranks[1].work_seconds[-1] == pytest.approx(0.4) and now.ranks[1].virtual_ranks == 3
    assert (attempt / WATCHED_FILE).exists()


def test_without_an_agents_word_the_ranks_own_records_do_and_others_folders_are_left_as_they_are(run: Path) -> None:
    for rank in range(2):
        write_events(run, rank, 9, forward=0.1 + 0.3 * rank)
    reader = LiveReader(run, may_ask=False)
    now = reader.read_snapshot(run / "attempt-1")
    assert not now.is_reported_by_agent
    assert [(one.rank, one.step, one.host, one.is_slowest, one.virtual_ranks) for one in now.ranks] == [
        (0, 9, "n1", False, 4),
        (1, 9, "n1", True, 4),
    ]
    assert (now.step, now.samples_per_second, len(now.losses)) == (9, 64.0, 9)
    assert [*(run / "attempt-1").iterdir()] == []


def test_the_use_of_the_devices_is_shown_while_it_runs() -> None:
    state = msgspec.structs.replace(RUNNING, tokens_per_second=640.0, mfu=0.5, goodput=0.9)
    rendered(summary_line(RunSnapshot(step=3, samples_per_second=64.0), state))


def test_only_what_is_new_is_read_and_of_a_long_file_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    path.write_bytes(b"".join(b"%07d\n" % number for number in range(100_000)))
    file = FileTail(path)
    first = file.read_new_lines()
    assert len(first) < 10_000
    assert first[-1] == b"0099999"
    with path.open("ab") as more:
        more.write(b"one\ntw")
    assert [*file.read_new_lines()] == [b"one"]
    with path.open("ab") as more:
        more.write(b"o\n" + b"x" * (3 << 20))
    file.read_new_lines()
    with path.open("ab") as more:
        more.write(b"\nlast\n")
    assert file.read_new_lines()[-1] == b"last"  # a line of megabytes hides nothing after it
    (tmp_path / "thinned").write_bytes(b"old\n" * 3)
    (tmp_path / "thinned").rename(path)
    assert [*file.read_new_lines()] == []  # as a writer leaves it that puts old records together: they were seen before
    with path.open("ab") as more:
        more.write(b"new\n")
    assert [*file.read_new_lines()] == [b"new"]
    assert [*FileTail(tmp_path / "none").read_new_lines()] == []


def test_a_rank_has_its_share_of_its_machine(run: Path) -> None:
    write_events(run, 0, 3)
    gpu = GpuUtilization(0, "H200", 0.9, 1 << 30, 2 << 30, 500.0, 80.0, 1000.0, 1980.0, "at its power limit")
    use = NodeUtilization(1.0, "n1", 8, 3.0, 97, 100, ranks={0: RankUtilization(1.5, 1 << 30)}, gpus=(gpu,))
    (run / node_log_name(0)).write_bytes(msgspec.json.encode(use) + b"\n")
    reader = LiveReader(run, may_ask=False)
    (one,) = reader.read_snapshot(None).ranks
    assert (one.resource_use, one.gpu) == (RankUtilization(1.5, 1 << 30), gpu)


def many(count: int, tick: int = 0) -> RunSnapshot:
    ranks = tuple(
        RankSnapshot(
            n, HOSTILE, "sync", "", 7 + tick, (0.1, 0.1 + n / 1000), 0.5, 0.0, RankUtilization(1.0, n << 20), None,
            n == 150, 1 + n % 9,
        )
        for n in range(count)
    )  # fmt: skip
    return RunSnapshot(
        ranks,
        is_reported_by_agent=True,
        step=7 + tick,
        losses=(2.0, 1.0),
        slow_rank_message="rank 150 is slow: [red]0.25 s",
    )


def on_screen(actions: KeyActions, act: Callable[[WatchApp, Any], Awaitable[None]], width: int = 80) -> WatchApp:
    app = WatchApp(actions)

    async def drive() -> None:
        async with app.run_test(size=(width, 24)) as pilot:
            while app.seen is None:
                await pilot.pause(0.01)
            await act(app, pilot)

    asyncio.run(drive())
    return app


def actions(look: Callable[[], tuple[RunSnapshot, StatusReport]], told: list[str] | None = None) -> KeyActions:
    told = [] if told is None else told

    def say(word: str) -> str:
        told.append(word)
        return HOSTILE

    return KeyActions(
        look, lambda n: f"{HOSTILE} stack of {n}", lambda _: HOSTILE, lambda: say("save"), lambda: say("stop")
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("width", [80, 200])
def test_200_ranks_with_hostile_names_stay_readable_and_inert(width: int) -> None:
    standing = StatusReport(
        run_dir=HOSTILE, state="running", words=HOSTILE, task=HOSTILE, strategy=HOSTILE, metrics={HOSTILE: 1.0}
    )
    told: list[str] = []

    async def act(app: WatchApp, pilot: Any) -> None:
        await pilot.pause()
        table = app.query_one(RankTable)
        assert table.row_count == 200
        assert table.get_row_at(0)[1].plain == "[red]n1[/red]…"  # as it is written, and cut
        assert table.virtual_size.width <= width
        assert [str(column.label) for column in table.columns.values()].count("virtual") == (width >= 90)
        await pilot.press("s")  # the slowest first
        assert table.get_row_at(0)[0].plain.strip() == "199"
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, RankScreen)
        await pilot.press("escape")
        await pilot.press("x", "n")
        assert told == []
        await pilot.press("x", "y", "c")
        await pilot.pause()
        shown = app.export_screenshot()
        assert "slow:&#160;[red]0.25" in shown and not {"\x1b", "\u202e"} & {*shown}

    on_screen(actions(lambda: (many(200), standing), told), act, width)
    assert sorted(told) == ["save", "stop"]


@pytest.mark.parametrize(
    ("slow_rank", "note"), [("", "slowest first"), ("rank 1 is slow", "slowest first  ·  rank 1 is slow")]
)
def test_the_note_begins_with_the_order(slow_rank: str, note: str) -> None:
    async def sort(app: WatchApp, pilot: Any) -> None:
        await pilot.press("s")
        assert str(app.query_one("#note", Static).content) == note

    on_screen(actions(lambda: (RunSnapshot(is_reported_by_agent=True, slow_rank_message=slow_rank), RUNNING)), sort)


def test_it_leaves_when_the_run_ends_and_says_why_it_cannot_look() -> None:
    async def wait(app: WatchApp, pilot: Any) -> None:
        while app.is_running:
            await pilot.pause(0.01)

    states = itertools.chain(["running"], itertools.repeat("done"))
    app = on_screen(actions(lambda: (many(2), StatusReport(run_dir="demo", state=next(states)))), wait)  # type: ignore[arg-type]
    assert app.seen is not None
    assert app.seen[1].state == "done"

    def fail() -> tuple[RunSnapshot, StatusReport]:
        raise OSError("gone") if next(states) else AssertionError

    app = WatchApp(actions(fail))
    asyncio.run(app.run_async(headless=True))
    assert isinstance(app.failure, OSError)


def test_a_run_that_has_ended_is_said_to_have(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(run, 0, 3)
    assert main(["watch", str(run)]) == 0
    out = capsys.readouterr().out
    assert "lost" in out.splitlines()[0]
    assert "step 3" in out.splitlines()[0] and "without progress" not in out
    assert main(["watch", str(run / "attempt-1")]) == 2


def test_nothing_is_asked_of_a_run_that_is_not_ours(run: Path) -> None:
    (run / "attempt-1" / "x").write_text("")
    theirs = command._Run(run, NO_ACCESS)
    for ask in (theirs.save, theirs.stop, lambda: theirs.stack(0)):
        with pytest.raises(command.UsageError):
            ask()
    assert [path.name for path in (run / "attempt-1").iterdir()] == ["x"]


def test_words_and_curves() -> None:
    assert sparkline([1, 2, 3, float("nan")], 10) == "▁▅█" or sparkline([1, 2, 3], 10) == "▁▄█"
    assert sparkline([1.0, 1.0, 1.001], 10) == "▂▂▂"
    assert sparkline([], 5) == sparkline([1], 0) == ""
    assert (format_size(0), format_size(1536), format_size(1 << 40)) == ("0 B", "1.5 KiB", "1.0 TiB")
    assert [format_duration(s) for s in (0.0031, 2, 245, 12_000, 190_800, -1, float("nan"))] == [
        "3 ms", "2.0 s", "4:05", "3:20:00", "2 d 5 h", "?", "?",
    ]  # fmt: skip
    assert len(shorten("a\nb" * 1_000_000, 10)) == 10
    still = RankSnapshot(0, no_progress_seconds=60.0)
    rendered(summary_line(RunSnapshot((still,)), RUNNING))


@pytest.fixture
def training(tmp_path: Path, small_mnist: Path) -> Iterator[Path]:
    """A run of two ranks that goes on until it is stopped, and saves nothing by itself."""
    folder = tmp_path / "run"
    words = ["-m", "paceline", "train", "mnist-cnn", "--data-dir", small_mnist, "--nproc", 2, "--steps", 100_000]
    more = ["--global-batch", 16, "--run-dir", folder, "--device", "cpu", "--eval-every", "100000"]
    with (tmp_path / "out").open("wb") as out:
        process = warm.Popen([*words, *more, "--no-checkpoint-epochs"], torch=False, stdout=out, stderr=out)
        try:
            yield folder
        finally:
            process.terminate()
            process.wait()


@pytest.mark.slow
def test_a_real_run_is_seen_live_saves_when_asked_shows_its_stack_and_stops(training: Path) -> None:
    while not (training / "events-1.jsonl").exists():
        time.sleep(0.05)
    watched = command._Run(training, ("ssh",))
    told = KeyActions(watched.read_view, watched.stack, watched.log, watched.save, watched.stop)

    async def until(pilot: Any, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(90):  # else a key without effect is a test without an end
            while not condition():
                await pilot.pause(0.1)

    async def act(app: WatchApp, pilot: Any) -> None:
        await until(
            pilot,
            lambda: (
                app.seen
                and app.seen[0].is_reported_by_agent
                and app.seen[0].step
                and app.seen[0].ranks[1].resource_use
                and app.seen[1].world_size
            ),
        )  # which rank 0 writes down in its own time
        assert app.seen is not None
        now, standing = app.seen
        assert [one.host for one in now.ranks] == [os.uname().nodename] * 2
        assert (standing.world_size, standing.strategy) == (2, "bucketed")
        await pilot.press("c")
        await until(pilot, lambda: app.seen and app.seen[0].saved_step)
        assert len([*(training / "checkpoints").glob("step-*")]) == 1
        await pilot.press("down", "enter")
        await until(pilot, lambda: "innermost first" in app.export_screenshot().replace("&#160;", " "))
        await pilot.press("escape", "x", "y")
        await until(pilot, lambda: not app.is_running)

    app = on_screen(told, act)
    assert app.seen is not None
    assert app.seen[1].state == "saved"
