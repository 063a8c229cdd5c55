"""The gradients of a fully connected network in closed form, without autograd.

Forward pass (eq. 2 of the PDFA paper), error, feedback to the hidden layers, then for each layer
dW_l = (1/m) sum_i delta_(l,i) clip_c(offset_nu(h_(l-1,i)))^T (eq. 8).

Symbols: e = dL/dz_L, the error (batch, n_L); delta_l = dL/dz_l or its replacement (batch, n_l);
W_l weights (n_l, n_(l-1)); B feedback matrix (sum of hidden widths, n_L); g noise; m batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from opusim import checks
from opusim.devices.base import NoisyDevice
from opusim.medium.transmission import Medium
from opusim.randomness.streams import NoiseStream
from opusim.training.config.run import LossName
from opusim.training.errors import TrainingDiverged
from opusim.training.feedback.config import (
    BpConfig,
    DfaConfig,
    EncodedConfig,
    FeedbackConfig,
    PdfaConfig,
    TdfaConfig,
)
from opusim.training.feedback.projection import (
    AbsoluteTernary,
    BitPlanes,
    DenseProjection,
    DeviceProjection,
    Encoding,
    Projection,
)
from opusim.training.networks.clipping import ActivationClipping, ball_factors, sphere_factors, widest
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.functions import LOSSES, Objective
from opusim.training.networks.network import ForwardPass, FullyConnected
from opusim.training.protections.base import PrivateGradients, SoftLabels


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The records of a step that this process has.

    Attributes:
        x: Inputs, shape (batch, n_inputs).
        y: Targets.
        records: Their numbers in the training set, shape (batch,), or None.
        step: The step's number.
        size: Records of the step on all processes.
        before: Records of the step on processes of lower rank.
        rank: The rank of this process.
        observe: Whether to measure diagnostics.
        protection: Writes private gradients from the records' contributions; None without protection.
        labels: Noisy labels in place of the labels; None if training sees the labels themselves.
        padding: Marks rows that only fill the batch, shape (batch,), or None.
        group: Neighbouring rows of one user, which are clipped as one; a row has weight 1 / the user's rows without
            padding.
    """

    x: Tensor
    y: Tensor
    records: Tensor | None
    step: int
    size: int
    before: int
    rank: int
    observe: bool
    protection: PrivateGradients | None
    labels: SoftLabels | None
    padding: Tensor | None = None
    group: int = 1

    def weighted(self, losses: Tensor) -> Tensor:
        """Return the losses to differentiate, whose sum is the sum of users' mean losses if rows belong to users."""
        if self.group == 1 or self.padding is None:
            return losses
        used = (~self.padding.view(-1, self.group)).sum(dim=1, keepdim=True)
        return torch.where(self.padding, 0.0, losses) / used.clamp_min(1).expand(-1, self.group).flatten()

    def targets(self, output: Tensor) -> Tensor:
        """Return what the loss compares the outputs with: the targets, or soft labels."""
        if self.labels is None:
            return self.y
        if self.records is None:
            raise ValueError("records is missing; noisy labels are looked up by the records' numbers")
        return self.labels.targets(output, self.records, self.step)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Outputs, losses and contributions of a batch.

    Attributes:
        output: The model's outputs, detached; None if the batch has no records here and the model did not run.
        loss_sum: Sum of the records' losses, float64 where there is float64.
        contributions: What its records add to the gradients, for a protection; None if the gradients are written.
        public_inputs: Layer inputs of the protection's reference records, if it has any.
        diagnose: Returns the diagnostics, once the gradients are written.
    """

    output: Tensor | None
    loss_sum: Tensor
    contributions: Contributions | None = None
    public_inputs: list[Tensor] | None = None
    diagnose: Callable[[], dict[str, list[float]]] = dict


def require_finite(value: Tensor, step: int) -> None:
    """Raise TrainingDiverged before an update that is not finite; on a card, before it is saved (`checks.require`)."""

    def diverged() -> TrainingDiverged:
        return TrainingDiverged(
            f"step {step}: training diverged, because the loss or a gradient is NaN or infinite; "
            "start a new run with a lower optimizer.lr or less noise, or check the inputs"
        )

    checks.require(value, diverged)


Draw = Callable[[tuple[int, int]], Tensor]
"""Returns fresh noise of shape (batch, width)."""


Scale = Callable[..., Tensor]
"""Returns the factors that scale rows v, times a public `gain`, to a norm, shape (batch, 1)."""


class ClosedForm:
    """Computes the gradients of a fully connected network by one of the four feedbacks.

    Backpropagation: delta_l = (delta_(l+1) W_(l+1)) * phi'_l(z_l), eq. 3. With noise, the error at the output is scaled
    into the ball and noise is added to it once, as in the private baseline of the paper's section 4; all layers
    backpropagate that noisy error.

    Alignment: delta_l = s_l * phi'_l(z_l) with s_l from a random projection of the error (eqs. 4 and 8). With r_l the
    slice of the reading for layer l and the public constants gain_l = gain / sqrt(n_l), c = signal_gain:
        hardware order:   s_l = c gain_l r_l                        (the noise is that of the reading)
        published order:  s_l = c (scale_tau_B(gain_l r_l) + g_l)   (eq. 8 at c = 1)

    The diagnostics are alignment, signal_norm and noise_norm per layer.

    Args:
        network: The network.
        config: Feedback, order of noise, clips.
        loss: "cross-entropy" or "squared-error".
        device: An open device; required by pdfa, ignored by the others.
        noise: Digital noise; required where config.sigma > 0.

    Raises:
        ConfigError: A key is for other modules.
        ValueError: pdfa without a device, a device of other widths, or sigma without a noise stream.
    """

    def __init__(
        self,
        network: FullyConnected,
        config: FeedbackConfig,
        *,
        loss: LossName = "cross-entropy",
        device: NoisyDevice | None = None,
        noise: NoiseStream | None = None,
    ) -> None:
        config.require_keys(closed_form=True)
        self._config, self.network, self.objective = config, network, Objective.named(loss, "class")
        self.device = device if config.kind == "pdfa" else None
        self.noises = (self.device, noise)  # positioned at the start of each step
        self._loss = LOSSES[loss]
        self._before = 0  # records of the batch that processes of lower rank have
        self._clipping = ActivationClipping(**config.update_clipping)
        depth, widths = network.depth, network.widths
        self._clips = any(self._clipping.applies_to(layer, depth) for layer in range(depth))
        # 1. Factors that bring a record's signal to tau_B, and digital noise.
        self._scale: Scale | None = None
        self._draw: Draw | None = None
        if config.tau_b is not None:
            factors = ball_factors if config.scale == "ball" else sphere_factors
            self._scale = partial(factors, radius=config.tau_b)
        place, sigma = network.linears[0].weight.device, config.digital_sigma
        if sigma and noise is None:
            raise ValueError(f"noise is missing; trainer.sigma = {sigma} draws from a NoiseStream")
        if sigma and noise is not None:

            def draw(shape: tuple[int, int]) -> Tensor:
                rows, width = shape  # a record's noise is the same whichever process has it
                return noise.normal((self._before + rows, width), device=place)[self._before :].mul_(sigma)

            self._draw = draw
        # 2. The projection of the error: none, through the device, or by a digital matrix.
        self._projection: Projection | None = None
        self._gain = 1.0
        if isinstance(config, PdfaConfig):
            wanted = (widths[-1], sum(widths[:-1]))
            if device is None:
                raise ValueError(
                    "device is missing; trainer.kind = 'pdfa' projects through one (opusim.open_device)"
                )
            if (device.n_inputs, device.n_outputs) != wanted:
                raise ValueError(
                    f"device {device.name!r} is open with {device.n_inputs} inputs and {device.n_outputs} outputs, "
                    f"the network needs {wanted[0]} and {wanted[1]}; open it with n_inputs={wanted[0]}, "
                    f"n_outputs={wanted[1]}"
                )
            self._projection = DeviceProjection(device, encoding=closed_form_encoding(config))
            self._draw = device.draw if config.order == "published" else None
        elif isinstance(config, DfaConfig | TdfaConfig):
            medium = Medium(widths[-1], max(sum(widths[:-1]), 1), config.feedback_seed)
            encoding = closed_form_encoding(config) if isinstance(config, TdfaConfig) else None
            self._projection = DenseProjection(medium.dense().to(place), encoding=encoding)
        elif not isinstance(config, BpConfig):
            raise TypeError(f"trainer.kind = {config.kind!r} is no feedback; take bp, dfa, tdfa or pdfa")
        if isinstance(config, PdfaConfig | DfaConfig | TdfaConfig) and config.gain is not None:
            self._gain = config.gain

    @property
    def state(self) -> dict[str, Tensor]:
        """See Trainer.state."""
        return {}

    def learn(self, batch: Batch) -> Learned:
        """Return what a batch contributes to a protection, or write this process's share of its mean gradient.

        A batch without records contributes nothing and gets no reading, unless other processes have records. Without
        protection, TrainingDiverged is raised if the loss or a gradient is not finite.
        """
        network, self._before = self.network, batch.before
        forward = network.forward(batch.x)
        value = self._loss(forward.output, batch.targets(forward.output))
        error = network.multiply_by_derivative(value.output_gradient, forward, -1, through_clip=True)
        losses = (
            value.per_record if batch.padding is None else torch.where(batch.padding, 0.0, value.per_record)
        )
        loss_sum = losses.sum(dtype=widest(losses.device))
        protection = batch.protection
        if protection is not None:  # stopping at a record's NaN would reveal that record
            error = torch.where(torch.isfinite(error).all(dim=1, keepdim=True), error, 0.0)
        else:
            require_finite(loss_sum + error.sum(), batch.step)  # one NaN or infinity carries over to the sum
        if batch.size:  # with a shared device, a process without records takes part in the reading
            deltas = self._deltas(forward, error, observe=batch.observe)
        else:  # no gradient; momentum still moves the weights
            layers = [torch.zeros_like(z) for z in forward.pre_activations]
            deltas = Deltas(layers=layers, gains=[1.0] * len(layers))
        inputs = self._update_inputs(forward) if self._clips else forward.inputs
        diagnose = partial(self._diagnostics, forward, error, deltas)
        pairs = zip(deltas.layers, deltas.gains, strict=True)
        if protection is not None:
            reference = protection.reference
            return Learned(
                output=forward.output,
                loss_sum=loss_sum,
                contributions=network.contributions([d if g == 1.0 else d * g for d, g in pairs], inputs),
                public_inputs=None if reference is None else self._update_inputs(network.forward(reference)),
                diagnose=diagnose,
            )
        for layer, ((delta, gain), h) in enumerate(zip(pairs, inputs, strict=True)):
            network.set_gradient(layer, delta, h, max(batch.size, 1) / gain)
        return Learned(output=forward.output, loss_sum=loss_sum, diagnose=diagnose)

    def start_from_feedback(self, records: Tensor) -> None:
        """Set the output layer's weights to the feedback that the last hidden layer receives, and its bias to zero.

        Of two records, shape (2, n_inputs), only `ModuleGradients` reads the sizes. Raises ValueError without a
        feedback matrix or a hidden layer.
        """
        network = self.network
        if self._projection is None or network.depth == 1:
            raise ValueError(
                "model.initial_output = 'feedback' needs a feedback matrix and a hidden layer, but trainer.kind = "
                f"{self._config.kind!r} with {network.depth - 1} hidden layers has none; use 'random'"
            )
        output, width = network.linears[-1], network.widths[-2]
        with torch.no_grad():  # gain / sqrt(n) B of the last hidden layer, transposed
            last = self._projection.columns(network.widths[-1])[:, -width:]
            output.weight.copy_(last * (self._gain / width**0.5))
            if output.bias is not None:
                output.bias.zero_()

    def measure(self, records: Tensor) -> None:
        """Calibrate the device before any record is read; the closed form needs no calibration."""

    def close(self) -> None:
        """See Trainer.close."""

    def _update_inputs(self, forward: ForwardPass) -> list[Tensor]:
        """Return h_(l-1) for each layer's update, clipped as configured."""
        depth, widths = self.network.depth, self.network.widths
        return [
            self._clipping(h, layer=layer, depth=depth, n_layer=widths[layer])
            for layer, h in enumerate(forward.inputs)
        ]

    def _diagnostics(self, forward: ForwardPass, error: Tensor, deltas: Deltas) -> dict[str, list[float]]:
        """Return norms, and the cosine of each layer's update with its backpropagation gradient (Figure 2, right)."""
        network = self.network
        updates = [network.gradients(layer) for layer in range(network.depth)]
        reference = backpropagated(network, forward, error)
        cosines = []
        for layer, update in enumerate(updates):
            gradient = reference[layer].t() @ forward.inputs[layer]
            flat = [gradient.flatten()]
            if network.linears[layer].bias is not None:
                flat.append(reference[layer].sum(dim=0))
            cosines.append(float(torch.cosine_similarity(update, torch.cat(flat), dim=0)))
        return {"alignment": cosines, "signal_norm": deltas.signal_norms, "noise_norm": deltas.noise_norms}

    def _deltas(self, forward: ForwardPass, error: Tensor, *, observe: bool) -> Deltas:
        """Return delta_1 .. delta_L for a batch of error e, shape (batch, n_L); `observe` measures norms as well."""
        network, options, scale = self.network, self._config, self._scale
        widths, signal_norms, noise_norms = network.widths[:-1], list[float](), list[float]()
        # Back through the weights.
        if self._projection is None:
            delta = error if scale is None else (error * scale(error)).to(error.dtype)
            noise = None if self._draw is None else self._draw((delta.shape[0], delta.shape[1]))
            if observe:
                signal_norms = [_mean_norm(delta)]
                noise_norms = [0.0 if noise is None else _mean_norm(noise)]
            layers = backpropagated(network, forward, delta if noise is None else delta + noise)
            gains = [options.signal_gain] * network.depth
            return Deltas(layers=layers, gains=gains, signal_norms=signal_norms, noise_norms=noise_norms)
        if not widths:
            return Deltas(layers=[error], gains=[1.0])
        # Through the projection, straight to every layer.
        readings = self._projection.read(error).split(widths, dim=1)
        noises: Sequence[Tensor | None] = [None] * len(widths)
        if self._draw is not None:
            noises = self._draw((error.shape[0], sum(widths))).split(widths, dim=1)
        if observe and self._draw is None:  # as expected of the reading
            std = self._projection.noise_std(error).expand(sum(widths)).split(widths)
            each = zip(widths, std, strict=True)
            noise_norms = [self._gain / n**0.5 * float(torch.linalg.vector_norm(part)) for n, part in each]
        elif observe:
            noise_norms = [_mean_norm(noise) for noise in noises if noise is not None]
        layers, gains = [], []
        for layer, (reading, noise) in enumerate(zip(readings, noises, strict=True)):
            gain = self._gain / widths[layer] ** 0.5
            factors = None if scale is None else scale(reading, gain=gain)
            if observe:
                signal_norms.append(_mean_norm(reading * (gain if factors is None else factors)))
            left = gain if noise is None and factors is None else 1.0  # multiplies the sums over records
            if noise is None:
                signal = reading if factors is None else reading.mul_(factors)
            elif factors is None:
                signal = noise.add_(reading, alpha=gain)
            else:
                signal = _add_scaled(noise, reading, factors)
            layers.append(
                network.multiply_by_derivative(signal, forward, layer, through_clip=options.through_clip)
            )
            gains.append(left * options.signal_gain)
        return Deltas(
            layers=[*layers, error], gains=[*gains, 1.0], signal_norms=signal_norms, noise_norms=noise_norms
        )


