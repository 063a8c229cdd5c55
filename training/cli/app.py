"""The `opusim` command: each layer's commands under one name; errors become one line and an exit code."""

from __future__ import annotations

import os
import re
import sys
import warnings
from functools import partial
from typing import Annotated, Any

import typer

from opusim.errors import CapabilityMissing, ConfigError, DeviceError, OpusimError
from opusim.processes import launched_processes
from training.cli.groups import LazyGroup, built

_TRAIN = "Train"
_RUNS = "Runs and privacy"
_DEVICES = "Devices"
_HELP = "Problems"
_UsageError: Any = typer.BadParameter.__base__  # of click, or of the copy that newer versions of typer hold


class OpusimGroup(LazyGroup):
    """The commands of all layers, listed by subject."""

    def fill(self) -> None:
        """See LazyGroup.fill."""
        self.later("train", "Train a network, resume a run, list the options.", _train, panel=_TRAIN)
        self.later("tune", "Choose a run's settings privately.", _tune, panel=_TRAIN)
        self.later("curve", "Train a table of runs and draw accuracy against noise.", _curve, panel=_TRAIN)
        for name, summary in (
            ("evaluate", "Measure a run's model on test records."),
            ("report", "Write the HTML report of one run or several."),
        ):
            self.later(name, summary, partial(_of_runs, name), panel=_RUNS)
        self.later("audit", "Attack a run, or test a trainer's mechanism.", _audit, panel=_RUNS)
        self.later(
            "runs", "List the runs of a folder, or remove some.", partial(_of_runs, "runs"), panel=_RUNS
        )
        self.later("account", "Say how private a run or a mechanism is.", _account, panel=_RUNS)
        self.later("explain", "State a theorem that a guarantee cites.", _explain, panel=_RUNS)
        self.later("zo", "Replay a zeroth-order run from its step log.", partial(_of_runs, "zo"), panel=_RUNS)
        self.later("device", "Show, calibrate, check and share devices.", _device, panel=_DEVICES)
        self.later("doctor", "Describe and check this installation, for a report.", _doctor, panel=_HELP)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands under their headings."""
        for panel in (_TRAIN, _RUNS, _DEVICES, _HELP):
            with formatter.section(panel):
                shown = [command for command in self.commands.values() if self.panels[command.name] == panel]
                formatter.write_dl([(f"{command.name:<9}", command.help) for command in shown])


def _train() -> Any:
    from training.cli.train import app as train_app

    return typer.main.get_group(train_app)


def _tune() -> Any:
    from training.cli.searches import tune_app

    return typer.main.get_group(tune_app)


def _curve() -> Any:
    from training.cli.searches import curve_app

    return typer.main.get_command(curve_app)


def _of_runs(name: str) -> Any:
    from training.cli.runs import app as runs_app

    return typer.main.get_group(runs_app).commands[name]


def _audit() -> Any:
    from training.cli.audits import audit

    return built("audit", audit)


def _account() -> Any:
    from accounting.cli import app as account_app
    from training.cli.runs import account_device, account_run

    group = typer.main.get_group(account_app)
    for name, command in (("run", account_run), ("device", account_device)):
        group.add_command(built(name, command), name)
    return group


def _explain() -> Any:
    from accounting.cli import explain_command

    return built("explain", explain_command)


def _device() -> Any:
    from opusim.cli import app as device_app
    from training.cli.runs import device_effects

    group = typer.main.get_group(device_app)
    group.add_command(built("effects", device_effects), "effects")
    return group


def _doctor() -> Any:
    from training.cli.doctor import doctor

    return built("doctor", doctor)


app = typer.Typer(
    name="opusim",
    cls=OpusimGroup,
    help="Train neural networks on a simulated or real optical processing unit (OPU), and see what its noise does.",
    epilog="Start with:  opusim train pdfa --data digits\n\nAny command takes --debug, which shows the traceback of an "
    "error, and --wait SECONDS, to wait for a device that is in use. Exit codes: 1 for a failed run of a sweep or a "
    "broken installation, 2 for bad input, 3 for a device "
    "fault, 4 for a spent privacy budget, 130 for Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text: importing rich's panels takes longer than all else that this page does
    pretty_exceptions_enable=False,
)


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
    warnings.formatwarning = lambda message, *_, **__: f"opusim: warning: {' '.join(str(message).split())}\n"
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        _serve_completion()
        _take_wait()
        _require_one_process()
        code = app(prog_name="opusim", standalone_mode=False)
    except typer.Abort:
        raise SystemExit(1) from None
    except _UsageError as error:
        if debug:
            raise
        typer.echo(_usage_line(error), err=True)
        raise SystemExit(2) from error
    except (OpusimError, ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        if debug:
            raise
        message = " ".join(str(error).split())
        typer.echo(f"opusim: {message}", err=True)
        raise SystemExit(_exit_code(error)) from error
    raise SystemExit(code if isinstance(code, int) else 0)


def _usage_line(error: Any) -> str:
    """Return what a command line has wrong: command, parameter, rule, value and remedy; help as it is."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    path = "opusim" if error.ctx is None else error.ctx.command_path
    rule, given = (
        " ".join(str(error.format_message()).split()).rstrip("."),
        _given(getattr(error, "param", None)),
    )
    rule = re.sub(
        r" \(Possible options: (.*)\)$", r"; did you mean \1?", rule.replace(". Did you", "; did you")
    )
    if given is not None and repr(given) not in rule:
        rule += f", got {given!r}"
    kinds = _kinds_that_take(getattr(error, "option_name", "")) if path.startswith("opusim train ") else []
    owners = f"; it is an option of {', '.join(kinds)}" if kinds else ""
    told = f"{rule[:1].lower()}{rule[1:]}{owners}"
    return f"{path}: {told}{'' if told.endswith('?') else ';'} `{path} --help` shows what it takes"


