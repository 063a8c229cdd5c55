"""Labels that are noised once, before training, and never looked at again.

Either training keeps a device's noisy reading of each record's one-hot label, or each label is replaced by k-ary
randomized response, or by one among the labels that a model of earlier responses makes likely. All that training sees
of the labels is the log-likelihood of every class, given what was observed, and the last such model. Its targets are
the posterior softmax(prior + log-likelihood), with a flat prior or that model at first, and the model's own prediction
as prior later. All of it is post-processing of what was observed once.
Source: docs/privacy-labels.md, sections 4 and 5 (labels read once, randomized response).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from opusim.accounting.guarantee import LedgerCorrupt, NoGuarantee
from opusim.accounting.ledger import Ledger
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.labels import (
    LabelReadout,
    RandomizedResponse,
    StagedResponse,
    UniformSource,
    label_distance,
    reading_log_likelihood,
    respond,
    response_log_likelihood,
)
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError
from opusim.noise import FluctuatingCountNoise, GaussianNoise, PhotonCountNoise
from opusim.randomness.streams import NoiseStream, SystemUniforms, noise_stream
from opusim.training.protections.base import Protection, SoftLabels, calibrated_once, creditable_law
from opusim.training.protections.noisy_labels import LEAST_PART, MOST_FEATURES, randomize_in_stages
from opusim.training.protections.planning import epsilon_of, require_own_noise
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import read_array, write_array

LABEL_STEP = 2**64 - 1
"""The step number under which labels are read, so that no training step repeats their noise."""
_RECORDS_AT_ONCE = 4096

Pay = Callable[[Mechanism], None]
"""Puts what is about to be released on record; called before anything is drawn."""


class OneLookProtection(Protection, ABC):
    """Labels that are looked at once; the run folder keeps what was observed."""

    needs = frozenset({"soft labels"})
    payment: ClassVar[str] = "labels"
    """What a ledger calls the one look at the labels."""

    @property
    @abstractmethod
    def mechanism(self) -> Mechanism:
        """What the look releases at the run's epsilon; a device with more noise releases less."""

    def whole_run(self) -> Mechanism:
        """See Protection.whole_run."""
        return self.mechanism

    def calibrated(self) -> float | None:
        """See Protection.calibrated; a look that no noise keeps within epsilon is refused before the run begins."""
        _ = self.mechanism
        return super().calibrated()

    @abstractmethod
    def look(self, device: NoisyDevice | None, pay: Pay) -> Tensor:
        """Read or randomize every label, and return the log-likelihood of every class, shape (n, k).

        Behind it may stand as many columns of the logarithm of the prior with which training begins.

        Args:
            device: The run's open device, or None without one.
            pay: Takes what is released.
        """

    def pay_upfront(self, ledger: Ledger, device: NoisyDevice | None, folder: RunFolder) -> None:
        """See Protection.pay_upfront."""
        if not folder.labels_file.exists():
            scores = self.look(device, lambda mechanism: ledger.pay_once(self.payment, mechanism))
            write_array(folder.labels_file, scores.numpy())
        elif all(payment.name != self.payment for payment in ledger.content.payments):
            raise LedgerCorrupt(
                f"{folder.ledger_file}: does not pay for {folder.labels_file.name}, which is there; restore it from a "
                "copy"
            )

    def soft_labels(self, device: NoisyDevice | None, folder: RunFolder) -> SoftLabels | None:
        """See Protection.soft_labels."""
        flat_steps = math.ceil(self.options.flat_prior * self.plan.total_steps)
        place, k = self.config.torch_device, self.dataset.n_classes
        return StoredLabels(folder, place=place, n_classes=k, flat_steps=flat_steps)


