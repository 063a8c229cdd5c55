"""Tables for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def print_table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A title, a header and its rows, as wide as they need, up to 160 characters."""
    table = Table(title=title)
    for column in header:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
