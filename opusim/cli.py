"""The commands ``opusim device ...``; heavy imports wait inside the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from opusim.errors import ConfigError
from opusim.files import FIGURES, output_folder, quoted, require_writable, to_toml
from opusim.progress import Progress
from opusim.tables import print_table, wrapped

Packing = Literal["mono10p", "mono12p"]
_NAME = Annotated[str, typer.Argument(help="A device's name, a path ending in .toml, or remote://HOST:PORT.")]
_LOCAL = Annotated[str, typer.Argument(help="A device's name, or a path ending in .toml.")]
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_SEED = Annotated[int, typer.Option(help="Seed of a simulated device's noise.")]
_INPUTS = Annotated[int, typer.Option("--inputs", help="Inputs of the window.")]
_FRAMES = Annotated[int, typer.Option("--frames", help="Frames of a level of light.")]
_READINGS = Annotated[int, typer.Option("--readings", help="Readings of each of five inputs.")]
_JOURNAL = Annotated[
    Path | None, typer.Option("--journal", help="File with one line of JSON for each minute of use.")
]

app = typer.Typer(
    name="device", help="Show, copy, record, calibrate, check and share devices.", no_args_is_help=True
)


@app.callback()
def device() -> None:
    """Show, copy, record, calibrate, check and share the devices that opusim can simulate or drive."""


@app.command("list")
def list_command(as_json: _JSON = False) -> None:
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
def show_command(name: _NAME, as_json: _JSON = False) -> None:
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
    name: _LOCAL,
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


@app.command("record")
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


@app.command("calibrate")
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
    frames: _FRAMES = 64,
    readings: _READINGS = 500,
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
        from opusim.calibration.recorded_transfer import reduced, require_lawful
        from opusim.calibration.report import CameraReport, measured_description
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

    from opusim.calibration.calibrate import calibrate
    from opusim.calibration.photon_transfer import Plan
    from opusim.calibration.report import print_calibration, write_report
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


@app.command("check")
def check_command(
    name: _NAME,
    certificate: Annotated[Path, typer.Argument(help="The device's certificate.")],
    frames: _FRAMES = 32,
    readings: _READINGS = 500,
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


@app.command("temperature")
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

    from opusim.calibration.report import print_temperatures, temperature_figure
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


@app.command("fit")
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


keys_app = typer.Typer(name="keys", no_args_is_help=True)
app.add_typer(keys_app)


@keys_app.callback()
def keys() -> None:
    """Make the keys that open served devices."""


@keys_app.command("new")
def new_command(
    name: Annotated[str, typer.Argument(help="Your name; 'server' for a server's own pair.")],
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where; ~/.config/opusim/keys by default.")
    ] = None,
    days: Annotated[int, typer.Option("--days", help="Days until the key expires.")] = 365,
) -> None:
    """Make a key pair: NAME.key stays here, NAME.pub goes to the other side."""
    from opusim.serving.keys import keys_folder, make_key, require_zmq

    require_zmq()
    place = folder or keys_folder()
    key = make_key(name, place, days=days)
    typer.echo(f"secret, never to be sent: {place / f'{name}.key'}")
    typer.echo(f"public, for the other side: {place / f'{name}.pub'}")
    typer.echo(f"public key {key.public}, accepted until {key.expires}")


@app.command("serve")
def serve_command(
    name: _LOCAL,
    bind: Annotated[str, typer.Option("--bind", help="Where to listen: tcp://HOST:PORT.")],
    keys: Annotated[Path, typer.Option("--keys", help="Folder of server.key and of the users' .pub files.")],
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="Certificate whose noise every client is told.")
    ] = None,
    inputs: Annotated[int | None, typer.Option("--inputs", help="Inputs to serve; all by default.")] = None,
    outputs: Annotated[
        int | None, typer.Option("--outputs", help="Outputs to serve; all by default.")
    ] = None,
    journal: _JOURNAL = None,
    clients: Annotated[int, typer.Option("--clients", help="Clients at once, at most.")] = 256,
    clients_per_user: Annotated[
        int, typer.Option("--clients-per-user", help="Clients of one user at once, at most.")
    ] = 64,
    request_mib: Annotated[float, typer.Option("--request-mib", help="Largest message from a client.")] = 64,
    reply_mib: Annotated[float, typer.Option("--reply-mib", help="Largest reading.")] = 256,
    silence_s: Annotated[
        float, typer.Option("--silence-s", help="Seconds after which a silent client loses its place.")
    ] = 20,
    idle_s: Annotated[
        float, typer.Option("--idle-s", help="Seconds without a call that a client may keep others out.")
    ] = 3600,
    torch_device: Annotated[
        str, typer.Option("--torch-device", help="Where a simulation computes: cpu, cuda.")
    ] = "cpu",
) -> None:
    """Share a device over the network until Ctrl-C or SIGTERM; clients name it remote://HOST:PORT."""
    import logging
    import signal
    import threading

    from opusim.description.schema import load_description
    from opusim.serving.instrument import Instrument
    from opusim.serving.journal import Journal, journal_file
    from opusim.serving.keys import Users, require_zmq
    from opusim.serving.server import Limits, Server

    require_zmq()
    limits = Limits(
        clients=clients,
        clients_per_user=clients_per_user,
        request_mib=request_mib,
        reply_mib=reply_mib,
        silence_s=silence_s,
        idle_s=idle_s,
    )
    description, users = load_description(name), Users(keys)
    kept = Journal(journal or journal_file(description.name))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z")
    logging.getLogger("opusim").setLevel(logging.INFO)
    instrument = Instrument(
        description, n_inputs=inputs, n_outputs=outputs, certificate=certificate, torch_device=torch_device
    )
    try:
        server = Server(instrument, users, bind=bind, journal=kept, limits=limits)
    except BaseException:
        instrument.close()
        raise
    typer.echo(f"serving {description.name} at {server.endpoint}; journal: {kept.path}")
    server.run(stop)


@app.command("usage")
def usage_command(
    name: Annotated[str | None, typer.Argument(help="The served device's name.")] = None,
    journal: _JOURNAL = None,
    days: Annotated[int | None, typer.Option("--days", help="Only the last days.")] = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw each user's hours over days into this file.")
    ] = None,
) -> None:
    """Show who used a served device how much, on the machine that serves it."""
    import datetime

    from opusim.serving.journal import USAGE_COLUMNS, journal_file, read_journal, usage_figure, usage_rows

    if figure is not None:
        require_writable(figure, "--figure", FIGURES)
    if journal is None and name is None:
        reason = "is missing; name the served device, or give --journal FILE"
        raise ConfigError("command line", "NAME", reason)
    entries = read_journal(journal or journal_file(str(name)))
    if days is not None:
        first = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
        entries = [entry for entry in entries if datetime.datetime.fromisoformat(entry.time) >= first]
    print_table("Use of the device", USAGE_COLUMNS, usage_rows(entries))
    if figure is not None:
        usage_figure(entries).savefig(figure, dpi=110)
        typer.echo(f"figure: {figure}")
