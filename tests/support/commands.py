"""The commands of a command group, those that are imported when they are used among them."""

from typing import Any

from opusim.training.cli.app import LazyGroup


def subcommands(command: Any) -> dict[str, Any]:
    """The subcommands of a command by name, loaded; none if it is no group."""
    if isinstance(command, LazyGroup):
        return {name: command.loaded(name) for name in command.commands}
    return dict(getattr(command, "commands", {}))
