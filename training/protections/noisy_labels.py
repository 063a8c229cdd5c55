"""Labels that are noised once, before training, and never read again.

Either training keeps a device's noisy reading of each record's one-hot label, or each label is replaced by k-ary
randomized response, or by one among the labels that a model of earlier responses makes likely. All that training sees
of the labels is the log-likelihood of every class, given what was observed, and the last such model. Its targets are
the posterior softmax(prior + log-likelihood), with a flat prior or that model at first, and the model's own prediction
as prior later. All of it is post-processing of what was observed once.

In stages the first part of the records answers by k-ary randomized response. Then, part after part, a model of all
responses so far predicts every record's class from its features, and a label is randomized among the likeliest classes
of the prediction. A model sees features, which are public, and responses, never a label.
Source: docs/privacy-labels.md, sections 4 and 5 (labels read once, randomized response); Ghazi, Golowich, Kumar,
Manurangsi and Zhang 2021, algorithms 2 and 3.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from opusim.accounting.guarantee import LedgerCorrupt, NoGuarantee
from opusim.accounting.ledger import Ledger
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.labels import (
    LabelReadout,
    RandomizedResponse,
    StagedResponse,
    UniformSource,
    among_log_likelihood,
    among_targets,
    label_distance,
    reading_log_likelihood,
    respond,
    respond_among,
    response_log_likelihood,
    telling_labels,
)
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError
from opusim.noise import FluctuatingCountNoise, GaussianNoise, PhotonCountNoise
from opusim.randomness.streams import NoiseStream, SystemUniforms, noise_stream
from opusim.training.networks.clipping import full_precision
from opusim.training.protections.base import (
    Protection,
    SoftLabels,
    calibrated_once,
    creditable_law,
    require_own_noise,
)
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import read_array, write_array

LEAST_PART = 10
"""Least number of records of a part; every tenth is held out of its model."""
MOST_FEATURES = 16_384
"""Largest number of features: a model holds three matrices of its square, 6 GiB at this number."""
_LEAST_PRIOR = float(np.finfo(np.float32).tiny)
_ROWS = 4096
"""Records of one matrix product."""
_RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_SHARPNESSES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
"""Held-out responses choose one of these ridges, and one of these factors of a regression's output."""


def drawn_parts(n_records: int, stages: int, source: UniformSource) -> list[np.ndarray]:
    """Divide the records at random into `stages` parts whose sizes differ by at most 1; they need not be secret."""
    return np.array_split(np.argsort(source.random((n_records,)), kind="stable"), stages)


class StagedResponses:
    """Collects the responses of one part of the records after the other; the caller has paid for them.

    Args:
        x: Public features, shape (n, d).
        parts: What `drawn_parts` returned.
        mechanism: What is paid for.

    Attributes:
        kept: The log-likelihood of every class, then the logarithm of the last prior, float64, shape (n, 2 k).

    Raises:
        ValueError: The parts do not hold every record once: a label would be randomized twice, or never.
    """

    def __init__(self, x: Tensor, parts: Sequence[np.ndarray], mechanism: StagedResponse) -> None:
        if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(x))):
            raise ValueError(
                "parts: must hold every record once, or a label would be randomized twice or never"
            )
        k = mechanism.n_classes
        self._left, self._epsilon = list(parts), mechanism.step_epsilon
        self._model = ResponseModel(x, k)
        self.kept = np.full((len(x), 2 * k), -math.log(k))

    def answer(self, labels: np.ndarray, source: UniformSource) -> None:
        """Randomize the labels of the next part among those that the responses so far make likely.

        Labels of other parts are not read; for a release the source is the operating system's own.
        """
        part, epsilon, k = self._left.pop(0), self._epsilon, self.kept.shape[1] // 2
        priors = self._model.priors()
        among = telling_labels(priors[part], epsilon=epsilon)
        observed = respond_among(labels[part], among, epsilon=epsilon, generator=source)
        scores = among_log_likelihood(observed, among, epsilon=epsilon)
        self.kept[part, :k], self.kept[:, k:] = scores, np.log(np.maximum(priors, _LEAST_PRIOR))
        if self._left:
            self._model.add(part, *among_targets(observed, among, priors[part], epsilon=epsilon), scores)


