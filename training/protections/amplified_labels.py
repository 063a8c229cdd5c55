"""Labels under a secret batch: contributions are clipped in a public geometry and noise has that geometry.

The features are public, the labels are protected. Record i contributes delta_i h_i^T to layer l, where h includes the
bias's constant. P_l is a positive definite matrix of public rows: their second moment, times the sum of all fan-ins, so
that a record of typical features has sum_l h_l^T P_l^-1 h_l = 1. A step releases

    [sum over a secret Poisson(q) batch of min(1, C / c_i) delta_li h_li^T + z C Xi_l P_l^(1/2)] / divisor,
    c_i^2 = sum_l ||delta_li||^2 h_li^T P_l^-1 h_li,

with independent Xi_l of N(0, 1). P_l of a hidden layer may be that of the weights of earlier steps, which were released
as well: any P_l serves that public numbers determine before the step. Everything is computed in float64, because
whitening magnifies float32 rounding by the root of P_l's condition number, up to 900 at a floor of 0.001. Only the
whitened sum is rounded to float32. Noise is added to that sum, on the CPU (and on a card of CUDA in release mode) as
one exactly rounded number; colouring it is post-processing. Whitened by P_l, each record's contribution has norm at
most C under every label, whatever a device's noise did to delta. This is the Poisson-subsampled Gaussian mechanism with
multiplier z under replace_one.
Source: docs/privacy-labels.md, section 3 (a secret batch and noise of a public covariance).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from opusim.accounting.mechanisms.labels import LabelAmplified
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.randomness.streams import NoiseStream
from opusim.training.data.samplers import most_records
from opusim.training.networks.clipping import CountedSums, bounded_factors, finite_rows
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.protections.base import (
    PoissonProtection,
    PrivateGradients,
    counts_sums,
    linear_uses,
    noise_std,
    rounds_exactly,
    with_constant,
    write_gradient,
)
from opusim.training.protections.released_model import Metric, equalised_weights

_EQUALISING_ROUNDS = 30


class AmplifiedLabelProtection(PoissonProtection):
    """Labels: clipping and noise in the geometry of public features, secret Poisson batches."""

    @override
    def mechanism(self, noise_multiplier: float) -> LabelAmplified:
        return LabelAmplified(
            noise_multiplier=noise_multiplier,
            sampling_probability=self.plan.sampling_probability,
            device_noise=self.options.noise == "device",
            exactly_rounded=rounds_exactly(self.config),
            counts_sums=self.counted_sums is not None,
            **self.plan.credit,
        )

    @property
    @override
    def counted_sums(self) -> CountedSums | None:
        sampler = self.plan.sampler
        if not counts_sums(self.config):
            return None
        most = most_records(sampler.expected_batch_size, records=sampler.n_records, processes=1)
        # Features are public, and so is their number.
        return CountedSums(records=most, processes=1, block=0)

    @override
    def gradients(self, device: NoisyDevice | None) -> AmplifiedLabels:
        options = self.options
        return AmplifiedLabels(
            clip_norm=options.clip,
            noise_multiplier=self.noise_multiplier,
            divisor=self.config.divisor,
            floor=options.floor,
            reference=self._reference(),
            reference_every=options.reference_every,
            sizes=[linear.in_features + (linear.bias is not None) for linear in self.plan.network.linears],
            equalise=options.equalise,
            noise=self.central_noise(device),
            error=0.0 if self.counted_sums is None else self.counted_sums.error,
        )

    def work_of_step(self, records: float, n_outputs: int) -> DeviceWork:
        """See Protection.work_of_step; each layer's sum has noise, its bias included."""
        sizes = [
            linear.out_features * (linear.in_features + (linear.bias is not None))
            for linear in self.plan.network.linears
        ]
        return self.noise_work(sizes, n_outputs)

    def _reference(self) -> Tensor:
        """Return a sample of the training features, which are public, since only the labels are protected."""
        config, train = self.config, self.dataset.train
        size = self.options.reference_size
        generator = torch.Generator().manual_seed(config.data.split_seed)
        chosen = torch.randperm(len(train), generator=generator)[:size]
        return train.batch(chosen.to(train.x.device))[0].to(config.torch_device)


