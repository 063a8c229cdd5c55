"""The commands of the feedback trainers: pdfa, dfa, tdfa, bp."""

from __future__ import annotations

import typer

from training.cli import options
from training.cli.training_runs import EXAMPLES, flag_changes, private_changes, train_configured


def mount(train_app: typer.Typer) -> None:
    """Add the four commands to `opusim train`."""
    train_app.command("pdfa", epilog=EXAMPLES.format(kind="pdfa"))(train_pdfa)
    _mount_digital(
        train_app, "dfa", "Direct feedback alignment: a digital random projection of the error (no device)."
    )
    _mount_digital(
        train_app,
        "tdfa",
        "Ternarized direct feedback alignment: a digital projection of the error in {-1, 0, 1} (no device).",
    )
    _mount_digital(train_app, "bp", "Backpropagation, as the reference (no device).")


def train_pdfa(
    config: options.Config = None,
    settings: options.Settings = None,
    data: options.Data = None,
    device: options.Device = None,
    sigma: options.Sigma = None,
    epochs: options.Epochs = None,
    seed: options.Seed = None,
    out: options.Out = None,
    protect: options.Protect = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise_multiplier: options.NoiseMultiplier = None,
    release: options.ReleaseMode = False,
    quiet: options.Quiet = False,
) -> None:
    """Photonic direct feedback alignment: the ternarized error goes through the device once per step."""
    changes = flag_changes("pdfa", data, epochs, seed)
    changes["device"] = {
        **({"name": device} if device is not None else {}),
        **({"noise": {"sigma": sigma}} if sigma is not None else {}),
    }
    changes |= private_changes(protect, epsilon, delta, noise_multiplier, release)
    train_configured(config, settings, changes, out, quiet)


def _mount_digital(train_app: typer.Typer, kind: str, description: str) -> None:
    """Mount the command of a trainer without a device; the three differ in their name alone."""

    def command(
        config: options.Config = None,
        settings: options.Settings = None,
        data: options.Data = None,
        sigma: options.Sigma = None,
        epochs: options.Epochs = None,
        seed: options.Seed = None,
        out: options.Out = None,
        protect: options.Protect = None,
        epsilon: options.Epsilon = None,
        delta: options.Delta = None,
        noise_multiplier: options.NoiseMultiplier = None,
        release: options.ReleaseMode = False,
        quiet: options.Quiet = False,
    ) -> None:
        changes = flag_changes(kind, data, epochs, seed)
        if sigma is not None:
            changes["trainer"]["sigma"] = sigma
        changes |= private_changes(protect, epsilon, delta, noise_multiplier, release)
        train_configured(config, settings, changes, out, quiet)

    train_app.command(kind, help=description, epilog=EXAMPLES.format(kind=kind))(command)
