"""The commands that take frames: ``opusim device record``, ``calibrate``, ``check``, ``temperature`` and ``fit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from opusim.errors import ConfigError
from opusim.files import FIGURES, output_folder, quoted, require_writable, to_toml
from opusim.progress import Progress
from opusim.tables import print_table, wrapped

Packing = Literal["mono10p", "mono12p"]
_NAME = Annotated[str, typer.Argument(help="A device's name, a path ending in .toml, or remote://HOST:PORT.")]
_SEED = Annotated[int, typer.Option(help="Seed of a simulated device's noise.")]
_INPUTS = Annotated[int, typer.Option("--inputs", help="Inputs of the window.")]


def record_command(
    name: _NAME,
    out: Annotated[Path, typer.Option("--out", help="A new folder for the frames.")],
    outputs: Annotated[int, typer.Option("--outputs", help="Pixels of an image.")] = 40_000,
    steps: Annotated[int, typer.Option("--steps", help="Points of the temporal series.")] = 30,
    spatial_frames: Annotated[int, typer.Option("--spatial-frames", help="Images of a spatial point.")] = 16,
    longest_exposure_us: Annotated[
        float | None, typer.Option("--longest-us", help="Exposure of the last point; ten times the device's.")
    ] = None,
    seed: _SEED = 0,
) -> None:
    """Record frames under uniform light in the layout of EMVA 1288, which `calibrate --recorded` reads."""
    from opusim.calibration.recorded import Recording, record, shape_of
    from opusim.description.schema import load_description
    from opusim.devices.camera import CameraDevice
    from opusim.devices.registry import open_window

    kind, camera = (description := load_description(name)).kind, description.camera
    if camera is None:  # before anything is opened
        remedy = "record a device of kind 'camera'"
        if not description.is_simulated:
            remedy = "record with your camera's own software, and give the frames to `calibrate --recorded`"
        raise ConfigError(name, "kind", f"{kind!r} has no simulated camera; {remedy}")
    with open_window(name, 2, outputs, seed) as device:
        if not isinstance(device, CameraDevice):
            raise ConfigError(
                name, "kind", f"{kind!r} is no camera of opusim; record a device of kind 'camera'"
            )
        exposure_us, bits = camera.light.exposure_us, device.exposure.sensor.adc_bits
        if bits is None:
            raise ConfigError(
                name, "camera.sensor.adc_bits", "is off; images need whole numbers, so switch it on"
            )
        width, height = shape_of(outputs)
        wanted = Recording(
            width=width,
            height=height,
            bits=bits,
            steps=steps,
            spatial_frames=spatial_frames,
            longest_exposure_us=longest_exposure_us or 10 * exposure_us,
            saturating_photons=1.1 * device.exposure.sensor.saturation_e / camera.light.quantum_efficiency,
        )
        opened = device.usage.frames
        with output_folder(out), Progress("device record", "frames") as progress:
            progress.follow(wanted.images, lambda: device.usage.frames - opened)
            path = record(device.flat_frames, wanted, out, exposure_us=exposure_us)
        typer.echo(f"{path}: {wanted.images:,} images of {width} x {height} pixels, {bits} bits")


def calibrate_command(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", help="A folder for certificate or description, and report.")],
    name: Annotated[
        str | None,
        typer.Argument(
            help="A device's name, a path ending in .toml, or remote://HOST:PORT. With --recorded: the camera that "
            "gives the numbers which frames do not tell."
        ),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            help="Frames of a camera in files: an EMVA 1288 folder, a folder of named stacks, .npz or HDF5."
        ),
    ] = None,
    outputs: Annotated[int, typer.Option("--outputs", help="Outputs of the window.")] = 4000,
    inputs: _INPUTS = 64,
    frames: Annotated[int, typer.Option("--frames", help="Frames of a level of light.")] = 64,
    readings: Annotated[int, typer.Option("--readings", help="Readings of each of five inputs.")] = 500,
    confidence: Annotated[float, typer.Option(help="Confidence of each single interval.")] = 0.95,
    warm_c: Annotated[
        float | None,
        typer.Option("--warm-c", help="Second temperature, to measure the dark current's doubling."),
    ] = None,
    beta: Annotated[
        float, typer.Option(help="Probability that the certified law's numbers are wrong.")
    ] = 1e-6,
    seed: _SEED = 0,
    bits: Annotated[
        int | None,
        typer.Option(help="Of --recorded: bits of the numbers, by default those that occur.", min=1, max=24),
    ] = None,
    packing: Annotated[
        Packing | None, typer.Option(help="Of --recorded: how numbers are packed into bytes.")
    ] = None,
    temperature_c: Annotated[
        float | None,
        typer.Option(
            "--temperature-c", help="Of --recorded: the sensor's temperature, by default the described one."
        ),
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="Of --recorded: what the description is, in one line.")
    ] = None,
) -> None:
    """Calibrate a device from its frames; write a dated certificate (TOML) and a report with the curves.

    Exits with 3 if no law of the noise can be certified; the constants are written all the same.

    With --recorded: find a camera's constants from frames in files, and write a description of the named camera.
    """
    given = [
        key
        for key in context.params
        if (source := context.get_parameter_source(key)) is not None and source.name == "COMMANDLINE"
    ]
    for key in given:
        option = f"--{key.replace('_', '-')}"
        if recorded is not None and key in _OF_DEVICES:
            raise ConfigError(
                option, "--recorded", "is given, and this option is for a device; leave one out"
            )
        if recorded is None and key in _OF_FILES:
            raise ConfigError(
                option, "--recorded", "is missing, and this option is for frames in files; give it"
            )
    if recorded is not None:
        # evaluate the frames; print the table, and write it with JSON, picture and description
        from opusim.calibration.recorded import read_frames
        from opusim.calibration.recorded_report import CameraReport, measured_description
        from opusim.calibration.recorded_transfer import reduced, require_lawful
        from opusim.description.schema import load_description

        base = None if name is None else load_description(name)
        if base is not None and base.camera is None:
            raise ConfigError(base.name, "kind", f"{base.kind!r} has no camera; name a camera, or nothing")
        with output_folder(out):
            transfer = reduced(read_frames(recorded, bits=bits, packing=packing), progress="lines")
            camera = CameraReport.of(transfer, require_lawful(transfer), confidence, base)
        typer.echo(camera.text())
        (out / "camera.txt").write_text(f"{camera.text()}\n", encoding="utf-8")
        content = json.dumps(camera.to_json(), indent=2, ensure_ascii=False)
        (out / "camera.json").write_text(f"{content}\n", encoding="utf-8")
        camera.figure().savefig(out / "camera.png", dpi=110)
        typer.echo(f"report: {out / 'camera.txt'}, camera.json and camera.png")
        if base is None:
            typer.echo("to write a description, name the camera that gives its other numbers")
            return
        path = out / f"{base.name}_measured.toml"
        description, remarks = measured_description(
            camera, base, path.stem, title=title, temperature_c=temperature_c
        )
        path.write_text(to_toml(description.dump()), encoding="utf-8")
        for remark in remarks:
            typer.echo(wrapped(remark))
        typer.echo(f"description: {path}; opusim device show {quoted(path)}")
        return
    if name is None:
        raise ConfigError("NAME", "--recorded", "is missing too; name a device, or give frames in files")

    from opusim.calibration.calibrate import calibrate, print_calibration, write_report
    from opusim.calibration.photon_transfer import Plan
    from opusim.devices.registry import open_window

    with open_window(name, inputs, outputs, seed) as device:
        dark = None if device.description.camera is None else device.description.camera.dark
        if warm_c is not None and dark is None:
            raise ConfigError(name, "camera.dark", "is off, so warm_c has nothing to measure; leave it out")
        temperatures = (dark.temperature_c, warm_c) if dark is not None and warm_c is not None else None
        plan = Plan(frames=frames, temperatures_c=temperatures)
        with output_folder(out):
            found = calibrate(
                device, plan=plan, readings=readings, confidence=confidence, beta=beta, progress="lines"
            )
    certificate, report = out / f"{found.certificate.device}.certificate.toml", out / "report.html"
    found.certificate.write(certificate)
    write_report(found, report)
    print_calibration(found)
    typer.echo(f"certificate: {certificate}\nreport: {report}")
    if found.certificate.noise is None:
        if device.description.kind == "bench":
            typer.echo(
                "training needs no law: a bench trains without one; private training adds digital noise"
            )
        typer.echo("no law is certified: private training cannot rest on this device's noise", err=True)
        raise typer.Exit(3)


_OF_DEVICES = ("outputs", "inputs", "frames", "readings", "warm_c", "beta", "seed")
"""Options of `calibrate_command` for devices only."""
_OF_FILES = ("bits", "packing", "temperature_c", "title")


def check_command(
    name: _NAME,
    certificate: Annotated[Path, typer.Argument(help="The device's certificate.")],
    frames: Annotated[int, typer.Option("--frames", help="Frames of a level of light.")] = 32,
    readings: Annotated[int, typer.Option("--readings", help="Readings of each of five inputs.")] = 500,
    seed: _SEED = 1,
) -> None:
    """Compare a device with its certificate; exit with 3 if its noise is below the certified one."""
    from opusim.calibration.calibrate import calibrate, compare, require_noise
    from opusim.calibration.photon_transfer import Plan
    from opusim.devices.certificate import load_certificate
    from opusim.devices.registry import open_window

    old = load_certificate(certificate)
    with open_window(name, old.n_inputs, old.n_outputs, seed) as device:
        if device.identity[0] != old.device:
            raise ConfigError(name, "certificate", f"is that of {old.device!r}; calibrate this device")
        plan = Plan(frames=frames)
        new = calibrate(
            device, plan=plan, readings=readings, confidence=old.confidence, beta=old.beta, progress="lines"
        )
    rows = [
        (
            row.name,
            f"{row.certified:.5g}",
            f"{row.measured:.5g}",
            f"{row.standard_errors:+.1f}",
            "agrees" if row.agrees else "differs",
        )
        for row in compare(old, new)
    ]
    if rows:
        print_table("", ("constant", f"certified {old.date}", "measured", "standard errors", ""), rows)
    require_noise(old, new)
    typer.echo("the certified noise is there")


def temperature_command(
    name: _NAME,
    std: Annotated[
        float | None, typer.Option("--std", help="Also: the temperature that gives this standard deviation.")
    ] = None,
    outputs: Annotated[int, typer.Option("--outputs", help="Outputs to average over.")] = 2000,
    inputs: _INPUTS = 10,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the curve into this PNG file.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Temperatures of the table.")] = 10,
    seed: _SEED = 0,
) -> None:
    """Show how a device's temperature sets the noise of its readings, and what temperature a noise needs."""
    import torch

    from opusim.calibration.calibrate import print_temperatures, temperature_figure
    from opusim.description.schema import load_description
    from opusim.devices.registry import open_window

    if figure is not None:
        require_writable(figure, "--figure", FIGURES)
    if not load_description(name).is_simulated:
        raise ConfigError(
            name,
            "kind",
            "is hardware, whose temperature is set at the instrument; describe a camera of its numbers (`opusim device "
            "copy camera_low_light`) to see what temperature does",
        )
    with open_window(name, inputs, outputs, seed) as device:
        law_of = getattr(device, "temperature_law", None)
        if law_of is None:
            raise ConfigError(
                name,
                "kind",
                f"no number of the kind {device.kind!r} depends on its temperature; use a device such as "
                "'gaussian_temperature' or 'camera_low_light'",
            )
        x = torch.randint(-1, 2, (64, device.n_inputs), generator=torch.Generator().manual_seed(1)).float()
        law = law_of(x)
    print_temperatures(law, device.name, device.n_inputs, steps)
    if std is not None:
        typer.echo(f"a noise of {std:g} projection units needs {law.temperature_c(std):.2f} °C")
    if figure is not None:
        temperature_figure(law, device.name).savefig(figure, dpi=110)
        typer.echo(f"figure: {figure}")