def randomize_in_stages(
    x: Tensor, labels: np.ndarray, mechanism: StagedResponse, source: UniformSource
) -> Tensor:
    """Randomize every label once, in parts drawn at random; return `StagedResponses.kept`, float32, shape (n, 2 k)."""
    responses = StagedResponses(x, drawn_parts(len(x), mechanism.stages, source), mechanism)
    for _ in range(mechanism.stages):
        responses.answer(labels, source)
    return torch.from_numpy(responses.kept).float()


class ResponseModel:
    """Predicts every record's class from the responses: softmax(beta f), f a weighted ridge regression on the features.

    Ridge and beta maximise the likelihood of the responses of held-out records; f is then fitted to all.

    Args:
        x: Features of all records, shape (n, d); read in blocks, and not copied.
        n_classes: k.
    """

    def __init__(self, x: Tensor, n_classes: int) -> None:
        self._x, self._k = x, n_classes
        self._fitted, self._held = _Sums(x, n_classes), _Sums(x, n_classes)
        self._records: list[np.ndarray] = []
        self._scores: list[np.ndarray] = []

    def add(self, part: np.ndarray, targets: np.ndarray, weights: np.ndarray, scores: np.ndarray) -> None:
        """Add the responses of m records, in random order; every tenth is held out.

        Targets (see `among_targets`) and scores, the log-likelihoods, have shape (m, k); weights are above 0.
        """
        held = np.arange(len(part)) % LEAST_PART == 0
        for rows, sums in ((~held, self._fitted), (held, self._held)):
            sums.add(self._x, part[rows], targets[rows], weights[rows])
        self._records.append(part[held])
        self._scores.append(scores[held])

    def priors(self) -> np.ndarray:
        """Return the probabilities of the classes, shape (n, k); flat for records whose features are not finite.

        They are flat for all records before the first response.
        """
        everyone = np.arange(len(self._x))
        if not self._records:
            return np.full((len(everyone), self._k), 1 / self._k)
        records, scores = np.concatenate(self._records), torch.from_numpy(np.concatenate(self._scores))
        best = (-math.inf, _RIDGES[-1], 0.0)
        for ridge in _RIDGES:
            output = _predicted(self._x, self._fitted.solved(ridge), records)
            for beta in _SHARPNESSES:
                chances = torch.log_softmax(beta * output, dim=1) + scores
                best = max(best, (float(torch.logsumexp(chances, dim=1).mean()), ridge, beta))
        self._fitted.merge(self._held)
        self._held = _Sums(self._x, self._k)
        output = _predicted(self._x, self._fitted.solved(best[1]), everyone)
        return np.asarray(torch.softmax(best[2] * output, dim=1).numpy())


