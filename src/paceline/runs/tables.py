"""Where tables are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def table_console(width: int = 132) -> Console:
    """As wide as the terminal, or `width` columns if there is none."""
    from rich.console import Console

    return Console(width=None if Console().is_terminal else width, highlight=False, emoji=False)
