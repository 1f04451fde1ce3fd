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
from paceline.report.live import RunNow
from paceline.report.watch_lines import COLUMNS, ORDERS, Column, footnote, progress, title
from paceline.runs.console import one_line
from paceline.runs.summary import LIVE, RunState

EVERY_SECONDS = 1.0
ROWS_A_LOOK = 32  # higher terminals do not draw each look: a row takes half a millisecond


@dataclass(frozen=True)
class Actions:
    """The actions of the keys. Each may take seconds, and raises PacelineError or OSError if it fails."""

    look: Callable[[], tuple[RunNow, RunState]]
    stack: Callable[[int], str]
    log: Callable[[int], str]
    save: Callable[[], str]
    stop: Callable[[], str]
    may_act: bool = True


class ConfirmScreen(ModalScreen[bool]):
    """Yes or no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n,escape,q", "dismiss(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """One box."""
        yield Static(Text(f"{self._question}\n\n  y  yes      n  no"), id="asked", markup=False)


class RankScreen(ModalScreen[None]):
    """The stack of one rank and the last lines of its log."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "back")]

    def __init__(self, rank: int, actions: Actions) -> None:
        super().__init__()
        self._rank, self._actions = rank, actions

    def compose(self) -> ComposeResult:
        """Two parts, each as long as it is."""
        with VerticalScroll(id="details"):
            yield Static(Text(f"rank {self._rank}", "bold"), markup=False)
            yield Static(Text("asking it where it is ...", "dim"), id="stack", markup=False)
            yield Static(Text("\nthe last lines of its log", "bold"), markup=False)
            yield Static("", id="log", markup=False)
        yield Footer()

    async def on_mount(self) -> None:
        """Request both; the stack may take seconds."""
        self.run_worker(self._fill("log", self._actions.log))
        self.run_worker(self._fill("stack", self._actions.stack))

    async def _fill(self, name: str, ask: Callable[[int], str]) -> None:
        text = await _result_of(lambda: ask(self._rank))
        if self.is_attached:
            self.query_one(f"#{name}", Static).update(Text(text))


class RankTable(DataTable[Text]):
    """The table of ranks, with Enter in the footer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "stack and log")]


class WatchApp(App[None]):
    """The screen."""

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

    def __init__(self, actions: Actions) -> None:
        super().__init__()
        self._actions = actions
        self._order = 0
        self._shown: list[tuple[int, list[Text]]] = []  # the table as it is: rank, cells
        self._form: list[str] = []  # its columns
        self._widths: list[int] = []
        self.seen: tuple[RunNow, RunState] | None = None
        """the last look"""
        self.failure: BaseException | None = None
        """the error that ended it"""

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield Static("", id="title", markup=False)
        yield Static("", id="progress", markup=False)
        yield RankTable(id="ranks", cursor_type="row", zebra_stripes=True, cell_padding=1)
        yield Static("", id="note", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one(RankTable).focus()
        self.run_worker(self._follow(), exclusive=True)

    async def _follow(self) -> None:
        for look in itertools.count():
            try:
                self.seen = await asyncio.to_thread(self._actions.look)
            except Exception as error:  # for example a deleted folder: printed after the terminal is restored
                self.failure = error
                self.exit()
                return
            over = self.seen[1].state not in (*LIVE, "unknown")
            if over or look % (1 + self.size.height // ROWS_A_LOOK) == 0:
                self._draw()
            if over:
                self.exit()
                return
            await asyncio.sleep(EVERY_SECONDS)

    def on_resize(self) -> None:
        """Wider: more columns."""
        self._draw()

    def _draw(self) -> None:
        if self.seen is None:
            return
        now, standing = self.seen
        self.screen_stack[0].query_one("#title", Static).update(title(standing))
        self.screen_stack[0].query_one("#progress", Static).update(progress(now, standing, self.size.width - 2))
        self._draw_table(now)
        note = footnote(now, may_act=self._actions.may_act)
        if self._order:
            note = Text("  ·  ", "dim").join([Text(ORDERS[self._order][0], "dim"), *([note] if note else [])])
        self.screen_stack[0].query_one("#note", Static).update(note)

    def _draw_table(self, now: RunNow) -> None:
        """Update only the cells that have changed: with 200 ranks they are few."""
        table = self.screen_stack[0].query_one("#ranks", RankTable)
        width = self.size.width
        columns = [one for one in COLUMNS if one.least_width <= width and _is_used(one.title, now)]
        ranks = sorted(now.ranks, key=ORDERS[self._order][1])
        rows = [(one.rank, [column.cell(one) for column in columns]) for one in ranks]
        widths = [max(len(one.title), *(cells[n].cell_len for _, cells in rows), 0) for n, one in enumerate(columns)]
        if (
            self._form != (form := [one.title for one in columns])
            or len(rows) != len(self._shown)
            or any(new > old for new, old in zip(widths, self._widths, strict=True))
        ):
            at, where = table.cursor_row, table.scroll_y
            table.clear(columns=True)
            for column, width in zip(columns, widths, strict=True):
                label = Text(column.title, justify="right" if column.right else "left")
                table.add_column(label, key=column.title, width=width)  # given: to measure all cells takes long
            for number, (_, cells) in enumerate(rows):
                table.add_row(*(_aligned(c, cell) for c, cell in zip(columns, cells, strict=True)), key=str(number))
            table.move_cursor(row=at)
            table.scroll_to(y=where, animate=False)
            self._form, self._widths = form, widths
        else:
            for number, ((_, cells), (_, before)) in enumerate(zip(rows, self._shown, strict=True)):
                for column, cell, old in zip(columns, cells, before, strict=True):
                    if cell.plain != old.plain or cell.style != old.style:
                        table.update_cell(str(number), column.title, _aligned(column, cell))
        self._shown = rows

    def action_sort(self) -> None:
        """Sort by the next order."""
        self._order = (self._order + 1) % len(ORDERS)
        self._draw()

    def on_data_table_row_selected(self, _: DataTable.RowSelected) -> None:
        """Show the rank under the cursor."""
        row = self.query_one(RankTable).cursor_row
        if 0 <= row < len(self._shown):
            self.push_screen(RankScreen(self._shown[row][0], self._actions))

    def action_save(self) -> None:
        """Ask for a checkpoint."""
        self.run_worker(self._do(self._actions.save))

    def action_stop(self) -> None:
        """Stop the run after a confirmation."""
        if self.seen is None:
            return

        def then(sure: bool | None) -> None:
            if sure:
                self.run_worker(self._do(self._actions.stop))

        name = one_line(self.seen[1].name, 50)
        self.push_screen(ConfirmScreen(f"End {name}? It saves its state first, and can be resumed."), then)

    async def _do(self, action: Callable[[], str]) -> None:
        self.notify(await _result_of(action), markup=False, timeout=8)


async def _result_of(action: Callable[[], str]) -> str:
    """The result of an action, or its error."""
    try:
        return await asyncio.to_thread(action)
    except (PacelineError, OSError) as error:
        return str(error)


def _is_used(name: str, now: RunNow) -> bool:
    """Whether a column has values for this run."""
    if name.startswith("GPU"):
        return any(one.gpu is not None for one in now.ranks)
    if name == "still":
        return any(one.still_seconds >= 1 for one in now.ranks) or not any(one.work_seconds for one in now.ranks)
    if name == "own work" or name == "lately":
        return any(one.work_seconds for one in now.ranks)
    return True


def _aligned(column: Column, cell: Text) -> Text:
    cell = cell.copy()
    cell.justify = "right" if column.right else "left"
    return cell
