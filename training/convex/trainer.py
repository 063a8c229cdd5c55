"""Train the gated ReLU model by noisy gradient descent, with gradients and their norms in closed form.

The model is linear in its weights, and nonlinear in a record through fixed gates:

f_c(x) = sum_p 1[u_p . x >= 0] x . v_pc / R(x),   R(x) = |x| sqrt(number of open gates)

with fixed hyperplanes u_p ~ N(0, I), from a generator or a device's scattering medium, and trained v_pc (eq. 3.8 of the
paper, one linear model per class). R depends on the record only, and makes the features
x~ = (1[u_p . x >= 0] x)_p / R of every record a vector of norm 1. x~ has P d entries and is never formed: the forward
pass is one product x V followed by a masked sum, the gradient one product x^T (gates * residual).

The theorems need |x~| <= 1 for every record, so x is centred and divided by |x| in float64, which holds the squares of
all float32 numbers; in float32, squares below 7e-46 vanish and sums above 3e38 overflow.

A record's gradient is x~ residual^T, of norm |x~| |residual|, so a bound on the residual bounds the gradient.
`opusim.accounting.mechanisms.convex` states each residual's formula, Lipschitz constant and bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.convex import ConvexLastIterate, log_expansion, residual_bound
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError
from opusim.processes import require_memory
from opusim.randomness.streams import NoiseStream
from opusim.training.config.run import RunConfig
from opusim.training.config.sections import ModelConfig
from opusim.training.convex.config import ConvexConfig
from opusim.training.data import Dataset
from opusim.training.engine.algorithm import Algorithm, DeviceShape, StepRecord, Trainer
from opusim.training.networks.base import BYTES_PER_PARAMETER, Network, seeded_generator
from opusim.training.networks.clipping import (
    are_all,
    bounded_factors,
    finite_rows,
    full_precision,
    norm_bounds,
    row_norms,
)
from opusim.training.networks.functions import LOSSES
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.protections.base import SoftLabels, noise_std

_FLOAT64_CHUNK = 2**20
"""Numbers converted to float64 at once, 8 MiB."""
_VECTORS_PER_CALL = 256
"""Unit vectors that a device projects in one call."""


@dataclass(frozen=True, kw_only=True)
class GatedRecords:
    """A batch as the model uses it.

    Attributes:
        x: Features, centred if the model centres them, then scaled to norm 1, shape (batch, d); 0 for a record that is
            not finite, or constant and centred.
        gates: 1 for an open gate, 0 for a closed one, shape (batch, P), float32.
        scale: 1 / sqrt(open gates) of each record, 0 for one without open gates or without features, shape (batch,).
    """

    x: Tensor
    gates: Tensor
    scale: Tensor


class GatedRelu(nn.Module):
    """The model as a torch module; its logits carry gradients for any optimizer.

    Args:
        n_inputs: d.
        n_classes: k.
        hyperplanes: u_p as rows, shape (P, d); stored as a buffer.
        centre: Whether to subtract each record's mean feature from it first.

    Attributes:
        exact_gates: Whether a graphics card, too, decides in float64 on which side of a near hyperplane a record lies.
            Guarantees need it; the host then waits for the card once a batch.
    """

    hyperplanes: Tensor
    exact_gates = True

    def __init__(self, n_inputs: int, n_classes: int, hyperplanes: Tensor, *, centre: bool = True) -> None:
        super().__init__()
        if hyperplanes.ndim != 2 or hyperplanes.shape[1] != n_inputs:
            raise ValueError(
                f"hyperplanes has shape {tuple(hyperplanes.shape)}: must be (P, n_inputs = {n_inputs})"
            )
        self.n_inputs, self.n_classes, self.centre = n_inputs, n_classes, centre
        self.register_buffer("hyperplanes", hyperplanes.clone().to(torch.float32))
        self.weight = nn.Parameter(torch.zeros(n_inputs, len(hyperplanes), n_classes))  # (d, P, k)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (batch, k), of records of shape (batch, d)."""
        return self.logits(self.gated(x))

    def gated(self, x: Tensor) -> GatedRecords:
        """Return the features, gates and scales of records of shape (batch, d)."""
        x, kept = unit_rows(x, centre=self.centre)
        exact = self.exact_gates or x.device.type == "cpu"
        gates = open_gates(x, self.hyperplanes, exact=exact).to(x.dtype)
        count = gates.sum(dim=1)
        return GatedRecords(x=x, gates=gates, scale=torch.where(kept & (count > 0), count.rsqrt(), 0.0))

    def logits(self, records: GatedRecords) -> Tensor:
        """Return f(x), shape (batch, k)."""
        products = (records.x @ self.weight.flatten(1)).unflatten(1, self.weight.shape[1:])  # (batch, P, k)
        summed = torch.bmm(records.gates.unsqueeze(1), products).squeeze(1)
        return summed * records.scale.unsqueeze(1)

    def clipped(self, records: GatedRecords, residual: Tensor, bound: float) -> Tensor:
        """Scale the residual, shape (batch, k), down if the gradient that `spread` makes of it exceeds the bound C > 0.

        The norm of that gradient is |x| sqrt(open gates) |residual scale|, computed from the numbers that are
        multiplied, so the bound does not rely on the normalisation.
        """
        spread = norm_bounds(residual * records.scale.unsqueeze(1)) * records.gates.sum(dim=1).double().sqrt()
        factors = bounded_factors(norm_bounds(records.x) * spread, bound)
        return (residual * factors.unsqueeze(1)).to(residual.dtype)

    def spread(self, records: GatedRecords, residual: Tensor) -> Tensor:
        """Copy the scaled residual to every open gate, shape (batch, P k).

        x^T times the result is the sum over the batch of x~ residual^T, the gradient of all weights.
        """
        scaled = residual * records.scale.unsqueeze(1)
        return (records.gates.unsqueeze(2) * scaled.unsqueeze(1)).flatten(1)


