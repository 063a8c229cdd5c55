"""The commands ``opusim device ...``; heavy imports wait inside the commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from opusim.camera_schema import CameraSettings
    from opusim.description_schema import DeviceDescription

app = typer.Typer(
    name="device", help="Show the devices that opusim can simulate or drive.", no_args_is_help=True
)

_UNITS = {
    "us": "µs",
    "w": "W",
    "mib": "MiB",
    "c": "°C",
    "k": "K",
    "e_per_s": "e⁻/s",
    "variance_per_e": "projection units²/e⁻",
    "sigma": "projection units",
    "sigma_0": "projection units",
    "per_s": "1/s",
    "e": "e⁻",
    "dn": "DN",
    "gain_dn_per_e": "DN/e⁻",
    "adc_bits": "bits",
    "prnu": "of the response",
    "s": "s",
    "temperatures_c": "°C",
    "quantum_efficiency": "e⁻/photon",
    "anchor_flux_per_s": "photons/s",
    "bias_flux_per_s": "photons/s",
    "lowest": "of the mean",
    "highest": "of the mean",
}
"""Unit of a key by its whole last word or its suffix; the longest match counts."""


@app.callback()
def device() -> None:
    """Show the devices that opusim can simulate or drive."""


@app.command("list")
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the devices that come with opusim."""
    from opusim.description import load_description, packaged_names

    found = [load_description(name) for name in packaged_names()]
    if as_json:
        keys = ("name", "kind", "title", "n_inputs", "n_outputs")
        typer.echo(json.dumps([{key: getattr(entry, key) for key in keys} for entry in found], indent=2))
        return
    rows = [
        (entry.name, entry.kind, f"{entry.n_inputs:,}", f"{entry.n_outputs:,}", entry.title)
        for entry in found
    ]
    _print_table("Devices", ("name", "kind", "inputs", "outputs", "what it is"), rows)


@app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(help="A device's name, or a path ending in .toml.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show a device: each number with its unit, status and source, and what its noise is."""
    from opusim.description import load_description

    description = load_description(name)
    if as_json:
        typer.echo(json.dumps(description.dump(), indent=2))
        return
    typer.echo(f"{description.name} ({description.kind}): {description.title}")
    _print_table("", ("key", "value", "unit", "status", "source"), _number_rows(description))
    typer.echo(_noise_line(description))


def _number_rows(description: DeviceDescription) -> list[tuple[str, ...]]:
    """Key, value, unit, status and source of every number."""
    rows: list[tuple[str, ...]] = []
    for key, value in description.numbers().items():
        origin = description.provenance.get(key)
        status, source = (origin.status, origin.source) if origin else ("", "")
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        rows.append((key, shown, _unit(key), status or ("off" if value == 0 else ""), source))
    return rows


def _unit(key: str) -> str:
    """The unit that a key's name ends in, or nothing for a count."""
    last = key.rsplit(".", 1)[-1]
    matches = [suffix for suffix in _UNITS if last == suffix or last.endswith(f"_{suffix}")]
    return _UNITS[max(matches, key=len)] if matches else ""


def _noise_line(description: DeviceDescription) -> str:
    """What the noise of a reading is, in one line."""
    noise = description.noise
    if description.camera is not None:
        return _camera_lines(description.camera)
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


def _camera_lines(camera: CameraSettings) -> str:
    """Where the light of a mean pixel goes, and what share of its variance each stage makes."""
    from opusim.camera.stages import Light
    from opusim.camera.twin import dark_charge_e, sensor_of

    light, sensor = Light(**camera.light.model_dump()), sensor_of(camera)
    dark = dark_charge_e(camera, light.exposure_us)
    shot = sensor.variance_dn2(1.0) - sensor.variance_dn2(0.0)  # DN² per electron
    parts = {
        "photon shot noise": shot * light.anchor_e,
        "bias light": shot * light.bias_e,
        "dark current": shot * dark,
        "read noise": (sensor.gain_dn_per_e * sensor.read_noise_e) ** 2,
        "rounding": 0.0 if sensor.adc_bits is None else 1 / 12,
    }
    total = sum(float(part) for part in parts.values())
    shares = (
        ", ".join(f"{name} {float(part) / total:.3%}" for name, part in parts.items()) if total else "none"
    )
    at = "" if camera.dark is None else f" at {camera.dark.temperature_c:g} °C"
    return (
        f"a mean pixel of the anchor frame: {light.anchor_e:.4g} e⁻ of light, {light.bias_e:.4g} e⁻ of bias light, "
        f"{dark:.4g} e⁻ of dark charge{at}; {sensor.gain_dn_per_e * light.anchor_e:.4g} DN above black, saturated at "
        f"{sensor.saturation_e:.5g} e⁻\nvariance of a frame there: {total:.4g} DN²: {shares}\n"
        "noise: Poisson counts, whose rates depend on what is shown; a reading takes four frames"
    )


def _print_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Prints a table of text; brackets in it are no markup."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title or None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console().print(table)
