"""The `opusim` command: each layer's commands under one name; errors become one line and an exit code."""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from typer.core import TyperCommand, TyperGroup

from opusim.errors import CapabilityMissing, ConfigError, DeviceError, OpusimError
from opusim.files import require_utf8
from opusim.plugins import PluginError
from opusim.processes import environment_number, exhausted_message, is_exhausted, launched_processes


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


_TRAIN = "Train"
_RUNS = "Runs and privacy"
_DEVICES = "Devices"
_HELP = "Problems"
_UsageError: Any = typer.BadParameter.__base__  # of click, or of the copy that newer versions of typer hold
_ARGUMENT = re.compile(r"(?P<name>[a-z][\w.]*)(?: = (?P<value>'(?P<quoted>[^']*)'|[^\s:]+))?: (?P<reason>.*)")
_STANDARD_ERROR = 2
_FORMER = {
    "opusim device effects": "it was dropped: set a fault under camera, as in docs/devices.md, then `opusim device "
    "calibrate` certifies or refuses the instrument, and the monitor names the fault"
}
"""Former commands, and what to use now."""
BROKEN = 70
"""Exit code after an error of opusim itself (EX_SOFTWARE of sysexits.h)."""
_FEW_COMMANDS = 8
"""Most subcommands that a refusal lists."""


