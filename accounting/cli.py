"""The commands ``opusim account ...``: how private a run was, or what a mechanism's parameters would give.

A command for a mechanism has the fields of its description as options, and their documentation as help.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Annotated, Any, get_type_hints

import typer

from accounting.convex import cli as convex_cli
from accounting.convex.mechanisms import ConvexLastIterate
from accounting.guarantee import Guarantee
from accounting.labels.mechanisms import LabelAmplified, LabelBudget, LabelOnce
from accounting.mechanisms import Gaussian, Mechanism, PoissonGaussian, PoissonLaplace, RandomizedResponse
from accounting.pdfa.mechanisms import PublishedLayer, PublishedPdfa
from accounting.records.mechanisms import RecordCentral
from accounting.selection.mechanism import PrivateSelection
from accounting.ulr.mechanisms import PublishedUlr, RejectionGaussian
from accounting.zeroth_order.mechanisms import ZoGaussian, ZoLaplace

app = typer.Typer(
    name="account",
    help="Say how private a run was, or what a mechanism's parameters would give, without running anything.",
    epilog="Example:  opusim account record-central --noise-multiplier 1.1 --sampling-probability 0.01 "
    "--steps 1000 --clip-norm 1 --divisor 600",
    no_args_is_help=True,
)

Delta = Annotated[float, typer.Option(help="At which epsilon is stated, in [0, 1); well below 1 / records.")]
Target = Annotated[
    float | None,
    typer.Option(help="Compute the least noise whose proven epsilon is at most this; leave the noise out."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with every assumption.")]
_COMMON = {"delta": (Delta, 1e-5), "target_epsilon": (Target, None), "as_json": (AsJson, False)}


@app.callback()
def account() -> None:
    """Say how private a run was, or what a mechanism's parameters would give, without running anything."""


@app.command("photon-counts")
def photon_counts_command(
    rate_low: Annotated[float, typer.Option(help="Lowest expected count of a pixel in a frame, above 0.")],
    rate_high: Annotated[float, typer.Option(help="Highest expected count, at least --rate-low.")],
    pixels: Annotated[int, typer.Option(help="Pixels times frames of one reading, at least 1.")] = 1,
    readings: Annotated[int, typer.Option(help="How many readings of one record leave, at least 1.")] = 1,
    delta: Delta = 1e-5,
    as_json: AsJson = False,
) -> None:
    """A camera's counts of a private input, protected by their own shot noise (exact Poisson divergence)."""
    import numpy as np

    from accounting.devices.readings import DeviceReadings, device_readings_guarantee
    from opusim import checks
    from opusim.noise import PhotonCountNoise

    checks.integer(minimum=1, pixels=pixels)
    noise = PhotonCountNoise(rate_low=np.full(pixels, rate_low), rate_high=np.full(pixels, rate_high))
    read = DeviceReadings(noise=noise, readings=readings)
    show([device_readings_guarantee(read, delta)], [], as_json=as_json)


def _mechanism_command(kind: type[Mechanism]) -> None:
    """Mount the command of a mechanism: its fields as options, in the order of its description, steps last."""

    def command(**values: Any) -> None:
        delta, target, as_json = (values.pop(name) for name in _COMMON)
        mechanism = _mechanism(kind, values, target)
        if target is not None:
            from accounting.calibration import calibrate

            mechanism, _ = calibrate(mechanism, target_epsilon=target, delta=delta)
        from accounting.composition import guarantees

        found = kind.noise_field if target is not None else None
        show(guarantees([mechanism], delta=delta), [mechanism], as_json=as_json, found=found)

    options = {field.name: _option(kind, field) for field in sorted(fields(kind), key=_steps_last)}
    parameters = options | _COMMON
    command.__annotations__ = {name: annotation for name, (annotation, _) in parameters.items()}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for name, (annotation, default) in parameters.items()
        ]
    )
    summary = (inspect.getdoc(kind) or kind.kind).split("\n\n")[0]
    app.command(kind.kind.replace("_", "-"), help=_escaped(" ".join(summary.split())))(command)


def _steps_last(field: Field[Any]) -> bool:
    return field.name == "steps"


def _option(kind: type[Mechanism], field: Field[Any]) -> tuple[Any, Any]:
    """Annotation and default of the option that sets a field."""
    meaning = _meanings(kind).get(field.name, "")
    if field.name == "layers":
        return Annotated[
            list[str] | None,
            typer.Option(
                "--layer",
                metavar="LAYER",
                help="FAN_IN,WIDTH,GMIN,GMAX and maybe ,positive and ,silent: one for each layer, the output layer "
                "last. GMIN and GMAX bound the slope |phi'|; positive: every input entry is bounded away from 0; "
                "silent: no noise on its signal. Such as 785,512,0,1",
            ),
        ], None
    hint = get_type_hints(kind)[field.name]
    default = None if field.default is MISSING else field.default
    name = "--" + field.name.replace("_", "-")
    metavar = None
    if isinstance(hint, type) and issubclass(hint, Enum):
        metavar = field.name.upper()  # the choices side by side are wider than a column
        meaning = f"{' or '.join(choice.value for choice in hint)}: {meaning}"
    option = typer.Option(name, help=_escaped(meaning), metavar=metavar)
    return Annotated[hint if default is not None else hint | None, option], default


