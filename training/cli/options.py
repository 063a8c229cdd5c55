"""Options that the training commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path | None, typer.Option(help="Run configuration: a TOML file, or the config.json of a run.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the configuration; repeatable."),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="digits (embedded), mnist or fashion-mnist (from $OPUSIM_DATA, else downloaded), cifar-10 ($OPUSIM_DATA)."
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Passes over the training records.")]
Seed = Annotated[int | None, typer.Option(help="Seed of initialisation, batches and simulated noise.")]
Out = Annotated[Path | None, typer.Option(help="The run folder; a new one under ./runs by default.")]
Device = Annotated[
    str | None,
    typer.Option(help="Device description: a name of `opusim device list`, or the path of a TOML file."),
]
Sigma = Annotated[
    float | None,
    typer.Option(help="Standard deviation of the noise, in units of the projection (short for --set)."),
]
Protect = Annotated[
    str | None,
    typer.Option(
        help="What is protected: record (whole records; Poisson batches), label, label-amplified (Poisson batches), "
        "label-once or label-response (labels alone, features public). Needs --epsilon, or for record and "
        "label-amplified --noise-multiplier."
    ),
]
ProtectRecord = Annotated[
    str | None,
    typer.Option(
        help="What is protected: record (whole records; Poisson batches). Needs --epsilon or --noise-multiplier."
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Privacy budget: sets the noise where none is given; training stops before it is exceeded."
    ),
]
Delta = Annotated[float | None, typer.Option(help="delta of every guarantee (1e-5 by default).")]
NoiseMultiplier = Annotated[
    float | None, typer.Option(help="Standard deviation of the central noise over the clip norm.")
]
ReleaseMode = Annotated[
    bool,
    typer.Option("--release", help="Draw from the system's entropy, store no seed and no private figure."),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="No progress bar, no table; prints the run folder alone.")
]
