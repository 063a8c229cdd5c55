"""The command of unified likelihood ratio training."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from training.cli import options
from training.cli.training_runs import EXAMPLES, flag_changes, private_changes, train_configured

Copies = Annotated[
    int | None,
    typer.Option(help="Noisy copies of every record for each module (antithetic pairs, by default)."),
]
OutputSigma = Annotated[
    float | None, typer.Option(help="Standard deviation of the noise on a module's output (short for --set).")
]


def mount(train_app: typer.Typer) -> None:
    """Add the command to `opusim train`."""
    train_app.command("ulr", epilog=EXAMPLES.format(kind="ulr"))(train_ulr)


def train_ulr(
    config: options.Config = None,
    settings: options.Settings = None,
    data: options.Data = None,
    device: options.Device = None,
    sigma: OutputSigma = None,
    copies: Copies = None,
    epochs: options.Epochs = None,
    seed: options.Seed = None,
    out: options.Out = None,
    protect: options.ProtectRecord = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise_multiplier: options.NoiseMultiplier = None,
    release: options.ReleaseMode = False,
    quiet: options.Quiet = False,
) -> None:
    """Unified likelihood ratio: forward passes alone, with noise on one module's output at a time.

    With --device the noise comes from that device, whose law must be Gaussian (trainer.noise = "device").
    """
    changes = flag_changes("ulr", data, epochs, seed)
    given: dict[str, Any] = {"sigma": sigma, "copies": copies}
    changes["trainer"] |= {key: value for key, value in given.items() if value is not None}
    if device is not None:
        changes["trainer"]["noise"] = "device"
        changes["device"] = {"name": device}
    changes |= private_changes(protect, epsilon, delta, noise_multiplier, release)
    train_configured(config, settings, changes, out, quiet)
