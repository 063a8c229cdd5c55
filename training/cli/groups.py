"""Command groups that import a subcommand only when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class LazyGroup(TyperGroup):
    """A group that lists its subcommands by name and one line, and loads the one that is invoked."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._loaders: dict[str, Callable[[], Any]] = {}
        self.panels: dict[str | None, str | None] = {}
        self.fill()

    def fill(self) -> None:
        """Name the subcommands, by `later`."""

    def later(self, name: str, summary: str, load: Callable[[], Any], *, panel: str | None = None) -> None:
        """Add a subcommand that `load` makes; help lists it under a panel with its summary."""
        self.commands[name] = TyperCommand(name, help=summary, rich_help_panel=panel)
        self._loaders[name], self.panels[name] = load, panel

    def loaded(self, name: str) -> Any:
        """Return a subcommand, imported when it is first asked for."""
        if name in self._loaders:
            self.commands[name] = self._loaders.pop(name)()
        return self.commands[name]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the subcommand of a command line, and load it."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = self.loaded(name)
            _show_flags_without_type(command, ctx)
        return name, command, rest


def _show_flags_without_type(command: Any, ctx: Any) -> None:
    """Let help show a flag as it is typed, without the type of a value that it does not take."""
    for option in [*command.params, command.get_help_option(ctx)]:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _show_flags_without_type(inner, ctx)


def built(name: str, command: Callable[..., None], **attributes: Any) -> Any:
    """Return a function as a command for a group; help wraps each paragraph of its docstring."""
    single = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    single.command(name, **attributes)(command)
    made = typer.main.get_command(single)
    made.help = "\n\n".join(" ".join(part.split()) for part in (made.help or "").split("\n\n"))
    return made
