"""What a record of the self-test adds to a step's sum: its gradient without noise, clipped as it is accounted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from training.attacks.base import Records
from training.attacks.controls import plain_descent
from training.attacks.replay import NoiselessStep
from training.config.run import RunConfig
from training.convex.config import ConvexConfig
from training.data import Dataset
from training.engine.plan import RunPlan
from training.networks.functions import LOSSES
from training.protections.config import NoProtectionConfig

_MIN_EXCESS = 1.5
"""Smallest ratio of a record's gradient norm to the clip in every layer."""

Weights = Mapping[str, Tensor]
Gradient = dict[str, np.ndarray]
"""By parameter, float64."""


def record_gradients(
    config: RunConfig, model: nn.Module, dataset: Dataset, at: Sequence[tuple[Weights, int]]
) -> list[Gradient]:
    """Return gradients of single records without clip or noise.

    Args:
        config: The resolved configuration of the run.
        model: A new model of the run; it is changed.
        dataset: The records.
        at: For each gradient the parameters, and the number of the record.
    """
    x, y = dataset.train.x, dataset.train.y
    if config.trainer.kind == "ulr":
        return [
            _autograd(model, dict(state), x[row : row + 1], y[row : row + 1], config) for state, row in at
        ]
    unprotected = config.unchecked(
        protection=NoProtectionConfig(), mode="experiment", optimizer={"name": "sgd"}
    )
    plan = plain_descent(RunPlan.checked(unprotected, dataset, model=model)).with_silent_device()
    with plan.opened_device() as device:
        noiseless = NoiselessStep(plan.network, plan.algorithm.trainer(device))
        found = [
            noiseless.gradients(state, Records(x=x[row : row + 1], y=y[row : row + 1]), step=0)
            for state, row in at
        ]
    return [{name: tensor.numpy() for name, tensor in gradient.items()} for gradient in found]


def _autograd(
    model: nn.Module, state: dict[str, Tensor], x: Tensor, y: Tensor, config: RunConfig
) -> Gradient:
    """Return the gradient of the loss by torch; names follow the order of the layers."""
    named = dict(zip(state, model.parameters(), strict=True))
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(state[name])
    loss = LOSSES[config.loss](model(x), y).per_record.sum()
    found = torch.autograd.grad(loss, list(named.values()))
    return {name: part.double().numpy() for name, part in zip(named, found, strict=True)}


def convex_contribution(config: RunConfig, dataset: Dataset, clip: float, *, row: int = 0) -> Gradient:
    """x~ residual^T at weights of 0, for a record with open gates only: x~ = x / (|x| sqrt(P)) on every gate."""
    options, k = config.trainer_as(ConvexConfig), dataset.n_classes
    x, label = dataset.train.x[row].double().numpy(), int(dataset.train.y[row])
    target = np.eye(k)[label]
    residual = {
        "squared": -target,
        "margin": -target,
        "one-against-rest": 0.5 - target,
        "softmax": 1 / k - target,
    }[options.objective]
    norm = float(np.linalg.norm(residual))
    if options.residual_clip is None or norm < _MIN_EXCESS * clip:
        raise ValueError(
            f"trainer.clip = {options.clip}: must be given and below {norm / _MIN_EXCESS:.2g}, so that the self-test's "
            f"records exceed it (objective {options.objective!r}); lower it"
        )
    if options.objective == "one-against-rest":
        residual = np.sign(residual)
        norm = math.sqrt(k)
    gates = np.ones(options.hyperplanes) / math.sqrt(options.hyperplanes)
    features = np.einsum("d,p,k->dpk", x / np.linalg.norm(x), gates, residual * clip / norm)
    return {"weight": features}


def clipped(gradient: Gradient, clip: float, *, by_layer: bool) -> Gradient:
    """Clip a gradient as docs/privacy-records.md states: one factor for all layers, or C / sqrt(L) for each."""
    layers = layers_of(list(gradient))
    if not by_layer:
        factor = clip / float(np.linalg.norm(flattened(gradient, list(gradient))))
        return {name: factor * part for name, part in gradient.items()}
    bound = clip / math.sqrt(len(layers))
    return {
        name: gradient[name] * (bound / float(np.linalg.norm(flattened(gradient, names))))
        for names in layers
        for name in names
    }


def require_beyond(norms: Sequence[float], clip: float) -> None:
    """Refuse a clip that the records' norms do not exceed in every layer."""
    least = min(norms)
    if least < _MIN_EXCESS * clip:
        raise ValueError(
            f"protection.clip_norm = {clip:g}: must be at most {least / _MIN_EXCESS:.2g}, so that the records of the "
            "self-test exceed it in every layer; lower it"
        )


def layers_of(names: Sequence[str]) -> list[list[str]]:
    """Return the names of each layer's parameters."""
    layers = dict.fromkeys(name.partition(".")[0] for name in names)
    return [[name for name in names if name.partition(".")[0] == layer] for layer in layers]


def flattened(gradient: Gradient, names: Sequence[str]) -> np.ndarray:
    """Return some parameters of a gradient in one row."""
    return np.concatenate([gradient[name].ravel() for name in names])
