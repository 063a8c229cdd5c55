"""Labels that are noised once, before training, and never looked at again.

Either a noisy reading of each record's one-hot label is kept (label-once), or each label is replaced by k-ary
randomized response. Training sees the log-likelihood of every class given what was observed, and nothing else of the
labels; its targets are the posterior softmax(prior + log-likelihood), with a flat prior at first and the model's own
prediction as prior later. All of it is post-processing of what was observed once.
Source: docs/privacy.md, sections 7 and 8 (labels read once, randomized response).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from accounting.labels.budget import label_distance
from accounting.labels.mechanisms import LabelReadout, RandomizedResponse
from accounting.labels.observations import (
    UniformSource,
    reading_log_likelihood,
    respond,
    response_log_likelihood,
)
from accounting.mechanisms import Mechanism
from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError
from opusim.noise import GaussianNoise
from opusim.randomness.streams import NoiseStream
from training.protections.base import creditable_law

LABEL_STEP = 2**64 - 1
"""The step number under which labels are read, so that no training step repeats their noise."""
_RECORDS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class NoisyLabels:
    """What training knows of the labels.

    Attributes:
        log_likelihood: Log P(observed | class), up to a constant of each record, float32, shape (n_records, classes).
        flat_steps: Steps at the beginning that take a flat prior.
    """

    log_likelihood: Tensor
    flat_steps: int

    def targets(self, output: Tensor, records: Tensor, step: int) -> Tensor:
        """Soft labels of a batch, rows of sum 1, shape (batch, classes).

        Args:
            output: The network's logits, shape (batch, classes).
            records: Numbers of the batch's records, shape (batch,).
            step: The step's number.
        """
        scores = self.log_likelihood[records]
        if step >= self.flat_steps:
            scores = scores + torch.log_softmax(output, dim=1)
        return torch.softmax(scores, dim=1)


Pay = Callable[[Mechanism], None]
"""Puts what is about to be released on record; called before anything is drawn."""


def read_once(labels: Tensor, n_classes: int, *, mu: float, noise: NoiseStream, pay: Pay) -> Tensor:
    """One-hot labels plus digital Gaussian noise of standard deviation sqrt(2) / mu.

    Args:
        labels: Class numbers, shape (n,).
        n_classes: k.
        mu: Of the guarantee, above 0.
        noise: Source of independent N(0, 1).
        pay: Takes what is released.

    Returns:
        The log-likelihood of every class, shape (n, k).
    """
    pay(LabelReadout(mu=mu))
    noise.seek(LABEL_STEP)
    sigma = math.sqrt(2) / mu
    readings = noise.add_to(_one_hot(labels, n_classes), sigma)
    scores = reading_log_likelihood([readings.numpy()], [np.eye(n_classes)], [sigma])
    return torch.from_numpy(scores).float()


def read_once_through(
    device: NoisyDevice, labels: Tensor, n_classes: int, *, mu: float, noise: NoiseStream, pay: Pay
) -> Tensor:
    """One-hot labels through a device of Gaussian law, whose noise is topped up to max_ab ||B_a - B_b|| / mu.

    Args:
        device: Open, simulated (its matrix is known), as many inputs as classes.
        labels: Class numbers, shape (n,).
        n_classes: k.
        mu: Of the guarantee, above 0; a device with more noise than that gives a smaller one.
        noise: Source of independent N(0, 1) for the rest.
        pay: Takes what is released.

    Returns:
        The log-likelihood of every class, shape (n, k).

    Raises:
        ConfigError: See `readable_law`.
    """
    law = readable_law(device)
    codes = device.matrix().cpu().double().numpy()  # type: ignore[attr-defined]  # (n_outputs, k)
    distance = label_distance(codes)
    own = law.min_std
    top_up = math.sqrt(max((distance / mu) ** 2 - own**2, 0.0))
    sigmas = np.sqrt(np.broadcast_to(law.variance(), len(codes)) + top_up**2)
    pay(LabelReadout(mu=min(distance / math.hypot(top_up, own), mu), device_law=True))
    device.seek(LABEL_STEP)
    noise.seek(LABEL_STEP)
    scores = []
    for part in labels.split(_RECORDS_AT_ONCE):
        readings = noise.add_to(device.project(_one_hot(part, n_classes)).cpu(), top_up)
        whitened = readings.double().numpy() / sigmas
        scores.append(reading_log_likelihood([whitened], [codes / sigmas[:, None]], [1.0]))
    return torch.from_numpy(np.concatenate(scores)).float()


def readable_law(device: NoisyDevice) -> GaussianNoise:
    """The law of a device through which labels can be read.

    Raises:
        ConfigError: See `creditable_law`, or its matrix is not known.
    """
    law = creditable_law(device)
    if getattr(device, "matrix", None) is None:
        raise ConfigError(
            "configuration",
            "protection.noise",
            f"'device' cannot read labels through device {device.name!r}, whose matrix is not known; use 'digital'",
        )
    return law


def randomize(labels: Tensor, mechanism: RandomizedResponse, generator: UniformSource, *, pay: Pay) -> Tensor:
    """Labels by k-ary randomized response.

    Args:
        labels: Class numbers, shape (n,).
        mechanism: The response.
        generator: Source of randomness; for a release the operating system's own.
        pay: Takes what is released.

    Returns:
        The log-likelihood of every class, shape (n, k).
    """
    pay(mechanism)
    epsilon, k = mechanism.step_epsilon, mechanism.n_classes
    observed = respond(labels.numpy(), epsilon=epsilon, n_labels=k, generator=generator)
    scores = response_log_likelihood(observed, epsilon=epsilon, n_labels=k)
    return torch.from_numpy(scores).float()


def _one_hot(labels: Tensor, n_classes: int) -> Tensor:
    return torch.nn.functional.one_hot(labels, n_classes).float()
