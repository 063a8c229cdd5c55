"""Which attacks apply to a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.attacks.base import Attack
from training.attacks.replay import AuditedRun, NoiselessStep
from training.attacks.update_attacks import CovarianceAttack, DifferenceAttack, RowSpaceAttack
from training.engine.plan import RunPlan
from training.feedback.config import FeedbackConfig, PdfaConfig
from training.networks.clipping import ActivationClipping
from training.networks.network import LayerShape
from training.ulr.config import UlrConfig

ROOM = 16
"""Directions that a batch's inputs must leave free for the row space to tell anything."""


def applicable_attacks(
    run: AuditedRun, plan: RunPlan, noiseless: NoiselessStep[Any] | None, *, batch_size: float
) -> list[Attack]:
    """Return the attacks on a run's updates, the one that needs least knowledge first.

    Args:
        run: The audited run.
        plan: The run as it is played.
        noiseless: The noiseless step, or None if there is none.
        batch_size: Expected number of records in a batch.
    """
    options, protected = plan.config.trainer, plan.config.protection.protects != "nothing"
    layers = [LayerShape(**layer) for layer in run.network_facts.get("layers", [])]
    attacks: list[Attack] = []
    spans = _spans(run, options, layers, batch_size)
    if spans:
        first = layers[0]
        clipping = update_clipping(options)
        attacks.append(RowSpaceAttack(clipping, width=first.n_outputs, depth=len(layers), bias=first.bias))
    elif noiseless is not None and not protected and _noised_readings(options):
        attacks.append(_covariance(options, layers, noiseless))
    if noiseless is not None and (protected or not spans):
        groups = parameter_groups(list(plan.network.tensors), plan)
        attacks.append(DifferenceAttack(noiseless, groups=groups))
    return attacks


def parameter_groups(names: Sequence[str], plan: RunPlan) -> list[list[str]]:
    """Return the parameters that the difference attack looks at, in groups of one noise each.

    A group is a layer of a feedback or of ulr. Without protection it is only the last layer, whose signal a published
    feedback leaves without noise. All parameters of other trainers form one group.

    Args:
        names: Of the parameters, "layer1.weight", ... for networks of layers.
        plan: The run.
    """
    options = plan.config.trainer
    if not isinstance(options, FeedbackConfig | UlrConfig):
        return [list(names)]
    layers = dict.fromkeys(name.partition(".")[0] for name in names)
    groups = [[name for name in names if name.startswith(f"{layer}.")] for layer in layers]
    published = isinstance(options, FeedbackConfig) and plan.config.protection.protects == "nothing"
    return groups[-1:] if published else groups


def update_clipping(options: object) -> ActivationClipping:
    """Return what an update does to the activations that enter it."""
    if not isinstance(options, FeedbackConfig):
        return ActivationClipping()
    return ActivationClipping(
        tau_h_max=options.tau_h_max,
        tau_h_min=options.tau_h_min,
        layers=options.clipped_layers,
        width=options.clip_width,
    )


def _spans(run: AuditedRun, options: object, layers: Sequence[LayerShape], batch_size: float) -> bool:
    """Return whether a batch's inputs span the rows of the first layer's gradient and leave room for others."""
    if not layers or not isinstance(options, FeedbackConfig | UlrConfig):
        return False
    fan_in, width = int(run.network_facts["n_inputs"]) + layers[0].bias, layers[0].n_outputs
    return batch_size + ROOM <= fan_in and batch_size <= width


def _noised_readings(options: object) -> bool:
    """Return whether every hidden layer's signal has noise of one standard deviation, before the slope."""
    if not isinstance(options, FeedbackConfig):
        return False
    if isinstance(options, PdfaConfig):
        return options.encoding == "ternary"
    return options.feedback_matrix and options.digital_sigma > 0


def _covariance(
    options: object, layers: Sequence[LayerShape], noiseless: NoiselessStep[Any]
) -> CovarianceAttack:
    through_clip = isinstance(options, FeedbackConfig) and options.through_clip
    return CovarianceAttack(
        noiseless,
        update_clipping(options),
        through_clip=through_clip,
        depth=len(layers),
        bias=layers[0].bias,
    )