class OpusimGroup(LazyGroup):
    """The commands of all layers, listed by subject."""

    def fill(self) -> None:
        """See LazyGroup.fill; without `@override`, whose import would slow `--help`."""
        for name, summary, panel, target in (
            (
                "train",
                "Train a network, resume a run, list the options.",
                _TRAIN,
                "opusim.training.cli.train:app",
            ),
            ("tune", "Choose a run's settings privately.", _TRAIN, "opusim.training.cli.train:tune_app"),
            (
                *("curve", "Train a table of runs and draw accuracy against noise.", _TRAIN),
                "opusim.training.cli.train:curve_app",
            ),
            (
                "evaluate",
                "Measure a run's model on test records.",
                _RUNS,
                "opusim.training.cli.runs:evaluate",
            ),
            (
                "report",
                "Write the HTML report of one run or several.",
                _RUNS,
                "opusim.training.cli.runs:report",
            ),
            (
                "dossier",
                "Write what a privacy reviewer asks of a run.",
                _RUNS,
                "opusim.training.cli.runs:dossier",
            ),
            (
                "audit",
                "Attack a run, or test a trainer's mechanism.",
                _RUNS,
                "opusim.training.cli.runs:audit",
            ),
            (
                "runs",
                "List the runs of a folder, or remove some.",
                _RUNS,
                "opusim.training.cli.runs:runs_app",
            ),
            ("account", "Say how private a run or a mechanism is.", _RUNS, "opusim.accounting.cli:app"),
            (
                "explain",
                "State a theorem that a guarantee cites.",
                _RUNS,
                "opusim.accounting.cli:explain_command",
            ),
            ("zo", "Replay a zeroth-order run from its step log.", _RUNS, "opusim.training.cli.runs:zo_app"),
            ("device", "Show, calibrate, check and share devices.", _DEVICES, "opusim.cli:app"),
            (
                *("doctor", "Describe and check this installation, for a report.", _HELP),
                "opusim.training.cli.doctor:doctor",
            ),
        ):
            self.later(name, summary, partial(_loaded, name, target), panel=panel)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands under their headings."""
        for panel in (_TRAIN, _RUNS, _DEVICES, _HELP):
            with formatter.section(panel):
                shown = [command for command in self.commands.values() if self.panels[command.name] == panel]
                formatter.write_dl([(f"{command.name:<9}", command.help) for command in shown])


def _loaded(name: str, target: str) -> Any:
    """Import a command, "module:object": a group of typer, one command of it, or a function."""
    module, _, attribute = target.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        return built(name, found)
    if found.registered_callback is None:
        return typer.main.get_command(found)
    group = typer.main.get_group(found)
    if name == "account":  # add the commands of training to those of accounting
        from opusim.training.cli.runs import account_device, account_run

        for inner, command in (("run", account_run), ("device", account_device)):
            group.add_command(built(inner, command), inner)
    return group


app = typer.Typer(
    name="opusim",
    cls=OpusimGroup,
    help="Train neural networks on a simulated or real optical processing unit (OPU), and see what its noise does.",
    epilog="Start with:  opusim train pdfa --data digits\n\nAny command takes --debug, which shows the traceback of an "
    "error, and --wait SECONDS, to wait for a device that is in use. Exit codes: 1 for a failed run of a sweep or a "
    "broken installation or an audit's alarm, 2 for bad input, 3 for a device "
    "fault or an audit whose controls failed, 4 for a spent privacy budget, 70 for "
    "an error of opusim itself, 130 for Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text: importing rich's panels takes longer than the rest of this page
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
    """Run the command; the end of `opusim --help` lists the exit codes."""
    _mend_streams()
    warnings.formatwarning = lambda message, *_, **__: f"opusim: warning: {' '.join(str(message).split())}\n"
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    line = CommandLine()
    try:
        if "_OPUSIM_COMPLETE" in os.environ:  # a shell asks for completions
            from typer.completion import completion_init

            completion_init()
        for word in sys.argv[1:]:  # files of a run cannot hold a word that is not UTF-8
            require_utf8(Path(word), "command line")
        _take_wait()
        found, first = launched_processes(), sys.argv[1:2]
        if found > 1 and first != ["train"]:  # refused before it writes anything
            reason = f"{found} processes share `opusim train` only; start `opusim {' '.join(first)}` without torchrun"
            raise ConfigError("command line", "torchrun", reason)
        command = typer.main.get_command(app)
        line = CommandLine.of(command, sys.argv[1:])
        line.require_unambiguous()
        code = _without_exit(partial(command, prog_name="opusim", standalone_mode=False))
    except typer.Abort:
        raise SystemExit(1) from None
    except _UsageError as error:
        if debug:
            raise
        typer.echo(line.usage(error), err=True)
        raise SystemExit(2) from error
    except (OpusimError, ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        if debug:
            raise
        typer.echo(f"opusim: {line.as_typed(error)}", err=True)
        raise SystemExit(_exit_code(error)) from error
    except Exception as error:
        if debug:
            raise
        if is_exhausted(error):
            typer.echo(f"opusim: {exhausted_message()}", err=True)
            raise SystemExit(2) from error
        # A fault of the program: no audit's alarm, whose exit code is that of an uncaught exception.
        traceback.print_exc()
        raise SystemExit(BROKEN) from error
    raise SystemExit(code if isinstance(code, int) else 0)


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line, its command if known, and the words after it; it turns errors into one-line messages."""

    path: str = "opusim"
    command: Any = None
    words: Sequence[str] = ()

    @classmethod
    def of(cls, command: Any, words: Sequence[str]) -> Self:
        """Follow the names of subcommands from the first command on."""
        path = "opusim"
        while words and words[0] in getattr(command, "commands", {}):
            name, words = words[0], words[1:]
            command = command.loaded(name) if isinstance(command, LazyGroup) else command.commands[name]
            path = f"{path} {name}"
        return cls(path, command, words)

    def require_unambiguous(self) -> None:
        """Refuse (_UsageError) an option that is given twice, and the name of an option in the place of a value."""
        seen: dict[str, str] = {}
        for name, option, value in self._given():
            if value in self._options() and f"{name}={value}" not in self.words:  # `name=value` is meant
                raise _UsageError(f"option '{name}' needs a value, and the option '{value}' follows")
            before, told = seen.get(option.name), name if option.is_flag else value
            seen[option.name] = told
            if option.is_flag and before not in (None, told):
                raise _UsageError(f"options '{before}' and '{told}' contradict each other; give one")
            if not option.is_flag and before is not None and not option.multiple:
                raise _UsageError(f"option '{name}' is given twice, {before!r} and {told!r}; give it once")

    def usage(self, error: Any) -> str:
        """Return a usage error in one line: command, parameter, rule, value and remedy. Help stays as it is."""
        if type(error).__name__ == "NoArgsIsHelpError":
            return str(error.format_message())
        rule = " ".join(str(error.format_message()).split()).rstrip(".").replace(". Did you", "; did you")
        rule = rule.replace("requires an argument", "needs a value").replace("argument(s)", "argument")
        rule = re.sub(r"Input should be ([^,]*)(, unable to parse .*)?$", r"must be \1", rule)
        parameter = getattr(error, "param", None)
        given = [value for _, option, value in self._given() if option.name == getattr(parameter, "name", "")]
        if given and repr(given[-1]) not in rule:
            rule += f", got {given[-1]!r}"
        if type(error).__name__ == "MissingParameter" and (meaning := getattr(parameter, "help", None)):
            rule += f" ({meaning.replace(chr(92), '').rstrip('.')})"
        rule = self._with_hint(rule, error)
        path = self.path if error.ctx is None else error.ctx.command_path
        rule = f"{rule[:1].lower()}{rule[1:]}{'' if rule.endswith('?') else ';'}"
        return f"{path}: {rule} `{path} --help` shows what it takes"

    def as_typed(self, error: BaseException) -> str:
        """Return an error in one line that names the option of this command line instead of a key or an argument."""
        text = re.sub(r"[^\S ]+", " ", str(error)).strip()  # spaces may belong to the name of a file
        found = _ARGUMENT.fullmatch(text)
        typed = {name: value for name, _, value in self._given()}
        if isinstance(error, ConfigError):
            option = self._option_of(error.key, missing=error.reason.startswith("is missing"))
            value = typed.get(option or "", "")
            shown = option if value in error.reason else f"{option} {value!r}"
            return f"{shown}: {error.reason}" if option else text
        option = self._option_of(found["name"], quoted=found["quoted"]) if found else None
        if found is None or option is None:
            return text
        value = found["value"] or "array"
        value = typed[option] if value.startswith("array") else value
        return f"{option} {value}: {found['reason']}"

    def _option_of(self, key: str, *, quoted: str | None = None, missing: bool = False) -> str | None:
        """Return the option on the line that set a key or an argument, or None; if `missing`, one that would.

        `quoted`, the text that it was set to, finds an option of another name.
        """
        given = {name: value for name, _, value in self._given()}
        settings = {value.partition("=")[0] for name, _, value in self._given() if name == "--set"}
        if {key, f"device.{key}"} & settings:
            return None
        keys, named = self._keys(), f"--{key.replace('_', '-')}"
        option = keys.get(key) or keys.get(f"device.{key}") or named
        option = option if option in self._options() else option.replace("--n-", "--")
        if option in given or (missing and option in self._options()):
            return option
        same = [name for name, value in given.items() if value == quoted]
        return same[0] if quoted and len(same) == 1 else None

    def _options(self) -> dict[str, Any]:
        """The options of the command by the words that name them."""
        named = [each for each in getattr(self.command, "params", ()) if hasattr(each, "is_flag")]
        return {word: each for each in named for word in (*each.opts, *each.secondary_opts)}

    def _given(self) -> Iterator[tuple[str, Any, str]]:
        """The options on the line: the word that names each, the option, and its value or an empty text."""
        options, words = self._options(), iter(self.words)
        for word in words:
            name, has_value, value = word.partition("=")
            option = options.get(name)
            if word == "--":
                return
            if option is not None:
                yield name, option, value if has_value or option.is_flag else next(words, "")

    def _with_hint(self, rule: str, error: Any) -> str:
        """Return a message with the available commands, or with where an option belongs."""
        commands = list(getattr(getattr(error.ctx, "command", None), "commands", ()))
        if rule.startswith("No such command"):
            former = _FORMER.get(f"{self.path} {rule.split(chr(39))[1]}")
            if former:
                return f"{rule}; {former}"
            if "did you mean" in rule:
                return rule
            from opusim.description.section import did_you_mean

            here = f"; the commands here are {', '.join(commands)}"
            word = rule.split(chr(39))[1]
            return rule + did_you_mean(
                word, commands, otherwise=here if len(commands) <= _FEW_COMMANDS else ""
            )
        extra = re.match(r"Got unexpected extra arguments? \(([\w.]+=\S+?)[\s)]", rule)
        if extra and "--set" in self._options():
            return f"{rule}; write --set {extra[1]}"
        name = str(getattr(error, "option_name", "")).removeprefix("--")
        if not rule.startswith("No such option") or not self.path.startswith(
            ("opusim train ", "opusim tune ")
        ):
            return re.sub(r" \(Possible options: (.*)\)$", r"; did you mean \1?", rule)
        from opusim.description.section import meant_by
        from opusim.training.cli.options import keys_called, trainer_options
        from opusim.training.config.kinds import TRAINERS

        kinds, rule = TRAINERS.every(), rule.partition(" (Possible")[0]
        kind = self.path.split()[-1]
        if kind in kinds and name == "noise" and kinds[kind].device_keys is not None:
            return f"{rule}; write --set device.noise.sigma=VALUE for the device's noise"
        takers = [
            each
            for each, section in kinds.items()
            if name in {one.name for one in trainer_options(each, section)}
        ]
        if takers:
            return f"{rule}; it is an option of {', '.join(takers)}"
        keys = keys_called(name, kind)
        words = [word.removeprefix("--") for word in self._options() if word.startswith("--")]
        if not keys and (meant := meant_by(name, words)):
            return f"{rule}; did you mean --{meant}?"
        keys = keys or keys_called(name, kind, roughly=True)
        return f"{rule}; write --set {keys[0]}=VALUE" if keys else rule

    def _keys(self) -> Mapping[str, str]:
        """The options of a command that trains, by the keys of the configuration that they set."""
        if not self.path.startswith(("opusim train ", "opusim tune ")):
            return {}
        from opusim.training.cli.options import trainer_options
        from opusim.training.config.kinds import TRAINERS

        kind = self.path.split()[-1]
        if kind not in TRAINERS.every():
            return {}
        return {option.key: f"--{option.name}" for option in trainer_options(kind, TRAINERS.find(kind))}


