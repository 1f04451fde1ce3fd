"""`paceline watch` on a terminal: a title, a table with a row for each rank, and keys. No text is parsed as markup."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from paceline.errors import PacelineError
from paceline.report.live import RunSnapshot
from paceline.report.watch_lines import COLUMNS, ORDERS, Column, notes_text, progress_line, title_line
from paceline.runs.console import shorten
from paceline.runs.summary import LIVE_STATES, StatusReport

EVERY_SECONDS = 1.0
ROWS_PER_DRAW = 32  # higher terminals skip some updates, because a row takes half a millisecond


@dataclass(frozen=True)
class KeyActions:
    """The actions of the keys. An action may take seconds. It raises PacelineError or OSError if it fails."""

    read_state: Callable[[], tuple[RunSnapshot, StatusReport]]
    request_stack: Callable[[int], str]
    read_log: Callable[[int], str]
    save: Callable[[], str]
    stop: Callable[[], str]
    can_control: bool = True


class ConfirmScreen(ModalScreen[bool]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n,escape,q", "dismiss(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self._question}\n\n  y  yes      n  no"), id="asked", markup=False)


class RankScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "back")]

    def __init__(self, rank: int, actions: KeyActions) -> None:
        super().__init__()
        self._rank, self._actions = rank, actions

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="details"):
            yield Static(Text(f"rank {self._rank}", "bold"), markup=False)
            yield Static(Text("requesting its stack ...", "dim"), id="stack", markup=False)
            yield Static(Text("\nlast lines of its log", "bold"), markup=False)
            yield Static("", id="log", markup=False)
        yield Footer()

    async def on_mount(self) -> None:
        self.run_worker(self._fill("log", self._actions.read_log))
        self.run_worker(self._fill("stack", self._actions.request_stack))

    async def _fill(self, name: str, request: Callable[[int], str]) -> None:
        text = await _result_of(lambda: request(self._rank))
        if self.is_attached:
            self.query_one(f"#{name}", Static).update(Text(text))


class RankTable(DataTable[Text]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "stack and log")]


class WatchApp(App[None]):
    CSS = """
    Screen { background: $background; }
    #title, #progress, #note { height: auto; padding: 0 1; }
    #ranks { height: 1fr; }
    #asked { width: auto; max-width: 90%; height: auto; padding: 1 3; border: round $warning; background: $surface; }
    #details { width: 96%; height: 94%; padding: 0 1; border: round $accent; background: $surface; }
    ConfirmScreen, RankScreen { align: center middle; }
    """
    TITLE = "paceline watch"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort"),
        Binding("c", "save", "checkpoint"),
        Binding("x", "stop", "stop"),
        Binding("q,ctrl+c", "quit", "leave"),
    ]

    def __init__(self, actions: KeyActions) -> None:
        super().__init__()
        self._actions = actions
        self._order = 0
        self._shown: list[tuple[int, list[Text]]] = []  # the rows of the table: rank, cells
        self._titles: list[str] = []  # of its columns
        self._widths: list[int] = []
        self.seen: tuple[RunSnapshot, StatusReport] | None = None  # the last state
        self.failure: BaseException | None = None  # the error that ended the app

    def compose(self) -> ComposeResult:
        yield Static("", id="title", markup=False)
        yield Static("", id="progress", markup=False)
        yield RankTable(id="ranks", cursor_type="row", zebra_stripes=True, cell_padding=1)
        yield Static("", id="note", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(RankTable).focus()
        self.run_worker(self._poll_state(), exclusive=True)

    async def _poll_state(self) -> None:
        for number in itertools.count():
            try:
                self.seen = await asyncio.to_thread(self._actions.read_state)
            except Exception as error:  # for example a deleted folder: printed after the terminal is restored
                self.failure = error
                self.exit()
                return
            has_ended = self.seen[1].state not in (*LIVE_STATES, "unknown")
            if has_ended or number % (1 + self.size.height // ROWS_PER_DRAW) == 0:
                self._draw()
            if has_ended:
                self.exit()
                return
            await asyncio.sleep(EVERY_SECONDS)

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if self.seen is None:
            return
        now, state = self.seen
        self.screen_stack[0].query_one("#title", Static).update(title_line(state))
        self.screen_stack[0].query_one("#progress", Static).update(progress_line(now, state, self.size.width - 2))
        self._draw_table(now)
        note = notes_text(now, may_act=self._actions.can_control)
        if self._order:
            note = Text("  ·  ", "dim").join([Text(ORDERS[self._order][0], "dim"), *([note] if note else [])])
        self.screen_stack[0].query_one("#note", Static).update(note)

    def _draw_table(self, now: RunSnapshot) -> None:
        """Update only the cells that changed, which are few even with 200 ranks."""
        table = self.screen_stack[0].query_one("#ranks", RankTable)
        width = self.size.width
        columns = [column for column in COLUMNS if column.min_terminal_width <= width and _is_used(column.title, now)]
        ranks = sorted(now.ranks, key=ORDERS[self._order][1])
        rows = [(rank.rank, [Text.assemble(column.make_cell(rank)) for column in columns]) for rank in ranks]
        widths = [max(len(c.title), *(cells[n].cell_len for _, cells in rows), 0) for n, c in enumerate(columns)]
        if (
            self._titles != (titles := [column.title for column in columns])
            or len(rows) != len(self._shown)
            or any(new > old for new, old in zip(widths, self._widths, strict=True))
        ):
            row, scroll = table.cursor_row, table.scroll_y
            table.clear(columns=True)
            for column, width in zip(columns, widths, strict=True):
                label = Text(column.title, justify="right" if column.is_right_aligned else "left")
                table.add_column(label, key=column.title, width=width)  # explicit, because measuring all cells is slow
            for number, (_, cells) in enumerate(rows):
                table.add_row(*(_aligned(c, cell) for c, cell in zip(columns, cells, strict=True)), key=str(number))
            table.move_cursor(row=row)
            table.scroll_to(y=scroll, animate=False)
            self._titles, self._widths = titles, widths
        else:
            for number, ((_, cells), (_, before)) in enumerate(zip(rows, self._shown, strict=True)):
                for column, cell, old in zip(columns, cells, before, strict=True):
                    if cell != old:
                        table.update_cell(str(number), column.title, _aligned(column, cell))
        self._shown = rows

    def action_sort(self) -> None:
        self._order = (self._order + 1) % len(ORDERS)
        self._draw()

    def on_data_table_row_selected(self, _: DataTable.RowSelected) -> None:
        row = self.query_one(RankTable).cursor_row
        if 0 <= row < len(self._shown):
            self.push_screen(RankScreen(self._shown[row][0], self._actions))

    def action_save(self) -> None:
        self.run_worker(self._run_action(self._actions.save))

    def action_stop(self) -> None:
        if self.seen is None:
            return

        def on_answer(confirmed: bool | None) -> None:
            if confirmed:
                self.run_worker(self._run_action(self._actions.stop))

        name = shorten(self.seen[1].name, 50)
        self.push_screen(ConfirmScreen(f"Stop {name}? It saves its state first, and can be resumed."), on_answer)

    async def _run_action(self, action: Callable[[], str]) -> None:
        self.notify(await _result_of(action), markup=False, timeout=8)


async def _result_of(action: Callable[[], str]) -> str:
    try:
        return await asyncio.to_thread(action)
    except (PacelineError, OSError) as error:
        return str(error)


def _is_used(name: str, now: RunSnapshot) -> bool:
    if name.startswith("GPU"):
        return any(rank.gpu is not None for rank in now.ranks)
    if name == "still":
        has_work = any(rank.work_seconds for rank in now.ranks)
        return any(rank.no_progress_seconds >= 1 for rank in now.ranks) or not has_work
    if name == "virtual":
        return any(rank.virtual_ranks > 1 for rank in now.ranks)
    if name in ("work", "history"):
        return any(rank.work_seconds for rank in now.ranks)
    return True


def _aligned(column: Column, cell: Text) -> Text:
    cell = cell.copy()
    cell.justify = "right" if column.is_right_aligned else "left"
    return cell
