"""Train by unified likelihood ratios: forward passes only, without gradients of later modules.

One step runs a forward pass without noise. Then, for every module with parameters, copies of its output with Gaussian
noise pass through the rest of the model to the loss. Noise times loss estimates the gradient at that output
(`opusim.training.ulr.estimator`), the module's Jacobian takes it to the parameters, and the optimizer updates them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import scipy.linalg
import torch
from torch import Tensor, nn
from typing_extensions import override

from opusim import checks
from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.ulr import PublishedUlr
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.noise import NoiseModel
from opusim.randomness.streams import NoiseStream, noise_stream
from opusim.training.config.run import RunConfig
from opusim.training.data import Dataset
from opusim.training.engine.algorithm import Algorithm, DeviceShape, StepRecord, Trainer
from opusim.training.errors import RunFolderError, TrainingDiverged
from opusim.training.networks.any_module import shape_taken
from opusim.training.networks.clipping import (
    are_all,
    bounded_factors,
    by_record,
    finite_rows,
    row_norms,
    widest,
)
from opusim.training.networks.functions import LOSS_VALUES
from opusim.training.networks.network import FullyConnected, build_model
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.networks.record_gradients.probe import require_separate_outputs
from opusim.training.networks.record_independence import invented_records, preserved_state
from opusim.training.protections.base import DeviceNormals, PrivateGradients, SoftLabels
from opusim.training.ulr.config import UlrConfig
from opusim.training.ulr.estimator import (
    Estimator,
    Losses,
    ModuleSequence,
    Outputs,
    coordinates_of,
    draw_sizes,
    needed_copies,
    parameter_estimates,
    parts_of_records,
)


class PlainUpdate:
    """Writes the mean of the records' estimates, or their clipped and noised sum.

    Args:
        network: The network.
        estimator: Estimates the signals.
        sigma: Standard deviation of the noise on every output.
        noise: Source of that noise.
        protection: Clips the records' contributions and adds noise; None averages over the batch.
    """

    def __init__(
        self,
        network: ModuleSequence,
        estimator: Estimator,
        *,
        sigma: float,
        noise: NoiseStream,
        protection: PrivateGradients | None = None,
    ) -> None:
        self._network, self._estimator = network, estimator
        self._sigmas = [sigma] * network.depth
        self._noise = noise
        self._protection = protection
        self.noises = (noise, protection)  # positioned at the start of each step

    def set_gradients(
        self, outputs: Outputs, losses: Losses, clean: Tensor, records: Tensor | None = None
    ) -> Tensor:
        """Write the gradient of every parameter from the outputs and losses, shape (batch,), without noise.

        Returns the records used, bool, shape (batch,): all but those with a loss that is NaN or infinite.
        """
        network, inputs = self._network, outputs.inputs
        signals = self._estimator.signals(network, outputs, losses, clean, self._noise, self._sigmas)
        used = used_records(signals, clean)
        if not are_all(used):  # 0 times NaN is NaN
            signals = [finite_rows(delta, used) for delta in signals]
            inputs = [finite_rows(h, used) for h in inputs]
        if self._protection is not None:
            self._protection.set_gradients([network.contributions(signals, inputs)], records=records)
            return used
        for layer, (delta, h) in enumerate(zip(signals, inputs, strict=True)):
            network.set_gradient(layer, delta, h, max(len(clean), 1))
        return used


def used_records(signals: list[Tensor], clean: Tensor) -> Tensor:
    """Return which records have only finite losses, bool, shape (batch,)."""
    used = torch.isfinite(clean)
    for delta in signals:
        used = used & torch.isfinite(delta).flatten(1).all(dim=1)
    return used


_RANK_TOLERANCE = 1e-10
"""Eigenvalues below this share of the largest one count as 0."""


class PublishedUpdate:
    """Writes the gradients of Algorithm 1 of the DP-ULR paper as published: clip by module, controller, remedies (A.4).

    For module l the covariance of a batch's estimate is Sigma / sigma^2 with Sigma = sum_i L_0i^2 J_i^T J_i (eq. 25)
    before any clipping. The controller chooses sigma^2 <= min eigenvalue(Sigma) / (K C^2 sigma_0^2) (eq. 8). For a
    linear or convolutional module Sigma = I (x) sum_ip L_0i^2 u_ip u_ip^T, which is rank-deficient if an input is
    constant, and then no sigma satisfies eq. 8. The paper then moves the noise to the parameters (J = I), or adds noise
    of covariance sigma_0^2 C^2 I - Sigma / (sigma^2 K) with negative eigenvalues set to 0. None of this proves privacy
    (docs/forward-only.md).

    Args:
        network: The network.
        options: copies (K), target_std (sigma_0), clip_norm (C, per module), remedy, and sigma, the upper limit of the
            controller, or the noise itself under remedy = 'extra-noise'.
        divisor: N_B.
        noise: Noise of the estimate.
        extra: Independent N(0, 1) for noise that completes a covariance.

    Raises:
        ValueError: The remedy needs a module's covariance, which only linear and ungrouped convolutional modules have.
    """

    def __init__(
        self,
        network: ModuleSequence,
        options: UlrConfig,
        divisor: float,
        *,
        noise: NoiseStream,
        extra: NoiseStream,
    ) -> None:
        self._network, self._options, self._divisor = network, options, divisor
        self._noise, self._extra = noise, extra
        self.noises = (noise, extra)
        self._estimator = Estimator(
            copies=options.copies, reduction="none", rows_per_pass=options.rows_per_pass
        )

    def set_gradients(
        self, outputs: Outputs, losses: Losses, clean: Tensor, records: Tensor | None = None
    ) -> Tensor:
        """See PlainUpdate.set_gradients."""
        if self._options.remedy == "parameters":
            return self._from_parameter_noise(outputs, losses, clean)
        network, options = self._network, self._options
        weights = torch.where(torch.isfinite(clean), clean, 0.0)
        roots = []  # R with R^T R = sum_ip L_0i^2 u_ip u_ip^T, shape (batch x positions, inputs)
        for layer, h in enumerate(outputs.inputs):
            rows = network.jacobians[layer].factor_rows(h)
            if rows is None:
                raise ValueError(
                    f"layer {layer + 1}: remedy = {options.remedy!r} needs the covariance of its noise, which only "
                    "linear and ungrouped convolutional modules have; use trainer.remedy = 'parameters'"
                )
            roots.append((rows * by_record(weights, rows)).flatten(0, 1))
        sigmas = [self._sigma(layer, root) for layer, root in enumerate(roots)]
        signals = self._estimator.signals(network, outputs, losses, clean, self._noise, sigmas)
        used = used_records(signals, clean)
        for layer, (delta, h) in enumerate(zip(signals, outputs.inputs, strict=True)):
            kept = finite_rows(delta, used), finite_rows(h, used)
            found = network.jacobians[layer].contributions(*kept)
            factors = bounded_factors(found.squared_norms().sqrt(), options.clip_norm)
            for parameter, total in found.totals(factors):
                parameter.grad = total.div_(self._divisor).float()
            if options.remedy == "extra-noise":
                self._complete(layer, roots[layer] / (sigmas[layer] * options.copies**0.5))
        return used

    def _sigma(self, layer: int, root: Tensor) -> float:
        """Return the controller's noise (eq. 8), or the configured one if extra noise completes it.

        Raises NoGuarantee if the covariance is rank-deficient, so that no sigma satisfies eq. 8.
        """
        options = self._options
        if options.remedy == "extra-noise":
            return options.sigma
        exact = root.double()
        values = torch.linalg.eigvalsh(exact.T @ exact)
        if not float(values[0]) > _RANK_TOLERANCE * float(values[-1]):
            rank = int((values > _RANK_TOLERANCE * values[-1]).sum())
            raise NoGuarantee(
                f"layer {layer + 1}: Assumption 1 of the DP-ULR paper fails, the batch's noise has rank {rank} of "
                f"{len(values)} for every output, and no sigma satisfies eq. 8; use trainer.remedy = 'extra-noise' or "
                "'parameters'"
            )
        return self._allowed(float(values[0]))

    def _allowed(self, smallest: float) -> float:
        """Return the largest sigma that eq. 8 allows at this smallest eigenvalue, up to the configured limit."""
        options = self._options
        bound = smallest / (options.copies * (options.clip_norm * options.target_std) ** 2)
        return min(options.sigma, max(bound, 1e-12) ** 0.5)

    def _complete(self, layer: int, root: Tensor) -> None:
        """Add noise that completes R^T R, the covariance of the estimate (root is scaled by 1 / (sigma sqrt(K)))."""
        options = self._options
        parameters = self._network.layer_parameters(layer)
        outputs = parameters[0].shape[0]
        normals = self._extra.normal((outputs, root.shape[1]), device=root.device)
        noise = completing_noise(normals, root, options.target_std * options.clip_norm) / self._divisor
        weight, *bias = parameters
        columns = weight[0].numel()
        if weight.grad is not None:
            weight.grad.add_(noise[:, :columns].reshape(weight.shape))
        for parameter in bias:
            if parameter.grad is not None:
                parameter.grad.add_(noise[:, columns])

    def _from_parameter_noise(self, outputs: Outputs, losses: Losses, clean: Tensor) -> Tensor:
        """Write gradients from noise on the parameters of one module at a time: J = I and Sigma = sum_i L_0i^2 I."""
        options, used = self._options, torch.isfinite(clean)
        sigma = self._allowed(float(clean[used].double().square().sum()))
        for layer in range(self._network.depth):
            totals = None
            for rows, records in parameter_estimates(
                self._network, layer, outputs.inputs[layer], losses, self._noise, sigma, options.copies
            ):
                finite = torch.isfinite(rows).all(dim=1) & used[records]
                kept = finite_rows(rows, finite)
                factors = bounded_factors(row_norms(kept), options.clip_norm)
                used[records] &= finite
                part = (factors @ kept.double()).float()
                totals = part if totals is None else totals + part
            parameters = self._network.layer_parameters(layer)
            sizes = [parameter.numel() for parameter in parameters]
            if totals is None:
                totals = parameters[0].new_zeros(sum(sizes))
            for parameter, part in zip(parameters, totals.detach().split(sizes), strict=True):
                parameter.grad = (part / self._divisor).reshape(parameter.shape)
        return used


def completing_noise(normals: Tensor, root: Tensor, level: float) -> Tensor:
    """Return rows of covariance level^2 I - R^T R, negative eigenvalues set to 0 (appendix A.4), float32.

    With N independent N(0, 1), shape (outputs, inputs), and level sigma_0 C they are N times the root of that
    covariance, N (level I + V g(S) V^T), for R^T R = V S V^T and g(s) = sqrt(max(level^2 - s, 0)) - level. If R has
    fewer rows than columns, V is never formed: with R R^T = U S U^T the second term is N R^T U (g(S) / S) U^T R, and
    g(s) / s is smooth at 0.
    """
    if len(root) < root.shape[1]:
        values, u = _spectrum(root)
        return level * normals + ((normals @ root.T @ u) * _slopes(values, level)) @ u.T @ root
    values, v = _spectrum(root.T)
    return level * normals + ((normals @ v) * (values * _slopes(values, level))) @ v.T


def _slopes(values: Tensor, level: float) -> Tensor:
    """Return g(s) / s of `completing_noise`: -1 / (sqrt(level^2 - s) + level), or -level / s for s >= level^2."""
    square = level**2
    return torch.where(
        values < square,
        -1 / ((square - values).clamp_min(0.0).sqrt() + level),
        -level / values.clamp_min(square),
    )


def _spectrum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of rows rows^T, float32.

    They are computed in float64: squared losses span decades, so in float32 the rounding of large eigenvalues hides
    small ones, and divide and conquer ends in NaN. If it fails in float64 too, QR iteration takes over.
    """
    exact = rows.double()
    matrix = exact @ exact.T
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        found = scipy.linalg.eigh(matrix.cpu().numpy(), driver="ev")
        values, vectors = (torch.from_numpy(part).to(matrix.device) for part in found)
    return values.clamp_min(0.0).float(), vectors.float()