class AmplifiedLabels(PrivateGradients):
    """Writes clipped, noised gradients that protect labels.

    Args:
        clip_norm: C, in the units above, in [1e-12, 1e12].
        noise_multiplier: z >= 0.
        divisor: The constant that the noisy sum is divided by, in [1e-12, 1e12]; never the realised batch size.
        floor: lambda of P_l over the mean of its diagonal, > 0.
        reference: Public features, shape (n, n_0): those of training records, since only their labels are protected.
        equalise: Whether the first layer weights them by the D-optimal design.
        noise: Source of independent N(0, 1).
        error: Change that one record may make in the rounding of the sum, over C; the noise is raised to cover it.
        reference_every: Steps for which P_l of hidden layers is kept.
        sizes: Inputs of each layer, the bias's constant included; for `reference_every` above 1.

    Raises:
        ValueError: P_l is kept, and the sizes are missing.
    """

    def __init__(
        self,
        *,
        clip_norm: float,
        noise_multiplier: float,
        divisor: float,
        floor: float,
        reference: Tensor,
        equalise: bool,
        noise: NoiseStream,
        error: float = 0.0,
        reference_every: int = 1,
        sizes: Sequence[int] = (),
    ) -> None:
        super().__init__(noise)
        if reference_every > 1 and not sizes:
            raise ValueError(
                f"sizes is missing; reference_every = {reference_every} keeps a matrix for each layer"
            )
        self._clip_norm = clip_norm
        std = noise_std(clip_norm=clip_norm, noise_multiplier=noise_multiplier, divisor=divisor)
        self._noise_std = std * (1 + error)
        self._kind = torch.float64 if error else torch.float32  # of sums until they have their noise
        self._divisor = divisor
        self._floor = floor
        self._features = reference
        self._equalise = equalise
        self._every, self._step = reference_every, 0
        self._first: Metric | None = None  # the network's input never changes, so neither does its geometry
        self._kept = {
            f"label_geometry_{layer}": torch.zeros(size, size, dtype=torch.float64, device=reference.device)
            for layer, size in enumerate(sizes)
            if layer and reference_every > 1
        }
        self._is_kept = False

    @property
    def reference(self) -> Tensor | None:
        """See PrivateGradients.reference: at the steps that compute a geometry, and after a start."""
        return self._features if self._first is None or self._is_due else None

    @property
    def state(self) -> dict[str, Tensor]:
        """See PrivateGradients.state: the factors of the hidden layers' geometry, which is public."""
        return self._kept

    @override
    def seek(self, step: int) -> None:
        super().seek(step)
        self._step = step

    @property
    def _is_due(self) -> bool:
        """Whether this step computes the geometry of hidden layers."""
        if self._every == 1 or self._step % self._every == 0:
            return True
        if not self._is_kept:  # read until one was computed, or restored from a checkpoint
            self._is_kept = all(float(factor[0, 0]) > 0 for factor in self._kept.values())
        return not self._is_kept

    @override
    def _write(
        self,
        parts: Iterable[Contributions],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        (found,) = parts
        uses = linear_uses(found)
        deltas, biases = [use.delta[:, 0] for use in uses], [use.bias is not None for use in uses]
        rows = [with_constant(use.h[:, 0], bias=bias) for use, bias in zip(uses, biases, strict=True)]
        metrics = self._metrics(public_inputs, biases)
        white = [metric.whiten(row) for metric, row in zip(metrics, rows, strict=True)]
        norms = whitened_norms(deltas, white)
        factors = bounded_factors(norms, self._clip_norm)
        finite = torch.isfinite(norms)
        for use, delta, row, metric in zip(uses, deltas, white, metrics, strict=True):
            scaled = finite_rows(delta, finite) * factors[:, None]
            total = (scaled.t() @ finite_rows(row, finite)).to(self._kind)  # (n_l, n_(l-1) + 1), whitened
            noisy = metric.colour(self._noise.add_rounded(total, self._noise_std))
            write_gradient(use, noisy.div_(self._divisor).float())

    def _metrics(self, public_inputs: Sequence[Tensor] | None, biases: Sequence[bool]) -> list[Metric]:
        """Return P_l of every layer, times the sum of fan-ins; a geometry that is due is computed, and kept."""
        is_due, others = self._is_due, [Metric(factor=factor) for factor in self._kept.values()]
        if public_inputs is None:
            if self._first is None or is_due:
                raise ValueError(
                    "public_inputs is missing; amplified label noise has the geometry of public records"
                )
            return [self._first, *others]
        public = [with_constant(h, bias=bias) for h, bias in zip(public_inputs, biases, strict=True)]
        scale = float(sum(row.shape[1] for row in public))
        if self._first is None:
            weights = None
            if self._equalise:
                weights = equalised_weights(public[0], rounds=_EQUALISING_ROUNDS, floor=self._floor)
            self._first = Metric.of_rows(public[0], weights=weights, floor=self._floor, scale=scale)
        if is_due:
            others = [Metric.of_rows(row, floor=self._floor, scale=scale) for row in public[1:]]
            for factor, metric in zip(self._kept.values(), others, strict=False):  # all are kept, or none
                factor.copy_(metric.factor)
            self._is_kept = True
        return [self._first, *others]


def whitened_norms(deltas: Sequence[Tensor], white: Sequence[Tensor]) -> Tensor:
    """Return c_i = sqrt(sum_l ||delta_li||^2 h_li^T P_l^-1 h_li), float64, shape (batch,).

    The h_(l-1), with the bias's constant, come whitened (`Metric.whiten`).
    """
    squares = [
        delta.double().square().sum(dim=1) * row.square().sum(dim=1)
        for delta, row in zip(deltas, white, strict=True)
    ]
    return torch.stack(squares).sum(dim=0).sqrt()