def closed_form_encoding(config: EncodedConfig) -> Encoding:
    """Return the encoding of a fully connected network's error."""
    return BitPlanes(config.planes) if config.encoding == "planes" else AbsoluteTernary(config.threshold)


@dataclass(frozen=True, kw_only=True)
class Deltas:
    """delta_l of every layer, and norms for diagnostics.

    Attributes:
        layers: delta_1 / gain_1 .. delta_L / gain_L, shapes (batch, n_l).
        gains: gain_1 .. gain_L, public constants that multiply the sums over records.
        signal_norms: Mean norm over records of each hidden layer's signal before signal_gain. It excludes noise that is
            added after the reading and includes the device's own noise. Empty unless observed.
        noise_norms: Mean norm of the noise in each signal; for the noise of a reading, its expected norm.
    """

    layers: list[Tensor]
    gains: list[float]
    signal_norms: list[float] = field(default_factory=list)
    noise_norms: list[float] = field(default_factory=list)


def backpropagated(network: FullyConnected, forward: ForwardPass, delta: Tensor) -> list[Tensor]:
    """Return delta_1 .. delta_L by backpropagation of delta_L, shape (batch, n_L)."""
    layers = [delta]
    for layer in range(network.depth - 2, -1, -1):
        delta = delta @ network.linears[layer + 1].weight.detach()
        delta = network.multiply_by_derivative(delta, forward, layer, through_clip=True)
        layers.append(delta)
    return layers[::-1]


def _add_scaled(noise: Tensor, reading: Tensor, factors: Tensor) -> Tensor:
    """Return factors * reading + noise, and overwrite noise; a factor beyond float32 affects only its own row."""
    if factors.dtype == noise.dtype:
        return noise.addcmul_(reading, factors)
    single = factors.float()
    apart = (noise.double() + reading * factors).to(noise.dtype)
    return torch.where(single == factors, noise.addcmul_(reading, single), apart)


def _mean_norm(v: Tensor) -> float:
    """Return the mean Euclidean norm of the rows, or 0 if there are none."""
    return float(torch.linalg.vector_norm(v, dim=1).mean()) if len(v) else 0.0
