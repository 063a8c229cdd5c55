"""The `opusim` command: mounts each layer's commands and turns errors into one line and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from accounting.cli import app as account_app
from opusim.cli import app as device_app
from opusim.errors import DeviceError, OpusimError
from training.cli import account_run, convex, curve, device_privacy, feedback, resuming, runs, tune, ulr, zo

app = typer.Typer(
    name="opusim",
    help="Train neural networks on a simulated or real optical processing unit (OPU), and see what its noise does.",
    epilog="Start with:  opusim train pdfa --data digits\n\nAny command takes --debug, which shows the traceback of an "
    "error. Exit codes: 1 for a sweep in which a run failed, 2 for bad input, 3 for a device fault, 4 for a spent "
    "privacy budget, 130 for Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
train_app = typer.Typer(
    help="Train a network: pdfa (through the device), dfa, tdfa (digital), bp (backpropagation), ulr, zo "
    "(forward passes alone), convex (private at the last iterate).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(device_app, name="device")
app.add_typer(train_app, name="train")
app.add_typer(account_app, name="account")
feedback.mount(train_app)
ulr.mount(train_app)
zo.mount(app, train_app)
convex.mount(train_app)
resuming.mount(train_app)
runs.mount(app)
tune.mount(app)
curve.mount(app)
account_run.mount(account_app)
device_privacy.mount(account_app)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"opusim {installed('opusim')}")
        raise typer.Exit


def main() -> None:
    """Run the command.

    Exit codes: 1 for a sweep in which a run failed, 2 for bad input, 3 for a device fault, 4 for a spent budget, 130
    for Ctrl-C.
    """
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except (OpusimError, ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        if debug:
            raise
        message = " ".join(str(error).split())
        typer.echo(f"opusim: {message}", err=True)
        raise SystemExit(_exit_code(error)) from error


def _exit_code(error: BaseException) -> int:
    from accounting.errors import BudgetExceeded
    from training.errors import RunInterrupted

    if isinstance(error, RunInterrupted):
        return 130
    if isinstance(error, BudgetExceeded):
        return 4
    return 3 if isinstance(error, DeviceError) else 2
