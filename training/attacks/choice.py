"""Which attacks fit a run."""

from __future__ import annotations

from training.attacks.base import Attack
from training.attacks.covariance import CovarianceAttack
from training.attacks.difference import DifferenceAttack
from training.attacks.row_space import RowSpaceAttack
from training.attacks.stage import RunParts, Shadow
from training.config.feedback import FeedbackConfig
from training.config.run import RunConfig
from training.feedback.options import feedback_options
from training.networks.clipping import ActivationClipping
from training.protections.plan import divisor_of

ROOM = 16
"""Directions that a batch's inputs must leave free for the row space to tell anything."""


def fitting_attacks(
    parts: RunParts, config: RunConfig, shadow: Shadow | None, *, batch_size: float
) -> list[Attack]:
    """The attacks that can be made on a run's updates, the one that needs least knowledge first.

    Args:
        parts: The run.
        config: Its configuration as it is played.
        shadow: The noiseless step, where there is one.
        batch_size: Expected records in a batch.
    """
    options = feedback_options(config)
    first, depth = parts.layers[0], len(parts.layers)
    clipping = update_clipping(options)
    protected = config.protection.kind != "none"
    attacks: list[Attack] = []
    spans = batch_size + ROOM <= parts.n_inputs + first.bias and batch_size <= first.n_outputs
    if spans:
        attacks.append(RowSpaceAttack(clipping, width=first.n_outputs, depth=depth, bias=first.bias))
    elif shadow is not None and not protected and _noised_readings(options):
        attacks.append(
            CovarianceAttack(
                shadow, clipping, through_clip=options.through_clip, depth=depth, bias=first.bias
            )
        )
    if shadow is not None and (protected or not spans):
        divisor = divisor_of(config) if protected else None
        layers = range(depth) if protected else [depth - 1]  # the published output layer carries e, unnoised
        attacks.append(DifferenceAttack(shadow, layers=layers, divisor=divisor))
    return attacks


def update_clipping(options: FeedbackConfig) -> ActivationClipping:
    """What an update does to the activations that enter it."""
    return ActivationClipping(
        tau_h_max=options.tau_h_max,
        tau_h_min=options.tau_h_min,
        layers=options.clipped_layers,
        width=options.clip_width,
    )


def _noised_readings(options: FeedbackConfig) -> bool:
    """Whether every hidden layer's signal has noise of one standard deviation, before the slope."""
    if options.kind == "pdfa":
        return options.encoding == "ternary"
    return options.kind in ("dfa", "tdfa") and options.sigma > 0
