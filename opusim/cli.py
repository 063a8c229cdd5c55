"""The commands ``opusim device ...``; heavy imports wait inside the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from opusim.calibration.cli import add_to as add_calibration_commands
from opusim.serving.cli import add_to as add_serving_commands
from opusim.tables import print_table, wrapped

app = typer.Typer(
    name="device", help="Show, copy, record, calibrate, check and share devices.", no_args_is_help=True
)


@app.callback()
def device() -> None:
    """Show, copy, record, calibrate, check and share the devices that opusim can simulate or drive."""


@app.command("list")
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the devices that come with opusim, what they can do, and the kinds that other packages add."""
    from opusim.devices.kinds import capabilities_of, device_kinds
    from opusim.devices.registry import list_devices

    found = [(entry, capabilities_of(entry)) for entry in list_devices()]
    added = {kind: package for kind, package in device_kinds().items() if package != "opusim"}
    if as_json:
        keys = ("name", "kind", "title", "n_inputs", "n_outputs")
        rows = [{key: getattr(entry, key) for key in keys} | {"can": can} for entry, can in found]
        typer.echo(json.dumps(rows, indent=2))
        return
    columns = ("name", "kind", "inputs", "outputs", "can", "what it is")
    print_table(
        "Devices",
        columns,
        [
            (
                entry.name,
                entry.kind,
                f"{entry.n_inputs:,}",
                f"{entry.n_outputs:,}",
                ", ".join(can),
                entry.title,
            )
            for entry, can in found
        ],
    )
    if added:
        print_table("Kinds of other packages", ("kind", "package"), list(added.items()))


@app.command("show")
def show_command(
    name: Annotated[
        str, typer.Argument(help="A device's name, a path ending in .toml, or remote://HOST:PORT.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show a device: each number with its unit, status and source, and what its noise is."""
    from opusim.camera.from_description import cautions, noise_line, number_rows
    from opusim.description.schema import load_description
    from opusim.devices.kinds import capabilities_of, require_described

    description = load_description(name)
    require_described(description)
    if as_json:
        typer.echo(json.dumps(description.dump(), indent=2))
        return
    typer.echo(f"{description.name} ({description.kind}): {description.title}")
    print_table("", ("key", "value", "unit", "status", "source"), number_rows(description))
    can = capabilities_of(description)
    typer.echo(f"can: {', '.join(can)}")
    if "://" in name:
        from opusim.serving.remote import about

        for line in about(name):
            typer.echo(wrapped(line))
    else:
        typer.echo(noise_line(description))
    for line in cautions(description):
        typer.echo(wrapped(f"caution: {line}", indent="  "))
    frames, outputs = description.frames, description.n_outputs
    one = "a vector of intensities" if "intensities" in can else "one vector"
    shown = {one: 1, "a ternary projection": frames.frames_per_projection}
    parts = [f"{what} {_time(frames.call_seconds(count, outputs))}" for what, count in shown.items()]
    known = "" if frames.host_us_per_frame is not None else "; frame times only, the host's own is not known"
    thousand = f"1,000 vectors {_time(frames.call_seconds(1000, outputs))}"
    typer.echo(wrapped(f"time of a call: {', '.join(parts)}, {thousand}{known}", indent="  "))


@app.command("copy")
def copy_command(
    name: Annotated[str, typer.Argument(help="A device's name, or a path ending in .toml.")],
    out: Annotated[Path, typer.Option("--out", help="The description to write, a new .toml file.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the description; repeatable."),
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="What your device is, in a line; by default that it is a copy.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="Where the numbers of --set come from, such as 'bench 3, 2026-11-28, A. Smith'."),
    ] = None,
) -> None:
    """Write a device's description into a file of your own, with some keys changed.

    Numbers that are kept become 'assumed', since they were not measured on your device; their sources say so.
    """
    from opusim.camera.from_description import cautions
    from opusim.description.schema import copied, load_description
    from opusim.description.section import merged, parse_setting
    from opusim.errors import ConfigError
    from opusim.files import quoted, require_writable, to_toml

    require_writable(out, "--out", (".toml",))
    if out.exists():
        raise ConfigError(str(out), "--out", "exists already; give another file, or remove this one")
    changes: dict[str, Any] = {"name": out.stem}
    for setting in settings or []:
        changes = merged(changes, parse_setting(setting))
    description = copied(load_description(name), load_description(name, changes), title, source)
    out.write_text(to_toml(description.dump()), encoding="utf-8")
    typer.echo(f"description: {out}; opusim device show {quoted(out)}")
    for line in cautions(description):
        typer.echo(wrapped(f"caution: {line}", indent="  "))


def _time(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


add_calibration_commands(app)
add_serving_commands(app)