def _given(parameter: Any) -> str | None:
    """Return the value that the command line gives an option, or None if it gives none."""
    words = sys.argv[1:]
    for place, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name in getattr(parameter, "opts", ()):
            return value if has_value else next(iter(words[place + 1 :]), None)
    return None


def _kinds_that_take(option: str) -> list[str]:
    """Return the kinds of trainers that have an option."""
    from training.cli.options import trainer_options
    from training.config.kinds import TRAINERS

    return [
        kind
        for kind, section in TRAINERS.every().items()
        if option.removeprefix("--") in {known.name for known in trainer_options(kind, section)}
    ]


def _serve_completion() -> None:
    """Let the command answer a shell that asks it for completions (`_OPUSIM_COMPLETE`)."""
    if "_OPUSIM_COMPLETE" in os.environ:
        from typer.completion import completion_init

        completion_init()


def _take_wait() -> None:
    """Take ``--wait SECONDS`` off the command line, as if OPUSIM_WAIT had been set.

    Raises:
        ValueError: It names no number of seconds.
    """
    if "--wait" not in sys.argv:
        return
    place = sys.argv.index("--wait")
    seconds = sys.argv[place + 1] if place + 1 < len(sys.argv) else ""
    if not seconds.replace(".", "", 1).isdigit():
        raise ValueError(f"--wait {seconds!r}: must be a number of seconds, at least 0; write --wait 600")
    del sys.argv[place : place + 2]
    os.environ["OPUSIM_WAIT"] = seconds


def _require_one_process() -> None:
    """Refuse every command but those that several processes can share, before it writes anything.

    Raises:
        ConfigError: torchrun started several.
    """
    found, command = launched_processes(), sys.argv[1:2]
    if found > 1 and command != ["train"]:
        reason = f"{found} processes share `opusim train` only; start `opusim {' '.join(command)}` without torchrun"
        raise ConfigError("command line", "torchrun", reason)


def _exit_code(error: BaseException) -> int:
    from accounting.errors import BudgetExceeded
    from training.errors import RunInterrupted

    if isinstance(error, RunInterrupted):
        return 130
    if isinstance(error, BudgetExceeded):
        return 4
    if isinstance(error, CapabilityMissing):  # no fault of the device: another one must be named
        return 2
    return 3 if isinstance(error, DeviceError) else 2