_WIDEST_READING = 65_536
"""Most outputs with which a device is opened; more noise takes further readings."""


class UlrTrainer(Algorithm[UlrConfig, ModuleSequence, "UlrTrainer"], Trainer):
    """Trains a sequence of modules; a step ignores records whose loss, with or without noise, is not finite."""

    applies = frozenset({"gradients"})
    uses_public_randomness = True
    layer_signals = "estimated"
    record_options: ClassVar[Mapping[str, Any]] = {"form": "proven", "noise": "digital"}
    network: ModuleSequence
    update: PlainUpdate | PublishedUpdate

    @classmethod
    def build_network(cls, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> ModuleSequence:
        """See Algorithm.build_network; a user-supplied module is an nn.Sequential of any modules.

        Raises ValueError if it mixes protected records, and ConfigError for another number of `trainer.module_copies`.
        """
        n_inputs = dataset.n_features
        network = ModuleSequence(model or build_model(config, dataset), n_inputs=n_inputs)
        config.trainer_as(UlrConfig).copies_of(network.depth)
        if model is None:
            return network
        place = network.parameters[0].device
        records = torch.zeros(2, n_inputs, device=place)
        shape = shape_taken(model, dataset, records, [(n_inputs,), dataset.record_shape])
        network = ModuleSequence(model, n_inputs=n_inputs, record_shape=shape)
        if config.protection.protects == "records":
            require_separate_outputs(model, network.shaped(invented_records(dataset, place)[0]))
        return network

    @classmethod
    @override
    def rebuild_network(cls, facts: dict[str, Any], model: nn.Module | None) -> ModuleSequence:
        if "layers" in facts:
            model = FullyConnected.from_facts(facts).model
        if model is None:
            raise RunFolderError(
                "the run trained a user-supplied module, which its folder does not hold; give it again: "
                "opusim.load_run(path, model=model)"
            )
        return ModuleSequence(model, n_inputs=facts["n_inputs"], record_shape=facts.get("record_shape"))

    @property
    def device_shape(self) -> DeviceShape:
        """A reading holds the noise of every output of one record."""
        outputs = sum(value.numel() for value in _blank_outputs(self.network).values)
        return DeviceShape(n_inputs=1, n_outputs=min(outputs, _WIDEST_READING))

    def work_of_step(self, records: float, n_outputs: int, *, observed: bool) -> DeviceWork:
        """See Algorithm.work_of_step; each copy of a module's noise is a draw, and so is what the protection adds."""
        own = self.protection.work_of_step(records, n_outputs)
        if self.options.noise != "device":
            return own
        return sum((DeviceWork.of_noise(size, n_outputs) for size in self._draws(records)), own)

    def _draws(self, records: float) -> list[float]:
        """Return the count of numbers in each draw of noise for the estimate."""
        network, options = self.network, self.options
        if options.form == "published" and options.remedy == "parameters":
            sizes = [
                sum(p.numel() for p in network.layer_parameters(layer)) for layer in range(network.depth)
            ]
            return [
                size * part for size in sizes for part in parts_of_records(size, records)
            ] * options.copies
        blank, draws = _blank_outputs(network), list[float]()
        layers = zip(
            network.jacobians, blank.values, blank.inputs, options.copies_of(network.depth), strict=True
        )
        for jacobian, value, h, copies in layers:
            shape = coordinates_of(jacobian, value, h, matched=options.shape == "matched").shape
            count = needed_copies(copies, value.numel(), options.directions, options.variance_reduction)
            draws += draw_sizes(math.prod(shape), records, count, options.directions)
        return draws

    @override
    def open(self, device: NoisyDevice | None, labels: SoftLabels | None) -> None:
        network, config, options = self.network, self.config, self.options
        self.device = device
        self.optimizer = make_optimizer(network.parameters, config.optimizer)
        noise = noise_stream(config.mode, config.seed_for("output-noise"), "output-noise")
        if options.noise == "device" and device is not None:
            noise = DeviceNormals(device, key="trainer.noise")
        if options.form == "published":
            extra = noise_stream(config.mode, config.seed_for("extra-noise"), "extra-noise")
            divisor = float(config.sampler.min_batch_size or config.sampler.batch_size)
            self.update = PublishedUpdate(network, options, divisor, noise=noise, extra=extra)
            return
        estimator = Estimator(
            copies=options.copies_of(network.depth),
            reduction=options.variance_reduction,
            rows_per_pass=options.rows_per_pass,
            directions=options.directions,
            matched=options.shape == "matched",
        )
        writer = self.gradients(device)
        self.update = PlainUpdate(network, estimator, sigma=options.sigma, noise=noise, protection=writer)

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool = False, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; the diagnostics are estimate_norm, one number per module."""
        network, loss = self.network, LOSS_VALUES[self.config.loss]
        for source in (self.device, *self.update.noises):
            if source is not None:
                source.seek(step)

        def losses(output: Tensor, rows: slice) -> Tensor:
            labels = y[rows]
            copies = len(output) // max(len(labels), 1)
            return loss(output, labels.repeat(copies)).view(copies, len(labels))

        protects = self.config.protection.protects
        # A step on protected records leaves nothing of them in the module's buffers and Python attributes.
        with preserved_state(self.model) if protects == "records" else nullcontext():
            outputs = network.forward(x)
            clean = loss(outputs.output, y)
            used = self.update.set_gradients(outputs, losses, clean, records)
            if self.config.mode == "experiment" or protects == "nothing":  # else it would reveal records
                checks.require(used.all(), partial(_ignored, used, records, step))
            self.optimizer.step()
        norms = [
            float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm())
            for parameters in map(network.layer_parameters, range(network.depth) if observe else ())
        ]
        return StepRecord(
            loss_sum=torch.where(used, clean, 0.0).sum(dtype=widest(clean.device)),
            n_correct=((outputs.output.argmax(dim=1) == y) & used).sum(),
            n_records=used.sum(),
            diagnostics={"estimate_norm": norms} if observe else {},
        )

    @property
    @override
    def state(self) -> dict[str, Tensor]:
        return {} if self.writer is None else self.writer.state

    @property
    @override
    def needs_float64(self) -> str | None:
        return None if self.options.form == "proven" else "trainer.form = 'published'"

    @property
    @override
    def clips_by_layer(self) -> bool:
        return self.options.clip == "module"

    def released(self, noise: NoiseModel | None) -> tuple[Mechanism, ...]:
        """See Algorithm.released; the published form states the paper's formula, with the constants of its eq. 11."""
        if self.options.form != "published":
            return super().released(noise)
        network, sampler, config = self.network, self.plan.sampler, self.config.sampler
        sizes = [sum(p.numel() for p in network.layer_parameters(layer)) for layer in range(network.depth)]
        published = PublishedUlr(
            target_std=self.options.target_std,
            sampling_probability=sampler.sampling_probability
            or min(config.batch_size / sampler.n_records, 1.0),
            n_records=sampler.n_records,
            min_batch_size=config.min_batch_size or config.batch_size,
            modules=network.depth,
            largest_module=max(sizes),
            sampled=sampler.scheme == "poisson-min-batch",
        )
        return (published,)

    @property
    def noiseless(self) -> Mapping[str, Any] | None:
        """See Algorithm.noiseless; the published form's noise is that of its probes, and a device's is unknown."""
        return None if self.options.form == "published" or self.options.noise == "device" else {}

    @property
    @override
    def leaves_directions(self) -> bool:
        return (self.options.form, self.options.remedy) == ("published", "extra-noise")


def _ignored(used: Tensor, records: Tensor | None, step: int) -> TrainingDiverged | None:
    """Warn about the records that a step ignored, or return an error if it ignored all."""
    if not bool(used.any()):
        return TrainingDiverged(
            f"step {step}: training diverged, because no record of the batch has a finite loss; start a new run "
            "with a lower optimizer.lr or trainer.sigma, or check the inputs"
        )
    places = torch.nonzero(~used).flatten()
    numbers = (places if records is None else records.to(places.device)[places]).tolist()
    named = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    warnings.warn(
        f"step {step}: ignored {len(numbers)} of {len(used)} records, whose loss is NaN or infinite "
        f"(training records {named})",
        stacklevel=4,
    )
    return None


def _blank_outputs(network: ModuleSequence) -> Outputs:
    """Return the modules' outputs for a record of zeros."""
    return network.forward(torch.zeros(1, network.n_inputs, device=network.parameters[0].device))
