"""The commands `opusim account ...` and `opusim explain`: how private a run was, what parameters would give, and why.

A mechanism's command has the fields of its class as options, and their `Doc` texts as help; mechanisms of other
packages appear next to ours.
"""

from __future__ import annotations

import inspect
import json
import math
from enum import Enum
from typing import Annotated, Any

import numpy as np
import typer

from opusim import checks
from opusim.accounting.composition import calibrate_noise, guarantees
from opusim.accounting.explanation import explain_theorem, guarantees_text, large_delta, number, print_rows
from opusim.accounting.guarantee import Guarantee, NoGuarantee
from opusim.accounting.mechanism import Mechanism, Parameter, mechanism_classes, parameters_of
from opusim.accounting.mechanisms.convex import (
    ConvexLastIterate,
    least_regularisation,
    most_epochs,
    priced_descents,
)
from opusim.accounting.mechanisms.readings import DeviceReadings, device_readings_guarantee
from opusim.accounting.theorems import known_theorems, theorem
from opusim.noise import PhotonCountNoise
from opusim.tables import print_table, wrapped

app = typer.Typer(
    name="account",
    epilog="Example:  opusim account record-central --noise-multiplier 1.1 --sampling-probability 0.01 "
    "--steps 1000 --clip-norm 1 --divisor 600",
    no_args_is_help=True,
)

Delta = Annotated[
    float, typer.Option(help="Delta of the statement, in [0, 1); choose it below 0.1 / records.")
]
Target = Annotated[
    float | None,
    typer.Option(help="Compute the least noise whose proven epsilon is at most this; leave the noise out."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with every assumption.")]
_COMMON = {"delta": (Delta, 1e-5), "target_epsilon": (Target, None), "as_json": (AsJson, False)}
_EPOCHS_SHOWN = (1, 2, 5, 10, 20, 40, 100, 400)


@app.callback()
def account() -> None:
    """Say how private a run was, or what a mechanism's parameters would give, without running anything."""


@app.command("photon-counts")
def photon_counts_command(
    rate_low: Annotated[float, typer.Option(help="Lowest expected count of a pixel in a frame, above 0.")],
    rate_high: Annotated[float, typer.Option(help="Highest expected count, at least --rate-low.")],
    pixels: Annotated[int, typer.Option(help="Pixels times frames of one reading, at least 1.")] = 1,
    readings: Annotated[
        int, typer.Option(help="How many readings of one record are released, at least 1.")
    ] = 1,
    delta: Delta = 1e-5,
    as_json: AsJson = False,
) -> None:
    """A camera's counts of a private input, protected by their own shot noise (exact Poisson divergence)."""
    checks.integer(minimum=1, pixels=pixels)
    noise = PhotonCountNoise(rate_low=np.full(pixels, rate_low), rate_high=np.full(pixels, rate_high))
    read = DeviceReadings(noise=noise, readings=readings)
    show([device_readings_guarantee(read, delta)], [], as_json=as_json)


@app.command(
    "convex-plan",
    help="Plan a last-iterate run: the least noise for several numbers of epochs or, with --noise-multiplier, the "
    "least regularisation and the most epochs.",
)
def convex_plan(
    target_epsilon: Annotated[float, typer.Option(help="Largest epsilon of the last iterate, above 0.")],
    batches: Annotated[int, typer.Option(help="k, steps of an epoch: records / batch size.")],
    objective: Annotated[str, typer.Option(help="squared, margin, one-against-rest or softmax.")] = "margin",
    clip: Annotated[float | None, typer.Option(help="Bound of a record's residual.")] = 0.5,
    learning_rate: Annotated[float, typer.Option(help="eta, below 2 / (beta + lambda).")] = 1.9,
    schedule: Annotated[str, typer.Option(help="constant, linear or cosine.")] = "constant",
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Keep this noise, and find the regularisation or the epochs instead.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Epochs of the run whose regularisation is found, 40 by default; with --noise-multiplier."
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="Delta of the statement, in (0, 1).")] = 1e-5,
) -> None:
    """Print the least noise for several numbers of epochs, or what a given noise allows."""
    checks.integer(minimum=1, batches=batches)
    if epochs is not None and noise_multiplier is None:
        raise ValueError(
            f"--epochs = {epochs} does nothing without --noise-multiplier: the table shows several lengths; "
            "leave it out"
        )
    start = ConvexLastIterate(
        objective=objective,
        clip=clip,
        learning_rate=learning_rate,
        schedule=schedule,
        batches=batches,
        epochs=40 if epochs is None else epochs,
        noise_multiplier=1.0 if noise_multiplier is None else noise_multiplier,
        final_noise=math.sqrt(batches - 1),
    )
    if noise_multiplier is None:
        found = priced_descents(start, target_epsilon=target_epsilon, delta=delta, epochs=_EPOCHS_SHOWN)
        rows = [
            {
                "epochs": str(one.mechanism.epochs),
                "noise multiplier": f"{one.mechanism.noise_multiplier:.4g}",
                "noise on a weight [C / records]": f"{one.weight_noise:.4g}",
                "epsilon": number(one.epsilon),
            }
            for one in found
        ]
        print_rows(rows)
        return
    for label, name, solve in (
        ("least regularisation", "regularisation", least_regularisation),
        ("most epochs", "epochs", most_epochs),
    ):
        try:
            value = getattr(solve(start, target_epsilon=target_epsilon, delta=delta), name)
            typer.echo(f"{label}: {value:.6g}")
        except NoGuarantee as refused:
            typer.echo(f"{name}: {refused}")