class LabelReadoutProtection(OneLookProtection):
    """Labels: one reading of each through a device of Gaussian noise, at the run's epsilon."""

    @property
    def mechanism(self) -> LabelReadout:
        """See OneLookProtection.mechanism."""
        options = self.options
        start = LabelReadout(mu=1.0, **self.plan.credit)
        return calibrated_once(start, epsilon=epsilon_of(options), delta=options.delta)

    def look(self, device: NoisyDevice | None, pay: Pay) -> Tensor:
        """See OneLookProtection.look."""
        config, dataset = self.config, self.dataset
        noise = noise_stream(config.mode, config.seed_for("label-noise"), "label-noise")
        labels, k, mu = dataset.train.y.cpu(), dataset.n_classes, self.mechanism.mu
        if device is None:
            raise ValueError("device is missing: labels are read through the run's device")
        return read_once_through(device, labels, k, mu=mu, noise=noise, pay=pay, credit=self.plan.credit)

    def work_before(self) -> DeviceWork:
        """See Protection.work_before; one reading of each label."""
        labels = len(self.dataset.train)
        return DeviceWork(projections=labels, calls=math.ceil(labels / _RECORDS_AT_ONCE))

    def soft_labels(self, device: NoisyDevice | None, folder: RunFolder) -> SoftLabels | None:
        """See Protection.soft_labels; a device that cannot read labels is refused before the run begins."""
        if device is not None:
            law = readable_law(device, self.plan.credit)
            if not self.options.top_up:
                codes = device.require("matrix").matrix().cpu().double().numpy()
                require_own_noise(device, law, label_distance(codes), self.mechanism)
        return super().soft_labels(device, folder)


class RandomizedResponseProtection(OneLookProtection):
    """Labels: k-ary randomized response at the run's epsilon."""

    @property
    def mechanism(self) -> RandomizedResponse:
        """See OneLookProtection.mechanism."""
        options, start = self.options, RandomizedResponse.from_epsilon(1.0, self.dataset.n_classes)
        return calibrated_once(start, epsilon=epsilon_of(options), delta=options.delta)

    def look(self, device: NoisyDevice | None, pay: Pay) -> Tensor:
        """See OneLookProtection.look."""
        return randomize(self.dataset.train.y.cpu(), self.mechanism, self.source(), pay=pay)

    def source(self) -> UniformSource:
        """Return what responses are drawn from: a generator of the run's seed, or the system in a release."""
        seed = self.config.seed_for("labels")
        return SystemUniforms() if seed is None else np.random.default_rng(seed)