def fit_command(
    readings: Annotated[
        Path,
        typer.Argument(
            help="A table with the columns conductance_us, programmed_us, time_s or input, weight, time_s, reading."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The description to write, a .toml file.")],
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw fit and residuals into this PNG file.")
    ] = None,
    like: Annotated[
        str, typer.Option(help="The crossbar whose converters, frames and product noise are taken.")
    ] = "pcm",
    g_max_us: Annotated[
        float | None,
        typer.Option(
            "--g-max-us", help="Conductance of a weight of 1; by default the largest target.", min=1e-9
        ),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Confidence of each constant's limits.")] = 0.95,
    force: Annotated[
        bool, typer.Option("--force", help="Write the description even if the published forms do not fit.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.", min=0)] = 0,
) -> None:
    """Fit programming noise and drift of a memory device to 20 or more measurements; write its description.

    Exits with 3, and writes no description, if fewer than 1 % of data of the published forms would deviate as much.
    """
    from opusim.calibration.conductance_fit import (
        LEAST_P_VALUE,
        fit,
        fit_figure,
        fit_rows,
        fitted_description,
        read_measurements,
    )

    require_writable(out, "--out", (".toml",))
    if figure is not None:
        require_writable(figure, "--figure", FIGURES)
    data, largest = read_measurements(readings, g_max_us)
    found = fit(data, confidence=confidence, seed=seed)
    limits = f"{100 * confidence:g} % limits"
    print_table(
        f"{found.lines} lines of {readings.name}", ("constant", "value", limits), fit_rows(found, largest)
    )
    typer.echo(
        f"law of time: {found.law.shape.time}; deviations as large in {100 * found.p_value:.2g} % of such data"
    )
    if figure is not None:
        fit_figure(found, data).savefig(figure, dpi=110)
        typer.echo(f"figure: {figure}")
    if found.p_value < LEAST_P_VALUE and not force:
        typer.echo(
            "the published forms do not describe these measurements, so no description is written; look at the "
            "residuals (--figure), or write it anyway with --force",
            err=True,
        )
        raise typer.Exit(3)
    description = fitted_description(found, data, readings, name=out.stem, like=like, g_max_us=largest)
    out.write_text(to_toml(description.dump()), encoding="utf-8")
    typer.echo(f"description: {out}; opusim device show {quoted(out)}")


def add_to(app: typer.Typer) -> None:
    """Add the commands to ``opusim device``."""
    app.command("record")(record_command)
    app.command("calibrate")(calibrate_command)
    app.command("check")(check_command)
    app.command("temperature")(temperature_command)
    app.command("fit")(fit_command)