class _Sums:
    """Sums over some records: w h h^T and w h t^T, with the features, shape (n, d), and a constant 1 in h."""

    def __init__(self, x: Tensor, n_classes: int) -> None:
        width = x.shape[1] + 1
        self._squares = x.new_zeros((width, width), dtype=torch.float64)
        self._products = x.new_zeros((width, n_classes), dtype=torch.float64)

    def add(self, x: Tensor, records: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> None:
        """Add some records; products of blocks are formed in float32."""
        for start in range(0, len(records), _ROWS):
            rows = slice(start, start + _ROWS)
            h = _inputs(x, records[rows])
            weighted = h * torch.from_numpy(weights[rows]).to(h)[:, None]
            with full_precision():
                self._squares += weighted.t() @ h
                self._products += weighted.t() @ torch.from_numpy(targets[rows]).to(h)

    def merge(self, other: _Sums) -> None:
        """Add the records of others."""
        self._squares += other._squares
        self._products += other._products

    def solved(self, ridge: float) -> Tensor:
        """Return (sum of w h h^T + lambda I)^-1 sum of w h t^T, shape (d + 1, k); 0 if it is not finite.

        `ridge` is lambda over the mean of the diagonal.
        """
        squares = self._squares.clone()
        squares.diagonal().add_(ridge * squares.diagonal().mean())
        factor, failed = torch.linalg.cholesky_ex(squares)
        found = torch.cholesky_solve(self._products, factor)
        return found if not failed and torch.isfinite(found).all() else torch.zeros_like(found)


def _inputs(x: Tensor, records: np.ndarray) -> Tensor:
    """Return features with a constant 1, float32, shape (m, d + 1); 0 for a record that is not finite."""
    part = x[torch.from_numpy(records).to(x.device)].float()
    h = torch.cat([part, part.new_ones(len(part), 1)], dim=1)
    return torch.where(torch.isfinite(h).all(dim=1, keepdim=True), h, 0.0)


def _predicted(x: Tensor, solution: Tensor, records: np.ndarray) -> Tensor:
    """Return the regression's output for some records, float64, on the CPU, shape (m, k); 0 for what is not finite."""
    with full_precision():
        parts = [
            _inputs(x, records[start : start + _ROWS]) @ solution.float()
            for start in range(0, len(records), _ROWS)
        ]
    output = torch.cat(parts).double().cpu()
    return torch.where(torch.isfinite(output).all(dim=1, keepdim=True), output, 0.0)


LABEL_STEP = 2**64 - 1
"""The step number under which labels are read, so that no training step repeats their noise."""
_RECORDS_AT_ONCE = 4096

Pay = Callable[[Mechanism], None]
"""Puts what is about to be released on record; called before anything is drawn."""


class OneLookProtection(Protection, ABC):
    """Labels that are read once; the run folder keeps what was observed."""

    needs = frozenset({"soft labels"})
    payment: ClassVar[str] = "labels"
    """What a ledger calls the one reading of the labels."""

    @property
    @abstractmethod
    def mechanism(self) -> Mechanism:
        """What `look` releases at the run's epsilon; a device with more noise releases less."""

    @override
    def whole_run(self) -> Mechanism:
        return self.mechanism

    def calibrated(self) -> float | None:
        """See Protection.calibrated; an epsilon that no noise reaches is refused before the run begins."""
        _ = self.mechanism
        return super().calibrated()

    @abstractmethod
    def look(self, device: NoisyDevice | None, pay: Pay) -> Tensor:
        """Read or randomize every label, and return the log-likelihood of every class, shape (n, k).

        k more columns may follow: the logarithm of the prior with which training begins.
        """

    def source(self) -> UniformSource:
        """Return what responses are drawn from: a generator of the run's seed, or the system in a release."""
        seed = self.config.seed_for("labels")
        return SystemUniforms() if seed is None else np.random.default_rng(seed)

    @override
    def pay_upfront(self, ledger: Ledger, device: NoisyDevice | None, folder: RunFolder) -> None:
        if not folder.labels_file.exists():
            scores = self.look(device, lambda mechanism: ledger.pay_once(self.payment, mechanism))
            write_array(folder.labels_file, scores.numpy())
        elif all(payment.name != self.payment for payment in ledger.content.payments):
            raise LedgerCorrupt(
                f"{folder.ledger_file}: does not pay for {folder.labels_file.name}, which is there; restore it from a "
                "copy"
            )

    @override
    def soft_labels(self, device: NoisyDevice | None, folder: RunFolder) -> SoftLabels | None:
        flat_steps = math.ceil(self.options.flat_prior * self.plan.total_steps)
        place, k = self.config.torch_device, self.dataset.n_classes
        return StoredLabels(folder, place=place, n_classes=k, flat_steps=flat_steps)


class LabelReadoutProtection(OneLookProtection):
    """Labels: one reading of each through a device of Gaussian noise, at the run's epsilon."""

    @property
    @override
    def mechanism(self) -> LabelReadout:
        options = self.options
        start = LabelReadout(mu=1.0, **self.plan.credit)
        return calibrated_once(start, epsilon=options.epsilon, delta=options.delta)

    @override
    def look(self, device: NoisyDevice | None, pay: Pay) -> Tensor:
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
    @override
    def mechanism(self) -> RandomizedResponse:
        options, start = self.options, RandomizedResponse.from_epsilon(1.0, self.dataset.n_classes)
        return calibrated_once(start, epsilon=options.epsilon, delta=options.delta)

    @override
    def look(self, device: NoisyDevice | None, pay: Pay) -> Tensor:
        return randomize(self.dataset.train.y.cpu(), self.mechanism, self.source(), pay=pay)


class StagedResponseProtection(RandomizedResponseProtection):
    """Labels: randomized response in parts, later ones among the labels that earlier responses make likely."""

    @property
    def _stages(self) -> int:
        return self.options.stages

    @property
    @override
    def mechanism(self) -> StagedResponse:  # type: ignore[override]
        options, k = self.options, self.dataset.n_classes
        start = StagedResponse(step_epsilon=1.0, n_classes=k, stages=self._stages)
        return calibrated_once(start, epsilon=options.epsilon, delta=options.delta)

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

    @override
    def look(self, device: NoisyDevice | None, pay: Pay) -> Tensor:
        train, mechanism = self.dataset.train, self.mechanism
        pay(mechanism)
        x = train.x.to(self.config.torch_device)
        return randomize_in_stages(x, train.y.cpu().numpy(), mechanism, self.source())


@dataclass(frozen=True, kw_only=True)
class NoisyLabels(SoftLabels):
    """Targets from log-likelihoods of the labels and a prior.

    Attributes:
        log_likelihood: Log P(observed | class), up to a constant of each record, float32, shape (n_records, classes).
        flat_steps: Steps at the beginning that take the first prior.
        first_prior: Log prior of these steps, shape (n_records, classes); None means a flat prior.
    """

    log_likelihood: Tensor
    flat_steps: int
    first_prior: Tensor | None = None

    @override
    def targets(self, output: Tensor, records: Tensor, step: int) -> Tensor:
        scores = self.log_likelihood[records]
        if step >= self.flat_steps:
            scores = scores + torch.log_softmax(output, dim=1)
        elif self.first_prior is not None:
            scores = scores + self.first_prior[records]
        return torch.softmax(scores, dim=1)


class StoredLabels(SoftLabels):
    """Noisy labels of a run folder, read at the first step, after `OneLookProtection.pay_upfront` wrote them."""

    def __init__(self, folder: RunFolder, *, place: str, n_classes: int, flat_steps: int) -> None:
        self._folder, self._place, self._k, self._flat_steps = folder, place, n_classes, flat_steps

    @cached_property
    def _labels(self) -> NoisyLabels:
        kept = torch.from_numpy(read_array(self._folder.labels_file)).to(self._place)
        prior = kept[:, self._k :] if kept.shape[1] > self._k else None
        return NoisyLabels(log_likelihood=kept[:, : self._k], flat_steps=self._flat_steps, first_prior=prior)

    @override
    def targets(self, output: Tensor, records: Tensor, step: int) -> Tensor:
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
    """Read one-hot labels through a simulated device of Gaussian law; return log-likelihoods, shape (n, k).

    Noise is added up to the deviation max_ab ||B_a - B_b|| / mu; a device with more noise gives a smaller mu. `credit`
    has the certificate of its noise and beta, as `creditable_law` takes them. Raises ConfigError as `readable_law`.
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
        one_hot = torch.nn.functional.one_hot(part, n_classes).float()
        readings = noise.add_to(device.project(one_hot).cpu(), top_up)
        whitened = readings.double().numpy() / sigmas
        scores.append(reading_log_likelihood([whitened], [codes / sigmas[:, None]], [1.0]))
    return torch.from_numpy(np.concatenate(scores)).float()


def readable_law(device: NoisyDevice, credit: Mapping[str, Any] | None = None) -> GaussianNoise:
    """Return the law of a device through which labels can be read; `credit` as for `creditable_law`.

    Raises ConfigError as `creditable_law`, or if the device's matrix is not known.
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
    """Pay, and replace labels by k-ary randomized response; return log-likelihoods, shape (n, k).

    The generator is the operating system's own for a release.
    """
    pay(mechanism)
    epsilon, k = mechanism.step_epsilon, mechanism.n_classes
    observed = respond(labels.numpy(), epsilon=epsilon, n_labels=k, generator=generator)
    scores = response_log_likelihood(observed, epsilon=epsilon, n_labels=k)
    return torch.from_numpy(scores).float()