class StagedResponseProtection(RandomizedResponseProtection):
    """Labels: randomized response in parts, later ones among the labels that earlier responses make likely."""

    @property
    def _stages(self) -> int:
        return self.options.stages

    @property
    def mechanism(self) -> StagedResponse:  # type: ignore[override]
        """See OneLookProtection.mechanism."""
        options, k = self.options, self.dataset.n_classes
        start = StagedResponse(step_epsilon=1.0, n_classes=k, stages=self._stages)
        return calibrated_once(start, epsilon=epsilon_of(options), delta=options.delta)

    def require_covered(self) -> None:
        """See Protection.require_covered; records without plain features, or too few or too wide ones, are refused."""
        super().require_covered()
        stages, dataset = self._stages, self.dataset
        kind, reason = "tokens" if dataset.holds_tokens else dataset.target, None
        if kind != "class":
            reason = f"fits a model of the class to numeric features, and the records are of {kind!r}"
        elif len(dataset.train) < LEAST_PART * stages:
            most = max(1, len(dataset.train) // LEAST_PART)
            reason = f"leaves less than {LEAST_PART} of the {len(dataset.train)} records in a part; take at most {most}"
        elif dataset.n_features > MOST_FEATURES:
            reason = (
                f"fits a model to {dataset.n_features} features, and takes at most {MOST_FEATURES}; set "
                "data.components"
            )
        if reason is not None:
            raise NoGuarantee(f"protection.stages = {stages}: {reason}; or take protection.stages = 1")

    def look(self, device: NoisyDevice | None, pay: Pay) -> Tensor:
        """See OneLookProtection.look."""
        train, mechanism = self.dataset.train, self.mechanism
        pay(mechanism)
        x = train.x.to(self.config.torch_device)
        return randomize_in_stages(x, train.y.cpu().numpy(), mechanism, self.source())


@dataclass(frozen=True, kw_only=True)
class NoisyLabels(SoftLabels):
    """What training knows of the labels.

    Attributes:
        log_likelihood: Log P(observed | class), up to a constant of each record, float32, shape (n_records, classes).
        flat_steps: Steps at the beginning that take the first prior.
        first_prior: Log prior of these steps, shape (n_records, classes); None means a flat prior.
    """

    log_likelihood: Tensor
    flat_steps: int
    first_prior: Tensor | None = None

    def targets(self, output: Tensor, records: Tensor, step: int) -> Tensor:
        """See SoftLabels.targets."""
        scores = self.log_likelihood[records]
        if step >= self.flat_steps:
            scores = scores + torch.log_softmax(output, dim=1)
        elif self.first_prior is not None:
            scores = scores + self.first_prior[records]
        return torch.softmax(scores, dim=1)


class StoredLabels(SoftLabels):
    """Noisy labels of a run folder, read at the first step, after `OneLookProtection.pay_upfront` wrote them.

    Args:
        folder: The run folder.
        place: The torch device of the training.
        n_classes: k.
        flat_steps: Steps at the beginning that take the first prior.
    """

    def __init__(self, folder: RunFolder, *, place: str, n_classes: int, flat_steps: int) -> None:
        self._folder, self._place, self._k, self._flat_steps = folder, place, n_classes, flat_steps

    @cached_property
    def _labels(self) -> NoisyLabels:
        kept = torch.from_numpy(read_array(self._folder.labels_file)).to(self._place)
        prior = kept[:, self._k :] if kept.shape[1] > self._k else None
        return NoisyLabels(log_likelihood=kept[:, : self._k], flat_steps=self._flat_steps, first_prior=prior)

    def targets(self, output: Tensor, records: Tensor, step: int) -> Tensor:
        """See SoftLabels.targets."""
        return self._labels.targets(output, records, step)


def read_once_through(
    device: NoisyDevice,
    labels: Tensor,
    n_classes: int,
    *,
    mu: float,
    noise: NoiseStream,
    pay: Pay,
    credit: Mapping[str, Any] | None = None,
) -> Tensor:
    """Read one-hot labels through a device of Gaussian law, whose noise is topped up to max_ab ||B_a - B_b|| / mu.

    Args:
        device: Open, simulated (its matrix is known), as many inputs as classes.
        labels: Class numbers, shape (n,).
        n_classes: k.
        mu: Of the guarantee, above 0; a device with more noise than that gives a smaller one.
        noise: Source of independent N(0, 1) for the rest.
        pay: Takes what is released.
        credit: The certificate of the device's noise and its beta, as `creditable_law` takes them.

    Returns:
        The log-likelihood of every class, shape (n, k).

    Raises:
        ConfigError: See `readable_law`.
    """
    law = readable_law(device, credit)
    codes = device.require("matrix").matrix().cpu().double().numpy()  # (n_outputs, k)
    distance = label_distance(codes)
    own = law.min_std
    top_up = math.sqrt(max((distance / mu) ** 2 - own**2, 0.0))
    sigmas = np.sqrt(np.broadcast_to(law.variance(), len(codes)) + top_up**2)
    pay(LabelReadout(mu=min(distance / math.hypot(top_up, own), mu), device_law=True, **(credit or {})))
    device.seek(LABEL_STEP)
    noise.seek(LABEL_STEP)
    scores = []
    for part in labels.split(_RECORDS_AT_ONCE):
        readings = noise.add_to(device.project(_one_hot(part, n_classes)).cpu(), top_up)
        whitened = readings.double().numpy() / sigmas
        scores.append(reading_log_likelihood([whitened], [codes / sigmas[:, None]], [1.0]))
    return torch.from_numpy(np.concatenate(scores)).float()


def readable_law(device: NoisyDevice, credit: Mapping[str, Any] | None = None) -> GaussianNoise:
    """Return the law of a device through which labels can be read.

    Args:
        device: The device, open or closed.
        credit: As for `creditable_law`.

    Raises:
        ConfigError: See `creditable_law`, or its matrix is not known.
    """
    if isinstance(device.noise, (PhotonCountNoise, FluctuatingCountNoise)):
        camera = device.description.camera
        is_counted = camera is None or camera.reference_beam is None
        way = "'counts' or 'argmax'" if is_counted else "another device"
        reason = f"'device' takes a Gaussian law, and device {device.name!r} counts photons; use {way}"
        raise ConfigError("configuration", "protection.noise", reason)
    law = creditable_law(device, credit=credit)
    if "matrix" not in device.capabilities:
        raise ConfigError(
            "configuration",
            "protection.noise",
            f"'device' cannot read labels through device {device.name!r}, whose matrix is not known; use "
            "another device, or protection.kind = 'label-randomized-response'",
        )
    return law


def randomize(labels: Tensor, mechanism: RandomizedResponse, generator: UniformSource, *, pay: Pay) -> Tensor:
    """Replace labels by k-ary randomized response.

    Args:
        labels: Class numbers, shape (n,).
        mechanism: The response.
        generator: Source of randomness; the operating system's own for a release.
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