def _mend_streams() -> None:
    """Let a command work whatever its standard streams are.

    The null device replaces a closed stream; otherwise a file of the run would get its number and receive what
    libraries print. A character that a stream cannot show is written as its code.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in ((1, "stdout"), (_STANDARD_ERROR, "stderr")):
        if getattr(sys, name) is None:
            null = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # for good
            setattr(sys, name, null)
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _without_exit(command: Callable[[], Any]) -> Any:
    """Run a command, and refuse an ``exit()`` in user code or another package; PluginError names the file."""
    try:
        return command()
    except SystemExit as error:
        if "_OPUSIM_COMPLETE" in os.environ or isinstance(error.__context__, BrokenPipeError):
            raise  # typer exits when `| head` has read enough
        frames = traceback.extract_tb(error.__traceback__)
        # the caller of `exit`, which itself is in a frozen module
        *_, place = (frame for frame in frames if not frame.filename.startswith("<frozen"))
        raise PluginError(
            f"exit({error.code!r}) at {place.filename}:{place.lineno} would end the command in silence; "
            "let that code raise an error instead"
        ) from error


def _take_wait() -> None:
    """Move ``--wait SECONDS`` from the command line to OPUSIM_WAIT; raise ValueError if that is no number."""
    if "--wait" in sys.argv:
        place = sys.argv.index("--wait")
        seconds = sys.argv[place + 1] if place + 1 < len(sys.argv) else ""
        if re.fullmatch(r"[0-9]+(\.[0-9]*)?", seconds) is None:
            raise ValueError(f"--wait {seconds!r}: must be a number of seconds, at least 0; write --wait 600")
        del sys.argv[place : place + 2]
        os.environ["OPUSIM_WAIT"] = seconds
    environment_number("OPUSIM_WAIT", 0.0, least=0.0, what="seconds")


def _exit_code(error: BaseException) -> int:
    from opusim.accounting.guarantee import BudgetExceeded
    from opusim.training.errors import RunInterrupted

    if isinstance(error, RunInterrupted):
        return 130
    if isinstance(error, BudgetExceeded):
        return 4
    if isinstance(error, CapabilityMissing):  # not the device's fault: the user must name another
        return 2
    return 3 if isinstance(error, DeviceError) else 2