def unit_rows(x: Tensor, *, centre: bool) -> tuple[Tensor, Tensor]:
    """Divide rows, less their means if `centre`, by their norms; return them and which rows have a norm.

    Guarantees for every float32 row: the norm is 1 up to 2^-23, or the row is 0 because it was 0, not finite, or, if
    centred, constant up to 2^-24 of its largest entry, the resolution of float32 features.
    """
    exact = x.to(torch.float64, copy=True)
    least = exact.new_zeros(())
    if centre:
        mean = exact.mean(dim=1, keepdim=True)
        exact -= mean
        least = mean[:, 0].abs() * (2.0**-24 * x.shape[1] ** 0.5)
    norms = torch.linalg.vector_norm(exact, dim=1)
    kept = (norms > least) & torch.isfinite(norms)
    exact.mul_(norms.reciprocal()[:, None])
    return (exact if are_all(kept) else finite_rows(exact, kept)).to(x.dtype), kept


def open_gates(x: Tensor, hyperplanes: Tensor, *, exact: bool = True) -> Tensor:
    """Return 1[u_p . x >= 0], bool, shape (batch, P), for each record independently of the others if `exact`.

    x are records of norm 0 or 1, shape (batch, d), and the hyperplanes u_p rows, shape (P, d), both float32. A float32
    product rounds differently in a batch of another size, so adding a record could switch gates of records near a
    hyperplane. If |u_p . x| is within the rounding of any order of summation, (d + 4) 2^-24 |u_p| |x|, that record's
    product in float64 decides.
    """
    with full_precision():
        values = x @ hyperplanes.t()
    if not exact:
        return values >= 0
    # twice, for |x| = 1 + 2^-23
    rounding = ((x.shape[1] + 4) * 2.0**-23 * row_norms(hyperplanes)).to(values.dtype)
    gates = values >= 0
    for entries in (values.abs() <= rounding).nonzero().split(max(1, _FLOAT64_CHUNK // x.shape[1])):
        record, plane = entries.unbind(1)
        gates[record, plane] = (x[record].double() * hyperplanes[plane].double()).sum(dim=1) >= 0
    return gates


class GatedNetwork(Network):
    """A view of a gated model as a network."""

    model: GatedRelu

    def __init__(self, model: GatedRelu) -> None:
        self.model = model

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """Build the network that `facts` describes, with hyperplanes and weights to be filled in."""
        hyperplanes = torch.zeros(facts["hyperplanes"], facts["n_inputs"])
        return cls(GatedRelu(facts["n_inputs"], facts["n_classes"], hyperplanes, centre=facts["centre"]))

    @property
    def n_inputs(self) -> int:
        """Number of features of a record."""
        return self.model.n_inputs

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights, and the hyperplanes, which never change but belong to the model."""
        return {"weight": self.model.weight, "hyperplanes": self.model.hyperplanes}

    @property
    @override
    def facts(self) -> dict[str, Any]:
        return {
            "n_inputs": self.model.n_inputs,
            "n_classes": self.model.n_classes,
            "hyperplanes": len(self.model.hyperplanes),
            "centre": self.model.centre,
        }


def device_hyperplanes(device: NoisyDevice, *, readings: int) -> Tensor:
    """Read the device's matrix B, shape (n_outputs, n_inputs): column i is the mean of `readings` projections of e_i.

    The noise is that of a reading divided by sqrt(readings). The gates use the result from then on, in training and at
    inference, so noise only makes it a slightly different random matrix.
    """
    units = torch.eye(device.n_inputs)
    columns = []
    for block in units.split(_VECTORS_PER_CALL):
        total = torch.zeros(len(block), device.n_outputs)
        for _ in range(readings):
            total += device.project(block).cpu()
        columns.append(total / readings)
    return torch.cat(columns).t().contiguous()


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A convex objective, given by the residual of a record's logits.

    Attributes:
        name: squared, margin, one-against-rest or softmax.
        clip: Largest norm C of a residual, or None if the residual is bounded without a clip.
    """

    name: str
    clip: float | None

    def residual(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the clipped residual of each record, shape (batch, k); 0 for a record whose logits are not finite."""
        target = torch.zeros_like(logits).scatter_(1, labels.unsqueeze(1), 1.0)
        residual = _RESIDUALS[self.name](logits, target)
        if self.clip is not None and self.name == "one-against-rest":  # entry by entry, which keeps it convex
            bound = self.clip / math.sqrt(logits.shape[1])
            residual = residual.clamp(-bound, bound)
        norms = row_norms(residual)
        residual = finite_rows(residual, torch.isfinite(norms))
        if self.clip is None or self.name == "one-against-rest":
            return residual
        return (residual * bounded_factors(norms, self.clip).unsqueeze(1)).to(residual.dtype)

    def bound(self, n_classes: int) -> float:
        """Return the largest norm of a residual, which bounds the norm of a record's gradient."""
        return residual_bound(self.name, self.clip, n_classes)


_RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": lambda logits, target: logits - target,
    # distance to the box z_y >= 1, z_c <= 0
    "margin": lambda logits, target: torch.where(
        target > 0, (logits - 1.0).clamp_max(0.0), logits.clamp_min(0.0)
    ),
    "one-against-rest": lambda logits, target: torch.sigmoid(logits) - target,
    "softmax": lambda logits, target: torch.softmax(logits, dim=1) - target,
}
"""Residual of each objective from logits and one-hot targets, both of shape (batch, k)."""


LAST_ITERATE_SCHEMES = ("disjoint-cyclic", "full-batch")


class ConvexTrainer(Algorithm[ConvexConfig, GatedNetwork, "ConvexTrainer"], Trainer):
    """v <- (1 - eta lambda) v - (eta / b) [sum over the batch of x~ residual^T + N(0, (z C)^2 I)].

    Guarantees for every batch, whatever it holds:
        - x~ of every finite record has norm at most 1 and its term of the sum norm at most C, both up to float32
          rounding (relative 1e-6);
        - a record whose features or logits are not finite counts as 0;
        - an empty batch takes the same noisy step.

    Attributes:
        objective: Supplies the residuals.
        noise: Source of independent N(0, 1), or None without noise.
        noise_std: Standard deviation of the noise on a batch's sum, z C.
        final_std: Standard deviation of the extra noise that the last step adds to the weights.
    """

    applies = frozenset({"own noise"})
    rounds_own_noise = counts_own_sums = True
    network: GatedNetwork
    objective: Objective
    noise: NoiseStream | None
    noise_std: float
    final_std: float

    @classmethod
    def build_network(cls, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> GatedNetwork:
        """See Algorithm.build_network; `initialise` reads a device's hyperplanes, and a checkpoint holds them."""
        options = config.trainer_as(ConvexConfig)
        if model is None:
            require_memory(
                BYTES_PER_PARAMETER * options.hyperplanes * dataset.n_features * dataset.n_classes,
                why="weights and gradients",
                remedy="lower trainer.hyperplanes",
                trainer__hyperplanes=options.hyperplanes,
                features=dataset.n_features,
                classes=dataset.n_classes,
            )
            generator = seeded_generator(config.seed_for("hyperplanes"))
            hyperplanes = torch.randn(options.hyperplanes, dataset.n_features, generator=generator)
            return GatedNetwork(
                GatedRelu(dataset.n_features, dataset.n_classes, hyperplanes, centre=options.centre)
            )
        if not isinstance(model, GatedRelu):
            raise TypeError(
                f"model must be a opusim.training.convex.trainer.GatedRelu, got {type(model).__name__}; leave it out"
            )
        found = (model.n_inputs, model.n_classes, len(model.hyperplanes), model.centre)
        wanted = (dataset.n_features, dataset.n_classes, options.hyperplanes, options.centre)
        if found != wanted:
            raise ValueError(
                f"model has (features, classes, hyperplanes, centre) = {found}: must be {wanted}, as the data and "
                "the section trainer say"
            )
        return GatedNetwork(model)

    @classmethod
    @override
    def rebuild_network(cls, facts: dict[str, Any], model: nn.Module | None) -> GatedNetwork:
        return GatedNetwork.from_facts(facts)

    @property
    def device_shape(self) -> DeviceShape:
        """A record's features go in, its hyperplanes' projections come out."""
        network = self.network
        return DeviceShape(n_inputs=network.n_inputs, n_outputs=len(network.model.hyperplanes))

    def work_before(self) -> DeviceWork:
        """See Algorithm.work_before; the hyperplanes are read."""
        own, n_inputs = super().work_before(), self.network.n_inputs
        if self.options.gates != "device":
            return own
        calls = math.ceil(n_inputs / _VECTORS_PER_CALL)
        return own + DeviceWork(projections=n_inputs, calls=calls).times(self.options.gate_readings)

    def work_of_step(self, records: float, n_outputs: int, *, observed: bool) -> DeviceWork:
        """See Algorithm.work_of_step; the noise on every weight of the update."""
        return self.protection.noise_work([self.network.model.weight.numel()], n_outputs)

    @override
    def open(self, device: NoisyDevice | None, labels: SoftLabels | None) -> None:
        config, options = self.config, self.options
        self.device = device
        self.optimizer = make_optimizer([self.network.model.weight], config.optimizer)  # holds the rate
        self.objective = Objective(name=options.objective, clip=options.residual_clip)
        bound = self.objective.bound(self.dataset.n_classes)
        multiplier = 0.0 if config.protection.protects == "nothing" else self.protection.noise_multiplier
        self.network.model.exact_gates = config.protection.protects != "nothing"
        self.noise = self.protection.central_noise(device) if multiplier else None
        self.noise_std = noise_std(clip_norm=bound, noise_multiplier=multiplier, divisor=self.divisor)
        self.final_std = self._final_noise * config.optimizer.lr * multiplier * bound / self.divisor
        if self.noise is None and (self.noise_std or self.final_std):
            raise ValueError(f"noise is missing; noise_std = {self.noise_std} draws from a NoiseStream")

    def initialise(self, trainer: ConvexTrainer) -> None:
        """Read the hyperplanes from the device, once, before the first step."""
        if self.options.gates == "device":
            if trainer.device is None:
                raise ValueError("device is missing; trainer.gates = 'device' reads them from an open device")
            trainer.device.seek(self.plan.total_steps)  # repeats no step's noise
            hyperplanes = device_hyperplanes(trainer.device, readings=self.options.gate_readings)
            self.network.model.hyperplanes.copy_(hyperplanes)

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool = False, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; there are no diagnostics."""
        model = self.network.model
        for source in (self.device, self.noise):
            if source is not None:
                source.seek(step)
        with full_precision():
            batch = model.gated(x)
            logits = model.logits(batch)
            residual = self.objective.residual(logits, y)
            residual = model.clipped(batch, residual, self.objective.bound(model.n_classes))
            self._descend(batch.x, model.spread(batch, residual), step)
        return StepRecord(
            loss_sum=LOSSES[self.config.loss](logits, y).per_record.sum(dtype=torch.float64),
            n_correct=(logits.argmax(dim=1) == y).sum(),
            n_records=len(x),
        )

    def _descend(self, x: Tensor, spread: Tensor, step: int) -> None:
        """Update the weights in place, after all noise is drawn: a device that fails leaves them unchanged."""
        rate, std = self.optimizer.param_groups[0]["lr"], self.noise_std
        weight = self.network.model.weight.data.flatten(1)  # (d, P k), a view
        # 1. The sum of the records' terms, in float32, or as `CountedSums` says.
        counted = self.protection.counted_sums
        if counted is None:
            move = torch.mm(x.t(), spread)
        elif not counted.block or len(x) > counted.records:
            move = torch.mm(x.double().t(), spread.double())
        else:
            blocks = zip(x.split(counted.block), spread.split(counted.block), strict=True)
            move, *others = (torch.mm(rows.t(), residuals) for rows, residuals in blocks)
            for other in others:
                move.add_(other)
        move.neg_()
        # 2. Its noise, and the step.
        if step == self.plan.total_steps - 1 and self.final_std:
            std = math.hypot(std, self.final_std * self.divisor / rate)  # on the weights it is final_std
        if self.noise is not None and std:
            self.noise.add_rounded(move, std if counted is None else std * (1 + counted.error))
        move = move.float().mul_(rate / self.divisor)
        torch.add(move, weight, alpha=1 - rate * self.options.regularisation, out=weight)

    def require_covered(self) -> None:
        """See Algorithm.require_covered; also refuse optimizers and rates without a theorem, and keys without effect.

        Raises:
            ConfigError: Momentum, weight decay, another optimizer, a clip in the wrong section, an average of weights.
            NoGuarantee: See Algorithm.require_covered; or the last iterate's theorem excludes the scheme or the rate.
        """
        super().require_covered()
        config = self.config
        optimizer, protection = config.optimizer, config.protection
        last = protection.last_iterate
        model = None if config.model == ModelConfig() else "this section"
        mean = optimizer.averaged_tail if last else 0
        divisor = protection.divisor if last else None
        # a key, its value, the only one that it may have, and a remedy
        keys: tuple[tuple[str, object, object, str], ...] = (
            ("model", model, None, "its network has no such layers, set trainer.hyperplanes"),
            ("optimizer.name", optimizer.name, "sgd", "use 'sgd'"),
            ("optimizer.momentum", optimizer.momentum, 0, "set it to 0"),
            ("optimizer.weight_decay", optimizer.weight_decay, 0, "use trainer.regularisation"),
            ("protection.clip_norm", protection.clip_norm, None, "use trainer.clip"),
            ("optimizer.averaged_tail", mean, 0, "a mean of iterates is not the last iterate; set it to 0"),
            ("protection.divisor", divisor, None, "the theorem divides by the batch size; leave it out"),
        )
        for key, value, idle, remedy in keys:
            if value != idle:
                reason = f"{value!r} is not for trainer.kind = 'convex': {remedy}"
                raise ConfigError("configuration", key, reason)
        if not last:
            return
        scheme, options = self.plan.sampler.scheme, self.options
        if scheme not in LAST_ITERATE_SCHEMES:
            raise NoGuarantee(
                f"sampler.scheme = {scheme!r}: the last iterate's theorem needs fixed disjoint batches in a fixed "
                f"order; use {' or '.join(repr(name) for name in LAST_ITERATE_SCHEMES)}, or protection.kind = 'record' "
                "with 'poisson'"
            )
        # raises NoGuarantee if eta >= 2 / (beta + lambda), or beyond the limit of clipped softmax
        rate = np.array([self.config.optimizer.lr])
        log_expansion(
            options.objective, options.residual_clip, self.dataset.n_classes, rate, options.regularisation
        )

    @classmethod
    def clip_norm(cls, config: RunConfig, n_classes: int) -> float:
        """See Algorithm.clip_norm; a bound on the residual bounds the gradient."""
        options = config.trainer_as(ConvexConfig)
        return residual_bound(options.objective, options.residual_clip, n_classes)

    @override
    def mechanism(self, noise_multiplier: float) -> Mechanism:
        config, options = self.config, self.options
        if not config.protection.last_iterate:
            return self.clipped_records(noise_multiplier, divisor=self.divisor)
        return ConvexLastIterate(
            objective=options.objective,
            clip=options.residual_clip,
            n_classes=self.dataset.n_classes,
            learning_rate=config.optimizer.lr,
            schedule=config.optimizer.schedule,
            regularisation=options.regularisation,
            batches=self.plan.sampler.steps_per_epoch,
            epochs=config.epochs,
            noise_multiplier=noise_multiplier,
            final_noise=self._final_noise,
            hyperplanes=options.hyperplanes,
            device_noise=config.protection.noise == "device",
            **self.plan.credit,
        )

    @property
    def _final_noise(self) -> float:
        """The last step's extra noise, in units of a step's noise at the first learning rate."""
        if self.options.final_noise is not None:
            return self.options.final_noise
        return (
            math.sqrt(self.plan.sampler.steps_per_epoch - 1) if self.config.protection.last_iterate else 0.0
        )

    @cached_property
    def divisor(self) -> float:
        """b, the divisor of a batch's sum: a constant that the data do not change."""
        sampler, config = self.plan.sampler, self.config
        full = sampler.scheme == "full-batch"
        return config.protection.divisor or (float(sampler.n_records) if full else config.divisor)
