"""Which attacks fit a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.attacks.base import Attack
from training.attacks.covariance import CovarianceAttack
from training.attacks.difference import DifferenceAttack
from training.attacks.replay import RunParts, Shadow
from training.attacks.row_space import RowSpaceAttack
from training.config.run import RunConfig
from training.feedback.config import DfaConfig, FeedbackConfig, PdfaConfig, TdfaConfig
from training.networks.clipping import ActivationClipping
from training.networks.network import LayerShape
from training.ulr.config import UlrConfig

ROOM = 16
"""Directions that a batch's inputs must leave free for the row space to tell anything."""


def fitting_attacks(
    parts: RunParts, config: RunConfig, shadow: Shadow[Any] | None, *, batch_size: float
) -> list[Attack]:
    """The attacks that can be made on a run's updates, the one that needs least knowledge first.

    Args:
        parts: The run.
        config: Its configuration as it is played.
        shadow: The noiseless step, where there is one.
        batch_size: Expected records in a batch.
    """
    options, protected = config.trainer, config.protection.kind != "none"
    layers = [LayerShape(**layer) for layer in parts.network_facts.get("layers", [])]
    attacks: list[Attack] = []
    spans = _spans(parts, config, layers, batch_size)
    if spans:
        first = layers[0]
        clipping = update_clipping(options)
        attacks.append(RowSpaceAttack(clipping, width=first.n_outputs, depth=len(layers), bias=first.bias))
    elif shadow is not None and not protected and _noised_readings(options):
        attacks.append(_covariance(options, layers, shadow))
    if shadow is not None and (protected or not spans):
        groups = parameter_groups(list(parts.network().tensors), config)
        attacks.append(DifferenceAttack(shadow, groups=groups))
    return attacks


def parameter_groups(names: Sequence[str], config: RunConfig) -> list[list[str]]:
    """The parameters that the difference attack looks at, in groups of one noise each.

    Layers of a feedback or of ulr; without protection the last alone, whose signal a published feedback leaves without
    noise. All parameters of zo and convex together.

    Args:
        names: Of the parameters, "layer1.weight", ... for networks of layers.
        config: The run.
    """
    options = config.trainer
    if not isinstance(options, FeedbackConfig | UlrConfig):
        return [list(names)]
    layers = dict.fromkeys(name.partition(".")[0] for name in names)
    groups = [[name for name in names if name.startswith(f"{layer}.")] for layer in layers]
    published = isinstance(options, FeedbackConfig) and config.protection.kind == "none"
    return groups[-1:] if published else groups


def update_clipping(options: object) -> ActivationClipping:
    """What an update does to the activations that enter it."""
    if not isinstance(options, FeedbackConfig):
        return ActivationClipping()
    return ActivationClipping(
        tau_h_max=options.tau_h_max,
        tau_h_min=options.tau_h_min,
        layers=options.clipped_layers,
        width=options.clip_width,
    )


def _spans(parts: RunParts, config: RunConfig, layers: Sequence[LayerShape], batch_size: float) -> bool:
    """Whether a batch's inputs span the rows of the first layer's gradient and leave room for others."""
    if not layers or not isinstance(config.trainer, FeedbackConfig | UlrConfig):
        return False
    fan_in, width = int(parts.network_facts["n_inputs"]) + layers[0].bias, layers[0].n_outputs
    return batch_size + ROOM <= fan_in and batch_size <= width


def _noised_readings(options: object) -> bool:
    """Whether every hidden layer's signal has noise of one standard deviation, before the slope."""
    if not isinstance(options, FeedbackConfig):
        return False
    if isinstance(options, PdfaConfig):
        return options.encoding == "ternary"
    return isinstance(options, DfaConfig | TdfaConfig) and options.sigma > 0


def _covariance(options: object, layers: Sequence[LayerShape], shadow: Shadow[Any]) -> CovarianceAttack:
    through_clip = isinstance(options, FeedbackConfig) and options.through_clip
    return CovarianceAttack(
        shadow,
        update_clipping(options),
        through_clip=through_clip,
        depth=len(layers),
        bias=layers[0].bias,
    )