def _escaped(text: str) -> str:
    """Brackets that are no markup of rich."""
    return text.replace("[", r"\[")


def _meanings(kind: type[Mechanism]) -> dict[str, str]:
    """The documented fields of a description and of its bases: name to text."""
    texts: dict[str, str] = {}
    for documented in reversed(kind.__mro__):
        _, _, attributes = (inspect.getdoc(documented) or "").partition("Attributes:\n")
        entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, flags=re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in entries}
    return texts


def _mechanism(kind: type[Mechanism], values: dict[str, Any], target: float | None) -> Mechanism:
    """The description, its noise a place to begin a calibration where it is left out.

    Raises:
        ValueError: A parameter is missing or out of range.
    """
    if values.get("layers") is not None:
        values["layers"] = tuple(_layer(text) for text in values["layers"])
    noise, start = kind.noise_field, 1.0
    if noise == "keep_probability" and values["n_classes"]:  # 0 is refused by the description
        start = (1 + 1 / values["n_classes"]) / 2
    if noise is not None and target is not None:
        if values[noise] is not None:
            name = noise.replace("_", "-")
            raise ValueError(
                f"--{name} = {values[noise]:g} and --target-epsilon = {target:g} contradict each other: the target "
                f"computes the {name.replace('-', ' ')}; leave one of them out"
            )
        values[noise] = start
    for field in fields(kind):
        if values[field.name] is None and field.default is MISSING:
            name = "layer" if field.name == "layers" else field.name.replace("_", "-")
            remedy = ", or --target-epsilon to have it computed" if field.name == noise else ""
            raise ValueError(f"--{name} is missing: give it{remedy}")
    return kind(**values)


def _layer(text: str) -> PublishedLayer:
    """The layer that FAN_IN,WIDTH,GMIN,GMAX[,positive][,silent] names."""
    numbers, words = text.split(",")[:4], text.split(",")[4:]
    if len(numbers) < 4 or not set(words) <= {"positive", "silent"}:
        raise ValueError(f"--layer {text}: must be FAN_IN,WIDTH,GMIN,GMAX[,positive][,silent]")
    try:
        fan_in, width, low, high = int(numbers[0]), int(numbers[1]), float(numbers[2]), float(numbers[3])
    except ValueError as error:
        raise ValueError(f"--layer {text}: FAN_IN and WIDTH must be integers, GMIN, GMAX numbers") from error
    return PublishedLayer(
        fan_in=fan_in,
        width=width,
        gamma_min=low,
        gamma_max=high,
        inputs_bounded_below="positive" in words,
        noised="silent" not in words,
    )


def show(
    guarantees: list[Guarantee],
    mechanisms: list[Mechanism],
    *,
    as_json: bool,
    seed_stored: bool = False,
    found: str | None = None,
) -> None:
    """Print guarantees: JSON, or what a calibration found, a table, and a paragraph for each."""
    if as_json:
        content = {
            "guarantees": [guarantee.to_json() for guarantee in guarantees],
            "mechanisms": [mechanism.to_json() for mechanism in mechanisms],
            "seed_stored": seed_stored,
        }
        typer.echo(json.dumps(content, indent=2))
        return
    from accounting.explanation import explain
    from accounting.tables import guarantee_rows, print_rows
    from opusim.tables import wrapped

    if found is not None:
        typer.echo(f"least noise that reaches the target: {found} = {getattr(mechanisms[0], found):.6g}")
    print_rows(guarantee_rows(guarantees, seed_stored=seed_stored), without=["notes"])
    for guarantee in guarantees:
        lines = explain(guarantee, seed_stored=seed_stored).splitlines()
        typer.echo("\n" + "\n".join(wrapped(line, indent="  ") for line in lines))


_SHOWN: tuple[type[Mechanism], ...] = (
    RecordCentral,
    ConvexLastIterate,
    PrivateSelection,
    LabelBudget,
    LabelAmplified,
    LabelOnce,
    RandomizedResponse,
    PoissonGaussian,
    PoissonLaplace,
    Gaussian,
    PublishedPdfa,
    PublishedUlr,
    RejectionGaussian,
    ZoGaussian,
    ZoLaplace,
)
for _kind in _SHOWN:
    _mechanism_command(_kind)
convex_cli.mount(app)
