"""`opusim train convex`."""

from __future__ import annotations

from typing import Annotated

import typer

from training.cli import options
from training.cli.training_runs import flag_changes, private_changes, train_configured

EXAMPLES = """[bold]Examples[/bold]

opusim train convex --data mnist --epsilon 3

opusim train convex --data mnist --epsilon 3 --method poisson

opusim train convex --data digits --epsilon 8 --device gaussian --release

[bold]--set[/bold] changes any key of the configuration; `opusim train options` lists them all, and \
docs/convex.md says what to choose at which epsilon."""

Method = Annotated[
    str | None,
    typer.Option(
        help="cyclic (fixed batches) or full (one batch): private at the last iterate; poisson: every update released. "
        "cyclic by default, or what --config says."
    ),
]
_SCHEMES = {"cyclic": "disjoint-cyclic", "full": "full-batch", "poisson": "poisson"}


def mount(train_app: typer.Typer) -> None:
    """Add the command to `opusim train`."""
    train_app.command("convex", epilog=EXAMPLES)(train_convex)


def train_convex(
    config: options.Config = None,
    settings: options.Settings = None,
    data: options.Data = None,
    device: options.Device = None,
    method: Method = None,
    epochs: options.Epochs = None,
    seed: options.Seed = None,
    out: options.Out = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise_multiplier: options.NoiseMultiplier = None,
    release: options.ReleaseMode = False,
    quiet: options.Quiet = False,
) -> None:
    """A ReLU network as a convex problem: noisy gradient descent on a gated linear model, private at the last iterate.

    With --device its hyperplanes and its noise are the device's, whose noise must be Gaussian.
    """
    changes = flag_changes("convex", data, epochs, seed)
    if method is not None:
        changes["sampler"] = {"scheme": _scheme(method)}
    if device is not None:
        changes["device"] = {"name": device}
        changes["trainer"]["gates"] = "device"
    changes |= private_changes(None, epsilon, delta, noise_multiplier, release)
    if epsilon is not None or noise_multiplier is not None:
        if method is not None:
            changes["protection"]["kind"] = "record" if method == "poisson" else "last-iterate"
        if device is not None:
            changes["protection"]["noise"] = "device"
    train_configured(config, settings, changes, out, quiet)


def _scheme(method: str) -> str:
    """The sampling scheme of a method."""
    if method not in _SCHEMES:
        raise ValueError(f"--method {method}: must be one of {', '.join(_SCHEMES)}")
    return _SCHEMES[method]