def explain_command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="THEOREM", help="The theorem's name; all are listed without one."),
    ] = None,
) -> None:
    """State a theorem that a guarantee cites: its formula, its hypotheses, its proof and the code that uses it."""
    if name is None:
        print_table("", ["theorem", "about"], [[one.name, one.title] for one in known_theorems()])
        return
    for line in explain_theorem(theorem(name)).splitlines():
        typer.echo(wrapped(line, indent="  "))


def _mechanism_command(kind: type[Mechanism]) -> None:
    """Add the command of a mechanism: its required fields as options first, steps last."""

    def command(**values: Any) -> None:
        delta, target, as_json = (values.pop(name) for name in _COMMON)
        mechanism = _mechanism(kind, values, target)
        if target is not None:
            mechanism, _ = calibrate_noise(mechanism, target_epsilon=target, delta=delta)
        found = kind.noise_field if target is not None else None
        show(guarantees([mechanism], delta=delta), [mechanism], as_json=as_json, found=found)

    ordered = sorted(parameters_of(kind), key=lambda one: (one.name == "steps", not one.required))
    options = {parameter.name: _option(parameter) for parameter in ordered} | _COMMON
    command.__annotations__ = {name: annotation for name, (annotation, _) in options.items()}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for name, (annotation, default) in options.items()
        ]
    )
    summary = (inspect.getdoc(kind) or kind.kind).split("\n\n")[0]
    app.command(kind.kind.replace("_", "-"), help=_escaped(" ".join(summary.split())))(command)


def _option(parameter: Parameter) -> tuple[Any, Any]:
    """Annotation and default of the option that sets a field."""
    meaning, metavar, hint = parameter.meaning, None, parameter.value_type
    if parameter.item is not None:
        hint, metavar = list[str], parameter.name.upper().rstrip("S")
    elif issubclass(hint, Enum):
        metavar = parameter.name.upper()  # the choices in one line are wider than a column
        meaning = f"{' or '.join(choice.value for choice in hint)}: {meaning}"
    option = typer.Option(_flag(parameter), help=_escaped(meaning), metavar=metavar)
    return Annotated[hint if parameter.default is not None else hint | None, option], parameter.default


def _flag(parameter: Parameter) -> str:
    """The option's name; one that may be repeated is singular."""
    name = parameter.name if parameter.item is None else parameter.name.rstrip("s")
    return "--" + name.replace("_", "-")


def _escaped(text: str) -> str:
    """Escape brackets, which rich would read as markup."""
    return text.replace("[", r"\[")


def _mechanism(kind: type[Mechanism], values: dict[str, Any], target: float | None) -> Mechanism:
    """The mechanism of the given options; a calibration starts from a placeholder for its noise."""
    noise = kind.noise_field
    if noise is not None and target is not None:
        if values[noise] is not None:
            name = noise.replace("_", "-")
            raise ValueError(
                f"--{name} = {values[noise]:g} and --target-epsilon = {target:g} contradict each other: the target "
                f"computes the {name.replace('-', ' ')}; leave one of them out"
            )
        values[noise] = kind.starting_noise(values)
    for parameter in parameters_of(kind):
        item: Any = parameter.item
        if values[parameter.name] is None and parameter.required:
            remedy = ", or --target-epsilon to have it computed" if parameter.name == noise else ""
            meaning = parameter.meaning.rstrip(".").removesuffix(";")
            raise ValueError(f"{_flag(parameter)} is missing: give it{remedy} ({meaning})")
        if item is not None:
            values[parameter.name] = tuple(
                getattr(item, "from_text", item)(text) for text in values[parameter.name]
            )
    return kind(**values)


def show(
    guarantees: list[Guarantee],
    mechanisms: list[Mechanism],
    *,
    as_json: bool,
    found: str | None = None,
) -> None:
    """Print guarantees: as JSON, or as a table with a paragraph for each, after what a calibration found."""
    lines = [large_delta(one.delta, mechanisms) for one in guarantees if one.is_proven]
    warned = list(dict.fromkeys(line for line in lines if line is not None))
    if as_json:
        content = {
            "guarantees": [guarantee.to_json() for guarantee in guarantees],
            "mechanisms": [mechanism.to_json() for mechanism in mechanisms],
            "seed_stored": False,
            "warnings": [{"code": "large-delta", "text": line} for line in warned],
        }
        typer.echo(json.dumps(content, indent=2))
        return
    if found is not None:
        typer.echo(f"least noise that reaches the target: {found} = {getattr(mechanisms[0], found):.6g}")
    typer.echo(guarantees_text(guarantees))
    for line in warned:
        typer.echo(wrapped(line, indent="  "))


for _kind in mechanism_classes().values():
    if _kind.priced:
        _mechanism_command(_kind)
