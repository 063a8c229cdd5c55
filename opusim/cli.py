"""The commands ``opusim device ...``; heavy imports wait inside the commands."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from opusim.calibration.cli import add_to as add_calibration_commands
from opusim.tables import print_table, unit_of

if TYPE_CHECKING:
    from opusim.description.schema import DeviceDescription

app = typer.Typer(name="device", help="Show, record, calibrate and check devices.", no_args_is_help=True)

add_calibration_commands(app)


@app.callback()
def device() -> None:
    """Show, record, calibrate and check the devices that opusim can simulate or drive."""


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
    name: Annotated[str, typer.Argument(help="A device's name, or a path ending in .toml.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show a device: each number with its unit, status and source, and what its noise is."""
    from opusim.description.loading import load_description
    from opusim.devices.kinds import capabilities_of

    description = load_description(name)
    if as_json:
        typer.echo(json.dumps(description.dump(), indent=2))
        return
    typer.echo(f"{description.name} ({description.kind}): {description.title}")
    print_table("", ("key", "value", "unit", "status", "source"), _number_rows(description))
    typer.echo(f"can: {', '.join(capabilities_of(description))}")
    typer.echo(_noise_line(description))


def _number_rows(description: DeviceDescription) -> list[tuple[str, ...]]:
    """Key, value, unit, status and source of every number."""
    rows: list[tuple[str, ...]] = []
    for key, value in description.numbers().items():
        origin = description.provenance.get(key)
        status, source = (origin.status, origin.source) if origin else ("", "")
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        rows.append((key, shown, unit_of(key), status or ("off" if value == 0 else ""), source))
    return rows


def _noise_line(description: DeviceDescription) -> str:
    """What the noise of a reading is, in one line."""
    noise = description.noise
    if description.camera is not None:
        from opusim.camera.twin import camera_lines

        return camera_lines(description.camera)
    if noise is None:
        return (
            "noise: none"
            if description.kind == "ideal"
            else f"noise: as the kind {description.kind!r} defines it"
        )
    line = f"noise: Gaussian, standard deviation {noise.value():.6g} projection units at each output"
    if noise.temperature_law is not None:
        temperature_c = noise.temperature_law.temperature_c
        share = noise.temperature_law.law().dark_share(temperature_c)
        line += f"; at {temperature_c:g} °C the dark current makes {share:.3%} of its variance"
    return line
